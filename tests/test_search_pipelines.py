"""The search's pipelines against everything there is: all degrees, schedules, ways of cutting and of recomputing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels.cluster import Cluster
from costmodels.errors import NoPlanFits
from passes.choices import groups, pairs, pipeline_refusal, stagings
from passes.cutting import EXHAUSTIVE, Uncut, positions
from passes.found import Found
from passes.memory import step_bytes
from passes.pipeline import PIPELINE, problem_of
from passes.search import Search
from passes.stages import made_again
from passes.state import State, Task, run
from passes.step import step_seconds
from passes.variant import Problem, Settled, Staging, Variant, layers_of, with_recompute
from test_search import Layer

ROWS, SEQ, HIDDEN, WORDS = 4, 64, 32, 50


class Plain(nn.Module):
    """Layers and nothing beside them: it can be cut around each, and before the loss is divided."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(HIDDEN) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Tied(nn.Module):
    """The first and the last stage read one table."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Layer(HIDDEN) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.table.weight)


def squares(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch["target"])


def words(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


IDS = torch.ones(ROWS, SEQ, dtype=torch.long)
MODELS: dict[str, tuple[Any, dict[str, Tensor], Any]] = {
    "plain": (Plain, {"x": torch.ones(ROWS, SEQ, HIDDEN), "target": torch.ones(ROWS, SEQ, HIDDEN)}, squares),
    "tied": (Tied, {"ids": IDS, "target": torch.ones(ROWS, SEQ, WORDS)}, squares),
    "words": (Tied, {"ids": IDS}, words),
}


@cache
def problem(model: str, layers: int) -> Problem:
    build, batch, loss_fn = MODELS[model]
    task = Task(build(layers), batch, loss_fn, Cluster.preset("4xh100"), ROWS, "fp32", "adamw", {})
    return problem_of(run(PIPELINE[:4], State(task, lambda text: None, lambda: False)))


@dataclass(frozen=True)
class Asked:
    """A small problem: its model, its cluster, its global batch, its pins."""

    model: str
    layers: int
    cluster: str
    rows: int
    pins: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((f"{self.model}{self.layers}", self.cluster, str(self.rows), *self.pins))

    @property
    def problem(self) -> Problem:
        fix: dict[str, int | str] = {key: text for key, text in (pin.split("=") for pin in self.pins)}
        made = problem(self.model, self.layers)
        return replace(made, cluster=Cluster.preset(self.cluster), global_batch=self.rows, fix=fix)


@dataclass(frozen=True)
class Choice:
    """One plan of all there are."""

    variant: Variant
    seconds: float
    peak_bytes: int


def search(made: Problem) -> Search:
    return Search(made, lambda text: None, lambda: False)


# -- everything -------------------------------------------------------------------------------------------------------


def variants(made: Problem, settled: Settled, zero: int, group: int) -> Iterator[Variant]:
    """Every variant of a sharding that can run."""
    pair, none = settled.pair, tuple(0 for _ in settled.blocks)
    if pair.pp == 1:
        for layers in product(*(counts(made, most) for most in settled.recomputable)):
            yield Variant(settled, zero, group, layers)
        return
    places = positions(settled.lowered.root, made_again(settled.lowered))
    for schedule, virtual in stagings(made, pair, zero):
        for cuts in combinations(places, pair.pp * virtual - 1):
            staging = Staging(schedule, virtual, cuts, (none,) * (len(cuts) + 1))
            variant = Variant(settled, zero, group, none, staging)
            if pipeline_refusal(made, variant):
                continue
            every = [
                [list(one) for one in product(*(counts(made, most) for most in layers_of(variant, stage)))]
                for stage in range(len(variant.stages))
            ]
            for again in product(*every):
                yield with_recompute(variant, list(again))


def counts(made: Problem, most: int) -> range:
    """How many of so many layers may be recomputed."""
    pinned = made.fix.get("recompute")
    return range(most, most + 1) if pinned == "full" else range(1) if pinned == "none" else range(most + 1)


@cache
def everything(asked: Asked) -> tuple[Choice, ...]:
    """All plans of a problem, the fastest first, whatever the memory."""
    made = asked.problem
    known = search(made)  # keeps shardings and rehearsals
    found = []
    for pair in pairs(made):
        for zero, group in groups(made, pair):
            settled = known.settled(pair, known.terms(pair, zero, group))
            for variant in variants(made, settled, zero, group):
                held = step_bytes(made, variant, known.rehearsed(variant))
                found.append(Choice(variant, step_seconds(made, variant).total, held.peak))
    return tuple(sorted(found, key=lambda one: one.seconds))


def limited(asked: Asked, limit_bytes: float) -> Problem:
    made = asked.problem
    if math.isinf(limit_bytes):
        return made
    return replace(made, cluster=made.cluster.with_memory_limit(int(limit_bytes)))


def limits(asked: Asked) -> list[float]:
    """From roomy to so tight that nothing fits; in between, what plans need that are best for their memory."""
    peaks: list[float] = []
    for one in everything(asked):
        if not peaks or one.peak_bytes < peaks[-1]:
            peaks.append(one.peak_bytes)
    picked = [peaks[round(k * (len(peaks) - 1) / 3)] for k in (1, 2, 3)]
    return [math.inf, *dict.fromkeys(picked), peaks[-1] - 1]


def best(asked: Asked, limit_bytes: float) -> float:
    """Seconds of the fastest plan that fits, infinite where none does."""
    return next((one.seconds for one in everything(asked) if one.peak_bytes <= limit_bytes), math.inf)


def found(asked: Asked, limit_bytes: float) -> Found | None:
    try:
        return search(limited(asked, limit_bytes)).run()
    except NoPlanFits:
        return None


def places_of(one: Any) -> tuple[int, ...]:
    lowered = one.variant.settled.lowered
    return positions(lowered.root, made_again(lowered))


def ways(asked: Asked) -> int:
    """Of cutting, for the schedule that has most."""
    return max(
        (
            math.comb(len(places_of(one)), len(one.variant.staging.cuts))
            for one in everything(asked)
            if one.variant.staging
        ),
        default=0,
    )


FEW = [
    Asked("plain", 3, "2xh100", 2),
    Asked("plain", 4, "2xh100", 2, ("pp=2",)),
    Asked("plain", 4, "2xh100", 4, ("pp=2", "schedule=1f1b")),
    Asked("plain", 4, "2x2xh100", 2, ("tp=1", "zero=1")),
    Asked("plain", 4, "2x2xh100", 4, ("pp=2", "tp=2", "schedule=gpipe")),
    Asked("tied", 2, "2xh100", 4, ("tp=1",)),
    Asked("tied", 2, "2xh100", 4, ("pp=2", "recompute=none")),
    Asked("tied", 3, "3xh100", 3, ("tp=1",)),
    Asked("tied", 3, "4xh100", 2, ("tp=1",)),
    Asked("tied", 3, "4xh100", 4, ("pp=4", "microbatches=4")),
    Asked("tied", 2, "cpu:4", 4, ("tp=1",)),
    Asked("plain", 4, "cpu:2", 4, ("pp=2", "recompute=full")),
    Asked("words", 3, "2xh100", 2, ("pp=2", "virtual_stages=2")),
    Asked("words", 4, "4xh100", 2, ("pp=4",)),
    Asked("words", 4, "cpu:4", 4, ("pp=4", "schedule=1f1b")),
]
MANY = [
    Asked("words", 9, "4xh100", 4, ("pp=4", "schedule=1f1b", "recompute=none", "microbatch=1", "zero=0")),
    Asked("words", 9, "4xh100", 2, ("pp=4", "schedule=gpipe", "recompute=none")),
    Asked("words", 6, "3xh100", 3, ("pp=3", "virtual_stages=2", "recompute=none", "microbatch=1")),
]


def compared(asked: Asked, tightness: int) -> tuple[float, Found | None]:
    """The least seconds under one of the limits, and what the search found, which fits; None where nothing does."""
    assert len(everything(asked)) <= 5000
    every = limits(asked)
    if tightness >= len(every):
        pytest.skip("fewer plans are best for their memory")
    seconds, answer = best(asked, every[tightness]), found(asked, every[tightness])
    if answer is None:
        assert math.isinf(seconds), f"{seconds} fits"
    else:
        held = answer.best.bytes
        assert held is not None and held.peak <= every[tightness]
    return seconds, answer


TIGHTNESS = [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3)), 4]


@pytest.mark.parametrize("asked", FEW, ids=str)
@pytest.mark.timeout(30)  # seconds are enough; were the same cuts queued again and again, hours would not be
@pytest.mark.parametrize("tightness", TIGHTNESS)
def test_the_search_finds_the_best_of_everything(asked: Asked, tightness: int) -> None:
    assert ways(asked) <= EXHAUSTIVE
    seconds, answer = compared(asked, tightness)
    if answer is None:
        return
    # where tp is free, tensors may be cut finer than any plan of `everything` does
    finer = asked.problem.fix.get("tp") != "1"
    assert answer.best.seconds.total == pytest.approx(seconds, rel=1e-9) or (
        finer and answer.best.seconds.total <= seconds
    )
    assert not answer.proved or answer.bound_s <= seconds * (1 + 1e-9)


def test_tensors_of_a_pipeline_are_cut_finer_where_no_sharding_fits_that_is_fastest() -> None:
    asked = Asked("plain", 4, "2x2xh100", 4, ("pp=2", "tp=2", "schedule=gpipe"))
    limit = limits(asked)[-1]
    answer = found(asked, limit)
    assert math.isinf(best(asked, limit))
    assert answer is not None and answer.best.bytes is not None and answer.best.bytes.peak <= limit


@pytest.mark.slow
@pytest.mark.parametrize("asked", MANY, ids=str)
@pytest.mark.parametrize("tightness", range(3))  # a limit that one way of hundreds meets may be missed
def test_where_not_all_ways_of_cutting_are_tried_the_plan_is_nearly_best(asked: Asked, tightness: int) -> None:
    assert ways(asked) > EXHAUSTIVE
    seconds, answer = compared(asked, tightness)
    assert answer is None or seconds * (1 - 1e-9) <= answer.best.seconds.total <= 1.02 * seconds


def best_where_layers_are_recomputed(made: Problem) -> float:
    """Seconds of the fastest pipeline, cut in any way, of which each rank recomputes what frees most per second."""
    known, least = search(made), math.inf
    for pair in pairs(made):
        for zero, group in groups(made, pair):
            settled = known.settled(pair, known.terms(pair, zero, group))
            none = tuple(0 for _ in settled.blocks)
            for schedule, virtual in stagings(made, pair, zero):
                for cuts in combinations(positions(settled.lowered.root, made_again(settled.lowered)), pair.pp - 1):
                    staging = Staging(schedule, virtual, cuts, (none,) * pair.pp)
                    found_ = known.recomputed(Variant(settled, zero, group, none, staging))
                    if found_ is not None and not pipeline_refusal(made, found_):
                        least = min(least, step_seconds(made, found_).total)
    return least


TIGHT = [(4, 0.7), (4, 0.45), (4, 0.42), (8, 0.5), (8, 0.4)]


@pytest.mark.parametrize(
    "rows, share", [pytest.param(*one, marks=[] if one[1] in (0.45, 0.5) else pytest.mark.slow) for one in TIGHT]
)
def test_pipelines_that_must_recompute_are_cut_until_they_fit(rows: int, share: float) -> None:
    asked = Asked("words", 9, "4xh100", rows, ("pp=4", "schedule=1f1b", "microbatch=1", "zero=0"))
    free = found(asked, math.inf)
    assert free is not None and free.best.bytes is not None
    made = limited(asked, share * free.best.bytes.peak)
    answer = search(made).run()
    assert answer.best.seconds.total <= 1.03 * best_where_layers_are_recomputed(made)
    assert answer.best.variant.staging not in [one.variant.staging for one in answer.others]


@pytest.mark.parametrize("asked", FEW, ids=str)
def test_no_pipeline_holds_less_than_its_bound(asked: Asked) -> None:
    made, bounds = asked.problem, search(asked.problem).bounds
    for one in everything(asked):
        if one.variant.staging is not None:
            in_flight = Uncut.of(one.variant, math.inf).in_flight(made.global_batch)
            assert 0 < bounds.cut_bytes(one.variant, in_flight) <= one.peak_bytes


@pytest.mark.parametrize("asked", [*FEW, *(pytest.param(one, marks=pytest.mark.slow) for one in MANY)], ids=str)
def test_no_pipeline_beats_its_floor(asked: Asked) -> None:
    for limit in limits(asked):
        searching = search(limited(asked, limit))
        fastest: dict[Uncut, float] = {}
        for one in everything(asked):
            variant, staging = one.variant, one.variant.staging
            if staging is not None and one.peak_bytes <= limit:
                fastest.setdefault(Uncut.of(variant, limit), one.seconds)
        for item, seconds in fastest.items():
            assert searching.uncut_floor(item) <= seconds * (1 + 1e-9), item
        for item in fastest:  # what the first sharding of a pair tells of the others
            if (item.pair.tp, item.pair.microbatch) not in searching.first_cutters:
                settled = searching.settled(item.pair, searching.terms(item.pair, item.zero, item.group))
                searching.first_cutters[item.pair.tp, item.pair.microbatch] = searching.cutter(settled)
        for item, seconds in fastest.items():
            assert searching.uncut_floor(item) <= seconds * (1 + 1e-9), item
