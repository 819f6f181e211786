"""Collectives with a gradient, each named for what it does in both directions.

    from -> to       function                                      forward          backward
    S(d) -> R        all_gather(x, d, axis)                        all-gather       reduce-scatter
    S(d) -> I        all_gather(x, d, axis, backward="slice")      all-gather       slice
    P -> S(d)        reduce_scatter(x, d, axis)                    reduce-scatter   all-gather
    P -> R           all_reduce(x, axis)                           all-reduce       all-reduce
    P -> I           all_reduce(x, axis, backward="identity")      all-reduce       -
    R -> S(d)        shard(x, d, axis)                             slice            zero-pad
    I -> S(d)        shard(x, d, axis, backward="all_gather")      slice            all-gather
    I -> R           replicate(x, axis)                            -                all-reduce
    R -> I           replicate(x, axis, backward="first_rank")     -                first rank's counts
    S(e) -> S(d)     all_to_all(x, e, d, axis)                     all-to-all       all-to-all

`blocks=k` makes a dim S(d, k). Slices follow `torch.chunk`; where the ranks' sizes differ, `size` says that of the
whole dim (it must where the dim is put together, it may where it is cut). An axis of one rank leaves the tensor as
it is. In the shapes below n is the size of the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.layout import S, chunk
from autopar.runtime.mesh import Axis
from autopar.runtime.mesh import axis as named_axis

# torch 2.13 renamed them, and warns at the old names
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(
    x: Tensor,
    dim: int,
    axis: str,
    backward: Literal["reduce_scatter", "slice"] = "reduce_scatter",
    *,
    blocks: int = 1,
    size: int | None = None,
) -> Tensor:
    """The whole of dim `dim`: [.., size / n, ..] -> [.., size, ..]. S -> R; "slice": S -> I."""
    on = named_axis(axis)
    _known(backward, "reduce_scatter", "slice")
    if on.size == 1:
        return x
    whole: Tensor = _AllGather.apply(x, dim % x.ndim, on, backward == "slice", blocks, size)  # type: ignore[no-untyped-call]
    return whole


def reduce_scatter(x: Tensor, dim: int, axis: str, *, blocks: int = 1, size: int | None = None) -> Tensor:
    """This rank's slice of the sum over ranks: [.., size, ..] -> [.., size / n, ..]. P -> S."""
    on = named_axis(axis)
    _expect(x, dim, size)
    if on.size == 1:
        return x
    part: Tensor = _ReduceScatter.apply(x, dim % x.ndim, on, blocks)  # type: ignore[no-untyped-call]
    return part


def all_reduce(x: Tensor, axis: str, backward: Literal["all_reduce", "identity"] = "all_reduce") -> Tensor:
    """The sum over ranks, shape kept. P -> R; "identity": P -> I."""
    on = named_axis(axis)
    _known(backward, "all_reduce", "identity")
    if on.size == 1:
        return x
    total: Tensor = _AllReduce.apply(x, on, backward == "identity")  # type: ignore[no-untyped-call]
    return total


def shard(
    x: Tensor,
    dim: int,
    axis: str,
    backward: Literal["pad", "all_gather"] = "pad",
    *,
    blocks: int = 1,
    size: int | None = None,
) -> Tensor:
    """This rank's slice of a whole tensor: [.., size, ..] -> [.., size / n, ..]. R -> S; "all_gather": I -> S."""
    on = named_axis(axis)
    _known(backward, "pad", "all_gather")
    _expect(x, dim, size)
    if on.size == 1:
        return x
    part: Tensor = _Shard.apply(x, dim % x.ndim, on, backward == "all_gather", blocks)  # type: ignore[no-untyped-call]
    return part


def replicate(x: Tensor, axis: str, backward: Literal["all_reduce", "first_rank"] = "all_reduce") -> Tensor:
    """A view of the tensor whose gradient is summed over ranks (I -> R), or the first one's ("first_rank", R -> I)."""
    on = named_axis(axis)
    _known(backward, "all_reduce", "first_rank")
    if on.size == 1:
        return x
    same: Tensor = _Replicate.apply(x, on, backward == "first_rank")  # type: ignore[no-untyped-call]
    return same


def all_to_all(
    x: Tensor,
    gather_dim: int,
    scatter_dim: int,
    axis: str,
    *,
    gather_blocks: int = 1,
    scatter_blocks: int = 1,
    gather_size: int | None = None,
    scatter_size: int | None = None,
) -> Tensor:
    """[.., gather_size / n, .., scatter_size, ..] -> [.., gather_size, .., scatter_size / n, ..]. S -> S.

    With one dim for both it is laid out in other blocks: S(d, gather_blocks) -> S(d, scatter_blocks).
    """
    on = named_axis(axis)
    gather_dim, scatter_dim = gather_dim % x.ndim, scatter_dim % x.ndim
    if on.size == 1 or (gather_dim, gather_blocks) == (scatter_dim, scatter_blocks):
        return x
    size = x.shape[gather_dim] * on.size if gather_size is None else gather_size
    if gather_dim != scatter_dim:
        _expect(x, scatter_dim, scatter_size)
    moved: Tensor = _AllToAll.apply(x, S(gather_dim, gather_blocks), S(scatter_dim, scatter_blocks), on, size)  # type: ignore[no-untyped-call]
    return moved


def vocabulary_embedding(ids: Tensor, weight: Tensor, axis: str, size: int, padding_idx: int | None = None) -> Tensor:
    """Partial sums of the embedding, rows of `weight` over the axis: [..] ids, [size / n, h] -> [.., h]. Gives P.

    Zero where the id's row lies on another rank. `size` is the number of rows of the whole table.
    """
    on = named_axis(axis)
    if on.size == 1:
        return F.embedding(ids, weight, padding_idx)
    start, rows = chunk(size, on.size, on.rank)
    assert rows == weight.shape[0], f"{weight.shape[0]} rows of a table of {size} over {on.size} ranks"
    local = ids - start
    elsewhere = (local < 0) | (local >= rows)
    if padding_idx is not None:
        padding = padding_idx % size - start
        padding_idx = padding if 0 <= padding < rows else None
    # The rows read for absent ids get no gradient: their result is overwritten.
    found = F.embedding(local.masked_fill_(elsewhere, 0), weight, padding_idx)
    return found.masked_fill_(elsewhere.unsqueeze(-1), 0)


def vocabulary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: str,
    size: int,
    ignore_index: int = -100,
    reduction: Literal["sum", "mean", "none"] = "sum",
) -> Tensor:
    """Cross entropy of logits whose classes lie over the axis: [N, size / n], [N] -> [] or [N]. S(1) -> I.

    `size` is the number of classes. Computed and returned in fp32 at least; two all-reduces (of N and 2 N numbers).
    """
    _known(reduction, "sum", "mean", "none")
    loss: Tensor = _CrossEntropy.apply(logits, target, named_axis(axis), size, ignore_index)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return loss
    total = loss.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def bias_on_one_rank(bias: Tensor, axis: str) -> Tensor:
    """The bias on the axis' first rank, zeros (with zero gradient) elsewhere, so that partial sums add it once."""
    on = named_axis(axis)
    if on.size == 1:
        return bias
    once: Tensor = _OnFirstRank.apply(bias, on)  # type: ignore[no-untyped-call]
    return once


def _known(value: str, *choices: str) -> None:
    if value not in choices:
        raise ValueError(f"{value!r} is none of {', '.join(choices)}")


def _expect(x: Tensor, dim: int, size: int | None) -> None:
    assert size is None or x.shape[dim] == size, f"dim {dim} of {list(x.shape)} is not {size}"


# What travels, without a gradient. A tensor is seen as [lead, block, rest]: `lead` counts what stands before the dim
# and its blocks, `block` is the part of the dim that is cut. Only the last slice may be short, so an uneven dim is an
# even one that was padded at its end.


def _split(x: Tensor, dim: int, blocks: int) -> tuple[int, int, int]:
    assert x.shape[dim] % blocks == 0, f"dim {dim} of {list(x.shape)} in {blocks} blocks"
    return math.prod(x.shape[:dim]) * blocks, x.shape[dim] // blocks, math.prod(x.shape[dim + 1 :])


def _gathered(x: Tensor, dim: int, on: Axis, blocks: int, size: int | None) -> Tensor:
    lead, length, rest = _split(x, dim, blocks)
    block = length * on.size if size is None else size // blocks
    step = -(-block // on.size)
    assert length == chunk(block, on.size, on.rank)[1], f"{length} of {block} on rank {on.rank} of {on.size}: say size="
    whole = x.new_empty(*x.shape[:dim], blocks * block, *x.shape[dim + 1 :])
    if length < step:
        x = F.pad(x.reshape(lead, length, rest), (0, 0, 0, step - length))
    if lead == 1 and block == on.size * step:  # the parts land where they belong
        _gather_single(whole.view(-1), x.contiguous().view(-1), group=on.group)
        return whole
    parts = x.new_empty(on.size, lead, step, rest)
    _gather_single(parts.view(-1), x.contiguous().view(-1), group=on.group)
    if block < on.size * step:
        trimmed = [parts[rank, :, : chunk(block, on.size, rank)[1]] for rank in range(on.size)]
        torch.cat(trimmed, 1, out=whole.view(lead, block, rest))
    else:
        torch.cat(parts.unbind(), 1, out=whole.view(lead, block, rest))
    return whole


def _reduce_scattered(x: Tensor, dim: int, on: Axis, blocks: int) -> Tensor:
    lead, block, rest = _split(x, dim, blocks)
    step = -(-block // on.size)
    length = chunk(block, on.size, on.rank)[1]
    part = x.new_empty(*x.shape[:dim], blocks * length, *x.shape[dim + 1 :])
    if even := block == on.size * step:
        padded = part
    else:
        x = F.pad(x.reshape(lead, block, rest), (0, 0, 0, on.size * step - block))
        padded = x.new_empty(lead, step, rest)
    if lead > 1:
        x = x.reshape(lead, on.size, step, rest).transpose(0, 1)
    _scatter_single(padded.view(-1), x.contiguous().view(-1), group=on.group)
    if not even:
        part.view(lead, length, rest).copy_(padded[:, :length])
    return part


def _sum(x: Tensor, on: Axis) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=on.group)
    return total


def _slice(x: Tensor, dim: int, on: Axis, blocks: int) -> Tensor:
    lead, block, rest = _split(x, dim, blocks)
    start, length = chunk(block, on.size, on.rank)
    part = x.new_empty(*x.shape[:dim], blocks * length, *x.shape[dim + 1 :])  # a view would keep the whole alive
    part.view(lead, length, rest).copy_(x.reshape(lead, block, rest).narrow(1, start, length))
    return part


def _padded(part: Tensor, shape: tuple[int, ...], dim: int, on: Axis, blocks: int) -> Tensor:
    whole = part.new_zeros(shape)
    lead, block, rest = _split(whole, dim, blocks)
    start, length = chunk(block, on.size, on.rank)
    whole.view(lead, block, rest).narrow(1, start, length).copy_(part.reshape(lead, length, rest))
    return whole


def _exchanged(x: Tensor, source: S, target: S, on: Axis, size: int) -> Tensor:
    """S(source) -> S(target); `size` is that of the source's whole dim."""
    if source.dim == target.dim:
        return _reblocked(x, source, target, on, size)
    cut = x.shape[target.dim] // target.blocks
    block = size // source.blocks
    moved = x.new_empty(
        _with(_with(x.shape, source.dim, size), target.dim, target.blocks * chunk(cut, on.size, on.rank)[1])
    )

    # [.., blocks * cut, ..] -> a slice of every block for each rank, one after the other
    cuts = x.reshape(_cut(x.shape, target.dim, target.blocks))
    slices = [cuts.narrow(target.dim + 1, *chunk(cut, on.size, rank)) for rank in range(on.size)]
    sent = [part.numel() for part in slices]
    packed = x.new_empty(x.numel())
    for space, part in zip(packed.split(sent), slices, strict=True):
        space.view(part.shape).copy_(part)

    whole = moved.view(_cut(moved.shape, source.dim, source.blocks))
    shapes = [_with(whole.shape, source.dim + 1, chunk(block, on.size, rank)[1]) for rank in range(on.size)]
    received = [math.prod(shape) for shape in shapes]
    arrived = x.new_empty(moved.numel())
    dist.all_to_all_single(arrived, packed, received, sent, group=on.group)
    parts = [part.view(shape) for part, shape in zip(arrived.split(received), shapes, strict=True)]
    torch.cat(parts, source.dim + 1, out=whole)
    return moved


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _cut(shape: Sequence[int], dim: int, blocks: int) -> tuple[int, ...]:
    return (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])


def _reblocked(x: Tensor, source: S, target: S, on: Axis, size: int) -> Tensor:
    """S(d, k) -> S(d, m): every rank sends each other the elements that are the other's under m."""
    dim = source.dim
    send, sent, receive, received = _routes(size, source.blocks, target.blocks, on.size, on.rank)
    packed = x.movedim(dim, 0).index_select(0, torch.tensor(send, device=x.device))
    arrived = packed.new_empty(len(receive), *packed.shape[1:])
    dist.all_to_all_single(arrived, packed, list(received), list(sent), group=on.group)
    moved = x.new_empty(_with(x.shape, dim, len(receive)))
    moved.movedim(dim, 0).index_copy_(0, torch.tensor(receive, device=x.device), arrived)
    return moved


@lru_cache(maxsize=256)
def _routes(
    size: int, source: int, target: int, ranks: int, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Which local elements go out, how many to each rank; where what comes in belongs, how many from each rank."""

    def held(blocks: int, rank: int) -> list[int]:
        start, length = chunk(size // blocks, ranks, rank)
        return [block * (size // blocks) + start + i for block in range(blocks) for i in range(length)]

    before, after = held(source, rank), held(target, rank)
    place = {element: i for i, element in enumerate(after)}
    wanted = [set(held(target, r)) for r in range(ranks)]
    out = [[i for i, element in enumerate(before) if element in wanted[r]] for r in range(ranks)]
    into = [[place[element] for element in held(source, r) if element in place] for r in range(ranks)]
    return (
        tuple(i for part in out for i in part),
        tuple(map(len, out)),
        tuple(i for part in into for i in part),
        tuple(map(len, into)),
    )


# The same with a gradient


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, on: Axis, same: bool, blocks: int, size: int | None) -> Tensor:
        ctx.how = dim, on, same, blocks
        return _gathered(x, dim, on, blocks, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dim, on, same, blocks = ctx.how
        back = _slice if same else _reduce_scattered
        return back(g, dim, on, blocks), None, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, on: Axis, blocks: int) -> Tensor:
        ctx.how = dim, on, blocks, x.shape[dim]
        return _reduce_scattered(x, dim, on, blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dim, on, blocks, size = ctx.how
        return _gathered(g, dim, on, blocks, size), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, on: Axis, same: bool) -> Tensor:
        ctx.how = on, same
        return _sum(x, on)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        on, same = ctx.how
        return g if same else _sum(g, on), None, None


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, on: Axis, same: bool, blocks: int) -> Tensor:
        ctx.how = dim, on, same, blocks, tuple(x.shape)
        return _slice(x, dim, on, blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dim, on, same, blocks, shape = ctx.how
        whole = _gathered(g, dim, on, blocks, shape[dim]) if same else _padded(g, shape, dim, on, blocks)
        return whole, None, None, None, None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, on: Axis, once: bool) -> Tensor:
        ctx.how = on, once
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        on, once = ctx.how
        if once:
            return g if on.rank == 0 else torch.zeros_like(g), None, None
        return _sum(g, on), None, None


class _OnFirstRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, on: Axis) -> Tensor:
        ctx.first = on.rank == 0
        return bias.view_as(bias) if ctx.first else torch.zeros_like(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g if ctx.first else torch.zeros_like(g), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: S, target: S, on: Axis, size: int) -> Tensor:
        ctx.how = target, source, on, size if source.dim == target.dim else x.shape[target.dim]
        return _exchanged(x, source, target, on, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(g, *ctx.how), None, None, None, None


class _CrossEntropy(torch.autograd.Function):
    """loss = lse - score, lse = log sum exp over all classes, score = the target's logit; its rows' gradient is
    softmax - onehot. The logits and lse are kept, not the softmax: the logits are alive in any case."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, on: Axis, size: int, ignore_index: int) -> Tensor:
        start, classes = chunk(size, on.size, on.rank)
        assert classes == logits.shape[1], f"{logits.shape[1]} of {size} classes over {on.size} ranks"
        valid = target != ignore_index
        known = ~valid | ((target >= 0) & (target < size))
        torch._assert_async(known.all(), f"a target is no class (0 to {size - 1}) and not ignore_index {ignore_index}")
        precise = torch.promote_types(logits.dtype, torch.float32)
        own = target - start
        here = valid & (own >= 0) & (own < classes)
        own = own.masked_fill_(~here, 0).unsqueeze(1)
        score = logits.gather(1, own).squeeze(1).to(precise).masked_fill_(~here, 0)
        lse = logits.to(precise).logsumexp(1)
        if on.size > 1:
            largest = lse.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=on.group)
            sums = torch.stack([(lse - largest).exp_(), score])
            dist.all_reduce(sums, group=on.group)
            lse, score = sums[0].log_().add_(largest), sums[1]
        ctx.save_for_backward(logits, lse, own, here, valid)
        return (lse - score).masked_fill_(~valid, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, own, here, valid = ctx.saved_tensors
        p = (logits - lse.unsqueeze(1)).exp_()  # [N, size / n] in fp32
        p.scatter_add_(1, own, -here.to(p.dtype).unsqueeze(1))
        p.mul_((g * valid).unsqueeze(1))
        return p.to(logits.dtype), None, None, None, None
