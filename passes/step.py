"""A plan's choices, and the exposed seconds of one optimizer step under them.

Everything is priced on the lowered program: the very operators and collectives that are emitted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, prod

import torch

from costmodels.cluster import Cluster
from costmodels.collectives import Collective
from costmodels.operators import exposed_seconds, optimizer_seconds
from passes.blocks import Blocked
from passes.emit import Emission
from passes.graph import Parameter, mutates
from passes.lower import LocalOp, LocalRegion, Lowered, Reshard, Statement, lower
from passes.placements import R, S, local_shape
from passes.plan import Fix
from passes.price import Axis, Seconds, op_seconds, reshard_seconds
from passes.saved import saved
from passes.sharding import Sharding


@dataclass(frozen=True)
class OptimizerCost:
    """Of each parameter element: fp32 states, and bytes that a fused step touches."""

    states: int
    touched_bytes: int


OPTIMIZER_COSTS = {"adamw": OptimizerCost(2, 28), "sgd": OptimizerCost(1, 20)}


@dataclass(frozen=True)
class Problem:
    """What is searched: a symbolic program, and where and how it is to be trained."""

    program: Blocked
    rows: Mapping[str, S]
    cluster: Cluster
    global_batch: int
    precision: str
    optimizer: str
    separable: str  # why rows cannot be told apart, "" where they can
    emission: Emission  # with the choices still open
    fix: Fix
    frozen: frozenset[str]

    @cached_property
    def at(self) -> Callable[[int], Blocked]:
        """The program for a microbatch of so many rows."""
        return cache(self.program.at)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def compute_bytes(self) -> int:
        return 2 if self.precision == "bf16" else 4

    @cached_property
    def whole_units(self) -> tuple[Unit, ...]:
        """The parameters of each kind of layer and of the root, uncut."""
        program = self.program
        paths = [*((b.paths[0], b.parameters, len(b.paths)) for b in program.blocks), ("", program.parameters, 1)]
        return tuple(
            _unit(self, path, count, ((p, p.value.elements) for p in parameters)) for path, parameters, count in paths
        )

    @property
    def elements(self) -> int:
        return sum(u.elements * u.count for u in self.whole_units)

    @property
    def trained(self) -> int:
        return sum(u.trained * u.count for u in self.whole_units)


@dataclass(frozen=True)
class Pair:
    """A tensor-parallel degree and a microbatch size: what one rank runs is settled by them."""

    tp: int
    dp: int
    microbatch: int

    def microbatches(self, global_batch: int) -> int:
        return global_batch // (self.dp * self.microbatch)


@dataclass(frozen=True)
class RegionSeconds:
    """One region, once: compute and tensor-parallel communication."""

    compute: Seconds
    comm: Seconds


@dataclass(frozen=True)
class Unit:
    """What one FSDP unit holds on a rank: elements after tensor parallelism."""

    elements: int
    trained: int
    count: int


@dataclass(frozen=True)
class Settled:
    """A pair with its sharding: the local program and its price."""

    pair: Pair
    lowered: Lowered
    root: RegionSeconds
    blocks: tuple[RegionSeconds, ...]
    again: tuple[float, ...]  # per block, seconds of running it a second time for its backward
    units: tuple[Unit, ...]  # per block, then the root
    partial_bytes: int  # gradients that are summed over tp once per step
    largest_parameter: int

    @property
    def recomputable(self) -> tuple[int, ...]:
        """Layers of each block that may run twice: those that change no buffer."""
        blocks = zip(self.lowered.program.blocks, self.units, strict=False)
        return tuple(0 if any(map(mutates, block.ops)) else unit.count for block, unit in blocks)

    @property
    def elements(self) -> int:
        return sum(u.elements * u.count for u in self.units)

    @property
    def trained(self) -> int:
        return sum(u.trained * u.count for u in self.units)


@dataclass(frozen=True)
class Variant:
    """Every choice of a plan."""

    settled: Settled
    zero: int
    group: int
    recompute: tuple[int, ...]  # per block, layers recomputed

    @property
    def partial_bytes(self) -> int:
        """What one rank sums over tp once per step: its ZeRO shard of the partial gradients."""
        return self.settled.partial_bytes // (self.group if self.zero else 1)


@dataclass(frozen=True)
class StepSeconds:
    """Exposed seconds of one optimizer step."""

    compute: float
    tp_comm: float
    dp_comm: float
    recompute: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.tp_comm + self.dp_comm + self.recompute + self.optimizer


def settle(problem: Problem, pair: Pair, sharding: Sharding) -> Settled:
    """The local program of a sharding, and its price: of the very operators and collectives that are emitted."""
    lowered = lower(problem.at(pair.microbatch), sharding)
    units = [
        unit(problem, region, pair.tp, block.paths[0], len(block.paths))
        for region, block in zip(lowered.blocks, lowered.program.blocks, strict=True)
    ]
    units.append(unit(problem, lowered.root, pair.tp, "", 1))
    partial = sum(
        p.value.elements * 4 * count
        for region, count in lowered.regions()
        for p, placement in region.parameters
        if placement is R
    )
    held = [
        prod(local_shape(placement, p.value.sizes, pair.tp))
        for region, _ in lowered.regions()
        for p, placement in region.parameters
    ]
    return Settled(
        pair,
        lowered,
        region_seconds(lowered.root.statements, sharding.axis),
        tuple(region_seconds(r.statements, sharding.axis) for r in lowered.blocks),
        tuple(forward_seconds(region_seconds(run_again(r), sharding.axis)) for r in lowered.blocks),
        tuple(units),
        partial,
        max(held, default=0),
    )


def unit(problem: Problem, region: LocalRegion, tp: int, path: str, count: int) -> Unit:
    """The parameters of one region on one rank."""
    return _unit(problem, path, count, ((p, prod(local_shape(at, p.value.sizes, tp))) for p, at in region.parameters))


def _unit(problem: Problem, path: str, count: int, held: Iterable[tuple[Parameter, int]]) -> Unit:
    """Of parameters with the elements that a rank holds of each."""
    elements = trained = 0
    for parameter, own in held:
        if parameter.buffer:
            continue
        elements += own
        full = f"{path}.{parameter.name}" if path else parameter.name
        trained += own if full not in problem.frozen else 0
    return Unit(elements, trained, count)


def run_again(region: LocalRegion) -> tuple[Statement, ...]:
    """What recompute runs of a layer: up to the last operator that keeps something, where checkpoint stops."""
    last = 0
    for i, statement in enumerate(region.statements):
        if isinstance(statement, LocalOp) and keeps(statement):
            last = i + 1
    return region.statements[:last]


def keeps(statement: LocalOp) -> bool:
    found = saved(statement.site)
    return bool(statement.strategy.form or found.operands or found.results or found.extra_bytes)


def forward_seconds(region: RegionSeconds) -> float:
    return region.compute.forward + region.comm.forward


def region_seconds(statements: tuple[Statement, ...], axis: Axis) -> RegionSeconds:
    """The time of statements (calls are priced by their blocks)."""
    compute, comm = Seconds(), Seconds()
    for statement in statements:
        if isinstance(statement, LocalOp):
            whole = op_seconds(statement.site, statement.rule, statement.strategy, axis)
            inside = sum(axis.seconds(kind, size) for kind, size in statement.strategy.inside)
            compute += Seconds(whole.forward - inside, whole.backward)
            comm += Seconds(inside, 0.0)
        elif isinstance(statement, Reshard):
            comm += reshard_seconds(statement.value, statement.source, statement.target, axis)
    return RegionSeconds(compute, comm)


def step_seconds(problem: Problem, variant: Variant) -> StepSeconds:
    """Exposed seconds of one optimizer step of a variant."""
    settled = variant.settled
    pair = settled.pair
    m = pair.microbatches(problem.global_batch)
    counts = [u.count for u in settled.units]
    regions = [*settled.blocks, settled.root]
    compute = Seconds()
    comm = Seconds()
    for region, count in zip(regions, counts, strict=True):
        compute += region.compute.times(count)
        comm += region.comm.times(count)
    again = sum(k * seconds for k, seconds in zip(variant.recompute, settled.again, strict=True))
    axis = settled.lowered.sharding.axis
    sums = axis.seconds(Collective.ALL_REDUCE, variant.partial_bytes) if pair.tp > 1 else 0.0
    return StepSeconds(
        compute=m * compute.total,
        tp_comm=m * comm.total + sums,
        dp_comm=dp_seconds(problem, dp_uses(problem, variant), compute),
        recompute=m * again,
        optimizer=update_seconds(problem, settled.trained, variant.group if variant.zero else 1),
    )


def update_seconds(problem: Problem, trained: int, shards: int) -> float:
    """The optimizer's own time: a rank updates its ZeRO shard of the elements that are trained."""
    touched_bytes = OPTIMIZER_COSTS[problem.optimizer].touched_bytes
    return optimizer_seconds(touched_bytes * ceil(trained / shards), problem.cluster.device)


def least_state_seconds(problem: Problem, pair: Pair, zero: int, group: int) -> float:
    """What an element of a rank's trained parameters adds to a step at least: its update, and what dp cannot hide.

    As if nothing were cut over tp and compute hid all it can: costs have economies of scale, so that no other number
    of elements costs less for each.
    """
    uses = _dp_uses(problem, pair, zero, group, problem.whole_units)
    hidden = dp_seconds(problem, uses, Seconds(math.inf, math.inf))
    return (hidden + update_seconds(problem, problem.trained, group if zero else 1)) / max(1, problem.trained)


@dataclass(frozen=True)
class DataParallelUse:
    """A collective of the data-parallel axis: how often it runs in a step, and which pass it runs beside."""

    kind: Collective
    axis: Axis
    unit: str
    full_bytes: int
    per_pass: int  # units of this kind
    passes: int  # forward or backward passes of a step in which it runs
    beside_backward: bool

    @property
    def seconds_per_pass(self) -> float:
        return self.per_pass * self.axis.seconds(self.kind, self.full_bytes)


def dp_uses(problem: Problem, variant: Variant) -> tuple[DataParallelUse, ...]:
    """What the engine runs over dp: gradients reduced in fp32, parameters gathered in the compute dtype, by unit.

    Stage 1 reduces once per step, stage 2 after every microbatch; both gather once. Stage 3 gathers for every forward
    and, but for the root, for every backward.
    """
    return _dp_uses(problem, variant.settled.pair, variant.zero, variant.group, variant.settled.units)


def _dp_uses(
    problem: Problem, pair: Pair, stage: int, group: int, units: tuple[Unit, ...]
) -> tuple[DataParallelUse, ...]:
    if pair.dp == 1:
        return ()
    m = pair.microbatches(problem.global_batch)
    shards = group if stage else 1
    inner = Axis.of(problem.cluster, "dp_shard", shards, pair.tp)
    outer = Axis.of(problem.cluster, "dp_replicate", pair.dp // shards, pair.tp * shards)
    names = [*(block.name for block in problem.program.blocks), "outside blocks"]
    reductions = m if stage >= 2 else 1
    uses: list[DataParallelUse] = []

    def add(kind: Collective, axis: Axis, name: str, size: int, unit: Unit, passes: int, backward: bool) -> None:
        if axis.ranks > 1 and size:
            uses.append(DataParallelUse(kind, axis, name, size, unit.count, passes, backward))

    for name, unit in zip(names, units, strict=True):
        gradients, parameters = 4 * unit.trained, problem.compute_bytes * unit.elements
        add(Collective.REDUCE_SCATTER, inner, name, gradients, unit, reductions, True)
        add(Collective.ALL_REDUCE, outer, name, gradients // shards, unit, reductions, True)
        add(Collective.ALL_GATHER, inner, name, parameters, unit, m if stage == 3 else 1, False)
        if stage == 3 and name != names[-1]:
            add(Collective.ALL_GATHER, inner, name, parameters, unit, m, True)
    return tuple(uses)


def dp_seconds(problem: Problem, uses: tuple[DataParallelUse, ...], compute: Seconds) -> float:
    """What data-parallel communication adds to a step: what the compute of its pass does not hide."""
    device = problem.cluster.device
    beside: dict[tuple[bool, int], float] = defaultdict(float)
    for use in uses:
        beside[use.beside_backward, use.passes] += use.seconds_per_pass
    added = 0.0
    hidden = {True: compute.backward, False: compute.forward}
    for (backward, passes), seconds in sorted(beside.items()):
        added += passes * exposed_seconds(hidden[backward], seconds, device)
    return added
