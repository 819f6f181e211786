"""A pipeline trains what one process trains, whatever the schedule and wherever the planner cuts."""

import re
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from costmodels.errors import BadInput
from models import CASES, OPTIMIZERS, buffers, differences, pins, planned, reference, trained
from passes.choices import pipeline_refusal
from passes.cutting import positions
from passes.emit import emit
from passes.pipeline import open_emission, problem_of
from passes.stages import made_again
from passes.variant import Staging, Variant
from test_transparency import check, least_bytes

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
BESIDE = (  # combinations and models that the matrix leaves out
    ("gpt2", "pp=2,schedule=1f1b,dp=2,zero=3,microbatches=3"),
    ("gpt2", "pp=2,schedule=gpipe,dp=2,zero=0"),
    ("llama", "pp=2,schedule=1f1b,microbatches=4,recompute=full"),
    ("llama", "pp=2,schedule=interleaved_zb,dp=2,zero=1"),
    ("nanogpt", "pp=3,schedule=1f1b,microbatches=3"),
    ("partly-trained", "pp=2,schedule=1f1b"),
    ("tied-thrice", "pp=2,schedule=interleaved,dp=2,zero=0"),
    ("tied-thrice", "pp=3,schedule=1f1b"),
    ("late-bias", "pp=2,schedule=1f1b"),
    ("turned", "pp=2,schedule=1f1b"),
    ("weighted", "pp=2,schedule=1f1b,microbatches=3"),
    ("dropout", "pp=2,schedule=1f1b,microbatches=2"),
)
REFUSED = {
    ("t5", "pp=2,schedule=zbv"): "schedule zbv would (lose the gradients of what makes|count the gradient of)",
    ("t5", "pp=2,schedule=interleaved_zb"): "schedule interleaved_zb would (lose the gradients|count the gradient) of",
}


@pytest.mark.parametrize(
    "model, fix, why",
    [
        ("tied-thrice", "pp=2,schedule=interleaved,dp=2,zero=2", "schedule interleaved has stages that share"),
        ("late-bias", "pp=2,schedule=zbv,microbatches=4", "schedule zbv would lose the gradients of what makes"),
        ("detached", "pp=2,schedule=interleaved,dp=2,zero=0", "stage 3 reads first.weight without a gradient"),
    ],
)
def test_what_would_train_something_else_is_refused(model, fix, why):
    state = planned(CASES[model], "dp=1,tp=1,pp=1,microbatches=4" if "zbv" in fix else "dp=2,tp=1,pp=1,zero=2")
    problem, settled = problem_of(state), state.found.best.variant.settled
    pair = replace(settled.pair, pp=2)
    schedule = pins(fix)["schedule"]
    none = (tuple(0 for _ in settled.blocks),) * 4
    refusals = set()
    for cuts in combinations(positions(settled.lowered.root, made_again(settled.lowered)), 3):
        staging = Staging(schedule, 2, cuts, none)
        zero = int(pins(fix).get("zero", 0))
        variant = Variant(replace(settled, pair=pair), zero, pair.dp if zero else 1, none[0], staging)
        refusals.add(pipeline_refusal(problem, variant))
    assert any(one.startswith(why) for one in refusals), refusals


def pinned(fix):
    """The pins with one rank of every axis that they do not name."""
    return ",".join(f"{key}={value}" for key, value in ({"dp": "1", "tp": "1"} | pins(fix)).items())


ALWAYS = {("gpt2", fix) for fix in PLANS} | {  # the rest of the matrix is slow
    ("llama", "pp=2,schedule=zbv"),
    ("llama", "pp=2,dp=2,zero=2"),
    ("t5", "pp=2"),
    ("t5", "pp=4"),
    ("t5", "pp=2,schedule=zbv"),
    ("bert", "pp=4"),
    ("bert-unmasked", "pp=2,schedule=interleaved_zb"),
    ("unet", "pp=4"),
    ("resnet", "pp=4"),
    ("resnet", "pp=2,tp=2"),
}
MATRIX = [
    pytest.param(model, fix, marks=() if (model, fix) in ALWAYS else pytest.mark.slow)
    for model in MODELS
    for fix in PLANS
]


@pytest.mark.timeout(400)  # of the tiny encoder-decoder under tp, the programme may take its whole minute, twice
@pytest.mark.parametrize("model, fix", MATRIX)
def test_pipeline_trains_what_one_process_trains(gloo, model, fix):
    if why := REFUSED.get((model, fix)):
        with pytest.raises(BadInput, match=why):
            planned(CASES[model], pinned(fix))
        return
    state = planned(CASES[model], pinned(fix))
    assert state.plan.mesh.pp > 1
    check(gloo, state, tuple(OPTIMIZERS)[PLANS.index(fix) % 2], model)


@pytest.mark.parametrize("model, fix", BESIDE)
def test_other_pipelines(gloo, model, fix):
    state = planned(CASES[model], pinned(fix))
    if model == "dropout":  # one process draws other masks: the pipeline draws those of the same plan without stages
        plain = planned(CASES[model], "pp=1,dp=1,tp=1,microbatches=2")
        runs = [gloo.run(s.plan.mesh.devices, trained, *arguments(s, model))[0] for s in (state, plain)]
        assert all(value <= 1 for value, _ in differences(*runs).values())
        return
    check(gloo, state, "sgd", model)


def arguments(state, model, steps=3):
    return model, state.program, buffers(state), CASES[model].weights, "sgd", steps


@pytest.mark.parametrize("norm_type", (2.0, float("inf")))
@pytest.mark.parametrize("fix", ("pp=2,schedule=1f1b", "pp=2,tp=2", "pp=2,dp=2,zero=2"))
def test_one_norm_over_all_stages_counts_a_tied_weight_once(gloo, fix, norm_type):
    case, state = CASES["gpt2"], planned(CASES["gpt2"], pinned(fix))
    found = gloo.run(
        state.plan.mesh.devices, clipped, state.program, buffers(state), case.weights, norm_type, timeout_s=60
    )
    model = case.build()
    case.loss(model, case.batch(0)).backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type).item()
    assert all(norm == pytest.approx(wanted, rel=1e-5) for norm in found)


def clipped(program, held, weights, norm_type):
    trainer = trainer_of(program, held, weights, clip_grad_norm=0.1, norm_type=norm_type)
    trainer.step(CASES["gpt2"].batch(0))
    return trainer.last_grad_norm


def trainer_of(program, held, weights, **more):
    from autopar.job import load_program
    from autopar.runtime import Trainer

    trainer = Trainer(load_program(program), OPTIMIZERS["sgd"], "cpu", **more)
    trainer.load_state_dict(weights)
    trainer.load_buffers(held)
    return trainer


@pytest.mark.parametrize(
    "model, fix",
    [
        ("gpt2", "pp=2,schedule=1f1b"),
        ("gpt2", "pp=2,tp=2"),
        ("llama", "pp=2,schedule=zbv"),
        ("bert", "pp=2,schedule=interleaved"),
    ],
)
def test_evaluation_is_that_of_one_process(gloo, model, fix):
    case, state = CASES[model], planned(CASES[model], pinned(fix))
    found = gloo.run(state.plan.mesh.devices, evaluated, model, state.program, buffers(state), case.weights)
    with torch.no_grad():
        wanted = [case.loss(case.build(), case.batch(step)).item() for step in (0, 1)]
    assert all(losses[:2] == pytest.approx(wanted, rel=1e-5) for losses in found)
    assert all(losses[2] == pytest.approx(wanted[0], rel=1e-5) for losses in found), "a step after it is as ever"


def evaluated(model, program, held, weights):
    trainer = trainer_of(program, held, weights)
    batches = [CASES[model].batch(step) for step in (0, 1)]
    return [trainer.evaluate(batches[0]), trainer.evaluate(batches[1]), trainer.step(batches[0])]


# -- cuts and meshes that no price would choose ------------------------------------------------------------------------


def staged(case, cuts, fix, order=("pp", "dp", "tp")):
    """The state of a plan without pp, its program cut into stages under 1f1b."""
    state = planned(case, f"pp=1,microbatches=3,{fix}")
    variant = state.found.best.variant
    pair, count = variant.settled.pair, len(cuts) + 1
    sizes = {"pp": count, "dp": pair.dp, "tp": pair.tp}
    emission = replace(
        open_emission(state),
        mesh={axis: sizes[axis] for axis in order},
        zero=variant.zero,
        zero_group=variant.group,
        microbatch=pair.microbatch,
        microbatches=3,
        recompute=(variant.recompute,) * count,
        cuts=tuple(cuts),
        schedule="1f1b",
    )
    plan = replace(state.plan, mesh=replace(state.plan.mesh, pp=count))
    return replace(state, program=emit(state.lowered, emission), plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("model", ("gpt2", "t5", "unet", "resnet"))
def test_any_cut_will_do(gloo, model):
    state = planned(CASES[model], "pp=1,dp=1,tp=1,microbatches=3")
    for cut in positions(state.lowered.root, made_again(state.lowered)):
        check(gloo, staged(CASES[model], (cut,), "dp=1,tp=1"), "sgd", model, steps=2)


@pytest.mark.parametrize("zero", (0, 2))
def test_pp_inside_of_dp(gloo, zero):
    state = staged(CASES["gpt2"], (6,), f"dp=2,tp=1,zero={zero}", order=("dp", "pp", "tp"))
    assert 'mesh={"dp": 2, "pp": 2, "tp": 1}' in state.program
    check(gloo, state, "adamw", "gpt2")


def test_own_choice_where_nothing_but_a_pipeline_fits(gloo):
    case = CASES["nanogpt"]
    limit = min(least_bytes("nanogpt", f"pp=1,dp={dp},tp={tp},zero={z}") for dp, tp, z in SHARDED) - 1
    state = planned(case, "", 4, limit_bytes=limit)
    assert state.plan.mesh.pp > 1
    check(gloo, state, "adamw", "nanogpt")


SHARDED = [(4, 1, 3), (4, 1, 1), (2, 2, 3), (2, 2, 1), (1, 4, 0)]


# -- what is left out is noticed --------------------------------------------------------------------------------------


def test_a_tied_gradient_that_is_not_summed_is_noticed(gloo):
    state = planned(CASES["gpt2"], pinned("pp=2,schedule=1f1b"))
    text = re.sub(r"    shared=\{\n.*?\n    \},\n", "", state.program, flags=re.S)
    assert text != state.program
    with pytest.raises(AssertionError):
        check(gloo, replace(state, program=text), "sgd", "gpt2", steps=2)


@pytest.mark.parametrize("schedule", ("1f1b", "interleaved"))
@pytest.mark.parametrize("what", ("get_fwd_send_ops", "get_bwd_send_ops"))
def test_a_send_that_is_left_out_ends_in_an_error(gloo, schedule, what):
    state = planned(CASES["gpt2"], pinned(f"pp=2,schedule={schedule}"))
    with pytest.raises((RuntimeError, TimeoutError)):
        gloo.run(2, silent, what, *arguments(state, "gpt2"), timeout_s=8.0)


def silent(what, *rest):
    from autopar.runtime import pipeline

    sends = getattr(pipeline._Stage, what)

    def once(stage, microbatch):
        ops = sends(stage, microbatch)
        return [] if microbatch == 0 else ops

    setattr(pipeline._Stage, what, once)
    pipeline._Stage._sent = lambda stage, ops: ops
    try:
        return trained(*rest)
    finally:
        setattr(pipeline._Stage, what, sends)


def test_reference_of_the_new_models_learns():
    for model in ("unet", "resnet"):
        losses = reference(CASES[model], "adamw").losses
        assert losses[-1] < losses[0]
