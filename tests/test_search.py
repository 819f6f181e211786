"""The search's answer is the best of everything that it may choose from; pins and limits are told in sentences."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels.cluster import Cluster
from costmodels.errors import BadInput, NoPlanFits
from costmodels.groups import Collective
from costmodels.profile import Profile, Sweep
from passes.choices import check_fix, degrees, divisors, groups, pairs, pipeline_refusal
from passes.memory import step_bytes
from passes.pipeline import PIPELINE, problem_of
from passes.price import Axis
from passes.search import Search, Unsettled
from passes.sharding import shard
from passes.state import State, Task, run
from passes.step import settle, step_seconds
from passes.variant import Pair, Problem, Variant

ROWS, SEQ, HIDDEN = 12, 4, 32


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(50, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.table.weight)


BATCH = {"ids": torch.ones(ROWS, SEQ, dtype=torch.long)}


def by_rows(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def of_all_rows(output: Tensor, batch: Any) -> Tensor:
    return output.var()


@cache
def problem(loss_fn: Any, hidden: int) -> Problem:
    task = Task(Net(hidden), BATCH, loss_fn, Cluster.preset("4xh100"), ROWS, "fp32", "adamw", {})
    return problem_of(run(PIPELINE[:4], State(task, lambda text: None, lambda: False)))


def asked(
    cluster: str = "4xh100", rows: int = ROWS, loss_fn: Any = by_rows, hidden: int = HIDDEN, **fix: int | str
) -> Problem:
    return replace(problem(loss_fn, hidden), cluster=Cluster.preset(cluster), global_batch=rows, fix=fix)


def search(made: Problem) -> Search:
    return Search(made, lambda text: None, lambda: False)


# -- what can be tried ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "per_node", "expected"),
    [
        (1, 1, [1]),
        (2, 2, [1, 2]),
        (3, 3, [1, 3]),  # two would leave one of three idle
        (6, 6, [1, 2, 3, 6]),
        (7, 7, [1, 2, 3, 7]),
        (8, 8, [1, 2, 4, 8]),
        (16, 8, [1, 2, 3, 4, 5, 8, 16]),
        (4, 1, [1, 2, 4]),  # across nodes only what divides
    ],
)
def test_degrees_worth_trying(devices, per_node, expected):
    assert degrees(devices, per_node) == expected


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_every_microbatch_of_every_degree():
    found = pairs(asked("2xh100", rows=4, pp=1))
    assert found == [Pair(1, 2, 1), Pair(1, 2, 2), Pair(2, 1, 1), Pair(2, 1, 2), Pair(2, 1, 4)]


def test_data_parallelism_takes_the_most_devices_that_divide_the_batch():
    assert {(p.tp, p.dp) for p in pairs(asked("8xh100", pp=1))} == {(1, 6), (2, 4), (4, 2), (8, 1)}


def test_pins_leave_what_they_name():
    assert pairs(asked(tp=2, dp=2, microbatch=3)) == [Pair(2, 2, 3)]
    assert pairs(asked(tp="2", microbatches="6")) == [Pair(2, 2, 1), Pair(2, 1, 2, pp=2)]
    assert pairs(asked(pp="2", dp="2", tp=1, microbatches="6")) == [Pair(1, 2, 1, pp=2)]


def test_rows_that_are_coupled_are_neither_split_nor_cut_in_time():
    assert {(p.dp, p.microbatch) for p in pairs(asked(loss_fn=of_all_rows))} == {(1, ROWS)}


def test_zero_shards_over_all_or_inside_a_node():
    pair = Pair(1, 4, 1)
    assert list(groups(asked("2x2xh100"), pair)) == [(0, 1), (1, 4), (1, 2), (2, 4), (2, 2), (3, 4), (3, 2)]
    assert list(groups(asked("2x2xh100", zero=3, zero_group=2), pair)) == [(3, 2)]
    assert list(groups(asked(), Pair(4, 1, 1))) == [(0, 1)]


# -- pins that cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fix", "sentence"),
    [
        ({"depth": 2}, "--fix does not know depth; it knows pp, dp, cp, ep, tp, zero"),
        ({"tp": 0}, "--fix tp=0 must be a positive number"),
        ({"zero": -1}, "--fix zero=-1 must be a positive number"),
        ({"tp": "two"}, "--fix tp=two must be a whole number"),
        ({"zero": 4}, "--fix zero=4: the ZeRO stages are 0, 1, 2 and 3"),
        ({"dp": 4, "tp": 2}, "--fix dp=4,tp=2 needs 8 devices; there are 4"),
        ({"tp": 5}, "--fix dp=1,tp=5 needs 5 devices; there are 4"),
        ({"dp": 5, "tp": 1}, "--fix dp=5,tp=1 needs 5 devices"),
        ({"dp": 4, "zero_group": 3}, "--fix zero_group=3 does not divide dp=4"),
        ({"dp": 2, "microbatch": 4}, "microbatch = 4 does not divide the 6 rows of a data-parallel rank"),
        ({"dp": 2, "microbatches": 5}, "microbatches = 5 does not divide the 6 rows"),
        (
            {"pp": 2, "dp": 2, "tp": 2},
            "--fix pp=2,dp=2,tp=2 needs 8 devices; there are 4: pp * dp * tp may be 4 at most",
        ),
        ({"pp": 2, "cp": 2}, "--fix cp=2: this version plans pp, dp and tp only; cp must be 1"),
        ({"pp": 2, "ep": 2}, "--fix ep=2: this version plans pp, dp and tp only; ep must be 1"),
        (
            {"pp": 4, "schedule": "interleaved", "virtual_stages": 4},
            "--fix pp=4,schedule=interleaved,virtual_stages=4 needs 16 stages, but the model can be cut into 8 at "
            "most: use a smaller pp * virtual_stages",
        ),
        (
            {"pp": 2, "dp": 1, "microbatches": 5},
            "does not divide the 12 rows of a data-parallel rank; use one of [1, 2, 3",
        ),
        ({"pp": 2, "schedule": "zbv", "recompute": "full"}, "under schedule zbv torch keeps what a layer makes again"),
        ({"schedule": "eager"}, "is not known; use one of none, gpipe, 1f1b, interleaved, zbv, interleaved_zb"),
        (
            {"pp": 4, "microbatches": 3, "schedule": "1f1b"},
            "1f1b on 4 ranks needs 4 microbatches or more, not 3; use a smaller pp, or schedule=gpipe",
        ),
        (
            {"schedule": "zbv", "virtual_stages": 3},
            "zbv runs 2 stages per rank; use virtual_stages=2, or schedule=interleaved",
        ),
        (
            {"pp": 2, "schedule": "1f1b", "virtual_stages": 2},
            "1f1b runs 1 stage per rank; use virtual_stages=1, or schedule=interleaved",
        ),
        (
            {"pp": 2, "schedule": "interleaved", "virtual_stages": 1},
            "interleaved runs 2 stages per rank or more; use virtual_stages=2, or schedule=1f1b",
        ),
        ({"pp": 1, "schedule": "zbv"}, "pp=1 has no stages; fix pp=2 or more, or leave schedule=zbv out"),
        ({"pp": 1, "virtual_stages": 2}, "pp=1 has no stages; fix pp=2 or more, or leave virtual_stages=2 out"),
        ({"pp": 2, "schedule": "none"}, "--fix schedule=none is for pp=1 and does not go with pp=2; use one of gpipe"),
        ({"dp": 4, "schedule": "1f1b"}, "4 devices leave none for pp beside what is fixed; fix a smaller dp or tp"),
        ({"tp": 3, "schedule": "1f1b"}, "leave none for pp"),
        ({"dp": 2, "zero": 2, "schedule": "zbv"}, "use zero=0 or 1, or schedule=interleaved"),
        ({"recompute": "selective"}, "recomputes whole layers; use none or full"),
    ],
)
def test_a_pin_that_cannot_be_is_told(fix, sentence):
    with pytest.raises(BadInput) as error:
        check_fix(asked(**fix))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("cluster", "rows", "fix", "sentence"),
    [
        (
            "16xh100", 13, {"pp": 4, "dp": 1, "tp": 1, "schedule": "interleaved", "microbatches": 13},
            "interleaved on 4 ranks cannot run 13 microbatches in 3 equal rounds; use 12 or 15, in a global batch that",
        ),
        ("4xh100", 3, {"pp": 4, "schedule": "1f1b"}, "1f1b on 4 ranks needs 4 microbatches or more, not 3"),
        ("2x8xh100", 12, {"tp": 3, "schedule": "1f1b"}, "use one of [1, 2, 4, 8], or fix pp too"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_run_says_what_can(cluster, rows, fix, sentence):
    with pytest.raises(BadInput) as error:
        search(asked(cluster, rows=rows, **fix)).run()
    assert sentence in str(error.value)


def test_a_pinned_schedule_never_gives_a_plan_without_stages():
    assert {pair.pp for pair in pairs(asked("2x8xh100", rows=16, schedule="1f1b"))} == {2}


class Shifted(Net):
    """Before its first statement that has a gradient, one that has none: no stage can end there."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids + 1)


@pytest.mark.parametrize(("model", "pp", "most"), [(Net, 9, 8), (Shifted, 10, 9), (Shifted, 9, 8)])
def test_more_stages_than_there_are_places_to_cut_is_told(model, pp, most):
    task = Task(model(HIDDEN), BATCH, by_rows, Cluster.preset("16xh100"), ROWS, "fp32", "adamw", {})
    made = replace(problem_of(run(PIPELINE[:4], State(task, lambda text: None, lambda: False))), fix={"pp": pp})
    with pytest.raises(BadInput) as error:
        search(made).run()
    assert str(error.value) == (
        f"--fix pp={pp} needs {pp} stages, but the model can be cut into {most} at most: use a smaller pp"
    )


def test_a_split_backward_with_both_holders_of_a_tied_weight_on_one_rank_is_refused():
    made = asked(pp=2, dp=2, schedule="zbv")
    variant = search(made).run().best.variant
    assert variant.staging is not None and pipeline_refusal(made, variant) == ""
    tied = replace(variant, staging=replace(variant.staging, cuts=(1, 2, 3)))
    assert pipeline_refusal(made, tied) == (
        "schedule zbv has stages that share table.weight on one rank, where FSDP gives it to only one; use "
        "another schedule, or dp=1 in fp32"
    )


def test_a_batch_that_cannot_be_split_names_what_can():
    with pytest.raises(BadInput) as error:
        check_fix(asked(rows=6, dp=4))
    assert str(error.value) == "a global batch of 6 rows cannot be split over dp=4; use one of [1, 2, 3]"


def test_microbatches_and_their_size_must_give_the_batch():
    with pytest.raises(BadInput):
        pairs(asked(tp=4, microbatch=2, microbatches=3))


def test_coupled_rows_and_data_parallelism_contradict_each_other():
    with pytest.raises(BadInput, match=r"--fix dp=2 is not possible: var in loss_fn \(.*\) mixes the rows of a batch"):
        check_fix(asked(loss_fn=of_all_rows, dp=2))
    with pytest.raises(BadInput, match="--fix microbatches=2 is not possible"):
        check_fix(asked(loss_fn=of_all_rows, microbatches=2))


# -- the answer -------------------------------------------------------------------------------------------------------


def everything(made: Problem) -> dict[tuple[int, int, int, int, int], tuple[float, bool]]:
    """Step time, and whether it fits, of every (tp, dp, microbatch, zero, group) without recompute."""
    found = {}
    searching = search(made)
    for pair in pairs(made):
        axis = Axis.of(made.cluster, "tp", pair.tp, 1)
        for stage, size in groups(made, pair):
            terms = searching.terms(pair, stage, size)
            sharding = shard(made.program.at(pair.microbatch), axis, terms, made.rows)
            assert sharding is not None
            settled = settle(made, pair, sharding)
            variant = Variant(settled, stage, size, tuple(0 for _ in settled.blocks))
            held = step_bytes(made, variant, searching.rehearsed(variant))
            fits = held.peak <= made.cluster.memory_limit_bytes
            key = (pair.tp, pair.dp, pair.microbatch, stage, size)
            found[key] = (step_seconds(made, variant).total, fits)
    return found


@pytest.mark.parametrize(("cluster", "hidden"), [("4xh100", HIDDEN), ("2x2xh100", HIDDEN), ("cpu:4", 192)])
def test_the_optimum_is_the_best_of_everything(cluster, hidden):
    made = asked(cluster, hidden=hidden, pp=1)
    answer = search(made).run()
    best = answer.best.variant
    pair = best.settled.pair
    table = everything(made)
    seconds, fits = table[pair.tp, pair.dp, pair.microbatch, best.zero, best.group]
    assert fits and answer.proved
    assert seconds == pytest.approx(answer.best.seconds.total, rel=1e-6)
    assert seconds == pytest.approx(min(s for s, ok in table.values() if ok), rel=1e-3)
    assert answer.enumerated == len(table)


# noise that has neither economies of scale nor order
JUMPS = tuple(
    Sweep(kind, 2, 1, siblings, tuple(4**n * 1024 for n in range(6)), (1e-4, 9e-5, 3e-3, 1e-3, 2e-2, 2e-3))
    for kind in Collective
    for siblings in (1, 2)
)
JUMPY = Profile("h100-sxm-80", "", "", "", "", 4, collectives=JUMPS)


def test_the_optimum_is_the_best_of_everything_by_a_noisy_profile():
    made = asked(pp=1)
    made = replace(made, cluster=made.cluster.with_profile(JUMPY))
    answer = search(made).run()
    assert answer.proved
    assert answer.best.seconds.total == pytest.approx(min(s for s, ok in everything(made).values() if ok), rel=1e-3)


@pytest.mark.parametrize("cluster", ["4xh100", "2x2xh100", "noisy"])
def test_no_pair_beats_its_bound_nor_what_larger_microbatches_say_of_it(cluster):
    made = asked("4xh100" if cluster == "noisy" else cluster, pp=1)
    if cluster == "noisy":
        made = replace(made, cluster=made.cluster.with_profile(JUMPY))
    searching = search(made)
    fastest: dict[Pair, float] = {}
    for (tp, dp, microbatch, _, _), (seconds, _) in everything(made).items():
        pair = Pair(tp, dp, microbatch)
        fastest[pair] = min(seconds, fastest.get(pair, seconds))
    for pair in sorted(fastest, key=lambda p: -p.microbatch):
        assert searching.bounds.seconds(pair) <= searching.floor(pair) <= fastest[pair] * (1 + 1e-6)
        searching.solve(pair)


def test_a_solved_microbatch_bounds_those_that_divide_it():
    searching = search(asked())
    searching.solved_s = {Pair(2, 2, 6): 1.0, Pair(4, 1, 12): 2.0}
    some, none, alone = Pair(2, 2, 3), Pair(4, 1, 4), Pair(1, 4, 3)

    def beside(pair: Pair) -> float:
        return min(searching.beside_s(pair, *one) for one in groups(searching.problem, pair))

    assert beside(some) > 0 == beside(none)
    expected = [1.0 + beside(some), 2.0, searching.bounds.seconds(alone) + beside(alone)]
    assert [searching.floor(pair) for pair in (some, none, alone)] == expected


def test_variants_that_sum_more_get_a_sharding_of_their_own_no_faster_than_they_were_queued():
    made = asked("cpu:4", hidden=192)
    searching = search(made)
    for pair in pairs(made):
        if pair.pp == 1:
            searching.solve(pair)
    waiting = [(seconds, item) for seconds, _, item in searching.queue if isinstance(item, Unsettled)]
    assert waiting
    for seconds, item in waiting:
        searching.queue = []
        searching.settle(item)
        assert seconds <= searching.queue[0][0]


def test_runners_up_are_slower_or_do_not_fit():
    answer = search(asked()).run()
    for other in answer.others:
        assert other.seconds.total >= answer.best.seconds.total * (1 - 1e-9) or other.why_not.startswith("does not fit")
        assert other.why_not


def test_the_same_problem_gives_the_same_answer():
    one, other = (search(asked()).run() for _ in range(2))
    assert (one.best.variant.settled.pair, one.best.seconds) == (other.best.variant.settled.pair, other.best.seconds)
    assert (one.enumerated, one.visited, one.solved) == (other.enumerated, other.visited, other.solved)


@pytest.mark.parametrize("devices", [3, 5, 6, 7])
@pytest.mark.parametrize("rows", [1, 7, 12])
def test_odd_numbers_of_devices_always_get_a_plan(devices, rows):
    answer = search(asked(f"{devices}xh100", rows=rows)).run()
    pair = answer.best.variant.settled.pair
    assert pair.tp * pair.dp <= devices and rows % (pair.dp * pair.microbatch) == 0


# -- memory -----------------------------------------------------------------------------------------------------------


def limited(bytes_: int, **fix: int | str) -> Problem:
    made = asked(**fix)
    return replace(made, cluster=made.cluster.with_memory_limit(bytes_))


def test_less_memory_costs_time_and_is_kept():
    free = search(asked()).run().best
    assert free.bytes is not None
    tight = search(limited(int(0.8 * free.bytes.peak))).run().best
    assert tight.bytes is not None and tight.bytes.peak <= int(0.8 * free.bytes.peak)
    assert tight.seconds.total >= free.seconds.total


def test_layers_are_recomputed_where_activations_do_not_fit():
    made = asked(pp=1, tp=1, dp=1, zero=0, microbatches=1, rows=240)
    free = search(made).run().best
    assert free.bytes is not None and sum(free.variant.recompute) == 0
    limit = free.bytes.peak - free.bytes.activations // 4
    tight = search(replace(made, cluster=made.cluster.with_memory_limit(limit))).run().best
    assert tight.bytes is not None and tight.bytes.peak <= limit and sum(tight.variant.recompute) > 0


def test_nothing_fits_says_by_how_much():
    with pytest.raises(NoPlanFits) as error:
        search(limited(50_000)).run()
    sentence = str(error.value)
    assert sentence.startswith("no plan fits 4 h100-sxm-80 (48.8 KiB usable each).\n  The closest (dp ")
    needs = re.search(r"needs ([\d.]+) KiB on every device: parameters [\d.]+ KiB", sentence)
    assert needs is not None and float(needs[1]) > 48.8


def test_past_the_deadline_the_best_known_plan_is_taken_and_not_called_optimal():
    asked_often = iter(range(10**6))
    answer = Search(asked(), lambda text: None, lambda: next(asked_often) > 3).run()
    assert answer.best.bytes is not None and not answer.proved
    assert answer.bound_s <= search(asked()).run().best.seconds.total <= answer.best.seconds.total
    assert 0 < answer.visited < answer.visited + answer.unvisited <= answer.enumerated


def test_past_the_deadline_what_was_left_is_taken_up_again_where_nothing_priced_fits():
    roomy = search(asked()).run().best
    assert roomy.bytes is not None
    made = asked()
    made = replace(made, cluster=replace(made.cluster, memory_limit_bytes=roomy.bytes.peak // 2))
    stopped = Search(made, lambda text: None, lambda: True).run().best
    assert stopped.bytes is not None and stopped.bytes.peak <= made.cluster.memory_limit_bytes


class Misled(Search):
    """Bounds say nothing of how slow tp 4, which comes first, is here."""

    def priced(self, settled, zero, group):
        one = super().priced(settled, zero, group)
        times = 10 if settled.pair.tp == 4 else 1
        return replace(one, seconds=replace(one.seconds, compute=times * one.seconds.compute))


def test_past_the_deadline_a_poor_plan_is_not_taken_at_once(monkeypatch):
    made = asked("2x2xh100", pp=1)
    kept = Misled(made, lambda text: None, lambda: True).run().best
    monkeypatch.setattr("passes.search.LATE_S", 0.0)
    first = Misled(made, lambda text: None, lambda: True).run().best
    assert first.variant.settled.pair.tp == 4
    assert search(made).run().best.seconds.total <= kept.seconds.total < first.seconds.total / 2


def test_what_comes_up_later_and_is_faster_is_the_best(monkeypatch):
    made = asked()
    first = search(made).run().best
    later = replace(first, seconds=replace(first.seconds, compute=0.5 * first.seconds.compute))
    monkeypatch.setattr(Search, "runners_up", lambda self, best: [later])
    answer = search(made).run()
    assert answer.best is later
    assert [one.seconds for one in answer.others if not one.why_not.startswith("does not fit")] == [first.seconds]
    assert not answer.proved and answer.bound_s <= later.seconds.total
