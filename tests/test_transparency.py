"""The parallel program trains what one process trains, whatever the plan: losses, gradients, weights."""

import pytest

from models import CASES, OPTIMIZERS, STEPS, buffers, differences, planned, ranks, reference, trained

MODELS = ("gpt2", "llama", "nanogpt", "mlp")
PLANS = (
    "dp=2",
    "tp=2",
    "tp=4",
    "dp=2,tp=2",
    "dp=3",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=2,tp=2,zero=3",
    "tp=2,recompute=full",
    "tp=2,microbatches=4",
    "dp=3,microbatches=4",
)


def check(gloo, case, state, optimizers=tuple(OPTIMIZERS), steps=STEPS):
    """Train the program of a plan and compare it with the model's own training."""
    plan = state.plan
    args = (case.name, state.program, buffers(state), case.weights, optimizers, steps)
    by_rank = gloo.run(plan.mesh.devices, trained, *args)
    for i, optimizer in enumerate(optimizers):
        wanted, found = reference(case, optimizer, steps), by_rank[0][i]
        assert all(rank[i].losses == found.losses for rank in by_rank), "the ranks tell different losses"
        assert set(found.weights) == set(wanted.weights)
        aliases = {name for name in wanted.first if any(wanted.first[name] is g for g in found.first.values())}
        assert set(found.first) <= set(wanted.first) and set(found.last) == set(found.first), aliases
        worst = differences(found, wanted)
        print(f"\n{case.name} {optimizer}: {plan}:", ", ".join(f"{k} {v * 1e-5:.1e} ({n})" for k, (v, n) in worst.items()))
        assert all(value <= 1 for value, _ in worst.values()), worst


@pytest.mark.parametrize("fix", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_pinned_plan_trains_what_one_process_trains(gloo, model, fix):
    check(gloo, CASES[model], planned(CASES[model], fix))
