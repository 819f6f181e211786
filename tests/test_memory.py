"""Plans' memory against the bytes that were live in a real step, on gloo; `benchmarks/memory.py` has all cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.memory import MODELS, Compared, Measured, measured, planned
from costmodels.memory import Engine
from gloo import Pool
from models import pins
from passes import memory, step
from passes.memory import padded, rank_bytes, step_bytes
from passes.pipeline import problem_of
from passes.rehearse import Held, rehearse
from passes.schedules import SCHEDULES
from passes.state import State, made

TOLERANCE = 0.05
CASES = {
    "nanogpt, dp=2": ("nanogpt", {"dp": 2, "zero": 0}, 2, "fp32"),
    "nanogpt, tp=2": ("nanogpt", {"dp": 1, "tp": 2}, 2, "fp32"),
    "nanogpt, zero=3, bf16": ("nanogpt", {"dp": 2, "zero": 3, "recompute": "full"}, 2, "bf16"),
    "nanogpt, dp=3, 4 microbatches": ("nanogpt", {"dp": 3, "zero": 0, "microbatches": 4}, 3, "fp32"),
    "mlp, zero=2, 3 microbatches": ("mlp", {"dp": 2, "zero": 2, "microbatches": 3}, 2, "fp32"),
}


@dataclass(frozen=True)
class Run:
    state: State
    measured: Measured

    def compared(self) -> Compared:
        """The prediction, made again."""
        state = self.state
        problem, variant = problem_of(state), made(state.found, "the plan").best.variant
        lowered = variant.settled.lowered
        found = step_bytes(problem, variant, rehearse(made(state.program, "it"), lowered, problem.dtype))
        return Compared(made(state.plan, "the plan").memory[0], found, self.measured)


@pytest.fixture(scope="module")
def runs(gloo: Pool) -> Callable[[str], Run]:
    """Each case is measured once."""
    known: dict[str, Run] = {}

    def of(name: str) -> Run:
        if name not in known:
            model, fix, ranks, precision = CASES[name]
            case = MODELS[model]()
            state = planned(case, fix, ranks, precision)
            known[name] = Run(state, measured(gloo, case, state))
        return known[name]

    return of


@pytest.mark.parametrize("name", CASES)
def test_a_plan_holds_what_a_real_step_does(name: str, runs: Callable[[str], Run]) -> None:
    one = runs(name).compared()
    assert abs(one.peak_error) < TOLERANCE, f"{one.plan}, measured {one.measured}"
    assert abs(one.saved_error) < TOLERANCE, f"{one.predicted}, measured {one.measured}"


@pytest.mark.parametrize("name", CASES)
def test_the_parts_add_up_to_the_peak(name: str, runs: Callable[[str], Run]) -> None:
    plan, found = runs(name).compared().plan, runs(name).compared().predicted
    parts = plan.parameters + plan.gradients + plan.optimizer + plan.activations + plan.logits + plan.buffers
    assert parts + plan.reserved_overhead == plan.peak_bytes == found.peak


def no_buckets(patch: pytest.MonkeyPatch) -> None:
    """The gradients of a layer are thought to be nowhere before its backward."""
    made_ = memory.engine_of

    def without(*args: object, **which: bool) -> Engine:
        engine = made_(*args, **which)
        engine.gradients = 0
        return engine

    patch.setattr(memory, "engine_of", without)


def no_gathers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "flat", lambda self, unit: 0)
    patch.setattr(Engine, "forward", lambda self, unit: iter(()))


def no_update(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(memory, "update_bytes", lambda *_: 0)


def no_reduction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "after_backward", lambda self, unit: iter(()))


@pytest.mark.parametrize(
    ("name", "forget"),
    [
        ("nanogpt, dp=2", no_buckets),
        ("nanogpt, dp=3, 4 microbatches", no_buckets),
        ("nanogpt, zero=3, bf16", no_gathers),
        ("mlp, zero=2, 3 microbatches", no_reduction),
    ],
)
def test_a_forgotten_term_shows(
    name: str,
    forget: Callable[[pytest.MonkeyPatch], None],
    runs: Callable[[str], Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = runs(name).compared()
    forget(monkeypatch)
    after = runs(name).compared().predicted
    assert after.peak / before.measured.peak - 1 < -TOLERANCE


PIPELINES = [
    *(
        ("fp32", f"pp=2,microbatches=12,schedule={one}")
        for one in ("gpipe", "1f1b", "interleaved", "zbv", "interleaved_zb")
    ),
    ("bf16", "pp=2,dp=2,microbatches=6,schedule=1f1b,zero=2"),
    ("bf16", "pp=2,dp=2,microbatches=6,schedule=interleaved,zero=3"),
    ("bf16", "pp=2,dp=2,microbatches=6,schedule=zbv,zero=1"),
    ("bf16", "pp=2,dp=2,microbatches=6,schedule=interleaved_zb,zero=1"),
    ("fp32", "pp=4,microbatches=12,schedule=1f1b"),
    ("fp32", "pp=3,microbatches=12,schedule=zbv"),
]


@pytest.mark.parametrize(("precision", "fix"), PIPELINES)
def test_rounds_that_recur_hold_no_more(precision: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = pins(fix) | {"recompute": "none"}
    state = planned(MODELS["nanogpt"](), fixed, 4, precision)
    problem, variant = problem_of(state), made(state.found, "the plan").best.variant
    rehearsals = rehearse(
        made(state.program, "it"), variant.settled.lowered, problem.dtype, variant.stages, variant.splits_backward
    )
    pp = variant.settled.pair.pp
    rows = problem.global_batch // int(fixed["microbatches"])
    rounds = [(step.ROUNDS_PLAYED + 1) * pp, 3 * step.ROUNDS_PLAYED * pp]
    if not SCHEDULES[variant.schedule].rounds:
        rounds.append((step.ROUNDS_PLAYED + 2) * pp + 1)  # the last one is not full
    for microbatches in rounds:
        longer = replace(problem, global_batch=rows * microbatches)
        shortened = rank_bytes(longer, variant, rehearsals)
        with monkeypatch.context() as patch:
            patch.setattr(step, "ROUNDS_PLAYED", 10**6)
            assert rank_bytes(longer, variant, rehearsals) == shortened


def test_the_temporaries_of_the_update_are_those_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    # sqrt and quotient of one parameter, beside the quotient of the one before
    fused = problem_of(planned(MODELS["mlp"](), {"dp": 1, "tp": 1}, 1))
    problem = replace(fused, fused=False)
    held = tuple(
        Held(shape, trained) for shape, trained in [((10,), True), ((100,), False), ((4, 5), True), ((1,), True)]
    )
    assert memory.update_bytes(problem, held, 1) == 4 * (10 + 2 * 20)
    assert memory.update_bytes(problem, held, 2) == 4 * (5 + 2 * 10)
    assert memory.update_bytes(fused, held, 1) == 0


def test_parameters_are_padded_to_the_group() -> None:
    assert padded((5, 7), 1) == 35
    assert padded((5, 7), 3) == 42
    assert padded((), 2) == 2


def test_a_rehearsal_does_not_depend_on_what_ran_before(runs: Callable[[str], Run]) -> None:
    one = runs("nanogpt, dp=2").state
    text, lowered = made(one.program, "the program"), made(one.lowered, "the local program")
    assert rehearse(text, lowered, torch.float32) == rehearse(text, lowered, torch.float32)
