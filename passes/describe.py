"""A plan in words and lists: what is split how, which collectives run, what nearly won and why it lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from costmodels.groups import Collective
from passes.dataparallel import dp_uses
from passes.found import Candidate, Found
from passes.lower import LocalOp, LocalRegion, Reshard
from passes.placements import S, collectives
from passes.plan import Alternative, BlockPlan, CollectiveUse, Mesh, Schedule, Zero
from passes.price import Axis, local_bytes, reshard_bytes
from passes.state import Task
from passes.step import loads, pp_axis, run_again, shared_seconds
from passes.variant import Problem, StageLoad, Variant


def headline(name: str, variant: Variant, task: Task) -> str:
    """The first lines of program.py."""
    pair = variant.settled.pair
    m = pair.microbatches(task.global_batch)
    zero = f", ZeRO-{variant.zero} over {variant.group}" if variant.zero else ""
    devices = pair.pp * pair.dp * pair.tp
    local = min(devices, task.cluster.devices_per_node)
    pp = f"pp {pair.pp} ({variant.schedule}), " if variant.staging else ""
    return (
        f"{name} on {devices} processes: {pp}dp {pair.dp}, tp {pair.tp}{zero}, "
        f"{m} microbatch{'es' if m > 1 else ''} of {pair.microbatch}, {task.precision}.\n\n"
        f"    torchrun --nproc-per-node {local} program.py --steps 10\n\n"
        "Written by autopar; yours to edit. Shapes in comments are those of one rank."
    )


def schedule_of(variant: Variant, global_batch: int) -> Schedule:
    pair = variant.settled.pair
    virtual = variant.staging.virtual_stages if variant.staging else 1
    return Schedule(variant.schedule, pair.microbatch, pair.microbatches(global_batch), virtual)


def block_plans(variant: Variant, stage: int) -> tuple[BlockPlan, ...]:
    """One line per distinct block of a stage, and one for what is outside of blocks."""
    lowered, part = variant.settled.lowered, variant.stages[stage]
    counts = Counter(call.block for call in part.calls)
    again = variant.recompute_by_stage[stage]
    lines = [
        BlockPlan(lowered.program.blocks[b].name, counts[b], again[b], words(lowered.blocks[b], variant))
        for b in sorted(counts)
    ]
    return (*lines, BlockPlan("outside blocks", 0, 0, words(part.region, variant)))


def words(region: LocalRegion, variant: Variant) -> str:
    """How the matrix work of a region is split, and what lies along another dim."""
    axis = variant.settled.lowered.sharding.axis
    if axis.ranks == 1:
        return "whole on every device"
    split: dict[str, list[str]] = defaultdict(list)
    for statement in region.statements:
        if isinstance(statement, LocalOp) and statement.rule is not None:
            op = statement.op
            leaf = op.module.rpartition(".")[2] or ("loss" if op.in_loss else op.target.split(".")[1])
            name = op.target.split(".")[1] if leaf.isdigit() else leaf
            heavy = statement.rule.flop(statement.site)[0] > 0 or statement.strategy.form
            if heavy:
                how = f"by {statement.strategy.name}" if statement.strategy.split else "repeated"
                label = "attention" if "attention" in op.target else "loss" if "loss" in op.target else name
                if label not in split[how]:
                    split[how].append(label)
    parts = [f"{', '.join(names)} {how}" for how, names in split.items()]
    along = Counter(
        local.placement.dim
        for local in region.locals.values()
        if isinstance(local.placement, S) and len(local.value.shape) == 3 and local.placement.dim == 1
    )
    if along:
        parts.append("norms along the sequence")
    return "; ".join(parts) or "repeated on every tp rank"


def collective_uses(problem: Problem, variant: Variant) -> tuple[CollectiveUse, ...]:
    """Every collective of a step with its cost, of each pp rank, costliest first."""
    every = loads(problem, variant)
    uses = [use for rank in range(len(variant.by_rank)) for use in _of_rank(problem, variant, rank, every)]
    return tuple(sorted(uses, key=lambda u: (-u.seconds, u.tensor, u.name, u.stage)))


def _of_rank(problem: Problem, variant: Variant, rank: int, every: tuple[StageLoad, ...]) -> Iterator[CollectiveUse]:
    """What the stages of one pp rank do."""
    lowered, pair, own = variant.settled.lowered, variant.settled.pair, variant.by_rank[rank]
    axis, m = lowered.sharding.axis, pair.microbatches(problem.global_batch)
    units = tuple(unit for stage in own for unit in every[stage].units)
    for use in dp_uses(problem, pair, variant.zero, variant.group, units):
        count = use.per_pass * use.passes
        seconds = use.passes * use.seconds_per_pass
        yield CollectiveUse(use.kind.value, use.axis.name, use.unit, use.full_bytes, count, seconds, rank)
    if axis.ranks > 1:
        for stage in own:
            part = variant.stages[stage]
            counts = Counter(call.block for call in part.calls)
            regions = [(part.region, 1), *((lowered.blocks[b], counts[b]) for b in sorted(counts))]
            for region, count in regions:
                for statement in region.statements:
                    yield from _uses(statement, axis, m * count, rank)
            for region, again in zip(lowered.blocks, variant.recompute_by_stage[stage], strict=True):
                for statement in run_again(region) if again else ():
                    yield from _uses(statement, axis, m * again, rank, backward=False)
        if partial := sum(every[stage].partial_bytes for stage in own):
            yield _use(axis, "all_reduce", "partial gradients", partial, 1, rank)
    for stage in own if variant.staging is not None else ():
        yield from _sent(problem, variant, stage, m, rank)
    if shared_bytes := sum(every[stage].shared_bytes for stage in own):
        seconds = shared_seconds(problem, variant, every)
        yield CollectiveUse(Collective.ALL_REDUCE.value, "pp", "shared gradients", shared_bytes, 1, seconds, rank)


def _sent(problem: Problem, variant: Variant, stage: int, microbatches: int, rank: int) -> Iterator[CollectiveUse]:
    """What a stage hands to the next, and the gradients that it gives back."""
    axis, part = pp_axis(problem, variant.settled.pair), variant.stages[stage]
    forward = part.region.outputs if stage + 1 < len(variant.stages) and variant.rank_of(stage + 1) != rank else ()
    back = part.received if stage and variant.rank_of(stage - 1) != rank else ()
    for name, gradient in (*((name, False) for name in forward), *((name, True) for name in back)):
        local = part.region.locals[name]
        if gradient and not local.value.grad:
            continue
        size = local_bytes(local.value, local.placement, variant.settled.pair.tp)
        seconds = microbatches * axis.seconds(Collective.SEND, size)
        yield CollectiveUse(Collective.SEND.value, "pp", name, size, microbatches, seconds, rank)


def _uses(statement: object, axis: Axis, count: int, rank: int, backward: bool = True) -> list[CollectiveUse]:
    if isinstance(statement, Reshard):
        value = statement.value
        kinds = collectives(statement.source, statement.target)
        sizes = reshard_bytes(value, statement.source, statement.target, axis.ranks)
        both = list(zip(kinds, sizes, strict=True))[: 2 if value.grad and backward else 1]
        return [_use(axis, kind.value, value.name, size, count, rank) for kind, size in both if kind is not None]
    if isinstance(statement, LocalOp):
        return [_use(axis, k.value, statement.op.name, size, count, rank) for k, size in statement.strategy.inside]
    return []


def _use(axis: Axis, name: str, tensor: str, size: int, count: int, rank: int) -> CollectiveUse:
    return CollectiveUse(name, axis.name, tensor, size, count, count * axis.seconds(Collective(name), size), rank)


def alternatives(found: Found, global_batch: int) -> tuple[Alternative, ...]:
    """What nearly won, and what was faster but did not fit."""
    return tuple(_alternative(one, global_batch) for one in found.others)


def _alternative(one: Candidate, global_batch: int) -> Alternative:
    pair = one.variant.settled.pair
    layers = sum(one.variant.recompute)
    return Alternative(
        mesh=Mesh(pp=pair.pp, dp=pair.dp, tp=pair.tp),
        zero=Zero(one.variant.zero, one.variant.group),
        schedule=schedule_of(one.variant, global_batch),
        recompute=f"{layers} layers" if layers else "none",
        step_time_s=one.seconds.total,
        peak_bytes=one.bytes.peak if one.bytes else 0,
        why_not=one.why_not,
    )
