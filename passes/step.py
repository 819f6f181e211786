"""A plan's choices, and the exposed seconds of one optimizer step under them.

Everything is priced on the lowered program: the very operators and collectives that are emitted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import ceil, prod

import torch

from costmodels.cluster import Cluster
from costmodels.groups import Collective
from costmodels.memory import FP32_BYTES, Kind
from costmodels.operators import OperatorClass, exposed_seconds, operator_seconds, optimizer_seconds
from costmodels.schedules import Lending, Queue, StageSeconds, Table, least_seconds, simulate
from passes.blocks import Blocked
from passes.emit import Emission
from passes.graph import Parameter, mutates
from passes.lower import LocalOp, LocalRegion, Lowered, Reshard, Statement, lower
from passes.placements import R, S, local_shape
from passes.plan import Fix
from passes.price import Axis, Seconds, local_bytes, op_launches, op_seconds, reshard_seconds
from passes.saved import saved
from passes.schedules import SCHEDULES, rank_of, refusal, round_size, table
from passes.sharding import Sharding
from passes.stages import LocalStage, shared, stages


@dataclass(frozen=True)
class OptimizerCost:
    """Of each parameter element: fp32 states, and bytes that a fused step touches."""

    states: int
    touched_bytes: int


DDP_BUCKET_BYTES = 25 * 2**20  # torch 2.13, nn/parallel/distributed.py: _DEFAULT_BUCKET_CAP_MB
ROUNDS_PLAYED = 6  # of as many microbatches as ranks, until a schedule repeats itself
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
    fused: bool  # whether the optimizer updates in place, without temporaries
    separable: str  # why rows cannot be told apart, "" where they can
    emission: Emission  # with the choices still open
    fix: Fix
    frozen: frozenset[str]
    queue: Queue  # where the transfers of a pipeline wait for each other
    copies: bool = True  # whether what is sharded is copied into and out of flat buffers
    accumulates: bool = True  # whether gradients are added up by operators of their own
    gradient_bytes: int = FP32_BYTES  # of an element, where whole gradients are kept until they are reduced
    reduced_bytes: int = FP32_BYTES  # of an element, as the data-parallel axis sums it
    sends_parts: bool = False  # ranks of tp that hold the same send a part each from stage to stage

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
            _unit(self, path, count, ((p, p.value.sizes) for p in parameters)) for path, parameters, count in paths
        )

    @property
    def elements(self) -> int:
        return sum(u.elements * u.count for u in self.whole_units)

    @property
    def trained(self) -> int:
        return sum(u.trained * u.count for u in self.whole_units)


@dataclass(frozen=True)
class Pair:
    """The degrees of the mesh and a microbatch size: by tp and the microbatch, what one rank runs is settled.

    Ranks of tp are neighbours; around them lies dp, and pp outermost, or the other way round (`pp_inside`).
    """

    tp: int
    dp: int
    microbatch: int
    pp: int = 1
    pp_inside: bool = False

    def microbatches(self, global_batch: int) -> int:
        return global_batch // (self.dp * self.microbatch)

    @property
    def order(self) -> tuple[str, str, str]:
        """The axes of the mesh, outermost first."""
        return ("dp", "pp", "tp") if self.pp_inside else ("pp", "dp", "tp")

    @property
    def dp_stride(self) -> int:
        """How far apart neighbours on dp are, in ranks."""
        return self.tp * (self.pp if self.pp_inside else 1)

    @property
    def pp_stride(self) -> int:
        """How far apart neighbours on pp are, in ranks."""
        return self.tp * (1 if self.pp_inside else self.dp)


@dataclass(frozen=True)
class RegionSeconds:
    """One region, once: compute, tensor-parallel communication, and of the backward what gradients of weights take.

    Compute includes what the device waits for the host, which starts one kernel after the other.
    """

    compute: Seconds
    comm: Seconds
    weight: float = 0.0

    def times(self, factor: float) -> RegionSeconds:
        return RegionSeconds(self.compute.times(factor), self.comm.times(factor), self.weight * factor)

    def __add__(self, other: RegionSeconds) -> RegionSeconds:
        return RegionSeconds(self.compute + other.compute, self.comm + other.comm, self.weight + other.weight)


@dataclass(frozen=True)
class Unit:
    """What one FSDP unit holds on a rank: elements after tensor parallelism."""

    elements: int
    trained: int
    count: int
    parameters: tuple[tuple[int, int, bool], ...] = ()  # of each: its first dim, elements beside it, if it is trained

    def padded(self, shards: int) -> tuple[int, int]:
        """Elements, and those that are trained, with every first dim filled up so that `shards` divides it."""
        more = [(-first % shards * rest, trained) for first, rest, trained in self.parameters]
        return self.elements + sum(n for n, _ in more), self.trained + sum(n for n, trained in more if trained)


@dataclass(frozen=True)
class Settled:
    """A pair with its sharding: the local program and its price."""

    pair: Pair
    lowered: Lowered
    root: RegionSeconds
    blocks: tuple[RegionSeconds, ...]
    again: tuple[float, ...]  # per block, seconds of running it a second time for its backward
    units: tuple[Unit, ...]  # per block, then the root
    statements: Mapping[int, RegionSeconds]  # of the root, by identity
    # those known, of this problem, by cuts, ranks and shards: all that they depend on
    loads: dict[object, tuple[StageLoad, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
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

    def partial_bytes(self, shards: int) -> int:
        """Gradients of the whole program that are summed over tp once per step, of a rank's shard."""
        return sum(partial_bytes(region, shards) * count for region, count in self.lowered.regions())


@dataclass(frozen=True)
class Staging:
    """How a pipeline runs: its schedule, where its stages begin, and what each of them recomputes."""

    schedule: str
    virtual_stages: int  # stages per rank
    cuts: tuple[int, ...]  # positions in the statements of the root
    recompute: tuple[tuple[int, ...], ...]  # per stage and block, layers recomputed


@dataclass(frozen=True)
class Variant:
    """Every choice of a plan."""

    settled: Settled
    zero: int
    group: int
    recompute: tuple[int, ...]  # per block, layers recomputed
    staging: Staging | None = None

    @property
    def shards(self) -> int:
        """Ranks over which states are sharded."""
        return self.group if self.zero else 1

    @property
    def schedule(self) -> str:
        return self.staging.schedule if self.staging else "none"

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.staging is not None and SCHEDULES[self.schedule].split

    @property
    def recompute_by_stage(self) -> tuple[tuple[int, ...], ...]:
        return self.staging.recompute if self.staging else (self.recompute,)

    @cached_property
    def stages(self) -> tuple[LocalStage, ...]:
        """What each stage runs."""
        return stages(self.settled.lowered, self.staging.cuts if self.staging else ())

    def rank_of(self, stage: int) -> int:
        """The pp rank of a stage."""
        return self.ranks[stage]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The pp rank of every stage."""
        if self.staging is None:
            return (0,)
        return rank_of(self.schedule, self.settled.pair.pp, self.staging.virtual_stages)

    @property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each pp rank."""
        found: list[list[int]] = [[] for _ in range(self.settled.pair.pp)]
        for stage in range(len(self.stages)):
            found[self.rank_of(stage)].append(stage)
        return tuple(tuple(one) for one in found)


def layers_of(variant: Variant, stage: int) -> list[int]:
    """Layers of each block that a stage may recompute.

    None where the backward is split: torch runs a layer again for the gradients of its inputs, keeps what it made for
    those of its weights, and runs it once more for these.
    """
    found = [0] * len(variant.settled.blocks)
    if variant.splits_backward:
        return found
    for call in variant.stages[stage].calls:
        found[call.block] += variant.settled.recomputable[call.block] > 0
    return found


def with_recompute(variant: Variant, layers: list[list[int]]) -> Variant:
    """The variant with so many layers recomputed, per stage and block."""
    again = tuple(tuple(one) for one in layers)
    staging = replace(variant.staging, recompute=again) if variant.staging else None
    return replace(variant, recompute=tuple(map(sum, zip(*again, strict=True))), staging=staging)


def full_recompute(variant: Variant) -> Variant:
    return with_recompute(variant, [layers_of(variant, k) for k in range(len(variant.stages))])


@dataclass(frozen=True)
class StageLoad:
    """One stage on a rank: seconds of a microbatch, its parameters, what it hands on and what it sums."""

    seconds: RegionSeconds
    again: float  # of running recomputed layers a second time
    units: tuple[Unit, ...]  # per block, then the rest
    partial_bytes: int  # gradients that are summed over tp once per step, of a rank's shard
    sent_bytes: int  # of what the next stage receives; gradients come back for as many
    moved_bytes: int  # of it, what a rank sends
    shared_bytes: int  # gradients of parameters that other ranks hold too, of a rank's shard

    @property
    def trained(self) -> int:
        return sum(u.trained * u.count for u in self.units)


@dataclass(frozen=True)
class StepSeconds:
    """Exposed seconds of one optimizer step."""

    compute: float
    tp_comm: float
    dp_comm: float
    recompute: float
    optimizer: float
    pp_comm: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        parts = (self.compute, self.tp_comm, self.dp_comm, self.recompute, self.optimizer, self.pp_comm, self.bubble)
        return sum(parts)


def settle(problem: Problem, pair: Pair, sharding: Sharding) -> Settled:
    """The local program of a sharding, and its price: of the very operators and collectives that are emitted."""
    lowered = lower(problem.at(pair.microbatch), sharding)
    units = [
        unit(problem, region, pair.tp, block.paths[0], len(block.paths))
        for region, block in zip(lowered.blocks, lowered.program.blocks, strict=True)
    ]
    units.append(unit(problem, lowered.root, pair.tp, "", 1))
    weights = weights_of(lowered.root)
    statements = {id(s): region_seconds((s,), sharding.axis, weights) for s in lowered.root.statements}
    return Settled(
        pair,
        lowered,
        sum(statements.values(), RegionSeconds(Seconds(), Seconds())),
        tuple(region_seconds(r.statements, sharding.axis, weights_of(r), layer=True) for r in lowered.blocks),
        tuple(forward_seconds(region_seconds(run_again(r), sharding.axis, layer=True)) for r in lowered.blocks),
        tuple(units),
        statements,
    )


def unit(problem: Problem, region: LocalRegion, tp: int, path: str, count: int) -> Unit:
    """The parameters of one region on one rank."""
    return _unit(problem, path, count, ((p, local_shape(at, p.value.sizes, tp)) for p, at in region.parameters))


def _unit(problem: Problem, path: str, count: int, held: Iterable[tuple[Parameter, tuple[int, ...]]]) -> Unit:
    """Of parameters with the shape that a rank holds of each."""
    found = []
    for parameter, shape in held:
        if not parameter.buffer:
            full = f"{path}.{parameter.name}" if path else parameter.name
            found.append((shape[0] if shape else 1, prod(shape[1:]), full not in problem.frozen))
    elements = sum(first * rest for first, rest, _ in found)
    return Unit(elements, sum(first * rest for first, rest, trained in found if trained), count, tuple(found))


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


def region_seconds(
    statements: tuple[Statement, ...], axis: Axis, weights: frozenset[str] = frozenset(), *, layer: bool = False
) -> RegionSeconds:
    """The time of statements (calls are priced by their blocks). `weights` are the names of trained parameters.

    The host runs ahead of the device, so that kernels that are shorter than their launch cost nothing beside longer
    ones; but a layer takes no less than all its launches.
    """
    compute, comm, launched, weight = Seconds(), Seconds(), Seconds(), 0.0
    for statement in statements:
        if isinstance(statement, LocalOp):
            whole = op_seconds(statement.site, statement.rule, statement.strategy, axis)
            inside = sum(axis.seconds(kind, size) for kind, size in statement.strategy.inside)
            compute += Seconds(whole.forward - inside, whole.backward)
            comm += Seconds(inside, 0.0)
            multiplies = statement.rule is not None and statement.rule.flop(statement.site)[0] > 0
            if multiplies and weights.intersection(statement.op.operands):
                weight += whole.backward / 2  # of the two products of the backward
            launched += op_launches(statement.site, statement.rule, statement.strategy)
        elif isinstance(statement, Reshard):
            moved = reshard_seconds(statement.value, statement.source, statement.target, axis)
            comm += moved
            launched += moved.launches
    if layer:
        compute += (compute + comm).waiting(launched.times(axis.cluster.device.launch_s))
    return RegionSeconds(compute, comm, weight)


def weights_of(region: LocalRegion) -> frozenset[str]:
    """Names of the trained parameters of a region, and of what they are resharded to."""
    found = {p.value.name for p, _ in region.parameters if p.value.grad}
    for statement in region.statements:
        if isinstance(statement, Reshard) and statement.value.name in found:
            found.add(statement.result)
    return frozenset(found)


def loads(problem: Problem, variant: Variant) -> tuple[StageLoad, ...]:
    """What every stage of a variant does on its rank."""
    settled = variant.settled
    if variant.staging is None:
        seconds = settled.root
        for region, one in zip(settled.blocks, settled.units, strict=False):
            seconds += region.times(one.count)
        again = sum(k * one for k, one in zip(variant.recompute, settled.again, strict=True))
        return (StageLoad(seconds, again, settled.units, settled.partial_bytes(variant.shards), 0, 0, 0),)
    key = variant.staging.cuts, variant.ranks, variant.shards
    if key not in settled.loads:
        both = shared(variant.stages)
        settled.loads[key] = tuple(_load(problem, variant, number, both) for number, _ in enumerate(variant.stages))
    return tuple(
        replace(load, again=sum(k * one for k, one in zip(recompute, settled.again, strict=True)))
        for load, recompute in zip(settled.loads[key], variant.staging.recompute, strict=True)
    )


def _load(problem: Problem, variant: Variant, number: int, both: Mapping[str, tuple[int, ...]]) -> StageLoad:
    """What a stage that recomputes nothing does."""
    settled, tp, part = variant.settled, variant.settled.pair.tp, variant.stages[number]
    program = settled.lowered.program
    counts = Counter(call.block for call in part.calls)
    seconds = sum((settled.statements[id(s)] for s in part.region.statements), RegionSeconds(Seconds(), Seconds()))
    for b, count in counts.items():
        seconds += settled.blocks[b].times(count)
    units = [replace(settled.units[b], count=counts[b]) for b in range(len(program.blocks))]
    units.append(unit(problem, part.region, tp, "", 1))
    here = variant.rank_of(number)
    before = {name for name, every in both.items() if any(n < number and variant.rank_of(n) == here for n in every)}
    partial = partial_bytes(part.region, variant.shards, before)
    partial += sum(partial_bytes(settled.lowered.blocks[b], variant.shards) * n for b, n in counts.items())
    held = ((p.name, local_shape(lies, p.value.sizes, tp)) for p, lies in part.region.parameters if p.value.grad)
    own = {name: _shard_bytes(shape, variant.shards) for name, shape in held if name not in before}
    elsewhere = {name for name, numbers in both.items() if len({variant.rank_of(n) for n in numbers}) > 1}
    sent = moved = 0
    if part is not variant.stages[-1]:
        values = [part.region.locals[name] for name in part.region.outputs]
        sent = moved = sum(local_bytes(local.value, local.placement, tp) for local in values)
        if problem.sends_parts:
            moved = sum(ceil(local.value.bytes / tp) for local in values)
    return StageLoad(
        seconds,
        0.0,
        tuple(units),
        partial,
        sent,
        moved,
        sum(size for name, size in own.items() if name in elsewhere),
    )


def partial_bytes(region: LocalRegion, shards: int = 1, without: Collection[str] = ()) -> int:
    """Gradients of a region that come in parts on the ranks of tp, in fp32: a rank's share of the ZeRO group's.

    `without`: names of parameters that another stage of the rank holds too.
    """
    held = (p for p, placement in region.parameters if placement is R and p.name not in without)
    return sum(_shard_bytes(p.value.sizes, shards) for p in held)


def _shard_bytes(shape: Sequence[int], shards: int) -> int:
    """A rank's share of a gradient in fp32."""
    first, *rest = shape or (1,)
    return 4 * ceil(first / shards) * prod(rest)


def step_seconds(problem: Problem, variant: Variant, *, play: bool = True) -> StepSeconds:
    """Exposed seconds of one optimizer step of a variant.

    A pipeline takes the makespan of its schedule, or unless it is played, what no order beats; what every rank does
    once a step comes on top, of the slowest one.
    """
    pair = variant.settled.pair
    m = pair.microbatches(problem.global_batch)
    shards = variant.shards
    every = loads(problem, variant)
    axis = variant.settled.lowered.sharding.axis
    kind = kind_of(problem, variant)
    once: list[tuple[float, float, float, float]] = []  # of each rank: dp, its engine, optimizer, sums over tp
    busy: list[RegionSeconds] = []
    again: list[float] = []
    for own in variant.by_rank:
        seconds = RegionSeconds(Seconds(), Seconds())
        for stage in own:
            seconds += every[stage].seconds
        units = tuple(unit for stage in own for unit in every[stage].units)
        sums = sum(every[stage].partial_bytes for stage in own)
        once.append((
            dp_seconds(problem, pair, variant.zero, variant.group, units, kind, seconds.compute),
            engine_seconds(problem, pair, variant.zero, variant.group, units, kind),
            update_seconds(problem, sum(every[stage].trained for stage in own), shards),
            axis.seconds(Collective.ALL_REDUCE, sums) if pair.tp > 1 else 0.0,
        ))  # fmt: skip
        busy.append(seconds)
        again.append(sum(every[stage].again for stage in own))
    slowest = max(range(len(once)), key=lambda rank: sum(once[rank]))
    dp, engine, optimizer, sums_s = once[slowest]
    fullest = max(range(len(busy)), key=lambda r: busy[r].compute.total + busy[r].comm.total + again[r])
    bubble = exposed = 0.0
    if variant.staging is not None:
        if play:
            bubble, exposed = waits(problem, variant, every, m)
        else:
            bubble = least_wait(problem, variant, every, m)
        exposed += shared_seconds(problem, variant, every)
    work_s = busy[fullest].compute.total + busy[fullest].comm.total + again[fullest]
    times = m if bubble >= 0 else m + bubble / work_s  # others lend more than it waits
    return StepSeconds(
        compute=times * busy[fullest].compute.total + engine,
        tp_comm=times * busy[fullest].comm.total + sums_s,
        dp_comm=dp,
        recompute=times * again[fullest],
        optimizer=optimizer,
        pp_comm=exposed,
        bubble=max(0.0, bubble),
    )


def timetable(variant: Variant, microbatches: int) -> Table:
    """The schedule of a variant, as torch runs it."""
    assert variant.staging is not None, "only a pipeline has a schedule"
    return table(variant.schedule, variant.settled.pair.pp, variant.staging.virtual_stages, microbatches)


def waits(problem: Problem, variant: Variant, every: tuple[StageLoad, ...], microbatches: int) -> tuple[float, float]:
    """Seconds of a step in which the busiest rank has nothing to do: by the order of work, and for transfers.

    A schedule repeats itself: of many microbatches only the first are played, and the last of their rounds counted as
    often as it recurs.
    """
    ranks = variant.settled.pair.pp
    seconds, sent = stage_seconds(every), transfers(problem, variant, every)

    def played(count: int) -> tuple[float, float]:
        timeline = simulate(timetable(variant, count), seconds, sent, problem.queue, lending(problem, variant))
        return timeline.bubble_s, timeline.exposed_s

    least = until_it_recurs(variant, microbatches)
    bubble, exposed = played(least)
    if least == microbatches:
        return bubble, exposed
    rounds, (bubble_before, exposed_before) = (microbatches - least) // ranks, played(least - ranks)
    return bubble + rounds * (bubble - bubble_before), exposed + rounds * (exposed - exposed_before)


def lending(problem: Problem, variant: Variant) -> Lending | None:
    """How pp ranks share processors, if they do."""
    cluster, pair = problem.cluster, variant.settled.pair
    together = min(pair.pp, cluster.devices_per_node // pair.pp_stride)
    return Lending(cluster.lent, together) if cluster.lent > 1 and together > 1 else None


def until_it_recurs(variant: Variant, microbatches: int) -> int:
    """Of so many microbatches, those after which a schedule only does again what it did, round by round."""
    assert variant.staging is not None, "only a pipeline has a schedule"
    ranks, virtual = variant.settled.pair.pp, variant.staging.virtual_stages
    least = ROUNDS_PLAYED * ranks + microbatches % ranks
    refused = any(refusal(variant.schedule, ranks, virtual, count) for count in (least, least - ranks))
    if refused or (SCHEDULES[variant.schedule].rounds and round_size(ranks, least) != round_size(ranks, microbatches)):
        return microbatches
    return min(least, microbatches)


def least_wait(problem: Problem, variant: Variant, every: tuple[StageLoad, ...], microbatches: int) -> float:
    """Seconds in which the busiest rank has nothing to do at least, less what others lend it."""
    stages_ = stage_seconds(every)
    ranks = tuple(variant.rank_of(k) for k in range(len(stages_)))
    split = SCHEDULES[variant.schedule].split
    busy = [0.0] * variant.settled.pair.pp
    for stage, rank in zip(stages_, ranks, strict=True):
        busy[rank] += microbatches * (stage.forward + stage.backward)
    least = least_seconds(stages_, ranks, microbatches, split=split)
    if (lent := lending(problem, variant)) is not None:
        least = max(least / lent.most, sum(busy) / len(busy) if lent.together == len(busy) else 0.0)
        return least - max(busy)
    return max(0.0, least - max(busy))


def stage_seconds(every: tuple[StageLoad, ...]) -> tuple[StageSeconds, ...]:
    """What a schedule needs to know of each stage; recomputing belongs to the backward.

    The first stage has no inputs to differentiate: where the backward is split, torch does all of it for the weights.
    """
    found = []
    for k, load in enumerate(every):
        forward = load.seconds.compute.forward + load.seconds.comm.forward
        backward = load.seconds.compute.backward + load.seconds.comm.backward + load.again
        weight = load.seconds.weight if k else backward
        found.append(StageSeconds(forward, backward, backward - weight, weight))
    return tuple(found)


def pp_axis(problem: Problem, pair: Pair) -> Axis:
    return Axis.of(problem.cluster, "pp", pair.pp, pair.pp_stride)


def transfers(problem: Problem, variant: Variant, every: tuple[StageLoad, ...]) -> tuple[float, ...]:
    """Seconds of handing one microbatch from each stage to the next; nothing where both are on one rank."""
    axis = pp_axis(problem, variant.settled.pair)
    return tuple(
        0.0 if variant.rank_of(k) == variant.rank_of(k + 1) else axis.seconds(Collective.SEND, load.moved_bytes)
        for k, load in enumerate(every[:-1])
    )


def shared_seconds(problem: Problem, variant: Variant, every: tuple[StageLoad, ...]) -> float:
    """Seconds of summing the gradients of what several ranks hold: they lie as far apart as ranks of pp do."""
    size = max(load.shared_bytes for load in every)
    pair = variant.settled.pair
    holders = {variant.rank_of(n) for numbers in shared(variant.stages).values() for n in numbers}
    if not size or len(holders) < 2:
        return 0.0
    axis = Axis.of(problem.cluster, "pp", len(holders), pair.pp_stride * (pair.pp // len(holders)))
    return axis.seconds(Collective.ALL_REDUCE, size)


def update_seconds(problem: Problem, trained: int, shards: int) -> float:
    """The optimizer's own time: a rank updates its ZeRO shard of the elements that are trained."""
    touched_bytes = OPTIMIZER_COSTS[problem.optimizer].touched_bytes
    return optimizer_seconds(touched_bytes * ceil(trained / shards), problem.cluster.device)


def least_state_seconds(problem: Problem, pair: Pair, zero: int, group: int) -> float:
    """What an element of a rank's trained parameters adds to a step at least: its update, and what dp cannot hide.

    As if nothing were cut over tp and compute hid all it can: costs have economies of scale, so that no other number
    of elements costs less for each.
    """
    held = (problem, pair, zero, group, problem.whole_units, _likely_kind(problem, pair, zero, group))
    hidden = dp_seconds(*held, Seconds(math.inf, math.inf), ends=False) + engine_seconds(*held)
    return (hidden + update_seconds(problem, problem.trained, group if zero else 1)) / max(1, problem.trained)


def least_dp_seconds(problem: Problem, pair: Pair, zero: int, group: int, hidden: Seconds) -> float:
    """What dp adds to a step of a pipeline at least: some rank has its share of the parameters or more."""
    units = []
    for one in problem.whole_units:
        if one.count >= pair.pp:
            units.append(Unit(one.elements // pair.tp, one.trained // pair.tp, one.count // pair.pp))
        else:
            cut = pair.tp * pair.pp
            units.append(Unit(one.elements // cut, one.trained // cut, one.count))
    held = (problem, pair, zero, group, tuple(units), _likely_kind(problem, pair, zero, group))
    return dp_seconds(*held, hidden, ends=False) + engine_seconds(*held)


def kind_of(problem: Problem, variant: Variant) -> Kind:
    """Which engine trains the plan (autopar/runtime/engine.py)."""
    pair = variant.settled.pair
    if variant.splits_backward and pair.dp > 1:
        return Kind.SHARDS
    return _likely_kind(problem, pair, variant.zero, variant.group)


def _likely_kind(problem: Problem, pair: Pair, zero: int, group: int) -> Kind:
    """The same where no backward is split; if one is, this one costs less."""
    if problem.precision == "bf16" or (pair.dp > 1 and zero and group > 1):
        return Kind.SHARDS
    return Kind.PLAIN if pair.dp == 1 else Kind.BUCKETS


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


def dp_uses(problem: Problem, variant: Variant, own: Sequence[int]) -> tuple[DataParallelUse, ...]:
    """What the engine runs over dp: gradients reduced in fp32, parameters gathered in the compute dtype, by unit.

    Stage 1 reduces once per step, stages 2 and 3 after every microbatch, but over the groups that hold the same once.
    Stages 1 and 2 gather once, stage 3 for every forward and, but for the root, for every backward. Of the stages of
    one pp rank, one after the other.
    """
    every = loads(problem, variant)
    units = tuple(unit for stage in own for unit in every[stage].units)
    return _dp_uses(problem, variant.settled.pair, variant.zero, variant.group, units)


def _dp_uses(
    problem: Problem, pair: Pair, stage: int, group: int, units: tuple[Unit, ...]
) -> tuple[DataParallelUse, ...]:
    if pair.dp == 1:
        return ()
    m = pair.microbatches(problem.global_batch)
    shards = group if stage else 1
    inner = Axis.of(problem.cluster, "dp_shard", shards, pair.dp_stride)
    outer = Axis.of(problem.cluster, "dp_replicate", pair.dp // shards, pair.dp_stride * shards)
    kinds = [*(block.name for block in problem.program.blocks), "outside blocks"]
    names = kinds * (len(units) // len(kinds))  # of every stage
    reductions = m if stage >= 2 else 1
    uses: list[DataParallelUse] = []

    def add(kind: Collective, axis: Axis, name: str, size: int, unit: Unit, passes: int, backward: bool) -> None:
        if axis.ranks > 1 and size and unit.count:
            uses.append(DataParallelUse(kind, axis, name, size, unit.count, passes, backward))

    for name, unit in zip(names, units, strict=True):
        elements, trained = unit.padded(shards)
        gradients, parameters = problem.reduced_bytes * trained, problem.compute_bytes * elements
        add(Collective.REDUCE_SCATTER, inner, name, gradients, unit, reductions, True)
        add(Collective.ALL_REDUCE, outer, name, gradients // shards, unit, 1, True)
        add(Collective.ALL_GATHER, inner, name, parameters, unit, m if stage == 3 else 1, False)
        if stage == 3 and name != names[-1]:
            add(Collective.ALL_GATHER, inner, name, parameters, unit, m, True)
    return tuple(uses)


def dp_seconds(
    problem: Problem,
    pair: Pair,
    stage: int,
    group: int,
    units: tuple[Unit, ...],
    kind: Kind,
    compute: Seconds,
    *,
    ends: bool = True,
) -> float:
    """What data-parallel communication adds to a step: what the compute of its pass does not hide.

    What runs once a step runs in one of its passes, beside what runs in all of them. Nothing is computed before the
    first forward has its parameters, and nothing after the last gradients: these `ends` of a step hide behind nothing.
    On CPUs fully_shard has no stream of its own: it waits for its collectives (torch 2.13, _fsdp_param_group.py).
    """
    device, m = problem.cluster.device, pair.microbatches(problem.global_batch)
    waits = kind is Kind.SHARDS and device.kind == "cpu"
    uses = _dp_uses(problem, pair, stage, group, units)
    bare = _ends(problem, pair, stage, group, units, kind) if ends and not waits else (0.0, 0.0)
    added = sum(bare)
    for backward, hidden, end in ((False, compute.forward, bare[0]), (True, compute.backward, bare[1])):
        beside = [use for use in uses if use.beside_backward is backward]
        every = sum(use.seconds_per_pass for use in beside if use.passes == m)
        once = sum(use.seconds_per_pass for use in beside if use.passes != m)
        for passes, seconds in ((m - 1, every), (1, max(0.0, every + once - end))):
            added += passes * (seconds if waits else exposed_seconds(hidden, seconds, device))
    return added


def _ends(
    problem: Problem, pair: Pair, stage: int, group: int, units: tuple[Unit, ...], kind: Kind
) -> tuple[float, float]:
    """Seconds of gathering the first parameters of a step, and of reducing its last gradients.

    fully_shard gathers the root, then the first layer, then each beside the layer before, and reduces the same two
    last. DistributedDataParallel reduces buckets; in the last are the gradients of what is read first.
    """
    kinds = len(problem.program.blocks)
    *layers, root = units[: kinds + 1]
    if kind is Kind.BUCKETS:
        largest = max((first * rest for first, rest, trained in root.parameters if trained), default=0)
        trained = min(sum(u.trained * u.count for u in units), max(largest, DDP_BUCKET_BYTES // problem.reduced_bytes))
        found = _dp_uses(problem, pair, stage, group, (*(Unit(0, 0, 0) for _ in layers), Unit(trained, trained, 1)))
    else:
        first = next((k for k, one in enumerate(layers) if one.count), None)
        two = (replace(one, count=int(k == first)) for k, one in enumerate(layers))
        found = _dp_uses(problem, pair, stage, group, (*two, root))
    gathers = [use for use in found if use.kind is Collective.ALL_GATHER]
    return (
        sum(use.seconds_per_pass for use in gathers if not use.beside_backward),
        sum(use.seconds_per_pass for use in found if use not in gathers),
    )


def engine_seconds(problem: Problem, pair: Pair, stage: int, group: int, units: tuple[Unit, ...], kind: Kind) -> float:
    """What the engine takes of a step where compute runs: gradients added up, copies, and hooks of every unit."""
    device, hooks = problem.cluster.device, 0.0
    moved = accumulated_bytes(problem, pair, stage, group, units, kind) if problem.accumulates else 0
    if kind is Kind.SHARDS and problem.copies:
        moved += copied_bytes(problem, pair, stage, group, units)
        hooks = device.unit_s * pair.microbatches(problem.global_batch) * sum(unit.count for unit in units)
    return hooks + (operator_seconds(OperatorClass.POINTWISE, 0.0, moved, "fp32", device) if moved else 0.0)


def accumulated_bytes(problem: Problem, pair: Pair, stage: int, group: int, units: tuple[Unit, ...], kind: Kind) -> int:
    """What is read and written in a step to add the gradients of its microbatches.

    Of P trained elements whose gradients have c bytes, from the second microbatch on: (c + 8) P, to those in fp32; the
    first is cast, (c + 4) P unless c = 4. In stages 2 and 3 it is what was scattered that is added: 12 P/n.
    DistributedDataParallel copies the sum into its buckets, 8 P.
    """
    m, c = pair.microbatches(problem.global_batch), problem.compute_bytes
    if kind is Kind.SHARDS and stage >= 2:
        return 12 * (m - 1) * sum(unit.count * unit.padded(group)[1] // group for unit in units)
    trained = sum(unit.count * unit.trained for unit in units)
    cast = c + 4 if c < FP32_BYTES and m > 1 else 0
    return trained * ((m - 1) * (c + 8) + cast + (8 if kind is Kind.BUCKETS else 0))


def copied_bytes(problem: Problem, pair: Pair, stage: int, group: int, units: tuple[Unit, ...]) -> int:
    """What fully_shard reads and writes in a step to copy parameters and gradients, on the stream that computes.

    Of P elements in n shards, in a compute dtype of c bytes: before a gather the shard is cast, (4 + c) P/n unless
    c = 4; behind it parameters are copied out of the flat buffer, 2 c P. Gradients are copied into a flat one in fp32,
    (c + 4) P. With n = 1 nothing is gathered, and the flat gradients are copied once more, 8 P (torch 2.13,
    _fsdp_collectives.py).
    """
    m, c = pair.microbatches(problem.global_batch), problem.compute_bytes
    shards = group if stage else 1
    total = 0
    for number, unit in enumerate(units):
        root = (number + 1) % (len(problem.program.blocks) + 1) == 0
        gathers = m * (1 if root else 2) if stage == 3 else 1
        reductions = m if stage >= 2 else 1
        elements, trained = unit.padded(shards)
        gather = ((4 + c) * elements // shards if c < 4 else 0) + (2 * c * elements if shards > 1 else 0)
        total += unit.count * (gathers * gather + reductions * trained * (c + 4 + (8 if shards == 1 else 0)))
    return total
