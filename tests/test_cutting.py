"""Where stages begin, and what a schedule takes and holds, against brute force on made-up stages."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import accumulate, combinations, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from costmodels.schedules import Queue, StageSeconds, held, least_seconds, simulate
from passes import step
from passes.cutting import HALVES, Cutter
from passes.schedules import SCHEDULES, least_in_flight, rank_of, refusal, table
from passes.step import least_wait, waits
from passes.variant import Staging, Variant

Cost = Callable[[int, int, int], float]


class MadeUp(Cutter):
    """Pieces of these seconds."""

    def __init__(self, seconds: list[float]) -> None:
        self.positions = tuple(range(1, len(seconds)))
        self.seconds = [0.0, *accumulate(seconds)]
        self.layers = []
        self.settled = cast(Any, SimpleNamespace(again=()))


def slowest(ends: tuple[int, ...], cost: Cost) -> float:
    return max(cost(k, start, end) for k, (start, end) in enumerate(pairwise((0, *ends))))


def least(pieces: int, count: int, cost: Cost) -> float:
    return min((slowest((*cuts, pieces), cost) for cuts in combinations(range(1, pieces), count - 1)), default=math.inf)


def made_up(seed: int) -> tuple[MadeUp, int]:
    draw = random.Random(seed)
    seconds = [draw.choice((0.0, 0.1, draw.random(), 10 * draw.random())) for _ in range(draw.randint(1, 9))]
    return MadeUp(seconds), len(seconds)


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_stage_is_as_fast_as_it_can_be(seed: int) -> None:
    cutter, pieces = made_up(seed)
    total = cutter.seconds[-1]

    def cost(stage: int, start: int, end: int) -> float:
        return cutter.seconds[end] - cutter.seconds[start]

    for count in range(1, pieces + 2):
        want = least(pieces, count, cost)
        found = cutter.least_of_slowest(count)
        assert found == pytest.approx(want, rel=1e-9, abs=total / 2**HALVES + 1e-12)
        assert found <= want * (1 + 1e-9), "a bound is no more than what it bounds"


@pytest.mark.parametrize("seed", range(40))
def test_stages_that_hold_too_much_are_avoided_from_one_end_or_the_other(seed: int) -> None:
    cutter, pieces = made_up(seed)
    draw = random.Random(seed)
    kept = [0.0, *accumulate(draw.random() for _ in range(pieces))]
    nearly = cutter.seconds[-1] / 2**HALVES + 1e-12
    for count in range(1, pieces + 1):
        room = draw.uniform(0.2, 1.5) * kept[-1]

        def cost(stage: int, start: int, end: int, count: int = count, room: float = room) -> float:
            fits = (count - stage) * (kept[end] - kept[start]) <= room  # earlier stages hold more microbatches
            return cutter.seconds[end] - cutter.seconds[start] if fits else math.inf

        want = least(pieces, count, cost)
        taken = []
        for ends in (cutter._filling(count, cost, backwards)[0] for backwards in (False, True)):
            if ends is not None:
                assert ends == sorted({*ends}) and len(ends) == count and ends[-1] == pieces
                taken.append(slowest(tuple(ends), cost))
        assert all(one >= want for one in taken)
        assert min(taken, default=math.inf) == pytest.approx(want, rel=1e-9, abs=nearly)


# -- schedules --------------------------------------------------------------------------------------------------------


def counts(name: str, most: int = 25) -> list[tuple[int, int, int]]:
    """Ranks, stages per rank and microbatches that are not refused."""
    grid = ((p, v, m) for p in (2, 3, 4, 5) for v in (1, 2, 3, 4) for m in range(1, most))
    return [(p, v, m) for p, v, m in grid if (v > 1) != SCHEDULES[name].single and not refusal(name, p, v, m)]


def unequal(stages: int, seed: int) -> list[StageSeconds]:
    """Stages of random seconds; torch computes no gradients of the first one's inputs."""
    draw = random.Random(seed)
    made = []
    for k in range(stages):
        forward, backward = draw.uniform(0.1, 2), draw.uniform(0.1, 4)
        weight = draw.uniform(0, backward) if k or seed % 2 else backward
        made.append(StageSeconds(forward, backward, backward - weight, weight))
    return made


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_hold_as_many_microbatches_as_least_in_flight_says_or_more(name: str) -> None:
    for p, v, m in counts(name):
        shown = [n / v for n in held(table(name, p, v, m), [1] * p * v)]
        for said, real in zip(least_in_flight(name, p, v, m), shown, strict=True):
            assert said <= real + 1e-9, (p, v, m, shown)
            if name in ("gpipe", "1f1b", "interleaved"):
                assert said == pytest.approx(real), (p, v, m, shown)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_order_beats_least_seconds(name: str) -> None:
    for seed, (p, v, m) in enumerate(counts(name, 18)):
        stages = unequal(p * v, seed)
        bound = least_seconds(stages, rank_of(name, p, v), m, split=SCHEDULES[name].split)
        played = simulate(table(name, p, v, m), stages, [0.0] * (p * v - 1), Queue.FREE).seconds
        assert bound <= played * (1 + 1e-9), (p, v, m, stages)


MANY = [
    (name, p, v, m)
    for name, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("interleaved_zb", 2))
    for p, v in ((2, per_rank), (3, per_rank), (4, per_rank))
    for m in (7 * p, 9 * p + 1, 20 * p)
    if not refusal(name, p, v, m)
]


def waited(
    args: tuple[str, int, int, int], seed: int, transfer_s: float, queue: Queue, lent: float = 1.0
) -> tuple[tuple[float, float], float]:
    """What waits find, and what they are at least."""
    name, p, v, m = args
    stages = unequal(p * v, seed)
    pair = SimpleNamespace(pp=p, pp_stride=1)
    variant = Variant(cast(Any, SimpleNamespace(pair=pair)), 0, 1, (), Staging(name, v, (), ()))
    problem = cast(Any, SimpleNamespace(queue=queue, cluster=SimpleNamespace(lent=lent, devices_per_node=p)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "stage_seconds", lambda every: stages)
        patch.setattr(step, "transfers", lambda *_: [transfer_s] * (p * v - 1))
        return waits(problem, variant, (), m), least_wait(problem, variant, (), m)


@pytest.mark.parametrize("transfer_s", [0.0, 0.3])
@pytest.mark.parametrize("queue", [Queue.RANK, Queue.FREE], ids=lambda queue: queue.name.lower())
@pytest.mark.parametrize("args", MANY, ids=lambda args: "-".join(map(str, args)))
def test_rounds_counted_are_rounds_played(args: tuple[str, int, int, int], queue: Queue, transfer_s: float) -> None:
    for seed in range(4):
        counted, _ = waited(args, seed, transfer_s, queue)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "ROUNDS_PLAYED", 10**6)
            played, _ = waited(args, seed, transfer_s, queue)
        assert counted == pytest.approx(played, rel=1e-9, abs=1e-9), seed


def test_rounds_are_counted_where_fewer_microbatches_would_be_refused() -> None:
    assert not refusal("interleaved", 8, 2, 63)
    (bubble, _), _ = waited(("interleaved", 8, 2, 63), 0, 0.0, Queue.RANK)
    assert bubble > 0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("lent", [1.0, 1.5, 4.0])
def test_no_order_beats_the_least_wait(name: str, lent: float) -> None:
    for seed, args in enumerate(counts(name, 6)):
        (bubble, _), least = waited((name, *args), seed, 0.0, Queue.FREE, lent)
        assert least <= bubble + 1e-9, args
