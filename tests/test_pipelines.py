"""A pipeline trains what one process trains, whatever the schedule and wherever the planner cuts."""

import pytest

from models import CASES, planned
from test_transparency import check

MODELS = ("gpt2", "llama", "t5", "bert", "bert-unmasked", "unet", "resnet")
PLANS = (
    "pp=2",
    "pp=4",
    "pp=2,tp=2",
    "pp=2,dp=2,zero=1",
    "pp=2,dp=2,zero=2",
    "pp=2,schedule=interleaved,virtual_stages=2",
    "pp=2,schedule=zbv",
    "pp=2,schedule=interleaved_zb",
    "pp=4,microbatches=2",
)


@pytest.mark.parametrize("fix", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_pipeline_trains_what_one_process_trains(gloo, model, fix):
    pins = ",".join(
        f"{key}={value}"
        for key, value in ({"dp": "1", "tp": "1"} | dict(pin.split("=") for pin in fix.split(","))).items()
    )
    state = planned(CASES[model], pins)
    assert state.plan.mesh.pp > 1
    check(gloo, state, "sgd", model)
