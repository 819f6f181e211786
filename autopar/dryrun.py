"""DRY RUN: one rank's real program, whole optimizer steps of it, on fake tensors in a fake process group of any size.

What it does not know: the allocator, kernels that choose by device. Tried with torch 2.13: the fake process group,
how FSDP frees storages, how pipelines transfer and DistributedDataParallel orders its buckets are private there.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as _c10d
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from autopar.job import load_program
from autopar.report import PROGRAM, bytes_for_people, entry, read_plan
from autopar.runtime import mesh
from autopar.runtime.engine import Replicated
from autopar.runtime.gradients import BUCKET_BYTES
from autopar.runtime.trainer import Trainer
from autopar.runtime.weights import local
from costmodels.errors import BadInput
from passes.kernels import ON_CUDA
from passes.plan import Plan
from passes.rehearse import Tracker

# of c10d's operators: what the collective is, and where the tensors that are the full one stand
KINDS: dict[str, tuple[str, Callable[[tuple[Any, ...]], Any]]] = {
    "allreduce_": ("all_reduce", lambda args: args[0]),
    "allreduce_coalesced_": ("all_reduce", lambda args: args[0]),
    "_allgather_base_": ("all_gather", lambda args: args[0]),
    "allgather_into_tensor_coalesced_": ("all_gather", lambda args: args[0]),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args: args[1]),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", lambda args: args[1]),
    "alltoall_base_": ("all_to_all", lambda args: args[1]),
    "broadcast_": ("broadcast", lambda args: args[0]),
    "send": ("send", lambda args: args[0]),
}
TOLERANCE = 0.03  # of the plan's peak
UNEVEN = 0.01  # of the plan's bytes


@dataclass(frozen=True)
class Traffic:
    """A kind of collective of one axis in a step of this rank."""

    name: str
    axis: str
    count: int
    full_bytes: int  # of all of them together
    in_buckets: bool = False  # gradients, whose buckets a plan does not count

    def is_as(self, planned: Traffic | None) -> bool:
        """Plans are for the fullest rank: where shards are uneven, others have a row less."""
        if planned is None:
            return False
        in_more = planned.in_buckets and self.count > planned.count
        if self.count != planned.count and not self.in_buckets and not in_more:
            return False
        return (1 - UNEVEN) * planned.full_bytes <= self.full_bytes <= planned.full_bytes

    @property
    def said(self) -> str:
        return f"{self.count:,} x, {bytes_for_people(self.full_bytes)}"


@dataclass(frozen=True)
class DryRun:
    """What one rank does and holds in an optimizer step."""

    rank: int
    place: tuple[tuple[str, int], ...]  # its coordinate on each axis
    peak_bytes: int
    predicted_bytes: int  # the plan's
    held: tuple[tuple[str, int], ...]  # what fills it at the peak, by category
    where: str  # the line at the peak
    traffic: tuple[Traffic, ...]
    predicted_traffic: tuple[Traffic, ...]  # the plan's

    @property
    def _planned(self) -> dict[tuple[str, str], Traffic]:
        return {(one.name, one.axis): one for one in self.predicted_traffic}

    @property
    def as_planned(self) -> bool:
        """Whether it holds no more than the plan says, and runs the very collectives."""
        planned = self._planned
        same = {(one.name, one.axis) for one in self.traffic} == planned.keys()
        same = same and all(one.is_as(planned[one.name, one.axis]) for one in self.traffic)
        return same and self.peak_bytes <= (1 + TOLERANCE) * self.predicted_bytes

    @property
    def text(self) -> str:
        """For people, against the plan."""
        place = "  ".join(f"{name} {at}" for name, at in self.place)
        off = 100 * (self.predicted_bytes / self.peak_bytes - 1)
        held, planned_for = bytes_for_people(self.peak_bytes), bytes_for_people(self.predicted_bytes)
        peak = f"{held} at the peak; the plan says {planned_for} ({off:+.1f} %)"
        parts = "  ".join(f"{name} {bytes_for_people(size)}" for name, size in self.held)
        planned = self._planned
        lines = []
        for one in self.traffic:
            plan = planned.pop((one.name, one.axis), None)
            same = "as planned" if one.is_as(plan) else f"the plan says {plan.said}" if plan else "not in the plan"
            lines.append(f"{one.name:15}{one.axis:14}{one.said:24}{same}")
        lines += [f"{one.name:15}{one.axis:14}{'never':24}the plan says {one.said}" for one in planned.values()]
        paragraphs = (
            entry("rank", [f"{self.rank}   {place}"]),
            entry("memory", [peak, parts, f"at {self.where}"]),
            entry("traffic", lines or ["none"]),
        )
        return "\n\n".join("\n".join(lines) for lines in paragraphs) + "\n"


def dryrun(folder: Path, rank: int = 0, progress: Callable[[str], None] = lambda text: None) -> DryRun:
    """Run the program in `folder` as `rank` of its world; once in a process, since torch remembers groups by name.

    Raises BadInput where there is no program, or no such rank.
    """
    plan = read_plan(folder)
    file = folder / PROGRAM
    if not folder.is_dir() or not file.is_file():
        raise BadInput(f"{folder}: there is no {PROGRAM} in it")
    program = load_program(file.read_text(), str(file))
    world, gloo = plan.mesh.devices, plan.cluster.device == "cpu"
    if not 0 <= rank < world:
        raise BadInput(f"--rank {rank}: the program is for {world} ranks, 0 to {world - 1}")
    with _fake_world(rank, world, gloo) as axes, _kernels_of(plan):
        mesh.init(program.mesh if "dp" in program.mesh else {"dp": 1, **program.mesh}, "cpu")
        place = tuple((name, axis.rank) for name, axis in mesh.current().axes.items())
        axes |= {axis.group.group_name: name for name, axis in mesh.current().axes.items()}
        with FakeTensorMode(allow_non_fake_inputs=True):
            progress("building the model")
            trainer = Trainer(program, device="cpu")
            trainer._missing_buffers.clear()  # their values are never read
            buckets = _Buckets(trainer)
            first_row, rows = program.own_rows(trainer.dp_rank)
            whole = program.random_batch(0, 0)  # nobody looks at its values
            own = slice(first_row, first_row + rows)
            batch = [whole[one.name][own].clone() if one.rows else whole[one.name] for one in program.inputs]
            del whole
            progress("the first step, in which the optimizer makes its states")
            trainer.advance(batch, sharded=True)
            progress("a step, in which memory is followed")
            with _Follower(trainer, buckets, axes, gloo) as first:
                trainer.advance(batch, sharded=True)
            progress("the same step again, up to its fullest moment")
            with _Follower(trainer, buckets, axes, gloo, stop_at=first.peak_at) as second:
                trainer.advance(batch, sharded=True)
    stage = dict(place).get("pp", 0)
    return DryRun(
        rank=rank,
        place=place,
        peak_bytes=first.peak,
        predicted_bytes=next(one.peak_bytes for one in plan.memory if one.stage == stage),
        held=second.held,
        where=second.where,
        traffic=first.traffic(),
        predicted_traffic=_predicted(plan, stage),
    )


def _predicted(plan: Plan, stage: int) -> tuple[Traffic, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    in_buckets: set[tuple[str, str]] = set()
    for use in plan.collectives:
        if use.stage != stage:
            continue
        counts[use.name, use.axis] += use.count
        sizes[use.name, use.axis] += use.count * use.full_bytes
        if use.tensor.endswith("gradients") and use.full_bytes > BUCKET_BYTES:  # summed in several parts
            in_buckets.add((use.name, use.axis))
    return tuple(Traffic(*key, counts[key], size, key in in_buckets) for key, size in sorted(sizes.items()))


# -- the fake world ---------------------------------------------------------------------------------------------------


@contextmanager
def _fake_world(rank: int, size: int, gloo: bool) -> Iterator[dict[str, str]]:
    """A process group in which this process is `rank` of `size`, and collectives do nothing.

    Gives the axes of groups by their names, as far as the mesh does not know them: these come to it as they are made.
    """
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining._utils import InferenceMode
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise BadInput("a dry run needs a process of its own: a process group is initialised here")
    environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def own_to_all(found: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
        found[:] = [own] * len(found)

    exchange, transfer = dist.batch_isend_irecv, schedules._batch_p2p

    def arrived(ops: list[dist.P2POp]) -> list[_Arrived]:
        exchange(ops)
        return [_Arrived(op.tensor, gloo) for op in ops]

    def transferred(ops: list[dist.P2POp], desc: str | None = None) -> list[_Arrived]:
        transfer(ops, desc)
        return [_Arrived(op.tensor, gloo) for op in ops]

    axes: dict[str, str] = {}
    shard_mesh, along = mesh.shard_mesh, mesh.along

    # meshes hold the numbers of ranks, which must be read
    def really_shard_mesh(group: int) -> DeviceMesh:
        with unset_fake_temporarily():
            made = shard_mesh(group)
            if made.ndim > 1:
                axes.update((made.get_group(name).group_name, name) for name in made.mesh_dim_names or ())
            return made

    def really_along(name: str, places: Sequence[int]) -> dist.ProcessGroup | None:
        with unset_fake_temporarily():
            made = along(name, places)
            if made is not None:
                axes[made.group_name] = name
            return made

    def agreed(schedule: Any, stages: Iterable[Any], *_: Any, **__: Any) -> None:
        """What ranks agree on before a pipeline's first step: shapes are known."""
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environment))
        stack.enter_context(patch.object(_PipelineSchedule, "_warmup_p2p", agreed))
        stack.enter_context(patch.object(dist, "all_gather_object", own_to_all))
        # DistributedDataParallel's buckets stay as they are: to order them anew ranks would compare real numbers
        stack.enter_context(patch.object(_c10d.Reducer, "_rebuild_buckets", lambda reducer: False))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", arrived))
        stack.enter_context(patch.object(schedules, "_batch_p2p", transferred))
        stack.enter_context(patch.object(mesh, "shard_mesh", really_shard_mesh))
        stack.enter_context(patch.object(mesh, "along", really_along))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield axes
        finally:
            dist.destroy_process_group()


class _Buckets:
    """The gradients of DistributedDataParallel, which sums them by a hook: its own way takes no fake tensors."""

    def __init__(self, trainer: Trainer) -> None:
        self.flat: list[Tensor] = []
        for engine in trainer.engines:
            if isinstance(engine, Replicated):
                # a lambda, since torch refuses annotations that are text
                group = engine.parallel.process_group
                engine.parallel.register_comm_hook(group, lambda group, bucket: self.sum(group, bucket))

    def sum(self, group: dist.ProcessGroup, bucket: _c10d.GradBucket) -> torch.futures.Future[Tensor]:
        self.flat.append(bucket.buffer())
        dist.all_reduce(bucket.buffer(), group=group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


class _Arrived:
    """The work of a transfer that is over: that of the fake process group never says so.

    It holds the tensor until it is waited for, over gloo as long as it is there itself.
    """

    def __init__(self, tensor: Tensor, gloo: bool) -> None:
        self.tensor: Tensor | None = tensor
        self.gloo = gloo

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        if not self.gloo:
            self.tensor = None
        return True


@contextmanager
def _kernels_of(plan: Plan) -> Iterator[None]:
    """Functions keep what they keep on the plan's device, not on the CPU, where a dry run is."""
    if plan.cluster.device == "cpu":
        yield
        return
    with ExitStack() as patched:
        for name, function in ON_CUDA.items():
            patched.enter_context(patch.object(torch.nn.functional, name, function))
        yield


# -- following --------------------------------------------------------------------------------------------------------


class _Follower(Tracker):
    """Follows the bytes of live storages and the collectives of one step; takes stock at the look `stop_at`."""

    def __init__(
        self, trainer: Trainer, buckets: _Buckets, axes: Mapping[str, str], gloo: bool, stop_at: int | None = None
    ) -> None:
        super().__init__()
        self.trainer, self.buckets, self.axes, self.gloo, self.stop_at = trainer, buckets, axes, gloo, stop_at
        self.looks = self.peak_at = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.held: tuple[tuple[str, int], ...] = ()
        self.where = ""

    def __enter__(self) -> _Follower:
        for tensor in (*self.parameters(), *self.states(), *self.trainer.model.buffers(), *self.buckets.flat):
            self.watch(tensor)
        follower = self
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            follower.resized(storage)
            return done

        self.patched = patch.object(torch.UntypedStorage, "resize_", resized)
        self.patched.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self.patched.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self.collective(func, args)
        return out

    def watch(self, tensor: Tensor) -> None:
        super().watch(local(tensor))

    def look(self) -> None:
        """Whenever something may have grown: the same looks in every step."""
        self.looks += 1
        if self.live > self.peak:
            self.peak_at = self.looks
        super().look()
        if self.looks == self.stop_at:
            self.take_stock()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP empties the storages of parameters that it gathers again."""
        key = storage._cdata
        if key in self.sizes:
            self.live += storage.nbytes() - self.sizes[key]
            self.sizes[key] = storage.nbytes()
            self.look()

    def collective(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.removeprefix("c10d::")
        if name not in KINDS:
            return
        kind, full = KINDS[name]
        size = sum(t.nbytes for t in tree_leaves(full(args)))
        if self.gloo and kind == "reduce_scatter":  # gloo reduces a copy
            self.live += size
            self.look()
            self.live -= size
        if all(t.dtype == torch.float64 for t in tree_leaves(full(args))):
            return  # sums of losses, counts and norms, which no plan lists
        group = next(a for a in args if isinstance(a, torch.ScriptObject))
        if kind == "all_to_all":  # what a rank gives is its part
            size *= dist.ProcessGroup.unbox(group).size()
        axis = self.axis_of(group, kind)
        self.counts[kind, axis] += 1
        self.bytes[kind, axis] += size

    def axis_of(self, group: Any, kind: str) -> str:
        """The axis as plans name it: on dp, what is gathered and scattered is sharded, what is reduced replicated."""
        name = self.axes[dist.ProcessGroup.unbox(group).group_name]
        return name if name != "dp" else "dp_replicate" if kind == "all_reduce" else "dp_shard"

    def traffic(self) -> tuple[Traffic, ...]:
        return tuple(
            Traffic(*key, self.counts[key], size, bool(self.buckets.flat) and key[1] == "dp_replicate")
            for key, size in sorted(self.bytes.items())
        )

    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.trainer.optimizer.param_groups for parameter in group["params"]]

    def states(self) -> list[Tensor]:
        found = self.trainer.optimizer.state.values()
        return [value for state in found for value in state.values() if isinstance(value, Tensor)]

    def take_stock(self) -> None:
        """What is live now by category, and the line that runs."""
        kinds = {
            "own parameters": self.parameters(),
            "own gradients": [p.grad for p in self.parameters() if p.grad is not None],
            "optimizer": self.states(),
        }
        left = dict(self.sizes)
        held = []
        for name, tensors in kinds.items():
            keys = {local(t).untyped_storage()._cdata for t in tensors}
            held.append((name, sum(left.pop(key, 0) for key in keys)))
        self.held = (*held, ("activations, gathered parameters, buffers", sum(left.values())))
        self.where = _line()


def _line() -> str:
    """Where the program is: its own line if one is on the stack, else the last line of the runtime."""
    frames = traceback.extract_stack()
    ours = [f for f in frames if f.filename.endswith(PROGRAM)]
    runtime = [f for f in frames if f"{os.sep}runtime{os.sep}" in f.filename]
    frame = (ours or runtime or frames)[-1]
    name = frame.filename if ours else os.path.join(*Path(frame.filename).parts[-3:])
    return f"{name}:{frame.lineno}: {frame.line}"
