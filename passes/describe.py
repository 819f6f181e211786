"""A plan in words and lists: what is split how, which collectives run, what nearly won and why it lost."""

from __future__ import annotations

from collections import Counter, defaultdict

from costmodels.collectives import Collective
from passes.lower import LocalOp, LocalRegion, Reshard
from passes.placements import S, collectives
from passes.plan import Alternative, BlockPlan, CollectiveUse, Mesh, Schedule, Zero
from passes.price import Axis
from passes.search import Candidate, Found
from passes.state import Task
from passes.step import Problem, Variant, dp_uses, run_again


def headline(name: str, variant: Variant, task: Task) -> str:
    """The first lines of program.py."""
    pair = variant.settled.pair
    zero = f", ZeRO-{variant.zero} over {variant.group}" if variant.zero else ""
    local = min(pair.dp * pair.tp, task.cluster.devices_per_node)
    return (
        f"{name} on {pair.dp * pair.tp} processes: dp {pair.dp}, tp {pair.tp}{zero}, "
        f"{pair.microbatches(task.global_batch)} microbatches of {pair.microbatch}, {task.precision}.\n\n"
        f"    torchrun --nproc-per-node {local} program.py --steps 10\n\n"
        "Written by autopar; yours to edit. Shapes in comments are those of one rank."
    )


def block_plans(variant: Variant) -> tuple[BlockPlan, ...]:
    """One line per distinct block, and one for what is outside of blocks."""
    lowered = variant.settled.lowered
    lines = []
    for block, region, again in zip(lowered.program.blocks, lowered.blocks, variant.recompute, strict=True):
        lines.append(BlockPlan(block.name, len(block.paths), again, words(region, variant)))
    return (*lines, BlockPlan("outside blocks", 0, 0, words(lowered.root, variant)))


def words(region: LocalRegion, variant: Variant) -> str:
    """How the matrix work of a region is split, and what lies along another dim."""
    axis = variant.settled.lowered.sharding.axis
    if axis.ranks == 1:
        return "whole on every device"
    by_factor: dict[str, list[str]] = defaultdict(list)
    for statement in region.statements:
        if isinstance(statement, LocalOp) and statement.rule is not None:
            op = statement.op
            leaf = op.module.rpartition(".")[2] or ("loss" if op.in_loss else op.target.split(".")[1])
            name = op.target.split(".")[1] if leaf.isdigit() else leaf
            heavy = statement.rule.flop(statement.site)[0] > 0 or statement.strategy.form
            if heavy:
                factor = statement.strategy.name if statement.strategy.split else "repeated"
                label = "attention" if "attention" in op.target else "loss" if "loss" in op.target else name
                if label not in by_factor[factor]:
                    by_factor[factor].append(label)
    parts = [f"{', '.join(names)} by {factor}" for factor, names in by_factor.items()]
    along = Counter(
        local.placement.dim
        for local in region.locals.values()
        if isinstance(local.placement, S) and len(local.value.shape) == 3 and local.placement.dim == 1
    )
    if along:
        parts.append("norms along the sequence")
    return "; ".join(parts) or "repeated on every tp rank"


def collective_uses(problem: Problem, variant: Variant) -> tuple[CollectiveUse, ...]:
    """Every collective of a step with its cost, costliest first."""
    lowered = variant.settled.lowered
    axis = lowered.sharding.axis
    m = variant.settled.pair.microbatches(problem.global_batch)
    uses = [
        CollectiveUse(
            use.kind.value, use.axis.name, use.unit, use.full_bytes, use.per_pass * use.passes,
            use.passes * use.seconds_per_pass,
        )
        for use in dp_uses(problem, variant)
    ]  # fmt: skip
    if axis.ranks > 1:
        for region, count in lowered.regions():
            for statement in region.statements:
                uses.extend(_uses(statement, axis, m * count))
        for region, again in zip(lowered.blocks, variant.recompute, strict=True):
            for statement in run_again(region):
                uses.extend(_uses(statement, axis, m * again, backward=False) if again else ())
        if variant.partial_bytes:
            uses.append(_use(axis, "all_reduce", "partial gradients", variant.partial_bytes, 1))
    return tuple(sorted(uses, key=lambda u: (-u.seconds, u.tensor, u.name)))


def _uses(statement: object, axis: Axis, count: int, backward: bool = True) -> list[CollectiveUse]:
    if isinstance(statement, Reshard):
        there, back = collectives(statement.source, statement.target)
        kinds = [there] + ([back] if statement.value.grad and backward else [])
        size = statement.value.bytes
        return [_use(axis, k.value, statement.value.name, size, count) for k in kinds if k is not None]
    if isinstance(statement, LocalOp):
        return [_use(axis, k.value, statement.op.name, size, count) for k, size in statement.strategy.inside]
    return []


def _use(axis: Axis, name: str, tensor: str, size: int, count: int) -> CollectiveUse:
    return CollectiveUse(name, axis.name, tensor, size, count, count * axis.seconds(Collective(name), size))


def alternatives(found: Found, global_batch: int) -> tuple[Alternative, ...]:
    """What nearly won, and what was faster but did not fit."""
    return tuple(_alternative(one, global_batch) for one in found.others)


def _alternative(one: Candidate, global_batch: int) -> Alternative:
    pair = one.variant.settled.pair
    layers = sum(one.variant.recompute)
    return Alternative(
        mesh=Mesh(dp=pair.dp, tp=pair.tp),
        zero=Zero(one.variant.zero, one.variant.group),
        schedule=Schedule("none", pair.microbatch, pair.microbatches(global_batch)),
        recompute=f"{layers} layers" if layers else "none",
        step_time_s=one.seconds.total,
        peak_bytes=one.bytes.peak if one.bytes else 0,
        why_not=one.why_not,
    )
