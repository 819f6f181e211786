"""A program cut into stages, wherever the cuts are, trains what one process trains."""

from dataclasses import replace

import pytest

from models import CASES, planned
from passes.emit import emit
from passes.pipeline import open_emission
from test_transparency import check


def staged(case, cuts, fix="", schedule="1f1b", pp=0, precision="fp32", microbatches=3):
    """The state of a plan without pp, its program cut into stages."""
    pins = {"dp": 1, "tp": 1, "microbatches": microbatches} | dict(pin.split("=") for pin in fix.split(",") if pin)
    state = planned(case, ",".join(f"{k}={v}" for k, v in pins.items()), precision=precision)
    variant = state.found.best.variant
    pair = variant.settled.pair
    emission = replace(
        open_emission(state),
        mesh={"pp": pp or len(cuts) + 1, "dp": pair.dp, "tp": pair.tp},
        zero=variant.zero,
        zero_group=variant.group,
        microbatch=pair.microbatch,
        microbatches=microbatches,
        recompute=(variant.recompute,) * (len(cuts) + 1),
        cuts=tuple(cuts),
        schedule=schedule,
    )
    plan = replace(state.plan, mesh=replace(state.plan.mesh, pp=emission.mesh["pp"]))
    return replace(state, program=emit(state.lowered, emission), plan=plan)


def evenly(case, count, fix=""):
    statements = len(staged(case, (), fix, schedule="none").lowered.root.statements)
    return [statements * (k + 1) // count for k in range(count - 1)]


@pytest.mark.parametrize("model", ["gpt2", "llama", "mlp", "bert", "t5", "vit"])
@pytest.mark.parametrize("fix", ["", "dp=2", "tp=2", "dp=2,zero=2"])
def test_two_stages(gloo, model, fix):
    case = CASES[model]
    check(gloo, staged(case, evenly(case, 2, fix), fix), "sgd", model)
