"""The memory of one optimizer step under a plan's choices: its first, a middle and its last microbatch, by moments.

    forward     layers add what they save          gathered parameters
    loss        all is saved                       the root computes beside it: logits
    backward    layers give back what they saved   gradients come
    optimizer   nothing is saved                   temporaries of the update

What layers and root hold comes from the rehearsal of the program, what the data-parallel engine holds from
`costmodels.memory`. The peak is the largest sum of one moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from costmodels.memory import FP32_BYTES, Engine, StaticBytes, Unit
from costmodels.schedules import held
from passes.rehearse import BlockMemory, Held, Rehearsal, Stretch
from passes.schedules import SCHEDULES
from passes.step import OPTIMIZER_COSTS, Problem, StageLoad, Variant, kind_of, loads, timetable

BUCKET_BYTES = 64 * 2**20  # of partial gradients, copied together to be summed over tp


@dataclass(frozen=True)
class StepBytes:
    """What the fullest rank holds at the fullest moment of a step; `saved` is the most that it saves at any."""

    static: StaticBytes
    activations: int  # saved in layers and before them
    logits: int  # behind the last layer
    transient: int
    inputs: int  # and buffers of the model
    saved: int

    @property
    def peak(self) -> int:
        return self.static.total + self.activations + self.logits + self.transient + self.inputs


def step_bytes(problem: Problem, variant: Variant, rehearsals: Sequence[Rehearsal]) -> StepBytes:
    """Memory of the fullest rank of a variant, from the rehearsals of its stages."""
    return max(rank_bytes(problem, variant, rehearsals), key=lambda held: held.peak)


def rank_bytes(problem: Problem, variant: Variant, rehearsals: Sequence[Rehearsal]) -> tuple[StepBytes, ...]:
    """Memory of each pp rank."""
    every = loads(problem, variant)
    waiting = _waiting(problem, variant, rehearsals)
    return tuple(
        _bytes_of_rank(problem, variant, own, rehearsals, every, kept)
        for own, kept in zip(variant.by_rank, waiting, strict=True)
    )


def _bytes_of_rank(
    problem: Problem,
    variant: Variant,
    own: Sequence[int],
    rehearsals: Sequence[Rehearsal],
    every: Sequence[StageLoad],
    kept: int,
) -> StepBytes:
    """Of whichever of its stages works at the fullest moment, beside what the others hold.

    `kept`: by all microbatches of the rank, when they keep most.
    """
    m = variant.settled.pair.microbatches(problem.global_batch)
    inputs = sum(m * rehearsals[k].input_bytes + rehearsals[k].buffer_bytes for k in own)
    travelling = _travelling_bytes(variant, own, every)
    # gradients that are partial over tp are copied together to be summed; then the update
    partial = sum(every[k].partial_bytes for k in own) if variant.settled.pair.tp > 1 else 0
    parameters = [p for k in own for p in rehearsals[k].parameters]
    after = (min(partial, BUCKET_BYTES), update_bytes(problem, parameters, variant.shards))
    peaks = []
    for stage in own:
        others = [rehearsals[k] for k in own if k != stage]
        resting = [engine_of(problem, variant, one, first=False, last=False) for one in others]
        watch = _Watch(inputs, resting, rehearsals[stage].root.received_bytes)
        peaks.append(_stage_bytes(problem, variant, stage, rehearsals[stage], watch, kept, travelling, after))
    return max(peaks, key=lambda held: held.peak)


def _stage_bytes(
    problem: Problem,
    variant: Variant,
    stage: int,
    rehearsal: Rehearsal,
    watch: _Watch,
    kept: int,
    travelling: int,
    after: Sequence[int],
) -> StepBytes:
    """The fullest moment of a rank while one of its stages works, and `after` that."""
    m = variant.settled.pair.microbatches(problem.global_batch)
    recompute = variant.recompute_by_stage[stage]
    own = _kept(recompute, rehearsal)
    split = variant.staging is not None and SCHEDULES[variant.schedule].split
    # microbatches between the first and the last are alike, or hold less
    for i in sorted({0, min(1, m - 1), m - 1}):
        watch.engine = engine_of(problem, variant, rehearsal, first=i == 0, last=i == m - 1)
        others = max(0, kept - own)
        if not watch.resting:  # towards the end fewer are left to wait for
            others = min(others, (m - 1 - i) * own)
        if split:  # what a backward pass of inputs has used stays for that of weights
            others += own
        watch.waiting = others + travelling
        _microbatch(watch, recompute, rehearsal, variant.shards)
    watch.waiting = watch.received = 0
    for temporaries in after:
        watch.engine.rest(temporaries)
        watch.see(0)
    assert watch.peak is not None, "seen a moment ago"
    return replace(watch.peak, saved=watch.saved)


def _travelling_bytes(variant: Variant, own: Sequence[int], every: Sequence[StageLoad]) -> int:
    """What a rank has sent and not yet seen arrive, and receives ahead of its use.

    With one stage per rank, what the microbatch before gave and the gradients it sent. Else, of each stage, what it
    sent and what comes, both ways.
    """
    if variant.staging is None:
        return 0
    received = sum(every[k - 1].sent_bytes for k in own if k)
    sent = sum(every[k].sent_bytes for k in own)
    return (1 if SCHEDULES[variant.schedule].single else 2) * (received + sent)


def _kept(recompute: Sequence[int], rehearsal: Rehearsal) -> int:
    """What one microbatch holds between the forward and the backward of a stage."""
    done = [0] * len(recompute)
    kept = rehearsal.root.forward[-1].live_bytes + rehearsal.root.received_bytes
    for b in rehearsal.root.calls:
        kept += (rehearsal.recomputed if done[b] < recompute[b] else rehearsal.blocks)[b].saved_bytes
        done[b] += 1
    return kept


def _waiting(problem: Problem, variant: Variant, rehearsals: Sequence[Rehearsal]) -> tuple[int, ...]:
    """Of each rank, the most bytes that its microbatches hold at one moment of the schedule."""
    kept = [_kept(again, one) for again, one in zip(variant.recompute_by_stage, rehearsals, strict=True)]
    if variant.staging is None:
        return tuple(kept)
    m = variant.settled.pair.microbatches(problem.global_batch)
    # where gradients of weights wait, the gradients of what they are made of wait too
    return held(timetable(variant, m), kept, kept)


class _Watch:
    """Keeps the fullest moment."""

    engine: Engine

    def __init__(self, inputs: int, resting: Sequence[Engine], received: int) -> None:
        self.inputs, self.resting = inputs, resting
        self.peak: StepBytes | None = None
        self.saved = 0
        self.waiting = 0  # of other microbatches
        self.received = received  # of this one

    def see(self, activations: int, transient: int = 0, logits: int = 0) -> None:
        static = self.engine.now()
        for other in self.resting:
            static += other.now()
        activations += self.waiting + self.received
        total = static.total + activations + transient + logits + self.inputs
        if self.peak is None or total > self.peak.peak:
            self.peak = StepBytes(static, activations, logits, transient, self.inputs, 0)


def _microbatch(watch: _Watch, recompute: Sequence[int], rehearsal: Rehearsal, shards: int) -> None:
    """The forward and backward pass of one microbatch."""
    engine, see = watch.engine, watch.see
    root, order = rehearsal.root, rehearsal.root.calls
    units = [unit(block.parameters, shards) for block in rehearsal.blocks]
    outer = unit(root.parameters, shards)

    # forward: what is saved inside of layers, beside what the root holds
    layers: list[BlockMemory] = []
    done = [0] * len(units)
    saved = 0
    for _ in engine.forward(outer):
        see(0)
    for stretch, b in zip(root.forward, order, strict=False):
        layer = (rehearsal.recomputed if done[b] < recompute[b] else rehearsal.blocks)[b]
        live = saved + stretch.live_bytes
        see(live, stretch.peak_bytes - stretch.live_bytes)
        for _ in engine.forward(units[b]):
            see(live)
        see(live, layer.forward_peak_bytes)
        engine.after_forward(units[b])
        saved += layer.saved_bytes
        done[b] += 1
        layers.append(layer)

    # all is saved; what the root holds behind the last layer are logits
    last = root.forward[-1]
    watch.saved = saved + last.live_bytes
    live = saved + root.forward[-2].live_bytes if layers else watch.saved
    see(live, logits=saved + last.peak_bytes - live)
    upcoming = [units[order[call]] for call in root.backward_calls]
    engine.turn(upcoming[0] if upcoming else None)
    see(live, logits=saved + peak_of(root.backward[0], engine) - live)

    # backward: gradients come, and what was saved goes
    for i, (call, one) in enumerate(zip(root.backward_calls, upcoming, strict=True)):
        stretch, layer = root.backward[i], layers[call]
        live = saved + stretch.live_bytes
        if i:
            see(live, peak_of(stretch, engine) - stretch.live_bytes)
        engine.fresh = 0 if engine.passing else stretch.gradient_bytes
        for _ in engine.backward(one, upcoming[i + 1] if i + 1 < len(upcoming) else None):
            see(live, layer.left_bytes)
        see(live, peak_of(layer, engine) - layer.saved_bytes)
        saved -= layer.saved_bytes
        for _ in engine.after_backward(one):
            see(live - layer.saved_bytes, layer.left_bytes)
        engine.fresh = 0
    see(0, peak_of(root.backward[-1], engine))
    for _ in engine.after_backward(outer):
        see(0)
    engine.rest()


def unit(parameters: tuple[Held, ...], shards: int) -> Unit:
    sizes = [padded(p.shape, shards) for p in parameters]
    trained = [size for p, size in zip(parameters, sizes, strict=True) if p.trained]
    return Unit(sum(sizes), sum(trained), trained[-1] if trained else 0)


def padded(shape: tuple[int, ...], shards: int) -> int:
    """Elements of a parameter whose first dim is filled up so that `shards` divides it."""
    first, *rest = shape or (1,)
    return -(-first // shards) * shards * prod(rest)


def engine_of(problem: Problem, variant: Variant, rehearsal: Rehearsal, *, first: bool, last: bool) -> Engine:
    """The engine that the runtime takes (autopar/runtime/engine.py), at the start of a microbatch."""
    shards = variant.shards
    units = [unit(rehearsal.blocks[b].parameters, shards) for b in rehearsal.root.calls]
    return Engine(
        [*units, unit(rehearsal.root.parameters, shards)],
        kind_of(problem, variant),
        stage=variant.zero if shards > 1 else 1,
        ranks=shards,
        compute_bytes=problem.compute_bytes,
        states=OPTIMIZER_COSTS[problem.optimizer].states,
        first=first,
        last=last,
        copies=problem.cluster.device.kind == "cpu",
        gradient_bytes=problem.gradient_bytes,
    )


def peak_of(one: BlockMemory | Stretch, engine: Engine) -> int:
    """Of a backward."""
    if isinstance(one, Stretch):
        return one.passing_peak_bytes if engine.passing else one.peak_bytes
    return one.passing_peak_bytes if engine.passing else one.backward_peak_bytes


def update_bytes(problem: Problem, parameters: Sequence[Held], shards: int) -> int:
    """Temporaries of AdamW unless it is fused: the root of the second moment, and what it is divided into.

    Over lists of tensors (the default on CUDA) all roots at once, divided in place. Tensor by tensor (CPU) both, of one
    parameter, beside the quotient of the one before, which its variable still names.
    """
    if problem.optimizer != "adamw" or problem.fused:
        return 0
    sizes = [FP32_BYTES * padded(p.shape, shards) // shards for p in parameters if p.trained]
    if problem.cluster.device.kind == "cuda":
        return sum(sizes)
    return max((before + 2 * one for before, one in pairwise([0, *sizes])), default=0)
