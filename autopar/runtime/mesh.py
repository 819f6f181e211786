"""The device mesh that this process is part of: one of each program, the current one reached by its axes' names.

init({"dp": 2, "tp": 2})           tp=0    tp=1        the last axis is innermost: neighbours in rank
                           dp=0   rank 0  rank 1
                           dp=1   rank 2  rank 3
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

GLOO_TIMEOUT = timedelta(seconds=60)
RELEASED_S = 0.1  # in which gloo's threads have let go of what was sent


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this process sees it: its group, its place in it, and how many are in it."""

    name: str
    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class Mesh:
    """The mesh, its axes by name, the device of this process, and what `along` gave before."""

    device_mesh: DeviceMesh
    axes: Mapping[str, Axis]
    device: torch.device
    world: dist.ProcessGroup
    parts: dict[tuple[str | int, ...], dist.ProcessGroup | None] = field(default_factory=dict, compare=False)


_current: Mesh | None = None
_made: list[Mesh] = []  # process groups are dear: one set for each mesh, however many programs are on it


def init(mesh: Mapping[str, int], device: str | torch.device | None = None) -> Mesh:
    """Make `mesh` ({axis: size}, last axis innermost) the current one.

    Initialises the process group where nobody has: nccl on cuda, gloo on cpu. Without torchrun the world is this
    process alone. `device` is "cpu" or "cuda"; None takes cuda where there is one.
    """
    global _current, _made
    _leave_at_exit()
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    check_world_size(mesh)
    own = own_device(kind)
    if not dist.is_initialized():
        init_process_group(own)
    _made = [one for one in _made if _is_alive(one)]
    for one in _made:
        if one.device == own and [(name, axis.size) for name, axis in one.axes.items()] == list(mesh.items()):
            _current = one
            return one
    device_mesh = init_device_mesh(kind, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    axes = {
        name: Axis(name, device_mesh.get_group(name), device_mesh.get_local_rank(name), size)
        for name, size in mesh.items()
    }
    _current = Mesh(device_mesh, axes, own, _world())
    _made.append(_current)
    return _current


@contextmanager
def using(mesh: Mesh) -> Iterator[None]:
    """Make `mesh` the current one inside: programs on several meshes may take turns in a process."""
    global _current
    before, _current = _current, mesh
    try:
        yield
    finally:
        _current = before


def current() -> Mesh:
    """The mesh that `init` made last, or that is used here."""
    if _current is None or not _is_alive(_current):
        raise RuntimeError("there is no device mesh yet: call autopar.runtime.init(mesh) first")
    return _current


def axis(name: str) -> Axis:
    """The axis of that name."""
    axes = current().axes
    if name not in axes:
        raise KeyError(f"the mesh has no axis {name!r}, only {', '.join(axes)}")
    return axes[name]


def axis_or_none(name: str) -> Axis | None:
    """The axis of that name, or None where the mesh does without."""
    return current().axes.get(name)


def shard_mesh(group: int) -> DeviceMesh:
    """The data-parallel axis for `fully_shard`, parameters sharded over `group` neighbours on it.

    One mesh dim where the group is the whole axis, else two: dp_replicate (outer) and dp_shard.
    """
    mesh = current()
    dp = mesh.axes["dp"].size
    if group == dp:
        return mesh.device_mesh["dp"]
    if dp % group:
        raise ValueError(f"a data-parallel axis of {dp} has no equal groups of {group}")
    names: list[str] = []
    sizes: list[int] = []
    for name, one in mesh.axes.items():
        names += ["dp_replicate", "dp_shard"] if name == "dp" else [name]
        sizes += [dp // group, group] if name == "dp" else [one.size]
    split = init_device_mesh(mesh.device.type, tuple(sizes), mesh_dim_names=tuple(names))
    return split["dp_replicate", "dp_shard"]


def along(name: str, places: Sequence[int]) -> dist.ProcessGroup | None:
    """The group of those ranks of an axis that are at `places`, None for others. All ranks call it together.

    torch names a group that only its members make by how many groups each of them has, which differs between ranks once
    a process has had programs on several meshes: they would wait for each other for ever (torch 2.13).
    """
    mesh = current()
    dim = list(mesh.axes).index(name)
    if len(places) == mesh.axes[name].size:
        return mesh.axes[name].group
    if (name, *places) not in mesh.parts:
        lines = mesh.device_mesh.mesh.movedim(dim, -1)[..., list(places)].reshape(-1, len(places))
        own, _ = dist.new_subgroups_by_enumeration(lines.tolist())
        mesh.parts[name, *places] = own
    return mesh.parts[name, *places]


def own_device(kind: str) -> torch.device:
    """The device of this process: of the GPUs that of its local rank, the current one from now on."""
    if kind != "cuda":
        return torch.device(kind)
    own = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(own)
    return own


def world_size() -> int:
    """How many processes were started."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def check_world_size(mesh: Mapping[str, int]) -> None:
    """Raise ValueError where the processes are not as many as the mesh has places."""
    world = world_size()
    places = math.prod(mesh.values())
    if world != places:
        shape = ", ".join(f"{name} {size}" for name, size in mesh.items())
        raise ValueError(
            f"the program is for {places} processes ({shape}), but {world} {'was' if world == 1 else 'were'} started; "
            f"use torchrun --nproc-per-node so that nodes x processes = {places}"
        )


def init_process_group(device: torch.device) -> None:
    """Initialise the process group of torchrun, or of this process alone."""
    _leave_at_exit()
    backend, options = ("nccl", {"device_id": device}) if device.type == "cuda" else ("gloo", {"timeout": GLOO_TIMEOUT})
    if "RANK" in os.environ:
        dist.init_process_group(backend, **options)
        return
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may resolve to nothing
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)


@cache
def _leave_at_exit() -> None:
    """Whoever made the group: its threads are the same."""
    atexit.register(_leave)


def _leave() -> None:
    """End the process group, if nobody did, and give gloo's threads the interpreter once more.

    They hold tensors a little longer than their work takes: one that lets go when the interpreter is gone aborts the
    process (seen in one run of five, torch 2.13).
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(RELEASED_S)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the process group is initialised"
    return world


def _is_alive(mesh: Mesh) -> bool:
    """Whether the mesh's process groups are still those of the initialised world."""
    return dist.is_initialized() and dist.group.WORLD is mesh.world
