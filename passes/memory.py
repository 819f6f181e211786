"""The memory of one optimizer step under a plan's choices: its first, a middle and its last microbatch, by moments.

    forward     layers add what they save          gathered parameters
    loss        all is saved                       the root computes beside it: logits
    backward    layers give back what they saved   gradients come
    optimizer   nothing is saved                   temporaries of the update

What layers and root hold comes from the rehearsal of the program, what the data-parallel engine holds from
`costmodels.memory`. The peak is the largest sum of one moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

from costmodels.memory import FP32_BYTES, Engine, Kind, StaticBytes, Unit
from costmodels.schedules import Action, Post, Transfer, Work
from passes.dataparallel import kind_of
from passes.placements import local_shape
from passes.rehearse import BlockMemory, Held, Rehearsal, RootSplit, Stretch
from passes.schedules import SCHEDULES
from passes.stages import shared
from passes.step import loads, timetable, until_it_recurs
from passes.variant import OPTIMIZER_COSTS, Problem, StageLoad, Variant

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
    once = [_once(variant, k, one) for k, one in enumerate(rehearsals)]
    return tuple(_bytes_of_rank(problem, variant, rank, once, every) for rank in range(len(variant.by_rank)))


def _bytes_of_rank(
    problem: Problem, variant: Variant, rank: int, rehearsals: Sequence[Rehearsal], every: Sequence[StageLoad]
) -> StepBytes:
    """Of whichever of its stages works at the fullest moment, beside what the others hold."""
    m = variant.settled.pair.microbatches(problem.global_batch)
    own = variant.by_rank[rank]
    passes = {k: _Passes(problem, variant, k, rehearsals[k]) for k in own}
    if variant.staging is None:
        # microbatches between the first and the last are alike, or hold less
        peaks = [passes[0].straight(first=i == 0, last=i == m - 1) for i in sorted({0, min(1, m - 1), m - 1})]
    else:
        peaks = _Rank(variant, m, passes, rehearsals, problem.cluster.device.kind == "cpu").peaks(rank)
    # gradients that are partial over tp are copied together to be summed; then the update
    partial = sum(every[k].partial_bytes for k in own) if variant.settled.pair.tp > 1 else 0
    parameters = [p for k in own for p in rehearsals[k].parameters]
    after = max(min(partial, BUCKET_BYTES), update_bytes(problem, parameters, variant.shards))
    peaks.append(StepBytes(_sum(one.resting(_OVER) for one in passes.values()) + _buffers(after), 0, 0, 0, 0, 0))
    before = _sum(one.resting(_BEFORE) for one in passes.values())
    peaks.append(StepBytes(before, 0, 0, max(rehearsals[k].counting_bytes for k in own), 0, 0))
    read = sum(rehearsals[k].input_bytes + rehearsals[k].counted_bytes for k in own)
    inputs = m * read + sum(rehearsals[k].buffer_bytes for k in own)
    if variant.staging is not None:  # a target of every microbatch, and the losses
        inputs += FP32_BYTES * (m + (m + 1) * (len(variant.stages) - 1 in own))
    fullest = max(peaks, key=lambda held: held.peak)
    return replace(fullest, inputs=inputs, saved=max(one.saved for one in passes.values()))


def _once(variant: Variant, stage: int, rehearsal: Rehearsal) -> Rehearsal:
    """Without the parameters that a later stage of the rank has too: gradients come there first."""
    here, region = variant.rank_of(stage), variant.stages[stage].region
    twice = {
        name
        for name, numbers in shared(variant.stages).items()
        if any(k > stage and variant.rank_of(k) == here for k in numbers)
    }
    root, parameters = list(rehearsal.root.parameters), list(rehearsal.parameters)
    for parameter, lies in region.parameters:
        if parameter.name in twice:
            one = Held(local_shape(lies, parameter.value.sizes, variant.settled.pair.tp), parameter.value.grad)
            root.remove(one)
            parameters.remove(one)
    return replace(rehearsal, root=replace(rehearsal.root, parameters=tuple(root)), parameters=tuple(parameters))


def _buffers(size: int) -> StaticBytes:
    return StaticBytes(0, 0, 0, size)


def _sum(parts: Iterable[StaticBytes]) -> StaticBytes:
    return sum(parts, _buffers(0))


# -- a pipeline -------------------------------------------------------------------------------------------------------


class _Progress(NamedTuple):
    """How far a stage is in a step, as far as its engine holds more or less for it."""

    gathered: bool  # a forward has run
    first: bool  # gradients of weights are not there yet
    last: bool  # the next are the last
    over: bool = False  # all are there
    fresh: bool = False  # there are some in the compute dtype that fully_shard has not seen
    waiting: bool = False  # a microbatch is between its forward and its backward


_BEFORE = _Progress(gathered=False, first=True, last=False)
_OVER = _Progress(gathered=True, first=False, last=False, over=True)


class _Rank:
    """A pp rank through the steps of its schedule: what waits between its actions, and the fullest moments.

    received   from the post of the receive to the end of the backward, of weights where that is split. A stage that
               follows another on its rank is given what that one keeps.
    kept       from the forward to the backward
    waiting    from the backward of inputs to that of weights
    gradients  of what was received: from the backward until the stage sends again, 1f1b: goes backward again;
               of what was given: from the post of the receive to the end of the backward, 1f1b: the next post.
               Where the backward is split, both also wait.
    """

    def __init__(
        self,
        variant: Variant,
        microbatches: int,
        passes: Mapping[int, _Passes],
        rehearsals: Sequence[Rehearsal],
        gloo: bool,
    ) -> None:
        self.gloo = gloo
        self.schedule = SCHEDULES[variant.schedule]
        # but for what gpipe hoards, a rank holds most before its rounds recur, or in the end
        self.microbatches = microbatches if self.schedule.hoards else until_it_recurs(variant, microbatches)
        self.table, self.passes = timetable(variant, self.microbatches), passes
        roots = [one.root for one in rehearsals]
        self.received = [0 if k - 1 in passes else root.received_bytes for k, root in enumerate(roots)]
        splits = [root.split for root in roots]
        self.copied = [split.copied_bytes if split and k - 1 not in passes else 0 for k, split in enumerate(splits)]
        self.viewed = [split.viewed_bytes if split and k - 1 in passes else 0 for k, split in enumerate(splits)] + [0]
        self.given = [root.received_bytes for root in roots[1:]] + [0]
        self.returned = [root.returned_bytes for root in roots] + [0]  # [k + 1]: gradients of what stage k gives
        self.done = Counter[tuple[int, Work]]()
        self.fresh = dict.fromkeys(passes, False)
        self.seen = dict.fromkeys(passes, False)  # whether fully_shard has seen gradients
        self.holders = Counter[tuple[int, int]]()  # of the gradients of what a stage received, by microbatch
        self.sent: dict[int, int] = {}  # by that stage, the microbatch whose gradients are held though they were sent
        self.had: dict[int, int] = {}  # the same on the other side, though they were used
        self.gave: dict[int, int] = {}  # by stage, the microbatch of which it sent last what it gives
        self.left: dict[int, int] = {}  # by stage, the bytes of that which are held though its backward is over
        self.waits = 0
        self.fullest: dict[object, tuple[StepBytes, int]] = {}  # of every kind of moment, and the most that waits then

    def peaks(self, rank: int) -> list[StepBytes]:
        for step in self.table.programs[rank]:
            if isinstance(step, Post):
                for transfer in step.transfers:
                    self.post(transfer, receives=transfer.target == rank)
            elif isinstance(step, Action):
                self.act(step.stage, step.work, step.microbatch)
        return [replace(peak, activations=peak.activations + waits) for peak, waits in self.fullest.values()]

    def post(self, transfer: Transfer, receives: bool) -> None:
        stage, microbatch, forward = transfer.stage, transfer.microbatch, transfer.work is Work.FORWARD
        if receives and forward:
            self.waits += self.received[stage + 1]
        elif receives:
            self.hold(stage, microbatch)
            if self.schedule.lingers:
                self.renew(self.had, stage, microbatch)
        elif not self.schedule.single:
            self.renew(self.sent, stage, None if forward else microbatch)
            self.waits -= self.left.pop(stage, 0)
            self.gave[stage] = microbatch if forward else -1

    def act(self, stage: int, work: Work, microbatch: int) -> None:
        one, given = self.passes[stage], self.returned[stage + 1]
        if self.schedule.split and stage == 0:  # torch leaves all to the backward of weights
            if work is Work.INPUT:
                return
            work = Work.BACKWARD if work is Work.WEIGHT else work
        if work is Work.FORWARD:
            self.see(stage, work, self.waits)
            self.waits += one.kept
        elif work is Work.WEIGHT:
            self.see(stage, work, self.waits - one.waiting)
            self.waits -= one.waiting + self.copied[stage] - given - self.returned[stage] + self.received[stage]
            self.waits += self.viewed[stage]  # until the stage before is done with the gradients
            self.hold(stage, microbatch, -1)
            self.fresh[stage] = one.sees_late
        else:
            self.see(stage, work, self.waits - one.kept - given)
            self.waits -= one.kept
            if work is Work.INPUT:
                # the gradients of what was received and given are held by themselves
                self.waits += one.waiting + self.copied[stage] - given - self.returned[stage]
                self.hold(stage, microbatch)
                self.seen[stage] |= self.fresh[stage]
                self.fresh[stage] = False
            else:
                self.waits -= self.received[stage]
            if stage > 0:
                self.hold(stage, microbatch)  # until it is sent, or used by the stage before
                if self.schedule.lingers:
                    self.renew(self.sent, stage, microbatch)
        if work in (Work.BACKWARD, Work.WEIGHT):
            self.waits -= self.viewed[stage + 1]
            if self.is_posted(stage, microbatch):
                self.left[stage] = self.left.get(stage, 0) + self.given[stage]
                self.waits += self.given[stage]
            if given and not self.schedule.lingers:
                self.hold(stage + 1, microbatch, -1)
        self.done[stage, work] += 1
        if one.reduces_apart and self.progress(stage).over:
            self.see(stage, None, self.waits)

    def is_posted(self, stage: int, microbatch: int) -> bool:
        """Whether what a stage gave is still held after its backward, by the work of its send.

        Until the stage sends again; but gloo's works hold what was sent as long as they live: gpipe keeps all of them,
        1f1b the last that it posts before its first backward.
        """
        if self.schedule.single:
            last = len(self.table.rank_of) - stage - 2
            return self.gloo and (self.schedule.hoards or microbatch == last)
        return self.gave.get(stage) == microbatch

    def hold(self, stage: int, microbatch: int, holders: int = 1) -> None:
        """The gradients of what a stage received are held by one more, or (-1) less."""
        before = self.holders[stage, microbatch]
        self.holders[stage, microbatch] = after = before + holders
        self.waits += ((after > 0) - (before > 0)) * self.returned[stage]

    def renew(self, held: dict[int, int], stage: int, microbatch: int | None) -> None:
        """The gradients that are held go, and these are held from now on."""
        if stage in held:
            self.hold(stage, held.pop(stage), -1)
        if microbatch is not None:
            held[stage] = microbatch

    def progress(self, stage: int) -> _Progress:
        one = self.passes[stage]
        trained = self.done[stage, Work.BACKWARD] + self.done[stage, Work.WEIGHT]
        return _Progress(
            gathered=one.reduces_apart or self.done[stage, Work.FORWARD] > 0,
            first=not self.seen[stage] if one.sees_late else trained == 0,
            last=trained == self.microbatches - 1 and not one.reduces_apart,
            over=trained == self.microbatches,
            fresh=self.fresh[stage],
            waiting=self.done[stage, Work.FORWARD] > trained,
        )

    def see(self, stage: int, work: Work | None, beside: int) -> None:
        """The moments of an action, or (None) of reducing gradients, beside which so much waits."""
        one, now = self.passes[stage], self.progress(stage)
        others = tuple((k, self.progress(k)) for k in self.passes if k != stage)
        key = stage, work, now, others
        if key not in self.fullest:
            peak = one.peak(work, now)
            static = peak.static + _sum(self.passes[k].resting(progress) for k, progress in others)
            self.fullest[key] = replace(peak, static=static), beside
        peak, before = self.fullest[key]
        self.fullest[key] = peak, max(before, beside)


# -- a stage, or the whole model ---------------------------------------------------------------------------------------


class _Watch:
    """Keeps the fullest moment."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.peak: StepBytes | None = None

    def see(self, activations: int, transient: int = 0, logits: int = 0) -> None:
        seen = StepBytes(self.engine.now(), activations, logits, transient, 0, 0)
        if self.peak is None or seen.peak > self.peak.peak:
            self.peak = seen

    def fullest(self) -> StepBytes:
        assert self.peak is not None, "nothing was seen"
        return self.peak


class _Passes:
    """The passes of a microbatch through a stage: the fullest moment of each, beside what was received."""

    def __init__(self, problem: Problem, variant: Variant, stage: int, rehearsal: Rehearsal) -> None:
        self.rehearsal, self.root, order = rehearsal, rehearsal.root, rehearsal.root.calls
        every = [unit(block.parameters, variant.shards) for block in rehearsal.blocks]
        self.units, self.outer = [every[b] for b in order], unit(self.root.parameters, variant.shards)
        self.engine = partial(engine_of, problem, variant, (*self.units, self.outer))
        done = [0] * len(every)
        self.layers: list[BlockMemory] = []
        for b in order:
            again = done[b] < variant.recompute_by_stage[stage][b]
            self.layers.append((rehearsal.recomputed if again else rehearsal.blocks)[b])
            done[b] += 1
        self.inside = sum(layer.saved_bytes for layer in self.layers)
        self.kept = self.saved = self.inside + self.root.forward[-1].live_bytes
        # where it splits the backward, torch has fully_shard gather before all forwards, and reduce in the end
        self.reduces_apart = variant.splits_backward and kind_of(problem, variant) is Kind.SHARDS
        # and that sees gradients of weights, to add them in fp32, in the next backward of inputs
        self.sees_late = self.reduces_apart and problem.compute_bytes < FP32_BYTES and stage > 0
        self.waiting = 0
        if self.root.split is not None:
            waiting = sum(rehearsal.split[b].waiting_bytes for b in order)
            self.waiting = waiting + self.root.split.waiting_bytes
        self.fresh_bytes = problem.compute_bytes * sum(one.trained for one in (*self.units, self.outer))
        self.known: dict[tuple[Work | None, _Progress], StepBytes] = {}

    def straight(self, *, first: bool, last: bool) -> StepBytes:
        """The whole microbatch, one of a step without a pipeline."""
        watch = _Watch(self.engine(first=first, last=last))
        self.forward(watch)
        self.backward(watch)
        return watch.fullest()

    def peak(self, work: Work | None, now: _Progress) -> StepBytes:
        """Of an action, or (None) of reducing gradients."""
        if (work, now) not in self.known:
            self.known[work, now] = self._peak(work, now)
        return self.known[work, now]

    def _peak(self, work: Work | None, now: _Progress) -> StepBytes:
        if work is None:
            watch = _Watch(self.engine(first=False, last=True))
            self.reduce(watch)
            return watch.fullest()
        gathered = now.gathered if work is Work.FORWARD else None
        watch = _Watch(self.engine(first=now.first, last=now.last, gathered=gathered))
        watch.engine.gradients += now.fresh * self.fresh_bytes
        self.forward(watch)
        if work is Work.FORWARD:
            return watch.fullest()
        watch.peak = None
        if work is Work.INPUT:
            self.inputs(watch, now)
        else:
            (self.backward if work is Work.BACKWARD else self.weights)(watch)
        return watch.fullest()

    def resting(self, now: _Progress) -> StaticBytes:
        """What its engine holds while it does nothing."""
        engine: Engine = self.engine(first=now.first, last=False, gathered=now.gathered)
        engine.gradients += now.fresh * self.fresh_bytes
        if now.over:
            engine.finish()
        elif now.waiting and engine.kind is Kind.SHARDS and engine.stage == 3:
            engine.whole += engine.compute_bytes * self.outer.elements  # the root stays whole for the backward
        return engine.now()

    def forward(self, watch: _Watch) -> None:
        """What is saved inside of layers, beside what the root holds."""
        engine, see, root = watch.engine, watch.see, self.root
        saved = 0
        for _ in engine.forward(self.outer):
            see(0)
        for stretch, one, layer in zip(root.forward, self.units, self.layers, strict=False):
            live = saved + stretch.live_bytes
            see(live, stretch.peak_bytes - stretch.live_bytes)
            for _ in engine.forward(one):
                see(live)
            see(live, layer.forward_peak_bytes)
            engine.after_forward(one)
            saved += layer.saved_bytes
        self.behind(watch, root.forward[-1].peak_bytes)

    def behind(self, watch: _Watch, held: int) -> None:
        """All layers are saved; what the root holds behind the last one are logits."""
        live = self.inside + self.root.forward[-2].live_bytes if self.layers else self.kept
        watch.see(live, logits=self.inside + held - live)

    def backward(self, watch: _Watch) -> None:
        """Gradients come, and what was saved goes."""
        engine, see, root = watch.engine, watch.see, self.root
        upcoming = [self.units[call] for call in root.backward_calls]
        engine.turn(upcoming[0] if upcoming else None)
        self.behind(watch, peak_of(root.backward[0], engine))
        saved = self.inside
        for i, (call, one) in enumerate(zip(root.backward_calls, upcoming, strict=True)):
            stretch, layer = root.backward[i], self.layers[call]
            live = saved + stretch.live_bytes
            if i:
                see(live, peak_of(stretch, engine) - stretch.live_bytes)
            engine.fresh = 0 if engine.passing else stretch.gradient_bytes
            for _ in engine.backward(one, upcoming[i + 1] if i + 1 < len(upcoming) else None):
                see(live, layer.left_bytes)
            see(live, peak_of(layer, engine, pinned=root.pinned and i == 0) - layer.saved_bytes)
            saved -= layer.saved_bytes
            for _ in engine.after_backward(one):
                see(live - layer.saved_bytes, layer.left_bytes)
            engine.fresh = 0
        see(0, peak_of(root.backward[-1], engine))
        for _ in engine.after_backward(self.outer):
            see(0)
        engine.rest()

    def inputs(self, watch: _Watch, now: _Progress) -> None:
        """Gradients of inputs alone: all that was saved stays, and what gradients of weights are made of comes.

        Layer by layer fully_shard adds, in fp32, what gradients of weights it has not seen.
        """
        root, split, live = self.root, self.split, self.inside
        watch.engine.turn(None)
        self.behind(watch, split.inputs[0].peak_bytes)
        for i, call in enumerate(root.backward_calls):
            stretch, saved = split.inputs[i], self.layers[call].saved_bytes
            layer = self.rehearsal.split[root.calls[call]]
            if i:
                watch.see(live + stretch.live_bytes, stretch.peak_bytes - stretch.live_bytes)
            watch.see(live + stretch.live_bytes, layer.input_peak_bytes - saved)
            live += layer.waiting_bytes - saved
            if now.fresh:
                watch.engine.add_late(self.units[call])
        watch.see(live, split.inputs[-1].peak_bytes)

    def weights(self, watch: _Watch) -> None:
        """Gradients of weights."""
        engine, split, passing = watch.engine, self.split, watch.engine.passing
        live = self.waiting
        engine.turn(None)
        peak = split.weights.passing_peak_bytes if passing else split.weights.peak_bytes
        watch.see(live, peak - split.waiting_bytes)
        live += split.weights.live_bytes - split.waiting_bytes
        for b, one in zip(self.root.calls, self.units, strict=True):
            layer = self.rehearsal.split[b]
            watch.see(live, (layer.passing_peak_bytes if passing else layer.weight_peak_bytes) - layer.waiting_bytes)
            live += layer.left_bytes - layer.waiting_bytes
            engine.gradients += 0 if passing else engine.compute_bytes * one.trained
            watch.see(live)

    @property
    def split(self) -> RootSplit:
        assert self.root.split is not None, "rehearsed for a split backward"
        return self.root.split

    def reduce(self, watch: _Watch) -> None:
        """All gradients of a step at once."""
        for one in (*self.units, self.outer):
            for _ in watch.engine.after_backward(one):
                watch.see(0)


def unit(parameters: tuple[Held, ...], shards: int) -> Unit:
    sizes = [padded(p.shape, shards) for p in parameters]
    trained = [size for p, size in zip(parameters, sizes, strict=True) if p.trained]
    return Unit(sum(sizes), sum(trained), trained[-1] if trained else 0)


def padded(shape: tuple[int, ...], shards: int) -> int:
    """Elements of a parameter whose first dim is filled up so that `shards` divides it."""
    first, *rest = shape or (1,)
    return -(-first // shards) * shards * prod(rest)


def engine_of(
    problem: Problem,
    variant: Variant,
    units: Sequence[Unit],
    *,
    first: bool,
    last: bool,
    gathered: bool | None = None,
) -> Engine:
    """The engine that the runtime takes (autopar/runtime/engine.py), at the start of a microbatch."""
    shards = variant.shards
    return Engine(
        units,
        kind_of(problem, variant),
        stage=variant.zero if shards > 1 else 1,
        ranks=shards,
        compute_bytes=problem.compute_bytes,
        states=OPTIMIZER_COSTS[problem.optimizer].states,
        first=first,
        last=last,
        copies=problem.cluster.device.kind == "cpu",
        gradient_bytes=problem.gradient_bytes,
        beside_bytes=problem.beside_bytes,
        gathered=gathered,
    )


def peak_of(one: BlockMemory | Stretch, engine: Engine, pinned: bool = False) -> int:
    """Of a backward; `pinned`: the gradients of the layer's outputs stay to its end."""
    if isinstance(one, Stretch):
        return one.passing_peak_bytes if engine.passing else one.peak_bytes
    if pinned:
        return one.pinned_passing_peak_bytes if engine.passing else one.pinned_peak_bytes
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
