"""SEARCH: the mesh, the ZeRO stage, the microbatch and the recompute that train fastest within the memory.

Best-first search (A*). A candidate is a (tp, microbatch) pair, then a variant of it (ZeRO stage and group), then that
variant with as many layers recomputed, or its tensors cut as finely, as the memory asks for. Each is queued under a
time that it cannot beat:

    pair       all its work cut over all ranks of tp, no communication       ->  solve the sharding programme
    variant    its exact step time, and the recompute that any plan needs    ->  count its memory
    fitted     its exact step time with what it needs to fit                 ->  the first one that comes up is optimal

So the answer is proved against every candidate that was enumerated, though few are solved.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from costmodels.collectives import Collective
from costmodels.errors import BadInput, NoPlanFits
from passes.bounds import Bounds
from passes.emit import emit
from passes.lower import Lowered
from passes.memory import StepBytes, step_bytes
from passes.plan import FIX_KEYS, Fix
from passes.rehearse import Rehearsal, rehearse
from passes.sharding import GAP, Programme, Terms
from passes.step import (
    Pair,
    Problem,
    Settled,
    StepSeconds,
    Variant,
    least_state_seconds,
    settle,
    step_seconds,
)


def size(bytes_: float) -> str:
    """Bytes for people, three digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if bytes_ >= 0.1 * unit or unit == 2**10:
            return f"{bytes_ / unit:.3g} {name}"
    raise AssertionError("unreachable")


FINER_TRIES = 3  # the budget is corrected by what the rehearsal finds
RUNNERS_UP = 3
NEARLY = 1.25  # times the best step: slower plans are no runners-up


@dataclass(frozen=True)
class Candidate:
    """A priced variant; `why_not` says why it was not chosen."""

    variant: Variant
    seconds: StepSeconds
    bytes: StepBytes | None
    why_not: str = ""


@dataclass(frozen=True)
class Unsettled:
    """A variant that needs a sharding of its own."""

    pair: Pair
    zero: int
    group: int


@dataclass(frozen=True)
class Finer:
    """A variant that does not fit as it is, to be solved again under a memory budget with these layers recomputed."""

    variant: Variant
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """The best variant, what nearly won, and how the search went."""

    best: Candidate
    others: tuple[Candidate, ...]
    enumerated: int
    visited: int  # variants whose price was worked out
    solved: int
    bound_s: float
    proved: bool


Progress = Callable[[str], None]


# -- what can be tried ------------------------------------------------------------------------------------------------


def pairs(problem: Problem) -> list[Pair]:
    """Every (tp, dp, microbatch) that the pins allow; raises BadInput where they contradict each other."""
    fix, devices, batch = problem.fix, problem.cluster.devices, problem.global_batch
    check_fix(problem)
    tp_fixed, dp_fixed = fixed_int(fix, "tp"), fixed_int(fix, "dp")
    found = []
    for tp in [tp_fixed] if tp_fixed else degrees(devices, problem.cluster.devices_per_node):
        most = devices // tp
        choices = [dp_fixed] if dp_fixed else [max(d for d in range(1, most + 1) if batch % d == 0)]
        if problem.separable and not dp_fixed:
            choices = [1]
        for dp in choices:
            if tp * dp > devices:
                continue
            rows = batch // dp
            for microbatch in divisors(rows):
                count = rows // microbatch
                if fixed_int(fix, "microbatch") not in (None, microbatch):
                    continue
                if fixed_int(fix, "microbatches") not in (None, count):
                    continue
                if problem.separable and count > 1:
                    continue
                found.append(Pair(tp, dp, microbatch))
    if not found:
        raise BadInput(
            f"no microbatch of a global batch of {batch} rows meets "
            + ", ".join(f"{k}={fix[k]}" for k in FIX_KEYS if k in fix)
        )
    return found


def check_fix(problem: Problem) -> None:
    """One clear sentence for pins that cannot be."""
    fix, devices, batch = problem.fix, problem.cluster.devices, problem.global_batch
    unknown = sorted(set(fix) - set(FIX_KEYS))
    if unknown:
        raise BadInput(f"--fix does not know {', '.join(unknown)}; it knows {', '.join(FIX_KEYS)}")
    for key in FIX_KEYS:
        number = fixed_int(fix, key)
        if number is not None and number < (0 if key == "zero" else 1):
            raise BadInput(f"--fix {key}={fix[key]} must be a positive number")
    for key in ("pp", "cp", "ep", "virtual_stages"):
        if fixed_int(fix, key) not in (None, 1):
            raise BadInput(f"--fix {key}={fix[key]}: this version plans dp and tp only; {key} must be 1")
    if fix.get("schedule", "none") not in ("none", "gpipe", "1f1b"):
        raise BadInput(f"--fix schedule={fix['schedule']} needs pipeline stages, which this version does not plan")
    if fix.get("recompute", "none") not in ("none", "full"):
        raise BadInput(f"--fix recompute={fix['recompute']}: this version recomputes whole layers; use none or full")
    tp, dp, zero = fixed_int(fix, "tp"), fixed_int(fix, "dp"), fixed_int(fix, "zero")
    group = fixed_int(fix, "zero_group")
    if (tp or 1) * (dp or 1) > devices:
        raise BadInput(f"--fix dp={dp or 1},tp={tp or 1} needs {(tp or 1) * (dp or 1)} devices; there are {devices}")
    if dp and batch % dp:
        near = [d for d in divisors(batch) if d <= devices // (tp or 1)]
        raise BadInput(f"a global batch of {batch} rows cannot be split over dp={dp}; use one of {near}")
    if dp and dp > 1 and problem.separable:
        raise BadInput(f"--fix dp={dp} is not possible: {problem.separable}")
    if (fixed_int(fix, "microbatches") or 1) > 1 and problem.separable:
        raise BadInput(f"--fix microbatches={fix['microbatches']} is not possible: {problem.separable}")
    if zero is not None and zero not in (0, 1, 2, 3):
        raise BadInput(f"--fix zero={zero}: the ZeRO stages are 0, 1, 2 and 3")
    if dp and group and dp % group:
        raise BadInput(f"--fix zero_group={group} does not divide dp={dp}")
    m, mb = fixed_int(fix, "microbatches"), fixed_int(fix, "microbatch")
    for name, size in (("microbatch", mb), ("microbatches", m), ("microbatch * microbatches", (m or 1) * (mb or 1))):
        if size and (batch // (dp or 1)) % size:
            raise BadInput(f"{name} = {size} does not divide the {batch // (dp or 1)} rows of a data-parallel rank")


def fixed_int(fix: Fix, key: str) -> int | None:
    value = fix.get(key)
    if value is None or key in ("schedule", "recompute"):
        return None
    try:
        return int(value)
    except ValueError:
        raise BadInput(f"--fix {key}={value} must be a whole number") from None


def degrees(devices: int, per_node: int) -> list[int]:
    """Tensor-parallel degrees worth trying: any inside a node, divisors of the cluster beyond it."""
    inside = range(1, min(devices, per_node) + 1)
    best: dict[int, int] = {}
    for tp in inside:  # of two degrees with the same number of groups, one leaves more devices idle
        best[devices // tp] = max(best.get(devices // tp, 0), tp)
    beyond = [d for d in divisors(devices) if per_node < d <= 8 * per_node and d % per_node == 0]
    return sorted({*best.values(), *beyond})


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def groups(problem: Problem, pair: Pair) -> Iterator[tuple[int, int]]:
    """ZeRO stages with the groups over which they shard."""
    stage_fixed, group_fixed = fixed_int(problem.fix, "zero"), fixed_int(problem.fix, "zero_group")
    for stage in [stage_fixed] if stage_fixed is not None else [0, 1, 2, 3]:
        if stage and pair.dp == 1 and stage_fixed is None:
            continue
        if stage == 0:
            yield 0, 1
            continue
        node = problem.cluster.devices_per_node // pair.tp
        sizes = {pair.dp} | ({node} if 1 < node < pair.dp and pair.dp % node == 0 else set())
        for size in [group_fixed] if group_fixed else sorted(sizes, reverse=True):
            if pair.dp % size == 0:
                yield stage, size


# -- the search -------------------------------------------------------------------------------------------------------


class Search:
    """One search: `run` gives the optimum or raises NoPlanFits with the closest."""

    def __init__(self, problem: Problem, progress: Progress, deadline: Callable[[], bool]) -> None:
        self.problem, self.progress, self.deadline = problem, progress, deadline
        self.limit = problem.cluster.memory_limit_bytes
        self.bounds = Bounds(problem)
        self.order = itertools.count()
        self.queue: list[tuple[float, int, object]] = []
        self.enumerated = 0
        self.visited = 0
        self.solved = 0
        self.solved_s: dict[Pair, float] = {}  # no step of the pair is faster
        self.rehearsals: dict[int, tuple[Lowered, Rehearsal]] = {}
        self.rejected: list[Candidate] = []
        self.all_settled: dict[Pair, list[Settled]] = defaultdict(list)  # one of each sharding

    def push(self, seconds: float, item: object) -> None:
        heapq.heappush(self.queue, (seconds, next(self.order), item))

    def run(self) -> Found:
        """The optimum and what nearly won; raises NoPlanFits."""
        for pair in pairs(self.problem):
            variants = list(groups(self.problem, pair))
            self.enumerated += len(variants)
            if any(not self.bounds.hopeless(pair, stage, size) for stage, size in variants):
                self.push(self.floor(pair), pair)
        best, bound = self.optimum()
        others = self.nearly(best, self.runners_up(best))
        proved = bound >= best.seconds.total
        return Found(best, others, self.enumerated, self.visited, self.solved, bound, proved)

    def optimum(self) -> tuple[Candidate, float]:
        """The first candidate known to fit that comes up, and the time that no plan can beat.

        Past the deadline it is the best one known to fit, if there is one.
        """
        while self.queue:
            bound, _, item = heapq.heappop(self.queue)
            if isinstance(item, Candidate) and item.bytes is not None:
                return item, bound
            if self.deadline():
                fitting = [i for _, _, i in self.queue if isinstance(i, Candidate) and i.bytes is not None]
                if fitting:
                    return min(fitting, key=lambda c: c.seconds.total), bound
            self.expand(item, bound)
        raise NoPlanFits(self.closest())

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
            elif isinstance(item, Candidate) and len(self.rehearsals) < rehearsals:
                self.fit(item)
        return found

    def fits_at_all(self) -> bool:
        """Whether some plan fits: of all degrees, the variant that holds least is tried."""
        try:
            every = pairs(self.problem)
        except BadInput:
            return False
        least = {(p.tp, p.dp): p for p in sorted(every, key=lambda p: -p.microbatch)}
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
            self.cut_finer(variant, variant.recompute)
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
        elif isinstance(item, Finer):
            self.cut_finer(item.variant, item.layers)
        elif isinstance(item, Candidate):
            self.fit(item)

    @cache  # noqa: B019
    def programme(self, pair: Pair) -> Programme:
        return Programme(self.problem.at(pair.microbatch), self.bounds.axis(pair), self.problem.rows)

    def floor(self, pair: Pair) -> float:
        """The best known bound of a pair: `Bounds`, or what a larger microbatch of the same degrees takes.

        Every cost has economies of scale (a fixed part, and one that grows with the rows), and a sharding stays valid
        when its rows are multiplied, so that k times the rows never take more than k times the seconds.
        """
        larger = (s for p, s in self.solved_s.items() if p.tp == pair.tp and p.microbatch % pair.microbatch == 0)
        recompute = min(self.bounds.recompute_seconds(pair, *one) for one in groups(self.problem, pair))
        return max(self.bounds.seconds(pair), *larger, 0.0) + recompute

    def solve(self, pair: Pair) -> None:
        """Shard the pair, and queue its variants.

        What parameters cost beside their use depends on the ZeRO stage and group. It is priced as where it costs
        least; a variant for which another sharding may be better gets its own when it comes up.
        """
        m = pair.microbatches(self.problem.global_batch)
        self.progress(f"tp {pair.tp}, dp {pair.dp}, {m} microbatches of {pair.microbatch}")
        every = {one: self.terms(pair, *one) for one in groups(self.problem, pair)}
        variants = {one: terms for one, terms in every.items() if not self.bounds.hopeless(pair, *one)}
        self.visited += len(variants)
        least = Terms(m, max(t.shards for t in every.values()), min(t.element_s for t in variants.values()))
        settled = self.settled(pair, least)
        bound = m * settled.lowered.sharding.bound_s
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
                recompute = self.bounds.recompute_seconds(pair, stage, size)
                self.push(bound + dearer * fewest + recompute, Unsettled(pair, stage, size))

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
        self.push(one.seconds.total + recompute, one)

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
        self.solved += 1
        sharding = self.programme(pair).solve(terms)
        assert sharding is not None, "without a memory budget there is always a sharding"
        for same in self.all_settled[pair]:  # lowered and rehearsed once
            if same.lowered.sharding.chosen == sharding.chosen:
                return same
        self.all_settled[pair].append(settle(self.problem, pair, sharding))
        return self.all_settled[pair][-1]

    def sums_s(self, settled: Settled, shards: int) -> float:
        """Seconds for the sums of partial gradients over tp."""
        return self.bounds.axis(settled.pair).seconds(Collective.ALL_REDUCE, settled.partial_bytes // shards)

    def rehearsal(self, settled: Settled) -> Rehearsal:
        key = id(settled.lowered)
        if key not in self.rehearsals:
            none = tuple(0 for _ in settled.blocks)
            text = emit(
                settled.lowered, replace(self.problem.emission, recompute=none, microbatch=settled.pair.microbatch)
            )
            rehearsal = rehearse(text, settled.lowered, self.problem.dtype)
            self.rehearsals[key] = settled.lowered, rehearsal  # held, so that the id stays its own
        return self.rehearsals[key][1]

    def fit(self, candidate: Candidate) -> None:
        """Queue the candidate with its memory; where it does not fit, queue what would make it fit."""
        variant = candidate.variant
        held = step_bytes(self.problem, variant, self.rehearsal(variant.settled))
        if held.peak <= self.limit:
            self.push(candidate.seconds.total, replace(candidate, bytes=held))
            return
        self.rejected.append(replace(candidate, bytes=held, why_not=f"does not fit: {size(held.peak)}"))
        if "recompute" not in self.problem.fix:
            again = self.recomputed(variant)
            if again is not None:
                seconds = step_seconds(self.problem, again)
                self.push(
                    seconds.total,
                    Candidate(again, seconds, step_bytes(self.problem, again, self.rehearsal(again.settled))),
                )
                return
            self.reject(replace(variant, recompute=variant.settled.recomputable))
        if variant.settled.pair.tp > 1:
            layers = self.most_layers(variant.settled)
            least = step_seconds(self.problem, replace(variant, recompute=layers))
            self.push(max(candidate.seconds.total, least.total), Finer(variant, layers))

    def recomputed(self, variant: Variant) -> Variant | None:
        """The variant with the fewest layers recomputed that fits, blocks that free most per second first."""
        settled, rehearsal = variant.settled, self.rehearsal(variant.settled)
        gains = []
        for b, (kept, again, seconds) in enumerate(
            zip(rehearsal.blocks, rehearsal.recomputed, settled.blocks, strict=True)
        ):
            freed = kept.saved_bytes - again.saved_bytes
            if freed > 0 and settled.recomputable[b]:
                gains.append((-freed / max(1e-12, seconds.compute.forward + seconds.comm.forward), b))
        layers = list(variant.recompute)
        for _, b in sorted(gains):
            count = settled.units[b].count
            low, high = layers[b], count
            layers[b] = count
            if not self.fits(replace(variant, recompute=tuple(layers))):
                continue
            while low < high:
                layers[b] = (low + high) // 2
                low, high = (
                    (low, layers[b]) if self.fits(replace(variant, recompute=tuple(layers))) else (layers[b] + 1, high)
                )
            layers[b] = high
            return replace(variant, recompute=tuple(layers))
        return None

    def fits(self, variant: Variant) -> bool:
        return step_bytes(self.problem, variant, self.rehearsal(variant.settled)).peak <= self.limit

    def cut_finer(self, variant: Variant, layers: tuple[int, ...]) -> None:
        """Solve the pair again under a memory budget: parameters and activations are cut where they were whole."""
        pair, problem = variant.settled.pair, self.problem
        programme = self.programme(pair)
        trial = replace(variant, recompute=layers)
        now = step_bytes(problem, trial, self.rehearsal(trial.settled))
        per_element = now.static.total / max(1, trial.settled.elements)
        terms = replace(
            self.terms(pair, variant.zero, variant.group), state_bytes=per_element, keeps_activations=not any(layers)
        )
        share = 1.02  # of the excess that is asked of what the programme counts
        for _ in range(FINER_TRIES):
            counted = programme.held_bytes(trial.settled.lowered.sharding.chosen, terms)
            budget = counted - share * (now.peak - self.limit)
            self.solved += 1
            self.progress(f"tp {pair.tp}, dp {pair.dp}, ZeRO-{variant.zero}: cut finer, {size(budget)}")
            found = programme.solve(replace(terms, budget_bytes=budget))
            if found is None:  # too much at once: part of the excess may be elsewhere
                share /= 2
                continue
            trial = replace(trial, settled=settle(problem, pair, found))
            now = step_bytes(problem, trial, self.rehearsal(trial.settled))
            seconds = step_seconds(problem, trial)
            if now.peak <= self.limit:
                self.push(seconds.total, Candidate(trial, seconds, now))
                return
            self.rejected.append(Candidate(trial, seconds, now, f"does not fit: {size(now.peak)}"))

    # -- what is said of the others --------------------------------------------------------------------------------

    def nearly(self, best: Candidate, runners: list[Candidate]) -> tuple[Candidate, ...]:
        said = [replace(c, why_not=reason(best, c)) for c in runners]
        shown = {(c.variant.settled.pair, c.variant.zero, c.variant.group) for c in (best, *runners)}
        for one in sorted(self.rejected, key=lambda c: c.seconds.total):
            key = (one.variant.settled.pair, one.variant.zero, one.variant.group)
            if key not in shown and one.seconds.total < best.seconds.total:
                shown.add(key)
                said.append(one)
        return tuple(said[:5])

    def closest(self) -> str:
        """The sentence for "nothing fits": which constraint binds and by how much."""
        cluster = self.problem.cluster
        head = f"no plan fits {cluster.devices} {cluster.device.name} ({size(self.limit)} usable each)"
        if not self.rejected:
            self.price_smallest()
        one = min(self.rejected, key=lambda c: c.bytes.peak if c.bytes else 0)
        assert one.bytes is not None
        variant, held = one.variant, one.bytes
        recompute = ", full recompute" if any(variant.recompute) else ""
        zero = f", ZeRO-{variant.zero} over {variant.group}" if variant.zero else ""
        pair = variant.settled.pair
        named = {
            "parameters": held.static.parameters,
            "gradients": held.static.gradients,
            "optimizer": held.static.optimizer,
            "activations": held.activations,
            "transients": held.logits + held.transient + held.static.buffers + held.inputs,
        }
        parts = ", ".join(f"{k} {size(v)}" for k, v in named.items() if v)
        return (
            f"{head}.\n  The closest (dp {pair.dp}, tp {pair.tp}{zero}{recompute}, microbatch {pair.microbatch}) needs "
            f"{size(held.peak)} on every device: {parts}."
        )

    def price_smallest(self) -> None:
        """Price the variant that comes nearest where every one was beyond hope: what binds is to be said."""
        problem = self.problem
        choices = [(pair, stage, size) for pair in pairs(problem) for stage, size in groups(problem, pair)]
        pair, stage, size = min(choices, key=lambda c: self.bounds.bytes(*c))
        settled = self.settled(pair, self.terms(pair, stage, size))
        self.reject(Variant(settled, stage, size, self.most_layers(settled)))

    def reject(self, variant: Variant) -> None:
        held = step_bytes(self.problem, variant, self.rehearsal(variant.settled))
        why = f"does not fit: {size(held.peak)}"
        self.rejected.append(Candidate(variant, step_seconds(self.problem, variant), held, why))


def reason(best: Candidate, other: Candidate) -> str:
    """Why a plan that fits is slower: where it loses most."""
    names = {
        "compute": "more compute per device",
        "tp_comm": "more tp communication",
        "dp_comm": "dp communication not hidden",
        "recompute": "more recompute",
        "optimizer": "a longer optimizer step",
    }
    lost = {k: getattr(other.seconds, k) - getattr(best.seconds, k) for k in names}
    if max(lost.values()) < 1e-3 * best.seconds.total:
        return (
            "as fast, with more memory"
            if other.bytes and best.bytes and other.bytes.peak > best.bytes.peak
            else "as fast"
        )
    return names[max(lost, key=lambda k: lost[k])]
