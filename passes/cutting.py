"""CUTTING: where the stages of a pipeline begin.

Few ways of cutting are all tried. Of many, those are taken in which the slowest stage is as fast as it can be: the
seconds of a stage are those of its statements and of the layers that it must recompute, since it holds the
microbatches that its schedule has in flight there. More statements never take less time or memory, so that filling
stages one after the other up to a time finds out whether it is enough for all; the least such time is searched by
halves. What memory needs is estimated here; the search counts it on the program itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import comb

from costmodels.memory import FP32_BYTES
from costmodels.schedules import in_flight
from passes.graph import DTYPE_BYTES
from passes.lower import LocalCall, LocalRegion
from passes.price import local_bytes
from passes.rehearse import Rehearsal
from passes.schedules import table
from passes.stages import reads_of, results_of
from passes.step import OPTIMIZER_COSTS, Problem, Settled, region_seconds

EXHAUSTIVE = 128  # ways of cutting that are all tried
HALVES = 40
MOST_POSITIONS = 400  # where the root can be cut


@dataclass(frozen=True)
class Piece:
    """The root between two neighbouring places to cut: seconds, parameters and kept bytes of a microbatch."""

    seconds: float
    elements: int
    kept_bytes: int  # by the root itself
    layers: tuple[int, ...]  # of each block
    crossing_bytes: int  # what a stage that begins here receives


class Cutter:
    """Cuts the local program of one sharding."""

    def __init__(self, problem: Problem, settled: Settled, rehearsal: Rehearsal) -> None:
        self.problem, self.settled, self.rehearsal = problem, settled, rehearsal
        self.positions = positions(settled.lowered.root)
        pieces = self._pieces()
        self.seconds = [0.0, *accumulate(p.seconds for p in pieces)]
        self.elements = [0, *accumulate(p.elements for p in pieces)]
        self.kept = [0, *accumulate(p.kept_bytes for p in pieces)]
        blocks = range(len(settled.blocks))
        self.layers = [[0, *accumulate(p.layers[b] for p in pieces)] for b in blocks]
        self.crossing = [p.crossing_bytes for p in pieces]
        kept, again = rehearsal.blocks, rehearsal.recomputed
        self.saved = [one.saved_bytes for one in kept]
        self.freed = [a.saved_bytes - b.saved_bytes for a, b in zip(kept, again, strict=True)]
        self.order = sorted(blocks, key=lambda b: settled.again[b] / max(1, self.freed[b]))
        self.transient = max((one.backward_peak_bytes - one.saved_bytes for one in kept), default=0)
        last = rehearsal.root
        self.ending = max(s.peak_bytes for s in (last.forward[-1], last.backward[0])) - last.forward[-1].live_bytes

    def __len__(self) -> int:
        """How many stages there can be."""
        return len(self.positions) + 1

    def cuts(self, schedule: str, virtual: int, zero: int, group: int, limit_bytes: float) -> Iterator[tuple[int, ...]]:
        """Ways of cutting into stages that may be best, as positions in the statements of the root."""
        count = self.settled.pair.pp * virtual
        if comb(len(self.positions), count - 1) <= EXHAUSTIVE:
            yield from combinations(self.positions, count - 1)
            return
        found = dict.fromkeys(
            self.positions_of(ends)
            for backwards in (False, True)
            if (ends := self._least(schedule, virtual, zero, group, limit_bytes, backwards)) is not None
        )
        yield from found

    def positions_of(self, ends: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.positions[end - 1] for end in ends[:-1])

    def _least(
        self, schedule: str, virtual: int, zero: int, group: int, limit_bytes: float, backwards: bool
    ) -> list[int] | None:
        """Where stages end, in pieces, so that the slowest is as fast as it can be; None where none fit."""
        pair = self.settled.pair
        m = pair.microbatches(self.problem.global_batch)
        flying = in_flight(table(schedule, pair.pp, virtual, short(m, pair.pp)))
        room = limit_bytes / virtual
        state_bytes = self._state_bytes(zero, group, m)
        count, pieces = len(flying), len(self.positions) + 1

        def seconds(stage: int, start: int, end: int) -> float:
            """What a stage of these pieces takes, infinite where it does not fit."""
            held = state_bytes * (self.elements[end] - self.elements[start])
            held += self.transient + (self.ending if end == pieces else 0)
            kept = self.kept[end] - self.kept[start] + self.crossing[start]
            layers = [counts[end] - counts[start] for counts in self.layers]
            kept += sum(n * saved for n, saved in zip(layers, self.saved, strict=True))
            excess = held + flying[stage] * kept - room
            taken = self.seconds[end] - self.seconds[start]
            for b in self.order:
                if excess <= 0:
                    break
                possible = min(layers[b], self.settled.recomputable[b])
                freed = flying[stage] * self.freed[b]
                if self.problem.fix.get("recompute") == "none" or freed <= 0 or not possible:
                    continue
                again = min(possible, -(-excess // freed))
                excess -= again * freed
                taken += again * self.settled.again[b]
            return taken if excess <= 0 else float("inf")

        def filled(most: float) -> list[int] | None:
            """Stages filled one after the other up to so many seconds, from either end."""
            ends: list[int] = []
            at = pieces if backwards else 0
            for k in range(count):
                stage = count - 1 - k if backwards else k
                left = count - 1 - k  # a piece at least for each of the others
                low, high = (left, at - 1) if backwards else (at + 1, pieces - left)
                if backwards:  # the least start that is not too much
                    while low < high:
                        middle = (low + high) // 2
                        low, high = (low, middle) if seconds(stage, middle, at) <= most else (middle + 1, high)
                    if low > at - 1 or seconds(stage, low, at) > most:
                        return None
                    ends.append(at)
                else:
                    while low < high:
                        middle = (low + high + 1) // 2
                        low, high = (middle, high) if seconds(stage, at, middle) <= most else (low, middle - 1)
                    if low < at + 1 or seconds(stage, at, low) > most:
                        return None
                    ends.append(low)
                at = low
            if at != (0 if backwards else pieces):
                return None
            return ends[::-1] if backwards else ends

        total = self.seconds[-1] + sum(n[-1] * one for n, one in zip(self.layers, self.settled.again, strict=True))
        low, high = total / count / 2, total
        best = filled(high)
        for _ in range(HALVES if best else 0):
            middle = (low + high) / 2
            if (found := filled(middle)) is None:
                low = middle
            else:
                best, high = found, middle
        return best

    def _state_bytes(self, zero: int, group: int, microbatches: int) -> float:
        """What the engine holds of each parameter element (costmodels/memory.py)."""
        states = FP32_BYTES * OPTIMIZER_COSTS[self.problem.optimizer].states
        c, n = self.problem.compute_bytes, group if zero else 1
        if n == 1 and self.problem.precision == "fp32":
            copies = 2 if self.settled.pair.dp > 1 and microbatches > 1 else 1
            return FP32_BYTES * (1 + copies) + states
        gradients = FP32_BYTES if zero < 2 else FP32_BYTES / n
        return (FP32_BYTES + states) / n + gradients + (c if zero < 3 else 0)

    def _pieces(self) -> list[Piece]:
        root, settled = self.settled.lowered.root, self.settled
        axis = settled.lowered.sharding.axis
        parameters = {p.value.name: (p, lies) for p, lies in root.parameters if not p.buffer}
        held: set[str] = set()
        calls = 0
        lives = [stretch.live_bytes for stretch in self.rehearsal.root.forward]
        crossing = crossings(root)
        found = []
        for start, end in zip((0, *self.positions), (*self.positions, len(root.statements)), strict=True):
            seconds, elements, kept = 0.0, 0, 0
            layers = [0] * len(settled.blocks)
            part = root.statements[start:end]
            own = region_seconds(part, axis)
            seconds += own.compute.total + own.comm.total
            for statement in part:
                if isinstance(statement, LocalCall):
                    block = settled.blocks[statement.block]
                    seconds += block.compute.total + block.comm.total
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
            found.append(Piece(seconds, elements, max(0, kept), tuple(layers), crossing.get(start, 0)))
        return found


def positions(root: LocalRegion) -> tuple[int, ...]:
    """Where the root may be cut: before any statement; of too many, around layers and where least would cross."""
    every = range(1, len(root.statements))
    if len(every) <= MOST_POSITIONS:
        return tuple(every)
    crossing = crossings(root)
    around = {i + k for i, s in enumerate(root.statements) if isinstance(s, LocalCall) for k in (0, 1)}
    rest = sorted((p for p in every if p not in around), key=lambda p: (crossing[p], p))
    most = max(0, MOST_POSITIONS - len(around))
    return tuple(sorted({p for p in around if 0 < p < len(root.statements)} | set(rest[:most])))


def crossings(root: LocalRegion) -> dict[int, int]:
    """Bytes of gradient-carrying values that are made before each position and read at or after it."""
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
            if local.value.grad and last.get(name, -1) > i:
                live[name] = local.value.bytes
        live = {name: size for name, size in live.items() if last[name] > i}
    return found


def short(microbatches: int, ranks: int) -> int:
    """As many microbatches as show all that a schedule holds at once: it repeats itself afterwards."""
    most = 4 * ranks
    return microbatches if microbatches <= most else most + microbatches % ranks
