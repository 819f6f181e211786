"""CUTTING: where the stages of a pipeline begin.

Few ways of cutting are all tried. Of many, those are taken in which the slowest stage is as fast as it can be: the
seconds of a stage are those of its statements and of the layers that it must recompute, since it holds the
microbatches that its schedule has in flight there. More statements never take less time or memory, so that filling
stages one after the other up to a time finds out whether it is enough for all; the least such time is searched by
halves. What memory needs is estimated here; the search counts it on the program itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, combinations, pairwise, product
from typing import TypeAlias

from costmodels.groups import Collective
from costmodels.memory import FP32_BYTES
from costmodels.schedules import StageSeconds, least_seconds
from passes.graph import DTYPE_BYTES
from passes.lower import LocalCall, LocalRegion
from passes.price import Seconds, local_bytes
from passes.rehearse import Rehearsal
from passes.schedules import SCHEDULES, least_in_flight, rank_of
from passes.stages import made_again, reads_of, results_of
from passes.step import pp_axis
from passes.variant import OPTIMIZER_COSTS, Pair, Problem, RegionSeconds, Settled, Staging, Variant

EXHAUSTIVE = 300  # ways of cutting that are all tried
HALVES = 16
ROUNDS = 4
MOST_POSITIONS = 400  # where the root can be cut
Span: TypeAlias = tuple[int, int]  # of a stage, where it starts and ends in pieces
Moment: TypeAlias = tuple[float, float]  # microbatches in flight, and bytes
_NOTHING = StageSeconds(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Piece:
    """The root between two neighbouring places to cut: seconds, parameters and kept bytes of a microbatch."""

    forward: float
    backward: float
    weight: float  # of the backward, the gradients of weights
    elements: int
    kept_bytes: int  # by the root itself
    layers: tuple[int, ...]  # of each block
    crossing_bytes: int  # what a stage that begins here receives


@dataclass(frozen=True)
class Uncut:
    """A pipeline whose stages are not chosen yet."""

    pair: Pair
    zero: int
    group: int
    schedule: str
    virtual_stages: int  # per rank
    room_bytes: float  # what a rank's stages may fill
    rooms_bytes: tuple[float, ...] = ()  # those of each rank instead, once it was seen how far the estimate is off

    def room(self, rank: int) -> float:
        """What the stages of a rank may fill."""
        return self.rooms_bytes[rank] if self.rooms_bytes else self.room_bytes

    def with_room(self, room_bytes: float) -> Uncut:
        """The same with so much room on every rank."""
        return replace(self, room_bytes=room_bytes, rooms_bytes=())

    @classmethod
    def of(cls, variant: Variant, room_bytes: float) -> Uncut:
        """A pipeline as it was before it was cut."""
        staging = variant.staging
        assert staging is not None, "only a pipeline is cut"
        pair = variant.settled.pair
        return cls(pair, variant.zero, variant.group, staging.schedule, staging.virtual_stages, room_bytes)

    def cut_at(self, settled: Settled, cuts: Sequence[int]) -> Variant:
        """The pipeline with stages that begin there, which recompute nothing."""
        none = tuple(0 for _ in settled.blocks)
        staging = Staging(self.schedule, self.virtual_stages, tuple(cuts), (none,) * (len(cuts) + 1))
        return Variant(settled, self.zero, self.group, none, staging)

    @property
    def count(self) -> int:
        """How many stages."""
        return self.pair.pp * self.virtual_stages

    @property
    def shards(self) -> int:
        """Ranks over which states are sharded."""
        return self.group if self.zero else 1

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The pp rank of every stage."""
        return rank_of(self.schedule, self.pair.pp, self.virtual_stages)

    @cached_property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every pp rank."""
        return tuple(tuple(k for k, at in enumerate(self.ranks) if at == rank) for rank in range(self.pair.pp))

    @property
    def split(self) -> bool:
        return SCHEDULES[self.schedule].split

    def in_flight(self, global_batch: int) -> tuple[float, ...]:
        """Microbatches that each rank holds when it holds most."""
        m = self.pair.microbatches(global_batch)
        return least_in_flight(self.schedule, self.pair.pp, self.virtual_stages, m)


class Cutter:
    """Cuts the local program of one sharding."""

    def __init__(self, problem: Problem, settled: Settled, rehearsal: Rehearsal) -> None:
        self.problem, self.settled, self.rehearsal = problem, settled, rehearsal
        self.again = made_again(settled.lowered)
        self.positions = positions(settled.lowered.root, self.again)
        pieces = self._pieces()
        self.forward: list[float] = [0.0, *accumulate(p.forward for p in pieces)]
        self.backward: list[float] = [0.0, *accumulate(p.backward for p in pieces)]
        self.weight: list[float] = [0.0, *accumulate(p.weight for p in pieces)]
        self.seconds: list[float] = [a + b for a, b in zip(self.forward, self.backward, strict=True)]
        self.elements = [0, *accumulate(p.elements for p in pieces)]
        self.kept = [0, *accumulate(p.kept_bytes for p in pieces)]
        blocks = range(len(settled.blocks))
        self.layers = [[0, *accumulate(p.layers[b] for p in pieces)] for b in blocks]
        self.crossing = [p.crossing_bytes for p in pieces]
        kept, again = rehearsal.blocks, rehearsal.recomputed
        self.saved = [one.saved_bytes for one in kept]
        self.freed = [a.saved_bytes - b.saved_bytes for a, b in zip(kept, again, strict=True)]
        self.order = sorted(blocks, key=lambda b: settled.again[b] / max(1, self.freed[b]))
        may = problem.fix.get("recompute") != "none"
        self._may_recompute = [may and count > 0 for count in settled.recomputable]
        self.transient = max((one.backward_peak_bytes - one.saved_bytes for one in kept), default=0)
        last = rehearsal.root
        self.ending = max(s.peak_bytes for s in (last.forward[-1], last.backward[0])) - last.forward[-1].live_bytes

    def __len__(self) -> int:
        """How many stages there can be."""
        return len(self.positions) + 1

    @cache  # noqa: B019
    def least_of_slowest(self, count: int) -> float:
        """Seconds of the slowest of so many stages at least, infinite where there cannot be as many."""
        ends, least = self._filling(count, lambda stage, start, end: self.seconds[end] - self.seconds[start], False)
        return math.inf if ends is None else least

    def tries_all(self, count: int) -> bool:
        """Whether there are few ways of cutting into so many stages."""
        return math.comb(len(self.positions), count - 1) <= EXHAUSTIVE

    def cuts(self, uncut: Uncut) -> Iterator[tuple[int, ...]]:
        """Ways of cutting into stages that may be best, as positions in the statements of the root."""
        if self.tries_all(uncut.count):
            yield from combinations(self.positions, uncut.count - 1)
            return
        ends = (self._least(uncut, backwards) for backwards in (False, True))
        yield from dict.fromkeys(tuple(self.positions[end - 1] for end in one[:-1]) for one in ends if one is not None)

    def recomputed(self, uncut: Uncut, cuts: Sequence[int]) -> list[list[int]] | None:
        """Layers that each stage between these cuts must recompute, per block; None where some rank cannot fit."""
        return self._recomputed(uncut, self._spans(cuts))

    def held(self, uncut: Uncut, cuts: Sequence[int], again: Sequence[Sequence[int]]) -> list[float]:
        """The estimate of what each rank holds if stages between these cuts recompute so many layers, per block."""
        spans, moments = self._spans(cuts), self._moments(uncut)
        found = []
        for own, flying in zip(uncut.by_rank, uncut.in_flight(self.problem.global_batch), strict=True):
            elements = sum(self.elements[spans[k][1]] - self.elements[spans[k][0]] for k in own)
            twice = [(n, one) for k in own for n, one in zip(again[k], self.freed, strict=True) if n]
            kept = sum(self._kept(*spans[k]) for k in own) - sum(n * one for n, one in twice)
            beside = self.transient + (self.ending if own[-1] == len(cuts) else 0)
            beside += max((one for _, one in twice), default=0)
            found.append(max(states * elements + most * kept for most, states in moments(flying)) + beside)
        return found

    def _spans(self, cuts: Sequence[int]) -> list[Span]:
        """Where the stages between these cuts start and end in pieces."""
        ends = [self.positions.index(cut) + 1 for cut in cuts] + [len(self.positions) + 1]
        return list(pairwise((0, *ends)))

    def _recomputed(self, uncut: Uncut, spans: Sequence[Span]) -> list[list[int]] | None:
        """The same of stages by where they start and end in pieces."""
        enough = self._by_rank(uncut)
        found: dict[int, list[int]] = {}
        for rank, own in enumerate(uncut.by_rank):
            again = enough(rank, [spans[k] for k in own])
            if again is None:
                return None
            found |= zip(own, again, strict=True)
        return [found[k] for k in range(len(spans))]

    def _by_rank(self, uncut: Uncut) -> Callable[[int, Sequence[Span]], list[list[int]] | None]:
        """What a rank must recompute in each of its stages; None where it cannot fit."""
        moments, blocks = self._moments(uncut), len(self.layers)
        in_flight = uncut.in_flight(self.problem.global_batch)
        last = len(self.positions) + 1

        def enough(rank: int, own: Sequence[Span]) -> list[list[int]] | None:
            elements = sum(self.elements[end] - self.elements[start] for start, end in own)
            kept = sum(self._kept(*span) for span in own)
            room = uncut.room(rank) - self.transient - (self.ending if own[-1][1] == last else 0)
            excess = self._excess(uncut, moments(in_flight[rank]), elements, kept, room)
            found = [[0] * blocks for _ in own]
            for b, k in product(self.order, range(len(own))):
                found[k][b], excess = self._enough(uncut, b, self._layers(*own[k])[b], excess)
            return found if all(size <= 0 for _, size in excess) else None

        return enough

    def _excess(
        self, uncut: Uncut, moments: Sequence[Moment], elements: int, kept: int, room: float
    ) -> tuple[Moment, ...]:
        """What these parameters and microbatches fill beyond so much room, at each moment.

        Where layers must be recomputed, one of them is live beside.
        """
        found = tuple((most, states * elements + most * kept - room) for most, states in moments)
        if all(size <= 0 for _, size in found):
            return found
        live = max((one for b, one in enumerate(self.freed) if self._may(uncut, b)), default=0)
        return tuple((most, size + live) for most, size in found)

    @cache  # noqa: B019
    def _layers(self, start: int, end: int) -> tuple[int, ...]:
        """How many layers of each block lie between two pieces."""
        return tuple(counts[end] - counts[start] for counts in self.layers)

    @cache  # noqa: B019
    def _kept(self, start: int, end: int) -> int:
        """What a microbatch keeps in a stage of these pieces that recomputes nothing."""
        inside = sum(n * saved for n, saved in zip(self._layers(start, end), self.saved, strict=True))
        return self.kept[end] - self.kept[start] + self.crossing[start] + inside

    def _may(self, uncut: Uncut, b: int) -> bool:
        """Whether layers of a block may run twice."""
        return self._may_recompute[b] and not uncut.split

    def _enough(self, uncut: Uncut, b: int, layers: int, excess: tuple[Moment, ...]) -> tuple[int, tuple[Moment, ...]]:
        """How many of these layers of a block are to be recomputed for so many bytes, and what is left of these."""
        over = [(most * self.freed[b], size) for most, size in excess if size > 0]
        if not over or self.freed[b] <= 0 or not self._may(uncut, b):
            return 0, excess
        again = min(layers, max(math.ceil(size / freed) if freed > 0 else layers for freed, size in over))
        return again, tuple((most, size - again * most * self.freed[b]) for most, size in excess)

    def least_again_s(self, uncut: Uncut, share: float) -> float:
        """Seconds of one microbatch, of all ranks, for what must be recomputed, infinite where they cannot hold all.

        However stages are cut, as long as none has more than `share` of what is kept. Of a rank, what it holds at any
        moment is less than it holds at most: the one with most microbatches in flight.
        """
        flying = sorted(uncut.in_flight(self.problem.global_batch))
        left, flown = 1.0, 0.0
        for one in flying:
            flown += one * min(left, share)
            left -= min(left, share)
        (_, states), *_ = self._moments(uncut)(flying[-1])
        held = states * self.elements[-1] + flown * self._kept(0, len(self.positions) + 1)
        excess = held - uncut.pair.pp * uncut.room_bytes
        seconds = 0.0
        for b in self.order:
            freed = flying[-1] * self.freed[b]
            if excess > 0 and freed > 0 and self._may(uncut, b):
                again = min(self.layers[b][-1], excess / freed)  # in parts, if need be
                excess -= again * freed
                seconds += again * self.settled.again[b]
        return seconds if excess <= 0 else math.inf

    def _needs(self, uncut: Uncut) -> Callable[[int, int, int], list[int] | None]:
        """What a stage must recompute, from its number, start and end in pieces; None where it cannot fit."""
        in_flight = uncut.in_flight(self.problem.global_batch)
        flying = [in_flight[rank] for rank in uncut.ranks]
        rooms = [(uncut.room(rank) - self.transient) / uncut.virtual_stages for rank in uncut.ranks]
        moments = self._moments(uncut)

        def need(stage: int, start: int, end: int) -> list[int] | None:
            elements = self.elements[end] - self.elements[start]
            room = rooms[stage] - (self.ending if end == len(self.positions) + 1 else 0)
            excess = self._excess(uncut, moments(flying[stage]), elements, self._kept(start, end), room)
            again = list(self._layers(start, end))
            for b in self.order:
                again[b], excess = self._enough(uncut, b, again[b], excess)
            return again if all(size <= 0 for _, size in excess) else None

        return need

    def _least(self, uncut: Uncut, backwards: bool) -> list[int] | None:
        """Where stages end, in pieces, so that the slowest is as fast as it can be; None where none fit."""
        need = self._needs(uncut)
        axis = pp_axis(self.problem, uncut.pair)
        received_s = [2 * axis.seconds(Collective.SEND, size) for size in self.crossing]  # and gradients sent back
        m = uncut.pair.microbatches(self.problem.global_batch)

        def plainly(stage: int, start: int, end: int) -> float:
            return self.seconds[end] - self.seconds[start] + received_s[start]

        def recompute_s(layers: Sequence[int]) -> float:
            return sum(n * one for n, one in zip(layers, self.settled.again, strict=True))

        @cache
        def seconds(stage: int, start: int, end: int) -> float:
            """What a stage of these pieces takes, infinite where it does not fit."""
            again = need(stage, start, end)
            return math.inf if again is None else plainly(stage, start, end) + recompute_s(again)

        def pace(stages: Sequence[float]) -> float:
            """Ranks go through their first stages together, then their second: each time the slowest sets the pace."""
            return m * sum(max(stages[k : k + uncut.pair.pp]) for k in range(0, uncut.count, uncut.pair.pp))

        enough = self._by_rank(uncut)

        @cache
        def of_rank(rank: int, own: tuple[Span, ...]) -> list[StageSeconds] | None:
            again = enough(rank, own)
            if again is None:
                return None
            found = []
            for layers, (start, end) in zip(again, own, strict=True):
                forward = self.forward[end] - self.forward[start]
                weight = self.weight[end] - self.weight[start]
                backward = plainly(0, start, end) - forward + recompute_s(layers)
                found.append(StageSeconds(forward, backward, backward - weight, weight))
            return found

        def step(ends: list[int]) -> float:
            spans = list(pairwise((0, *ends)))
            every: list[StageSeconds] = [_NOTHING] * len(spans)
            for rank, own in enumerate(uncut.by_rank):
                found = of_rank(rank, tuple([spans[k] for k in own]))
                if found is None:
                    return math.inf
                for k, one in zip(own, found, strict=True):
                    every[k] = one
            least = least_seconds(every, uncut.ranks, m, split=uncut.split)
            return max(least, pace([one.forward + one.backward for one in every]))

        starts = [self._filling(uncut.count, seconds, backwards, max(received_s))[0]]
        if (uncut.virtual_stages > 1 and not backwards) or starts == [None]:  # a rank may hold what no stage knows
            starts.append(self._filling(uncut.count, plainly, backwards, max(received_s))[0])
        every = [_improved(ends, step) for ends in starts if ends is not None]
        taken, ends = min(((taken, ends) for ends, taken in every), default=(math.inf, None))
        return ends if taken < math.inf else None

    def _filling(
        self, count: int, seconds: Callable[[int, int, int], float], backwards: bool, beside_s: float = 0.0
    ) -> tuple[list[int] | None, float]:
        """Where stages end so that the slowest, by `seconds` from its start to its end, is as fast as it can be.

        And what it takes at least. `beside_s`: what a stage takes at most besides its pieces and their recompute.
        """
        pieces = len(self.positions) + 1

        def filled(most: float) -> list[int] | None:
            """Stages filled one after the other up to so many seconds, from either end."""
            ends: list[int] = []
            at = pieces if backwards else 0
            for k in range(count):
                left = count - 1 - k  # a piece at least for each of the others
                if backwards:  # the least start that is not too much
                    low, high = left, at - 1
                    while low < high:
                        middle = (low + high) // 2
                        low, high = (low, middle) if seconds(left, middle, at) <= most else (middle + 1, high)
                    if low > at - 1 or seconds(left, low, at) > most:
                        return None
                    ends.append(at)
                else:
                    low, high = at + 1, pieces - left
                    while low < high:
                        middle = (low + high + 1) // 2
                        low, high = (middle, high) if seconds(k, at, middle) <= most else (low, middle - 1)
                    if low < at + 1 or low > pieces - left or seconds(k, at, low) > most:
                        return None
                    ends.append(low)
                at = low
            if at != (0 if backwards else pieces):
                return None
            return ends[::-1] if backwards else ends

        again = sum(n[-1] * one for n, one in zip(self.layers, self.settled.again, strict=True))
        low, high = self.seconds[-1] / count, self.seconds[-1] + again + beside_s
        best = filled(high)
        for _ in range(HALVES if best else 0):
            middle = (low + high) / 2
            if (found := filled(middle)) is None:
                low = middle
            else:
                best, high = found, middle
        return best, low

    def _moments(self, uncut: Uncut) -> Callable[[float], tuple[Moment, ...]]:
        """Of a rank with so many microbatches in flight at most, how many it has at its fullest moments, and what the
        engine holds of each parameter element then (costmodels/memory.py).

        Where all of them are in flight, no gradients are there yet; they are with one less.
        """
        states = FP32_BYTES * OPTIMIZER_COSTS[self.problem.optimizer].states
        c, n, m = self.problem.compute_bytes, uncut.shards, uncut.pair.microbatches(self.problem.global_batch)
        if n == 1 and self.problem.precision == "fp32":
            buckets = FP32_BYTES * (uncut.pair.dp > 1)
            gradients: float = FP32_BYTES * (m > 1 or not buckets)
            held: float = FP32_BYTES + states + buckets
        else:
            gradients = FP32_BYTES if uncut.zero < 2 else FP32_BYTES / n
            held = (FP32_BYTES + states) / n + (c if uncut.zero < 3 else 0)

        def of(flying: float) -> tuple[Moment, ...]:
            if flying < m:
                return ((flying, held + gradients),)
            return (flying, held), (flying - 1, held + gradients)

        return of

    def _pieces(self) -> list[Piece]:
        root, settled = self.settled.lowered.root, self.settled
        axis = settled.lowered.sharding.axis
        parameters = {p.value.name: (p, lies) for p, lies in root.parameters if not p.buffer}
        held: set[str] = set()
        calls = 0
        lives = [stretch.live_bytes for stretch in self.rehearsal.root.forward]
        crossing = crossings(root, axis.ranks, self.again)
        found = []
        for start, end in zip((0, *self.positions), (*self.positions, len(root.statements)), strict=True):
            elements, kept = 0, 0
            layers = [0] * len(settled.blocks)
            part = root.statements[start:end]
            own = sum((settled.statements[id(s)] for s in part), RegionSeconds(Seconds(), Seconds()))
            for statement in part:
                if isinstance(statement, LocalCall):
                    own += settled.blocks[statement.block]
                    elements += settled.units[statement.block].elements
                    layers[statement.block] += 1
                    kept += lives[calls] - (lives[calls - 1] if calls else 0)
                    calls += 1
                for name in {*reads_of(statement)} & parameters.keys() - held:
                    held.add(name)
                    parameter, lies = parameters[name]
                    elements += local_bytes(parameter.value, lies, axis.ranks) // DTYPE_BYTES[parameter.value.dtype]
            if end == len(root.statements):
                kept += lives[-1] - (lives[-2] if len(lives) > 1 else 0)
            forward, backward = (
                own.compute.forward + own.comm.forward,
                own.compute.backward + own.comm.backward,
            )
            crossed = crossing.get(start, 0)
            found.append(Piece(forward, backward, own.weight, elements, max(0, kept), tuple(layers), crossed))
        return found


def _improved(ends: list[int], step: Callable[[list[int]], float]) -> tuple[list[int], float]:
    """Ends moved by a piece for as long as that makes a step faster (ranks may have several stages), and its time."""
    best = step(ends)
    for _ in range(ROUNDS):
        before = best
        for k in range(len(ends) - 1):
            for by in (-1, 1):
                moved = [*ends[:k], ends[k] + by, *ends[k + 1 :]]
                fits = (ends[k - 1] if k else 0) < moved[k] < ends[k + 1]
                if fits and (seconds := step(moved)) < best:
                    best, ends = seconds, moved
        if best == before:
            break
    return ends, best


def positions(root: LocalRegion, again: frozenset[str]) -> tuple[int, ...]:
    """Where the root may be cut: once an input is read, wherever something with a gradient is handed on.

    Of too many places, around layers and where least would cross.
    """
    crossing = crossings(root, 1, again)
    first = next((i for i, s in enumerate(root.statements) if set(root.inputs) & set(reads_of(s))), 0)
    every = [p for p in range(first + 1, len(root.statements)) if crossing[p]]
    if len(every) <= MOST_POSITIONS:
        return tuple(every)
    around = {i + k for i, s in enumerate(root.statements) if isinstance(s, LocalCall) for k in (0, 1)}
    rest = sorted((p for p in every if p not in around), key=lambda p: (crossing[p], p))
    most = max(0, MOST_POSITIONS - len(around))
    return tuple(sorted(around.intersection(every).union(rest[:most])))


def crossings(root: LocalRegion, tp: int, again: frozenset[str]) -> dict[int, int]:
    """A rank's bytes of gradient-carrying values that are made before each position and read at or after it.

    But for those that every stage makes `again` for itself.
    """
    last: dict[str, int] = {name: len(root.statements) for name in root.outputs}
    for i, statement in enumerate(root.statements):
        for name in reads_of(statement):
            last[name] = max(last.get(name, 0), i)
    found, live = {}, dict[str, int]()
    for i, statement in enumerate(root.statements):
        if i:
            found[i] = sum(live.values())
        for name in results_of(statement):
            local = root.locals[name]
            if local.value.grad and name not in again and last.get(name, -1) > i:
                live[name] = local_bytes(local.value, local.placement, tp)
        live = {name: size for name, size in live.items() if last[name] > i}
    return found
