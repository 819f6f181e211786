"""What the data-parallel axis and its engine take of a step: collectives, copies, gradients added up, the update."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import ceil

from costmodels.groups import Collective
from costmodels.memory import Kind
from costmodels.operators import OperatorClass, exposed_seconds, operator_seconds, optimizer_seconds
from passes.price import Axis, Seconds
from passes.variant import OPTIMIZER_COSTS, Pair, Problem, Unit, Variant

DDP_BUCKET_BYTES = 25 * 2**20  # torch 2.13, nn/parallel/distributed.py: _DEFAULT_BUCKET_CAP_MB


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


def dp_uses(
    problem: Problem, pair: Pair, stage: int, group: int, units: tuple[Unit, ...]
) -> tuple[DataParallelUse, ...]:
    """What the engine runs over dp: gradients reduced in fp32, parameters gathered in the compute dtype, by unit.

    Stage 1 reduces once per step, stages 2 and 3 after every microbatch, but over the groups that hold the same once.
    Stages 1 and 2 gather once, stage 3 for every forward and, but for the root, for every backward. A layer that no
    gradient comes through has none; but the one before the first that has is gathered beside it, and stays for its
    next forward. `units` are those of the stages of one pp rank, one after the other.
    """
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

    def add(kind: Collective, axis: Axis, name: str, size: int, count: int, passes: int, backward: bool) -> None:
        if axis.ranks > 1 and size and count:
            uses.append(DataParallelUse(kind, axis, name, size, count, passes, backward))

    for name, unit in zip(names, units, strict=True):
        elements, trained = unit.padded(shards)
        gradients, parameters = problem.reduced_bytes * trained, problem.compute_bytes * elements
        add(Collective.REDUCE_SCATTER, inner, name, gradients, unit.count, reductions, True)
        add(Collective.ALL_REDUCE, outer, name, gradients // shards, unit.count, 1, True)
        add(Collective.ALL_GATHER, inner, name, parameters, unit.count, m if stage == 3 else 1, False)
        if stage == 3 and name != names[-1]:
            add(Collective.ALL_GATHER, inner, name, parameters, unit.count - unit.idle, m, True)
            add(Collective.ALL_GATHER, inner, name, parameters, unit.in_vain, 1, True)
    return tuple(uses)


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
    share: float = 1.0,
) -> float:
    """What data-parallel communication adds to a step: what the compute of its pass does not hide.

    What runs once a step runs in one of its passes, beside what runs in all of them. Nothing is computed before a
    forward has its first parameters, and nothing after the last gradients of a step: these `ends` hide behind nothing.
    The streams that gather wait for all that was computed before (torch 2.13, _fsdp_state.py: _root_pre_forward).
    `share`: of the units, that are this rank's.
    """
    device, m = problem.cluster.device, pair.microbatches(problem.global_batch)
    waits = _waits(problem, kind)
    uses = dp_uses(problem, pair, stage, group, units)
    bare = _ends(problem, pair, stage, group, units, kind) if ends and not waits else (0.0, 0.0)
    added = 0.0
    for backward, hidden, end in ((False, compute.forward, bare[0]), (True, compute.backward, bare[1])):
        beside = [use for use in uses if use.beside_backward is backward]
        every = share * sum(use.seconds_per_pass for use in beside if use.passes == m)
        once = share * sum(use.seconds_per_pass for use in beside if use.passes != m)
        again = end if stage == 3 and not backward else 0.0  # in the passes before the last
        for passes, seconds, shown in ((m - 1, every, again), (1, every + once, end)):
            behind = exposed_seconds(hidden, max(0.0, seconds - shown), device)
            added += passes * (seconds if waits else shown + behind)
    return added


def _waits(problem: Problem, kind: Kind) -> bool:
    """On CPUs fully_shard has no stream of its own: it waits for its collectives (torch 2.13, _fsdp_param_group.py)."""
    return kind is Kind.SHARDS and problem.cluster.device.kind == "cpu"


def _ends(
    problem: Problem, pair: Pair, stage: int, group: int, units: tuple[Unit, ...], kind: Kind
) -> tuple[float, float]:
    """Seconds of gathering the first parameters of a forward, and of reducing the last gradients of a step.

    fully_shard gathers the root, then the first layer, then each beside the layer before, and reduces the same two
    last. DistributedDataParallel reduces buckets; in the last are the gradients of what is read first.
    """
    *layers, root = units[: len(problem.program.blocks) + 1]
    if kind is Kind.BUCKETS:
        largest = max((first * rest for first, rest, trained in root.parameters if trained), default=0)
        whole, bucket = sum(u.trained * u.count for u in units), DDP_BUCKET_BYTES // problem.reduced_bytes
        last = min(whole, max(largest, bucket))
        layers, root = [Unit(0, 0, 0) for _ in layers], Unit(last, last, 1)

    def with_root(layer: int | None) -> tuple[DataParallelUse, ...]:
        two = [replace(u, count=int(k == layer), idle=0, in_vain=0) for k, u in enumerate(layers)]
        return dp_uses(problem, pair, stage, group, (*two, root))

    first = next((k for k, u in enumerate(layers) if u.count), None)
    trained = next((k for k, u in enumerate(layers) if u.count and u.trained), None)
    found = [with_root(layer) for layer in dict.fromkeys((first, trained))]  # mostly one
    gathers = (u for u in found[0] if u.kind is Collective.ALL_GATHER and not u.beside_backward)
    reductions = (u for u in found[-1] if u.kind is not Collective.ALL_GATHER)
    return sum(u.seconds_per_pass for u in gathers), sum(u.seconds_per_pass for u in reductions)


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

    Of P trained elements whose gradients come in c bytes and are kept in g, from the second microbatch on: (c + 2 g) P;
    the first is cast, (c + g) P, unless c = g. In stages 2 and 3 it is what was scattered that is added: 3 g P/n.
    DistributedDataParallel copies the sum into its buckets, 2 g P.
    """
    m, c, g = pair.microbatches(problem.global_batch), problem.compute_bytes, problem.gradient_bytes
    if kind is Kind.SHARDS and stage >= 2 and group > 1:
        return 3 * g * (m - 1) * sum(unit.count * unit.padded(group)[1] // group for unit in units)
    trained = sum(unit.count * unit.trained for unit in units)
    cast = c + g if c < g and m > 1 else 0
    return trained * ((m - 1) * (c + 2 * g) + cast + (2 * g if kind is Kind.BUCKETS else 0))


def copied_bytes(problem: Problem, pair: Pair, stage: int, group: int, units: tuple[Unit, ...]) -> int:
    """What fully_shard reads and writes in a step to copy parameters and gradients, on the stream that computes.

    Of P elements in n shards, in a compute dtype of c bytes: before a gather the shard is cast, (4 + c) P/n unless
    c = 4; behind it parameters are copied out of the flat buffer, 2 c P. Gradients are copied into a flat one in fp32,
    (c + 4) P. With n = 1 nothing is gathered, and the flat gradients are copied once more, 8 P (torch 2.13,
    _fsdp_collectives.py).
    """
    m, c = pair.microbatches(problem.global_batch), problem.compute_bytes
    shards = group if stage else 1
    stage = stage if group > 1 else 1  # as the runtime's engine does
    total = 0
    for number, unit in enumerate(units):
        root = (number + 1) % (len(problem.program.blocks) + 1) == 0
        gathers = unit.count
        if stage == 3:
            gathers = m * unit.count if root else m * (2 * unit.count - unit.idle) + unit.in_vain
        reductions = m if stage >= 2 else 1
        elements, trained = unit.padded(shards)
        gather = ((4 + c) * elements // shards if c < 4 else 0) + (2 * c * elements if shards > 1 else 0)
        total += gathers * gather + unit.count * reductions * trained * (c + 4 + (8 if shards == 1 else 0))
    return total


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


def least_ends_seconds(problem: Problem, pair: Pair, zero: int, group: int) -> float:
    """What the ends of passes show at least beside `least_state_seconds`: as if all parameters were cut over tp.

    Communication costs at least its part that slows compute; of the ends, all of it.
    """
    device, kind = problem.cluster.device, _likely_kind(problem, pair, zero, group)
    if pair.dp == 1 or _waits(problem, kind):
        return 0.0
    first, last = _ends(problem, pair, zero, group, _cut(problem, pair.tp), kind)
    passes = pair.microbatches(problem.global_batch) if zero == 3 else 1
    return (passes * first + last) / device.overlap_slowdown


def least_dp_seconds(problem: Problem, pair: Pair, zero: int, group: int, hidden: Seconds) -> float:
    """What communication over dp adds to a step of a pipeline at least, beside so much compute on each rank.

    On average a rank has its share of all units; and what is not hidden of the average is no more than the average of
    what is not hidden.
    """
    held = (problem, pair, zero, group, _cut(problem, pair.tp), _likely_kind(problem, pair, zero, group))
    return dp_seconds(*held, hidden, ends=False, share=1 / pair.pp)


def least_once_seconds(problem: Problem, pair: Pair, zero: int, group: int) -> float:
    """What the engine and the update of some rank of a pipeline add to a step at least: the average of all."""
    units, kind = _cut(problem, pair.tp), _likely_kind(problem, pair, zero, group)
    update = update_seconds(problem, problem.trained // pair.tp, group if zero else 1)
    return (engine_seconds(problem, pair, zero, group, units, kind) + update) / pair.pp


def _cut(problem: Problem, tp: int) -> tuple[Unit, ...]:
    """All parameters cut over tp."""
    return tuple(Unit(u.elements // tp, u.trained // tp, u.count, idle=u.idle) for u in problem.whole_units)
