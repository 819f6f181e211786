"""Whole tensors in and out of a sharded model, one at a time: the model never stands whole on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime import mesh
from autopar.runtime.layout import Layout, S, chunk
from autopar.runtime.module import derived_seed

_Sent: TypeAlias = tuple[str, tuple[int, ...], torch.dtype]


def local(tensor: Tensor) -> Tensor:
    """This rank's own part of a tensor that `fully_shard` has cut, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> dict[str, Tensor] | None:
    """The whole tensors on the CPU of rank 0, None on the others. All ranks call it together.

    Where the ranks of pp hold different ones, those of all of them; of what several hold, the first one's.
    """
    pp = mesh.axis_or_none("pp")
    leads = all(axis.rank == 0 for name, axis in mesh.current().axes.items() if name != "pp")
    names: list[list[_Sent]] = [[] for _ in range(pp.size if pp else 1)]
    own = [(name, layouts[name].shape, tensor.dtype) for name, tensor in tensors.items()]
    if pp and leads:
        dist.all_gather_object(names, own, group=pp.group)
    first = dist.get_rank() == 0
    found = {}
    for name, tensor in tensors.items():
        part = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        whole = _gather_over_tp(part, layouts[name])
        if first:
            assert whole is not None, "rank 0 gathers"
            found[name] = whole.to("cpu", copy=True)
        elif pp and leads:
            assert whole is not None, "the first rank of a stage gathers"
            dist.send(_as_real(whole).contiguous(), group=pp.group, group_dst=0)
    if not first:
        return None
    for source, sent in enumerate(names[1:], 1):
        for name, shape, dtype in sent:
            assert pp is not None, "only its ranks send"
            whole = torch.empty(shape, dtype=dtype, device=mesh.current().device)
            dist.recv(_as_real(whole), group=pp.group, group_src=source)
            found.setdefault(name, whole.to("cpu", copy=True))
    return found


def _gather_over_tp(part: Tensor, layout: Layout) -> Tensor | None:
    axes = mesh.current().axes
    tp = axes.get("tp")
    if not isinstance(layout.placement, S) or tp is None or tp.size == 1:
        return part
    if any(axis.rank for name, axis in axes.items() if name not in ("pp", "tp")):
        return None  # it is gathered in another group
    dim = layout.placement.dim
    shapes = [layout.local_shape(rank, tp.size) for rank in range(tp.size)]
    largest = shapes[0][dim]
    padding = (0, 0) * (part.ndim - 1 - dim) + (0, largest - part.shape[dim])
    padded = F.pad(part, padding).contiguous()
    parts = [torch.empty_like(padded) for _ in shapes] if tp.rank == 0 else None
    dist.gather(_as_real(padded), parts and [_as_real(one) for one in parts], group=tp.group, group_dst=0)
    if parts is None:
        return None
    return layout.full([one.narrow(dim, 0, shape[dim]) for one, shape in zip(parts, shapes, strict=True)])


def _as_real(tensor: Tensor) -> Tensor:
    """Gloo moves no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@torch.no_grad()
def scatter(
    tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], whole: Callable[[str], Tensor | None]
) -> list[str]:
    """Copy this rank's part of every whole tensor into place. What could not be copied, in words."""
    faults = []
    for name, tensor in tensors.items():
        value, shape = whole(name), layouts[name].shape
        if value is None:
            faults.append(f"{name} is missing")
        elif not isinstance(value, Tensor):
            faults.append(f"{name} is a {type(value).__name__}, not a tensor")
        elif tuple(value.shape) != shape:
            faults.append(f"{name} has shape {list(value.shape)}, not {list(shape)}")
        else:
            _copy_part(tensor, value, layouts[name])
    return faults


def _copy_part(tensor: Tensor, whole: Tensor, layout: Layout) -> None:
    tp = mesh.axis_or_none("tp")
    part = layout.local(whole.detach(), tp.rank, tp.size) if tp else whole.detach()
    if isinstance(tensor, DTensor):  # the last mesh dim cuts dim 0
        ranks = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
        rank = tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1)
        part = part.narrow(0, *chunk(part.shape[0], ranks, rank))
    local(tensor).copy_(part)


def draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The initial value of a parameter, a function of its name and the seed: the same for every plan. [*shape]

    Normal of standard deviation 0.02; ones for the weights of norms, zeros for other vectors.
    """
    if len(shape) >= 2:
        generator = torch.Generator().manual_seed(derived_seed("parameter", seed, name))
        return torch.empty(shape, device="cpu").normal_(0.0, 0.02, generator=generator)
    return torch.full(shape, float(name.endswith("weight")), device="cpu")
