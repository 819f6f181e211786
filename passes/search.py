"""SEARCH: the mesh, the ZeRO stage, the schedule, the microbatch and the recompute that train fastest in the memory.

Best-first search (A*). Each candidate is queued under a time that it cannot beat, and takes shape as it comes up:

    without stages
    pair       all its work cut over all ranks of tp, no communication       ->  solve the sharding programme
    variant    its exact step time, and the recompute that any plan needs    ->  count its memory

    pipelines
    uncut      its work shared evenly, the waits of its schedule             ->  cut it into stages
    cut        what no order of its stages' work beats                       ->  play the schedule
    played     its step time under the sharding of another mesh              ->  solve its own sharding
    own        its exact step time                                           ->  count its memory

    fitted     its exact step time with what it needs to fit                 ->  the first one that comes up is best

So the answer is proved against every candidate that was enumerated, though few are solved. Where there are too many
ways of cutting a pipeline, a rule chooses (passes/cutting.py), and the answer is that much less certain: `bound_s`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from costmodels.errors import BadInput, NoPlanFits
from costmodels.groups import Collective
from passes.bounds import Bounds
from passes.choices import (
    fixed_int,
    groups,
    pairs,
    pipeline_refusal,
    remedy,
    stages_per_rank,
    stagings,
    too_many_stages,
)
from passes.cutting import Cutter, Uncut
from passes.dataparallel import (
    least_dp_seconds,
    least_ends_seconds,
    least_once_seconds,
    least_state_seconds,
)
from passes.emit import counted, emit
from passes.found import Candidate, Found, closest, for_people, nearly
from passes.lower import Lowered
from passes.memory import StepBytes, rank_bytes, step_bytes
from passes.plan import FIX_KEYS
from passes.price import Axis, Seconds
from passes.rehearse import Rehearsal, Rehearser
from passes.schedules import SCHEDULES, refusal
from passes.sharding import GAP, Programme, Sharding, Terms
from passes.step import settle, step_seconds
from passes.variant import Pair, Problem, Settled, Variant, full_recompute, layers_of, with_recompute

PIPELINES_SHARDED_FINER = 1  # of each tp and microbatch: it is dear, and most are in vain
FINER_TRIES = 3  # the budget is corrected by what the rehearsal finds
CORRECTIONS = 12  # of one pipeline
ROOMY = 1.05  # times the limit: where stages are not rehearsed yet, what they hold is known to a few percent
ROOMIER = 1.3  # times the limit: where nothing fits otherwise
UNEVEN = 1.25  # times an even share of the work, in a bound
POOR = 2.0  # times a bound: a plan that is worth going on for
LATE_S = 3.0  # past the deadline, and the step that is under way then
RUNNERS_UP = 3
NEARLY = 1.25  # times the best step: slower plans are no runners-up


@dataclass(frozen=True)
class Unsettled:
    """A variant that needs a sharding of its own."""

    pair: Pair
    zero: int
    group: int


@dataclass(frozen=True)
class Finer:
    """A variant that does not fit as it is, to be sharded again under a memory budget."""

    variant: Variant


Progress = Callable[[str], None]


# -- the search -------------------------------------------------------------------------------------------------------


class Search:
    """One search: `run` gives the optimum or raises NoPlanFits with the closest."""

    cutter_of: type[Cutter] = Cutter
    programme_of: type[Programme] = Programme

    def __init__(self, problem: Problem, progress: Progress, deadline: Callable[[], bool]) -> None:
        self.problem, self.progress, self.deadline = problem, progress, deadline
        self.limit = problem.cluster.memory_limit_bytes
        self.bounds = Bounds(problem)
        self.order = itertools.count()
        self.queue: list[tuple[float, int, object]] = []
        self.enumerated = 0
        self.visited: set[object] = set()
        self.unvisited: list[tuple[float, object]] = []  # what was no longer looked at, under its bound
        self.solved = 0
        self.solved_s: dict[Pair, float] = {}  # no step of the pair is faster
        self.rehearsals: dict[tuple[Lowered, tuple[int, ...], bool], tuple[Rehearsal, ...]] = {}
        self.rehearsers: dict[Lowered, Rehearser] = {}
        self.rejected: list[Candidate] = []
        self.solved_once_s: dict[tuple[int, int], float] = {}  # by tp and microbatch: no microbatch is faster
        self.all_settled: dict[tuple[int, int], list[Settled]] = defaultdict(list)  # one of each sharding
        self.cutters: dict[Lowered, Cutter] = {}
        self.finer: dict[tuple[int, int], list[Settled]] = defaultdict(list)  # under a memory budget
        self.sharded_finer: Counter[tuple[int, int]] = Counter()  # by tp and microbatch, for pipelines
        self.fitted: set[object] = set()  # pipelines whose memory was counted
        self.corrected: dict[tuple[Lowered, Uncut], set[Uncut]] = defaultdict(set)  # what was cut again
        self.first_cutters: dict[tuple[int, int], Cutter] = {}  # by tp and microbatch
        self.ruled_s = math.inf  # at least, of the fastest pipeline of whose cuts or shardings not all were tried
        self.left: list[tuple[float, Uncut]] = []  # of which no cut fits by the estimate
        self.refused: list[str] = []  # why ways of cutting were not taken

    def push(self, seconds: float, item: object) -> None:
        """Queue what takes so many seconds at least; what is infinitely slow cannot be at all."""
        if math.isinf(seconds):
            return
        heapq.heappush(self.queue, (seconds, next(self.order), item))

    def run(self) -> Found:
        """The optimum and what nearly won; raises NoPlanFits."""
        for pair in pairs(self.problem):
            variants = list(groups(self.problem, pair))
            if pair.pp > 1:
                self.queue_pipelines(pair, variants)
                continue
            self.enumerated += len(variants)
            if any(not self.bounds.hopeless(pair, stage, size) for stage, size in variants):
                self.push(self.floor(pair), pair)
        if not self.enumerated:
            raise BadInput(self.why_no_pipeline())
        first, bound = self.optimum()
        # where a rule cut them or the search was stopped, a later one may be faster
        best, *runners = sorted([first, *self.runners_up(first)], key=lambda one: one.seconds.total)
        others = nearly(best, runners, self.rejected)
        bound = min(bound, self.ruled_s, best.seconds.total)
        proved = best is first and bound >= best.seconds.total
        by_rank = rank_bytes(self.problem, best.variant, self.rehearsed(best.variant))
        stopped = (self.choices(item) for least, item in self.unvisited if least < best.seconds.total)
        unvisited = frozenset[object]().union(*stopped) - self.visited
        return Found(
            best, by_rank, others, self.enumerated, len(self.visited), len(unvisited), self.solved, bound, proved
        )

    def optimum(self) -> tuple[Candidate, float]:
        """The first candidate known to fit that comes up, and the time that no plan can beat.

        Past the deadline only what is priced already is looked at, as long as there is some; for a little longer, if
        that is far from what may be found. What was left is taken up again where nothing priced fits.
        """
        until_s = math.inf
        while self.queue or self.unvisited or self.left:
            if not self.queue and self.unvisited:
                for bound, item in self.unvisited:
                    self.push(bound, item)
                self.unvisited = []
            elif not self.queue:  # before it is said that nothing fits, what does not by the estimate is tried
                for bound, uncut in self.left:
                    self.push(bound, uncut)
                self.left = []
            bound, _, item = heapq.heappop(self.queue)
            if isinstance(item, Candidate) and item.bytes is not None:
                return item, min([bound, *(least for least, _ in self.unvisited)])
            if not isinstance(item, Candidate) and self.deadline():
                until_s = min(until_s, time.monotonic() + LATE_S)
                if self.priced_s() < (POOR * bound if time.monotonic() < until_s else math.inf):
                    self.unvisited.append((bound, item))
                    continue
            self.expand(item, bound)
        if self.refused and not self.rejected:
            fix = ",".join(f"{k}={self.problem.fix[k]}" for k in FIX_KEYS if k in self.problem.fix)
            raise BadInput(f"--fix {fix} is not possible: {self.refused[0]}")
        if not self.rejected:
            self.price_smallest()
        raise NoPlanFits(closest(self.problem.cluster, self.rejected))

    def priced_s(self) -> float:
        """The fastest of what waits with a price; it may yet turn out not to fit."""
        return min((bound for bound, _, item in self.queue if isinstance(item, Candidate)), default=math.inf)

    def choices(self, item: object) -> frozenset[object]:
        """The candidates that something queued stands for, if none of them was priced."""
        if isinstance(item, Pair):
            return frozenset((item, *one) for one in groups(self.problem, item) if not self.bounds.hopeless(item, *one))
        if isinstance(item, Uncut):
            return frozenset({(item.pair, item.zero, item.group, item.schedule, item.virtual_stages)})
        return frozenset()

    def runners_up(self, best: Candidate) -> list[Candidate]:
        """Slower plans that fit, of what is solved by now; few are rehearsed to find them."""
        found: list[Candidate] = []
        rehearsals = len(self.rehearsals) + RUNNERS_UP
        while self.queue and len(found) < RUNNERS_UP:
            bound, _, item = heapq.heappop(self.queue)
            if bound > best.seconds.total * NEARLY:
                break
            if isinstance(item, Candidate) and item.bytes is not None:
                found.append(item)
            elif isinstance(item, Candidate) and len(self.rehearsals) < rehearsals and not self.deadline():
                self.expand(item, bound)
        return found

    def fits_at_all(self) -> bool:
        """Whether some plan fits: of all degrees, the variant that holds least is tried."""
        try:
            every = pairs(self.problem)
        except BadInput:
            return False
        least = {(p.tp, p.dp): p for p in sorted(every, key=lambda p: -p.microbatch) if p.pp == 1}
        return any(self.is_thrifty_enough(pair) for pair in least.values())

    def is_thrifty_enough(self, pair: Pair) -> bool:
        stage, size = min(groups(self.problem, pair), key=lambda g: self.bounds.bytes(pair, *g), default=(0, 0))
        if not size or self.bounds.hopeless(pair, stage, size):
            return False
        settled = self.settled(pair, self.terms(pair, stage, size))
        variant = Variant(settled, stage, size, self.most_layers(settled))
        if self.fits(variant):
            return True
        if pair.tp > 1:
            self.cut_finer(variant)
        return any(isinstance(item, Candidate) for _, _, item in self.queue)

    @property
    def least_peak_bytes(self) -> int | None:
        """The smallest peak among the plans that did not fit."""
        return min((one.bytes.peak for one in self.rejected if one.bytes), default=None)

    def expand(self, item: object, bound: float) -> None:
        if isinstance(item, Pair) and bound < (floor := self.floor(item)):
            self.push(floor, item)
        elif isinstance(item, Pair):
            self.solve(item)
        elif isinstance(item, Unsettled):
            self.settle(item)
        elif isinstance(item, Uncut) and bound < (floor := self.uncut_floor(item)):
            self.push(floor, item)
        elif isinstance(item, Uncut):
            self.cut(item, bound)
        elif isinstance(item, Finer):
            self.cut_finer(item.variant)
        elif isinstance(item, Candidate) and not (item.played and item.own):
            self.play(item)
        elif isinstance(item, Candidate):
            self.fit(item)

    # -- pipelines -------------------------------------------------------------------------------------------------

    def queue_pipelines(self, pair: Pair, variants: list[tuple[int, int]]) -> None:
        """Queue every schedule of a pipeline under what it cannot beat."""
        for zero, group in variants:
            found = stagings(self.problem, pair, zero)
            self.enumerated += len(found)
            if not self.bounds.hopeless(pair, zero, group):
                for schedule, virtual in found:
                    item = Uncut(pair, zero, group, schedule, virtual, ROOMY * self.limit)
                    self.push(self.uncut_floor(item), item)

    def uncut_floor(self, item: Uncut) -> float:
        """What all ranks of the pipeline together have to do, and wait for, shared evenly."""
        pair, m = item.pair, item.pair.microbatches(self.problem.global_batch)
        again = self.bounds.recompute_seconds(pair, item.zero, item.group)
        once = self.microbatch_s(pair) + again / m
        schedule = SCHEDULES[item.schedule]
        if schedule.split and again > 0:  # it recomputes nothing
            return math.inf
        lent = self.problem.cluster.lent
        # a rank waits for the first microbatch to come, and for its gradients to go, through all stages before
        if lent > 1:  # or lends what it does not use
            least = m * once / pair.pp
        elif schedule.single:
            least = once / (1 - (1 - 1 / m) ** pair.pp)
        else:
            least = m * once / pair.pp + once / item.count * (pair.pp - 1) / 2
        dp = 0.0
        if (cutter := self.first_cutters.get((pair.tp, pair.microbatch))) is not None:
            slowest = cutter.least_of_slowest(item.count)
            if math.isinf(slowest):
                return math.inf
            if schedule.single:
                least = max(least, m * slowest / lent)
            # a rank with more than its share makes the step longer, unless others lend it their processors
            if lent == 1:
                if "recompute" not in self.problem.fix:
                    known = cutter.least_again_s(item.with_room(ROOMY * self.limit), UNEVEN / pair.pp)
                    least += min(m / pair.pp * max(0.0, known - again / m), (UNEVEN - 1) * least)
                most = UNEVEN * once / pair.pp  # of what hides dp
                least_dp = least_dp_seconds(self.problem, pair, item.zero, item.group, Seconds(most, most))
                dp = min(least_dp, (UNEVEN - 1) * m * once / pair.pp)
        return least + dp + least_once_seconds(self.problem, pair, item.zero, item.group)

    def microbatch_s(self, pair: Pair) -> float:
        """What one microbatch takes on all stages together at least, parameters apart."""
        known = (s / (size // pair.microbatch) for (tp, size), s in self.solved_once_s.items()
                 if tp == pair.tp and size % pair.microbatch == 0)  # fmt: skip
        m = pair.microbatches(self.problem.global_batch)
        return max(self.bounds.seconds(pair) / m, *known, 0.0)

    def cut(self, item: Uncut, bound: float) -> None:
        """Queue the ways of cutting a pipeline that may be best, of the first sharding that was found."""
        pair = item.pair
        first = self.first_cutters.get((pair.tp, pair.microbatch))
        if first is None:
            settled = self.settled(pair, self.terms(pair, item.zero, item.group))
            if self.uncut_floor(item) <= bound:  # else what was solved says enough
                self.first_cutters[pair.tp, pair.microbatch] = self.cutter(settled)
            if (floor := self.uncut_floor(item)) > bound:
                self.push(floor, item)
                return
        else:
            settled = replace(first.settled, pair=pair)
        self.visited |= self.choices(item)
        if not self.cutter(settled).tries_all(item.count):
            self.ruled_s = min(self.ruled_s, bound)
        if not self.queue_cuts(item, settled, own=False):
            if not self.cutter(settled).tries_all(item.count):
                self.leave(item, bound)
            if pair.tp > 1:
                self.shard_finer(item, settled, bound)

    def shard_finer(self, item: Uncut, settled: Settled, bound: float) -> None:
        """Queue a pipeline whose ranks cannot hold the fastest sharding, under another: not each that there may be."""
        pair = item.pair
        self.ruled_s = min(self.ruled_s, bound)
        for known in self.finer[pair.tp, pair.microbatch]:
            if self.queue_cuts(item, replace(known, pair=pair)):
                return
        self.sharded_finer[pair.tp, pair.microbatch] += 1
        if self.sharded_finer[pair.tp, pair.microbatch] > PIPELINES_SHARDED_FINER:
            return
        if (variant := self.staged(item, settled)) is not None and not self.is_beyond(variant):
            self.push(bound, Finer(variant))

    def is_beyond(self, variant: Variant) -> bool:
        """Whether a pipeline as it is cut fits under no sharding."""
        in_flight = Uncut.of(variant, math.inf).in_flight(self.problem.global_batch)
        return self.bounds.cut_bytes(variant, in_flight) > self.limit

    def is_finer(self, settled: Settled) -> bool:
        """Whether it was sharded for a pipeline under a memory budget."""
        return any(one.lowered is settled.lowered for one in self.finer[settled.pair.tp, settled.pair.microbatch])

    def staged(self, item: Uncut, settled: Settled) -> Variant | None:
        """The pipeline cut as if there were room, with all recompute there may be; None where it is refused."""
        variant = self.roomy(item, settled)
        if variant is None or not (why := pipeline_refusal(self.problem, variant)):
            return variant
        self.refused.append(why)
        return None

    def roomy(self, item: Uncut, settled: Settled) -> Variant | None:
        """The pipeline cut as if there were room, with all recompute there may be."""
        cuts = next(self.cutter(settled).cuts(item.with_room(math.inf)), None)
        if cuts is None:
            return None
        variant = item.cut_at(settled, cuts)
        return variant if self.problem.fix.get("recompute") == "none" else full_recompute(variant)

    def queue_cuts(self, item: Uncut, settled: Settled, *, own: bool = True, played: bool = False) -> bool:
        """Queue a pipeline with the stages that may be best for it, if there are any."""
        full = self.problem.fix.get("recompute") == "full"
        cutter = self.cutter(settled)
        found = False
        for cuts in cutter.cuts(item):
            variant = item.cut_at(settled, cuts)
            if full:
                variant = full_recompute(variant)
            if why := pipeline_refusal(self.problem, variant):
                self.refused.append(why)
                continue
            if self.is_beyond(variant):
                continue
            seconds = step_seconds(self.problem, variant, play=False)
            more = 0.0
            if not full and not cutter.tries_all(item.count):  # where all are tried, no estimate decides
                roomy = item if item.rooms_bytes else item.with_room(max(item.room_bytes, ROOMY * self.limit))
                least = cutter.recomputed(roomy, cuts)
                again = full_recompute(variant) if least is None else with_recompute(variant, least)
                more = step_seconds(self.problem, again, play=False).total - seconds.total
            if played:
                seconds = step_seconds(self.problem, variant)
            self.push_unfitted(Candidate(variant, seconds, None, "", played, own, more, item))
            found = True
        return found

    def play(self, one: Candidate) -> None:
        """Price a pipeline by its schedule, then under the sharding that is best for it."""
        variant = one.variant
        if not one.played:
            self.push_unfitted(replace(one, seconds=step_seconds(self.problem, variant), played=True))
            return
        pair = variant.settled.pair
        settled = self.settled(pair, self.terms(pair, variant.zero, variant.group))
        if settled.lowered is variant.settled.lowered:
            self.push_unfitted(replace(one, own=True))
        else:
            assert one.uncut is not None, "only what was cut is played"
            self.queue_cuts(one.uncut, settled, played=True)

    def cutter(self, settled: Settled) -> Cutter:
        key = settled.lowered
        if key not in self.cutters:
            # layers hold about as much under all shardings that are fastest: one rehearsal tells where to cut
            first = self.first_cutters.get((settled.pair.tp, settled.pair.microbatch))
            rehearsal = first.rehearsal if first and not self.is_finer(settled) else self.rehearsal(settled)
            self.cutters[key] = self.cutter_of(self.problem, settled, rehearsal)
        return self.cutters[key]

    def why_no_pipeline(self) -> str:
        """The sentence for pins that no schedule meets."""
        fix = ",".join(f"{k}={self.problem.fix[k]}" for k in FIX_KEYS if k in self.problem.fix)
        fixed = fixed_int(self.problem.fix, "virtual_stages") or 1
        name = str(self.problem.fix.get("schedule", "interleaved" if fixed > 1 else "1f1b"))
        virtual = max(fixed, stages_per_rank(name))
        least = min(pairs(self.problem), key=lambda pair: (pair.pp, pair.microbatch))
        m = least.microbatches(self.problem.global_batch)
        why = refusal(name, least.pp, virtual, m) if name in SCHEDULES else ""
        said = f"{why}{remedy(name)}" if why else "no schedule runs it; fix less"
        return f"--fix {fix} is not possible: {said}"

    @cache  # noqa: B019
    def programme(self, tp: int, microbatch: int) -> Programme:
        axis = Axis.of(self.problem.cluster, "tp", tp, 1)
        return self.programme_of(self.problem.at(microbatch), axis, self.problem.rows)

    def floor(self, pair: Pair) -> float:
        """The best known bound of a pair: `Bounds`, or what a larger microbatch of the same degrees takes.

        Every cost has economies of scale (a fixed part, and one that grows with the rows), and a sharding stays valid
        when its rows are multiplied, so that k times the rows never take more than k times the seconds.
        """
        larger = (s for p, s in self.solved_s.items() if p.tp == pair.tp and p.microbatch % pair.microbatch == 0)
        more = min(self.beside_s(pair, *one) for one in groups(self.problem, pair))
        return max(self.bounds.seconds(pair), *larger, 0.0) + more

    def beside_s(self, pair: Pair, zero: int, group: int) -> float:
        """What a variant adds at least to the work of its pair and to what each parameter costs."""
        recompute = self.bounds.recompute_seconds(pair, zero, group)
        return recompute + least_ends_seconds(self.problem, pair, zero, group)

    def solve(self, pair: Pair) -> None:
        """Shard the pair, and queue its variants.

        What parameters cost beside their use depends on the ZeRO stage and group. It is priced as where it costs
        least; a variant for which another sharding may be better gets its own when it comes up.
        """
        m = pair.microbatches(self.problem.global_batch)
        self.progress(f"tp {pair.tp}, dp {pair.dp}, {m} microbatches of {pair.microbatch}")
        every = {one: self.terms(pair, *one) for one in groups(self.problem, pair)}
        variants = {one: terms for one, terms in every.items() if not self.bounds.hopeless(pair, *one)}
        self.visited |= self.choices(pair)
        least = Terms(m, max(t.shards for t in every.values()), min(t.element_s for t in variants.values()))
        settled = self.settled(pair, least)
        # of these terms: `settled` may have met the same sharding under others
        bound = m * self.sharded(pair.tp, pair.microbatch, least).bound_s
        fewest = self.problem.trained // pair.tp
        # a smaller microbatch may leave room for a stage that costs less
        cheapest = min(t.element_s for t in every.values())
        self.solved_s[pair] = bound - self.problem.trained * (least.element_s - cheapest)
        for (stage, size), terms in variants.items():
            priced = self.priced(settled, stage, size)
            dearer = terms.element_s - least.element_s
            more = self.sums_s(settled, terms.shards) - self.sums_s(settled, least.shards)
            if more + dearer * (settled.trained - fewest) <= GAP * priced.seconds.total:
                self.push_unfitted(priced)
            else:
                self.push(bound + dearer * fewest + self.beside_s(pair, stage, size), Unsettled(pair, stage, size))

    def terms(self, pair: Pair, zero: int, group: int) -> Terms:
        """What the sharding of a variant needs to know of it."""
        m = pair.microbatches(self.problem.global_batch)
        return Terms(m, group if zero else 1, least_state_seconds(self.problem, pair, zero, group))

    def settle(self, one: Unsettled) -> None:
        settled = self.settled(one.pair, self.terms(one.pair, one.zero, one.group))
        self.push_unfitted(self.priced(settled, one.zero, one.group))

    def priced(self, settled: Settled, zero: int, group: int) -> Candidate:
        """A variant that recomputes only what is pinned, its memory not yet counted."""
        variant = Variant(settled, zero, group, self.fewest_layers(settled))
        return Candidate(variant, step_seconds(self.problem, variant), None)

    def push_unfitted(self, one: Candidate) -> None:
        variant = one.variant
        recompute = self.bounds.recompute_seconds(variant.settled.pair, variant.zero, variant.group)
        self.push(one.seconds.total + max(one.recompute_s, recompute / variant.settled.pair.pp), one)

    def fewest_layers(self, settled: Settled) -> tuple[int, ...]:
        """Layers that are recomputed whatever the memory."""
        full = self.problem.fix.get("recompute") == "full"
        return settled.recomputable if full else tuple(0 for _ in settled.blocks)

    def most_layers(self, settled: Settled) -> tuple[int, ...]:
        """Layers that may be recomputed."""
        none = self.problem.fix.get("recompute") == "none"
        return tuple(0 for _ in settled.blocks) if none else settled.recomputable

    @cache  # noqa: B019
    def settled(self, pair: Pair, terms: Terms) -> Settled:
        sharding = self.sharded(pair.tp, pair.microbatch, terms)
        every = self.all_settled[pair.tp, pair.microbatch]
        for same in every:  # lowered and rehearsed once
            if same.lowered.sharding.chosen == sharding.chosen:
                return replace(same, pair=pair)
        every.append(settle(self.problem, pair, sharding))
        return every[-1]

    @cache  # noqa: B019
    def sharded(self, tp: int, microbatch: int, terms: Terms) -> Sharding:
        self.solved += 1
        programme = self.programme(tp, microbatch)
        sharding = programme.solve(terms)
        assert sharding is not None, "without a memory budget there is always a sharding"
        # without what parameters cost, it is a bound for every mesh
        trained, m = self.problem.trained, terms.microbatches
        sums = programme.axis.seconds(Collective.ALL_REDUCE, 4 * trained // terms.shards)
        once = sharding.bound_s - (terms.element_s * trained + (sums if tp > 1 else 0.0)) / m
        self.solved_once_s[tp, microbatch] = max(once, self.solved_once_s.get((tp, microbatch), 0.0))
        return sharding

    def sums_s(self, settled: Settled, shards: int) -> float:
        """Seconds for the sums of partial gradients over tp."""
        return self.bounds.axis(settled.pair).seconds(Collective.ALL_REDUCE, settled.partial_bytes(shards))

    def rehearsal(self, settled: Settled) -> Rehearsal:
        """Of the whole model."""
        none = tuple(0 for _ in settled.blocks)
        return self.rehearsed(Variant(settled, 0, 1, none))[0]

    def rehearsed(self, variant: Variant) -> tuple[Rehearsal, ...]:
        """Of each stage."""
        settled, cuts = variant.settled, variant.staging.cuts if variant.staging else ()
        key = settled.lowered, cuts, variant.splits_backward
        if key not in self.rehearsals:
            none = tuple(0 for _ in settled.blocks)
            emission = replace(
                self.problem.emission,
                recompute=(none,) * (len(cuts) + 1),
                microbatch=settled.pair.microbatch,
                cuts=cuts,
                schedule=variant.schedule,
            )
            rehearser = self.rehearsers.setdefault(key[0], Rehearser(settled.lowered, self.problem.dtype))
            self.rehearsals[key] = rehearser.rehearse(
                variant.stages,
                lambda: emit(settled.lowered, emission),
                split=variant.splits_backward,
                counts=lambda part: counted(part, emission, whole=not cuts),
            )
        return self.rehearsals[key]

    def bytes_of(self, variant: Variant) -> StepBytes:
        return step_bytes(self.problem, variant, self.rehearsed(variant))

    def fit(self, candidate: Candidate) -> None:
        """Queue the candidate with its memory; where it does not fit, queue what would make it fit."""
        variant = candidate.variant
        if variant.staging is not None:  # pipelines are cut alike for different rooms
            same = variant.settled.lowered, variant.settled.pair, variant.zero, variant.group, variant.staging
            if same in self.fitted:
                return
            self.fitted.add(same)
        held = self.bytes_of(variant)
        if held.peak <= self.limit:
            self.push(candidate.seconds.total, replace(candidate, bytes=held))
            return
        self.rejected.append(replace(candidate, bytes=held, why_not=f"does not fit: {for_people(held.peak)}"))
        if candidate.uncut is not None and not self.cutter(variant.settled).tries_all(len(variant.stages)):
            self.correct(candidate.uncut, variant, candidate.seconds.total)
        if "recompute" not in self.problem.fix:
            less = self.recomputed(variant)
            if less is not None:
                seconds = step_seconds(self.problem, less)
                self.push(seconds.total, Candidate(less, seconds, self.bytes_of(less)))
                return
            self.reject(full_recompute(variant))
        if variant.settled.pair.tp == 1 or self.is_finer(variant.settled):
            return
        most = variant if "recompute" in self.problem.fix else full_recompute(variant)
        bound = max(candidate.seconds.total, step_seconds(self.problem, most).total)
        if variant.staging is not None:
            self.shard_finer(Uncut.of(variant, self.limit), variant.settled, bound)
        else:
            self.push(bound, Finer(most))

    def correct(self, uncut: Uncut, variant: Variant, bound: float) -> None:
        """Cut a pipeline again where the estimate by which it was cut is corrected by what its ranks really hold."""
        assert variant.staging is not None, "only a pipeline is cut"
        cutter, cuts = self.cutter(variant.settled), variant.staging.cuts
        if "recompute" not in self.problem.fix:  # it was cut for what the estimate has it recompute
            least = cutter.recomputed(uncut, cuts)
            variant = full_recompute(variant) if least is None else with_recompute(variant, least)
        peaks = [held.peak for held in rank_bytes(self.problem, variant, self.rehearsed(variant))]
        estimated = cutter.held(uncut, cuts, variant.recompute_by_stage)
        rooms = [
            uncut.room(rank) if peak <= self.limit else self.limit + expected - peak
            for rank, (expected, peak) in enumerate(zip(estimated, peaks, strict=True))
        ]
        again = replace(uncut, rooms_bytes=tuple(rooms))
        known = self.corrected[variant.settled.lowered, uncut.with_room(uncut.room_bytes)]
        if max(peaks) > self.limit and len(known) < CORRECTIONS and again not in known:
            known.add(again)
            if not self.queue_cuts(again, variant.settled, played=True):
                self.leave(uncut, bound)

    def leave(self, item: Uncut, bound: float) -> None:
        """Keep a pipeline that cannot be cut so that it fits by the estimate, until nothing else does."""
        if item.room_bytes < ROOMIER * self.limit:
            self.left.append((bound, item.with_room(ROOMIER * self.limit)))

    def recomputed(self, variant: Variant) -> Variant | None:
        """The variant with the fewest layers recomputed on each pp rank that fits; first what frees most per second."""
        settled, rehearsals = variant.settled, self.rehearsed(variant)
        layers = [list(again) for again in variant.recompute_by_stage]
        whole = rehearsals[0]
        freed = [a.saved_bytes - b.saved_bytes for a, b in zip(whole.blocks, whole.recomputed, strict=True)]
        order = sorted(
            (b for b in range(len(settled.blocks)) if freed[b] > 0 and settled.recomputable[b]),
            key=lambda b: settled.again[b] / freed[b],
        )

        def fits(rank: int) -> bool:
            held = rank_bytes(self.problem, with_recompute(variant, layers), rehearsals)
            return held[rank].peak <= self.limit

        for rank, own in enumerate(variant.by_rank):
            if fits(rank):
                continue
            steps = [(k, b) for b in order for k in own for _ in range(layers_of(variant, k)[b] - layers[k][b])]
            before = [list(one) for one in layers]

            def take(count: int, steps: list[tuple[int, int]] = steps, before: list[list[int]] = before) -> None:
                layers[:] = [list(one) for one in before]
                for k, b in steps[:count]:
                    layers[k][b] += 1

            take(len(steps))
            if not fits(rank):
                return None
            low, high = 1, len(steps)
            while low < high:
                middle = (low + high) // 2
                take(middle)
                low, high = (low, middle) if fits(rank) else (middle + 1, high)
            take(high)
        return with_recompute(variant, layers)

    def fits(self, variant: Variant) -> bool:
        return self.bytes_of(variant).peak <= self.limit

    def cut_finer(self, variant: Variant) -> None:
        """Solve the pair again under a memory budget: parameters and activations are cut where they were whole.

        A pipeline is cut into stages again. Its budget is that of its fullest rank: of the states a rank has a share,
        and as many microbatches in flight as there are stages hold as much as one does in all of them.
        """
        pair, problem = variant.settled.pair, self.problem
        programme = self.programme(pair.tp, pair.microbatch)
        trial = variant
        uncut = Uncut.of(trial, self.limit) if trial.staging is not None else None
        by_rank = rank_bytes(problem, trial, self.rehearsed(trial))
        now = max(by_rank, key=lambda held: held.peak)
        per_element = sum(held.static.total for held in by_rank) / len(by_rank) / max(1, trial.settled.elements)
        terms = replace(
            self.terms(pair, variant.zero, variant.group),
            state_bytes=per_element,
            keeps_activations=not any(trial.recompute),
        )
        share = 1.02  # of the excess that is asked of what the programme counts
        for _ in range(FINER_TRIES):
            counted = programme.held_bytes(trial.settled.lowered.sharding.chosen, terms)
            budget = counted - share * (now.peak - self.limit)
            self.solved += 1
            self.progress(f"tp {pair.tp}, dp {pair.dp}, ZeRO-{variant.zero}: cut finer, {for_people(budget)}")
            found = programme.solve(replace(terms, budget_bytes=budget))
            if found is None:  # too much at once: part of the excess may be elsewhere
                share /= 2
                continue
            settled = settle(problem, pair, found)
            if uncut is None:
                trial = replace(trial, settled=settled)
            else:
                self.finer[pair.tp, pair.microbatch].append(settled)
                staged = None if self.queue_cuts(uncut, settled) else self.staged(uncut, settled)
                if staged is None:
                    return
                trial = staged
            now = self.bytes_of(trial)
            seconds = step_seconds(problem, trial)
            if now.peak <= self.limit:
                self.push(seconds.total, Candidate(trial, seconds, now))
                return
            self.rejected.append(Candidate(trial, seconds, now, f"does not fit: {for_people(now.peak)}"))

    def price_smallest(self) -> None:
        """Price the variant that comes nearest where every one was beyond hope: what binds is to be said."""
        problem = self.problem
        choices = [(pair, stage, size) for pair in pairs(problem) for stage, size in groups(problem, pair)]
        pair, stage, size = min(choices, key=lambda c: self.bounds.bytes(*c))
        settled = self.settled(pair, self.terms(pair, stage, size))
        if pair.pp == 1:
            self.reject(Variant(settled, stage, size, self.most_layers(settled)))
            return
        schedule, virtual = next((one for zero in (stage, 0) for one in stagings(problem, pair, zero)), ("gpipe", 1))
        variant = self.roomy(Uncut(pair, stage, size, schedule, virtual, math.inf), settled)
        if variant is None:
            raise BadInput(too_many_stages(problem.fix, pair.pp * virtual, len(self.cutter(settled))))
        self.reject(variant)

    def reject(self, variant: Variant) -> None:
        held = self.bytes_of(variant)
        why = f"does not fit: {for_people(held.peak)}"
        self.rejected.append(Candidate(variant, step_seconds(self.problem, variant), held, why))
