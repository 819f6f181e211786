"""The exposed seconds of one optimizer step under a plan's choices.

Everything is priced on the lowered program: the very operators and collectives that are emitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from costmodels.groups import Collective
from costmodels.schedules import Lending, StageSeconds, Table, least_seconds, simulate
from passes.dataparallel import dp_seconds, engine_seconds, kind_of, update_seconds
from passes.lower import LocalOp, LocalRegion, Reshard, Statement, lower
from passes.placements import local_shape
from passes.price import Axis, Seconds, local_bytes, op_launches, op_seconds, reshard_seconds
from passes.saved import saved
from passes.schedules import SCHEDULES, refusal, round_size, table
from passes.sharding import Sharding
from passes.stages import shared
from passes.variant import (
    Pair,
    Problem,
    RegionSeconds,
    Settled,
    StageLoad,
    Variant,
    partial_bytes,
    shard_bytes,
    unit,
    with_idle,
)

ROUNDS_PLAYED = 6  # of as many microbatches as ranks, until a schedule repeats itself


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
    called = [call.block for call in lowered.program.calls]
    units = [*with_idle(units, lowered.program, called), unit(problem, lowered.root, pair.tp, "", 1)]
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
    units = [*with_idle(units, program, [call.block for call in part.calls]), unit(problem, part.region, tp, "", 1)]
    here = variant.rank_of(number)
    before = {name for name, every in both.items() if any(n < number and variant.rank_of(n) == here for n in every)}
    partial = partial_bytes(part.region, variant.shards, before)
    partial += sum(partial_bytes(settled.lowered.blocks[b], variant.shards) * n for b, n in counts.items())
    held = ((p.name, local_shape(lies, p.value.sizes, tp)) for p, lies in part.region.parameters if p.value.grad)
    own = {name: shard_bytes(shape, variant.shards) for name, shape in held if name not in before}
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
    seconds, sent, lends = stage_seconds(every), transfers(problem, variant, every), lending(problem, variant)

    def played(count: int) -> tuple[float, float]:
        timeline = simulate(timetable(variant, count), seconds, sent, problem.queue, lends)
        return timeline.bubble_s, timeline.exposed_s

    # what is lent never quite recurs
    least = microbatches if lends else until_it_recurs(variant, microbatches)
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
