"""What happens to the gradients of a step once they are summed over dp: summed over tp, measured, clipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime import mesh
from autopar.runtime.layout import Layout, S
from autopar.runtime.weights import local

BUCKET_BYTES = 64 * 2**20  # summed in one all-reduce


@torch.no_grad()
def sum_over_tp(gradients: Iterable[Tensor]) -> None:
    """Sum, in place and in few all-reduces, the partial gradients of parameters placed R."""
    tp = mesh.axis_or_none("tp")
    if tp is None or tp.size == 1:
        return
    all_reduce(gradients, tp.group)


@torch.no_grad()
def all_reduce(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sum this rank's part of each gradient over the group, in place and in few all-reduces."""
    for bucket in _buckets([g for g in map(local, gradients) if g.numel()]):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat, group=group)
        summed = flat.split([g.numel() for g in bucket])
        torch._foreach_copy_(bucket, [s.view(g.shape) for s, g in zip(summed, bucket, strict=True)])


@torch.no_grad()
def norm(gradients: Mapping[str, Tensor], layouts: Mapping[str, Layout], order: float) -> Tensor:
    """The norm (of order 2 or inf) of the whole gradient, each element of each parameter counted once. []"""
    largest = order == float("inf")
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    #                    cut over tp      the same on tp
    # cut over dp          [0, 0]            [0, 1]
    # the same on dp       [1, 0]            [1, 1]
    groups: dict[tuple[int, int], list[Tensor]] = {(i, j): [] for i in (0, 1) for j in (0, 1)}
    shards: dist.ProcessGroup | None = None
    for name, g in gradients.items():
        if isinstance(g, DTensor):
            shards = g.device_mesh.get_group(g.device_mesh.ndim - 1)
        cut = isinstance(layouts[name].placement, S)
        groups[int(not isinstance(g, DTensor)), int(not cut)].append(local(g))
    powers = torch.zeros(2, 2, dtype=torch.float64, device=mesh.current().device)
    for place, found in groups.items():
        if parts := [g for g in found if g.numel()]:
            norms = torch.stack(torch._foreach_norm(parts, order)).double()
            powers[place] = norms.max() if largest else norms.square().sum()
    if shards is not None:
        dist.all_reduce(powers[0], op, group=shards)
    over_tp, same = powers[:, 0].contiguous(), powers[:, 1]
    tp = mesh.axis_or_none("tp")
    if tp is not None and tp.size > 1:
        dist.all_reduce(over_tp, op, group=tp.group)
    total = torch.maximum(over_tp, same).max() if largest else (over_tp + same).sum()
    if (pp := mesh.axis_or_none("pp")) is not None:  # every stage has parameters of its own
        dist.all_reduce(total, op, group=pp.group)
    return total if largest else total.sqrt()


@torch.no_grad()
def clip(gradients: Iterable[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients of that norm down to `limit`, as `torch.nn.utils.clip_grad_norm_` does on one device."""
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for same in _by_dtype([local(g) for g in gradients]):
        torch._foreach_mul_(same, scale.to(same[0].dtype))


def _by_dtype(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        yield [tensor for tensor in tensors if tensor.dtype == dtype]


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, up to BUCKET_BYTES of them (a larger one stands alone)."""
    for same in _by_dtype(tensors):
        bucket: list[Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket
