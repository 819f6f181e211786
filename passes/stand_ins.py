"""What a rehearsed program takes from the runtime: modules and collectives that hold and allocate as the real ones.

Nothing is communicated; all is as on the first rank of tp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.kernels import ON_CUDA, applied
from passes.lower import Lowered
from passes.placements import I, P, Placement, R, S, local_shape


class _Scope(nn.Module):
    """A module whose numbered children can be indexed."""

    def __getitem__(self, number: int) -> Any:
        return getattr(self, str(number))


def built(kind: Any) -> nn.Module:
    """An instance whose children hide the methods that are called like them, as the runtime has it."""
    module: nn.Module = kind()
    for one in module.modules():
        held = {**one._modules, **one._parameters, **one._buffers}
        one.__dict__.update({name: value for name, value in held.items() if hasattr(type(one), name)})
    return module


def _attach(module: nn.Module, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in module._modules:
            module._modules[parent] = _Scope()  # where a method may have that name
        module = cast(nn.Module, module._modules[parent])
    if isinstance(value, nn.Module):
        module._modules[name] = value  # where a method may have that name
    elif isinstance(value, nn.Parameter):
        module._parameters[name] = value  # register_parameter refuses names of methods
    else:
        module._buffers[name] = value


def runtime_names(lowered: Lowered, low: torch.dtype) -> dict[str, Any]:
    """For the first rank: parameters are in the compute dtype, as the engine hands them out."""
    axis = lowered.sharding.axis
    copies = axis.cluster.device.kind == "cpu"  # gloo reduces and scatters a copy

    def local(shape: Sequence[int], dtype: torch.dtype, where: dict[str, Any]) -> Tensor:
        placement: Placement = where.get(axis.name, I)
        return torch.empty(local_shape(placement, tuple(shape), axis.ranks), dtype=dtype)

    class ShardedModule(_Scope):
        def parameter(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, **where: Any) -> None:
            tensor = local(shape, low if dtype == torch.float32 else dtype, where)
            _attach(self, name, nn.Parameter(tensor, requires_grad=where.get("requires_grad", True)))

        def buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, **where: Any) -> None:
            _attach(self, name, local(shape, dtype, where))

        def blocks(self, path: str, modules: list[nn.Module] | dict[int, nn.Module]) -> None:
            holder = self if not path else nn.ModuleList() if isinstance(modules, list) else _Scope()
            for number, module in modules.items() if isinstance(modules, dict) else enumerate(modules):
                holder.add_module(str(number), module)
            if path:
                _attach(self, path, holder)

        def alias(self, name: str, of: str) -> None:
            """Holds nothing."""

        def rng(self, site: int, axes: tuple[str, ...] = ()) -> Any:
            return nullcontext()

    return {
        "__name__": "rehearsal",
        "F": F if copies else _OnCuda(),
        "S": S,
        "R": R,
        "I": I,
        "P": P,
        "ShardedModule": ShardedModule,
        **dict.fromkeys(("Program", "Input", "Stage", "Edge"), lambda *_, **__: None),
        "main": lambda _: None,
        "recompute": lambda layer, *inputs: layer(*inputs),
        **collectives(axis.ranks, copies),
    }


class _OnCuda:
    """torch.nn.functional as CUDA has it."""

    def __getattr__(self, name: str) -> Any:
        return ON_CUDA.get(name) or getattr(F, name)


# -- collectives: see autopar/runtime/collectives.py for what they are ------------------------------------------------


def collectives(n: int, copies: bool) -> dict[str, Any]:
    if n == 1:
        return {
            "all_gather": lambda x, *_, **__: x,
            "reduce_scatter": lambda x, *_, **__: x,
            "all_reduce": lambda x, *_, **__: x,
            "shard": lambda x, *_, **__: x,
            "replicate": lambda x, *_, **__: x,
            "all_to_all": lambda x, *_, **__: x,
            "bias_on_one_rank": lambda x, *_, **__: x,
            "vocabulary_embedding": lambda ids, weight, **_: F.embedding(ids, weight),
            "vocabulary_cross_entropy": _vocabulary_cross_entropy,
        }

    scattered = partial(_scattered, n=n, copies=copies)
    gathered, sliced = partial(_gathered, n=n), partial(_sliced, n=n)

    def all_gather(
        x: Tensor, dim: int, axis: str, backward: str = "", blocks: int = 1, size: int | None = None
    ) -> Tensor:
        cut = {"dim": dim % x.ndim, "blocks": blocks}
        return moved(
            x, partial(gathered, **cut, size=size), partial(sliced if backward == "slice" else scattered, **cut)
        )

    def reduce_scatter(x: Tensor, dim: int, axis: str, blocks: int = 1, size: int | None = None) -> Tensor:
        cut = {"dim": dim % x.ndim, "blocks": blocks}
        return moved(x, partial(scattered, **cut), partial(gathered, **cut, size=x.shape[dim]))

    def shard(
        x: Tensor, dim: int, axis: str, backward: str = "pad", blocks: int = 1, size: int | None = None
    ) -> Tensor:
        cut = {"dim": dim % x.ndim, "blocks": blocks}
        padded = partial(_padded, shape=tuple(x.shape))
        back = partial(gathered, **cut, size=x.shape[dim]) if backward == "all_gather" else padded
        return moved(x, partial(sliced, **cut), back)

    def all_reduce(x: Tensor, axis: str, backward: str = "all_reduce") -> Tensor:
        return moved(x, _summed, _summed if backward == "all_reduce" else same)

    def replicate(x: Tensor, axis: str, backward: str = "all_reduce") -> Tensor:
        return moved(x, _viewed, _summed if backward == "all_reduce" else same)

    def all_to_all(x: Tensor, gather_dim: int, scatter_dim: int, axis: str, **how: int) -> Tensor:
        gather_dim, scatter_dim = gather_dim % x.ndim, scatter_dim % x.ndim
        whole = resized(x.shape, gather_dim, how.get("gather_size") or x.shape[gather_dim] * n)
        shape = local_shape(S(scatter_dim, how.get("scatter_blocks", 1)), whole, n)
        return moved(x, partial(_exchanged, shape=shape), partial(_exchanged, shape=tuple(x.shape)))

    return {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
        "shard": shard,
        "replicate": replicate,
        "all_to_all": all_to_all,
        "bias_on_one_rank": lambda bias, axis: bias,
        "vocabulary_embedding": _vocabulary_embedding,
        "vocabulary_cross_entropy": _vocabulary_cross_entropy,
    }


class _Moved(torch.autograd.Function):
    """Something happens to a tensor, and something else to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0]), None, None


def moved(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    return cast(Tensor, applied(_Moved, x, there, back))


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def same(x: Tensor) -> Tensor:
    return x


def _viewed(x: Tensor) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, dim: int, n: int, blocks: int, size: int | None) -> Tensor:
    lead, length = prod(x.shape[:dim]) * blocks, x.shape[dim] // blocks
    block = length * n if size is None else size // blocks
    whole = x.new_empty(resized(x.shape, dim, blocks * block))
    sent = x.new_empty(x.numel()) if block % n else x.contiguous()  # a short rank fills up its part
    parts = x.new_empty(n * x.numel() if lead > 1 or block % n else 0)  # they do not land where they belong
    del sent, parts
    return whole


def _scattered(x: Tensor, dim: int, n: int, blocks: int, copies: bool) -> Tensor:
    lead, block, rest = prod(x.shape[:dim]) * blocks, x.shape[dim] // blocks, prod(x.shape[dim + 1 :])
    step = -(-block // n)
    part = x.new_empty(local_shape(S(dim, blocks), tuple(x.shape), n))
    if block % n:
        x = F.pad(x.reshape(lead, block, rest), (0, 0, 0, n * step - block))
    padded = part if block % n == 0 else x.new_empty(lead, step, rest)
    if lead > 1:
        x = x.reshape(lead, n, step, rest).transpose(0, 1)
    sent = x.contiguous()
    if copies:
        sent = sent.clone()
    del sent, padded
    return part


def _sliced(x: Tensor, dim: int, n: int, blocks: int) -> Tensor:
    lead, block, rest = prod(x.shape[:dim]) * blocks, x.shape[dim] // blocks, prod(x.shape[dim + 1 :])
    part = x.new_empty(local_shape(S(dim, blocks), tuple(x.shape), n))
    x.reshape(lead, block, rest)
    return part


def _padded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    whole = x.new_zeros(shape)
    x.contiguous()
    return whole


def _exchanged(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    part = x.new_empty(shape)
    packed, arrived = x.new_empty(x.numel()), x.new_empty(part.numel())
    del packed, arrived
    return part


def _vocabulary_embedding(ids: Tensor, weight: Tensor, axis: str, size: int, padding_idx: int | None = None) -> Tensor:
    local = ids - 0
    elsewhere = (local < 0) | (local >= weight.shape[0])
    found = F.embedding(local.masked_fill_(elsewhere, 0), weight)
    return found.masked_fill_(elsewhere.unsqueeze(-1), 0)


def _vocabulary_cross_entropy(
    logits: Tensor, target: Tensor, axis: str, size: int, ignore_index: int = -100, reduction: str = "sum"
) -> Tensor:
    loss = cast(Tensor, applied(_CrossEntropy, logits, target, ignore_index))
    if reduction == "none":
        return loss
    total = loss.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        valid = target != ignore_index
        precise = torch.promote_types(logits.dtype, torch.float32)
        own = target - 0
        here = valid & (own >= 0) & (own < logits.shape[1])
        own = own.masked_fill_(~here, 0).unsqueeze(1)
        score = logits.gather(1, own).squeeze(1).to(precise).masked_fill_(~here, 0)
        lse = logits.to(precise).logsumexp(1)
        sums = torch.stack([(lse - lse.clone()).exp_(), score])
        lse, score = sums[0], sums[1]
        ctx.save_for_backward(logits, lse, own, here, valid)
        return (lse - score).masked_fill_(~valid, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, lse, own, here, valid = ctx.saved_tensors
        p = (logits - lse.unsqueeze(1)).exp_()
        p.scatter_add_(1, own, -here.to(p.dtype).unsqueeze(1))
        p.mul_((gradients[0] * valid).unsqueeze(1))
        return p.to(logits.dtype), None, None
