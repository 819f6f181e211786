"""The parallel program trains what one process trains, whatever the plan: losses, gradients, weights."""

import random
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_map

import autopar
from models import (
    CASES,
    OPTIMIZERS,
    ROWS,
    STEPS,
    buffers,
    differences,
    llama,
    off,
    pins,
    planned,
    reference,
    trained,
)
from passes.price import Seconds

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
COMBINED = (  # what works alone may fail together
    "dp=2,zero=3,recompute=full",
    "dp=2,tp=2,zero=1,microbatches=3,recompute=full",
    "dp=2,tp=2,zero=2,microbatches=2",
    "dp=2,tp=2,zero=3,microbatches=3",
    "dp=4,zero=2,zero_group=2,microbatches=3",
    "dp=4,zero=3,zero_group=2",
)
NUMBER = {case: i for i, case in enumerate(product(MODELS, PLANS))}


def check(gloo, state, optimizer, name, steps=STEPS, clip=None):
    """Train the program of a plan, and compare it with the plain loop over the user's model."""
    case = CASES[name]
    plan = state.plan
    by_rank = gloo.run(
        plan.mesh.devices, trained, name, state.program, buffers(state), case.weights, optimizer, steps, clip
    )
    found, wanted = by_rank[0], reference(case, optimizer, steps, clip)
    assert all(rank.losses == found.losses for rank in by_rank), "the ranks tell different losses"
    assert set(found.weights) == set(wanted.weights)
    found = under_first_names(found, case)
    assert set(found.first) == set(found.last) == set(wanted.first)
    worst = differences(found, wanted)
    said = ", ".join(f"{what} {value * 1e-5:.1e} ({where})" for what, (value, where) in worst.items())
    print(f"{name}, {optimizer}, {plan.mesh}, {plan.zero}, {plan.schedule}: {said}")
    assert all(value <= 1 for value, _ in worst.values()), said
    assert not any(rank.drifted for rank in by_rank), by_rank[0].drifted
    return found, wanted


def under_first_names(found, case):
    """A tied weight's gradient comes under one of its names, not always the model's first."""
    first = {}
    names = {name: first.setdefault(id(p), name) for name, p in case.build().named_parameters(remove_duplicate=False)}
    assert len({names[name] for name in found.first}) == len(found.first), "one gradient under two names"
    renamed = [{names[name]: gradient for name, gradient in part.items()} for part in (found.first, found.last)]
    return type(found)(found.losses, *renamed, found.weights, found.norms)


# -- every plan, every model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fix", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_pinned_plan_trains_what_one_process_trains(gloo, model, fix):
    check(gloo, planned(CASES[model], fix), tuple(OPTIMIZERS)[NUMBER[model, fix] % 2], model)


@pytest.mark.slow
@pytest.mark.parametrize("fix", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_pinned_plan_trains_alike_with_the_other_optimizer(gloo, model, fix):
    check(gloo, planned(CASES[model], fix), tuple(OPTIMIZERS)[1 - NUMBER[model, fix] % 2], model)


@pytest.mark.slow
@pytest.mark.parametrize("fix", COMBINED)
@pytest.mark.parametrize("model", MODELS)
def test_combined_pins_train_what_one_process_trains(gloo, model, fix):
    for optimizer in OPTIMIZERS:
        check(gloo, planned(CASES[model], fix), optimizer, model)


@pytest.mark.parametrize("model", MODELS)
def test_own_choice_where_plain_data_parallelism_does_not_fit(gloo, model):
    state = planned(CASES[model], "", 4, limit_bytes=plain_dp_bytes(model) - 1)
    plan = state.plan
    assert plan.zero.stage or plan.mesh.tp > 1 or plan.mesh.pp > 1
    assert all(rank.peak_bytes < plain_dp_bytes(model) for rank in plan.memory)
    check(gloo, state, "adamw", model)


def plain_dp_bytes(model):
    """The least that any plan needs that has every state on every rank."""
    return least_bytes(model, "pp=1,dp=4,tp=1,zero=0")


def least_bytes(model, fix):
    choices = [f"{fix},microbatch={rows},recompute={again}" for rows in (1, 3) for again in ("none", "full")]
    return min(planned(CASES[model], choice).plan.memory[0].peak_bytes for choice in choices)


@pytest.mark.parametrize("model", ("gpt2", "llama", "nanogpt"))
def test_own_choice_where_only_tensor_parallelism_fits(gloo, model):
    fully_sharded = min(least_bytes(model, f"pp=1,dp=4,tp=1,zero={stage}") for stage in (1, 2, 3))
    state = planned(CASES[model], "pp=1", 4, limit_bytes=fully_sharded - 1)
    assert state.plan.mesh.tp > 1
    check(gloo, state, "sgd", model)


@pytest.mark.parametrize(
    "model, fix", [("gpt2", "tp=4"), ("llama", "dp=2,tp=2,zero=3"), ("nanogpt", "tp=2"), ("mlp", "tp=4")]
)
def test_plan_for_thin_links_trains_what_one_process_trains(gloo, model, fix):
    check(gloo, planned(CASES[model], fix, thin=True), "adamw", model)


@pytest.mark.parametrize("thin", (False, True))
@pytest.mark.parametrize("model, fix", [("bert", "dp=2,tp=2"), ("vit", "tp=2")])
def test_other_families_train_what_one_process_trains(gloo, model, fix, thin):
    check(gloo, planned(CASES[model], f"{fix},microbatches=1", thin=thin), "adamw", model)


@pytest.mark.slow
@pytest.mark.timeout(400)  # of the tiny encoder-decoder, the programme is hard: it may take its whole minute
@pytest.mark.parametrize("fix", ("dp=2,zero=3", "tp=2", "tp=4", "tp=2,microbatches=3", "dp=2,tp=2,recompute=full"))
@pytest.mark.parametrize("model", ("bert", "vit", "t5"))
def test_other_families_under_other_plans(gloo, model, fix):
    one = "" if "microbatches" in fix else ",microbatches=1"
    check(gloo, planned(CASES[model], fix + one), "sgd", model)


@pytest.mark.parametrize("model", (*MODELS, "bert", "vit", "t5"))
def test_a_sum_in_another_order_is_far_within_the_bound(model):
    """Else a case would tell nothing: in it one process would not even train what itself trains."""
    case = CASES[model]

    def backwards(step):
        return tree_map(lambda rows: rows.flip(0), case.batch(step))

    for optimizer in OPTIMIZERS:
        worst = differences(reference(replace(case, batch=backwards), optimizer), reference(case, optimizer))
        assert all(value <= 0.25 for value, _ in worst.values()), worst


# -- plans that no price would choose ---------------------------------------------------------------------------------


def at_random(model, fix, seed):
    """A plan whose strategies are drawn: the programme is solved for prices that mean nothing."""

    def price(site, rule, strategy, axis):
        return Seconds(random.Random(f"{seed} {site.op.name} {strategy}").random(), 0.0)

    with (
        patch("passes.sharding.op_seconds", price),
        patch("passes.sharding.reshard_seconds", lambda *args: Seconds(0.01, 0.0)),
    ):
        return planned.__wrapped__(CASES[model], fix)


@pytest.mark.parametrize("model, fix, seed", [("llama", "tp=2", 0), ("nanogpt", "tp=2", 1), ("gpt2", "tp=4", 2)])
def test_plan_drawn_at_random_trains_what_one_process_trains(gloo, model, fix, seed):
    check(gloo, at_random(model, fix, seed), "sgd", model, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fix", ("tp=2", "tp=3", "tp=4"))
@pytest.mark.parametrize("model", (*MODELS, "bert", "vit", "t5"))
def test_many_plans_drawn_at_random(gloo, model, fix, seed):
    check(gloo, at_random(model, fix, seed), "sgd", model, steps=2)


@pytest.mark.parametrize("fix", ("dp=2,zero=0", "tp=2", "dp=2,zero=3,microbatches=3", "dp=2,tp=2,recompute=full"))
def test_layers_that_nothing_precedes(gloo, fix):
    check(gloo, planned(CASES["sequential"], fix), "adamw", "sequential")


# -- heads that do not divide -----------------------------------------------------------------------------------------


def test_more_ranks_than_kv_heads(gloo):
    check(gloo, planned(CASES["few-kv-heads"], "tp=4"), "adamw", "few-kv-heads")


@pytest.mark.parametrize("fix", ("", "tp=3"))
def test_three_ranks_and_four_heads(gloo, fix):
    check(gloo, planned(CASES["gpt2"], fix, 3), "adamw", "gpt2")


# -- what a training loop does beside steps ---------------------------------------------------------------------------


@pytest.mark.parametrize("fix", ("dp=2,tp=2", "dp=2,zero=3", "dp=3"))
def test_frozen_and_unused_parameters_stay_and_have_no_gradient(gloo, fix):
    found, wanted = check(gloo, planned(CASES["partly-trained"], fix), "adamw", "partly-trained")
    before = CASES["partly-trained"].weights
    still = [name for name in before if name not in wanted.first and name != "lm_head.weight"]
    assert still == ["wpe.weight", "h.1.ln_2.bias", "spare.weight", "spare.bias"]
    assert all(torch.equal(found.weights[name], before[name]) for name in still)


@pytest.mark.parametrize("model, fix", [("gpt2", "tp=2"), ("llama", "dp=2,tp=2,zero=3"), ("partly-trained", "dp=2")])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(gloo, model, fix):
    found, wanted = check(gloo, planned(CASES[model], fix), "sgd", model, steps=5, clip=0.1)
    assert min(wanted.norms) > 0.2, "nothing was clipped"
    assert found.norms == pytest.approx(wanted.norms, rel=1e-5)


@pytest.mark.parametrize("model, fix", [("llama", "dp=2,tp=2"), ("gpt2", "dp=2,zero=3"), ("nanogpt", "tp=2")])
def test_bf16_loss_is_near_that_of_one_process_in_bf16(gloo, model, fix):
    state = planned(CASES[model], fix, precision="bf16")
    args = (model, state.program, buffers(state), CASES[model].weights, "adamw", 10)
    found = gloo.run(state.plan.mesh.devices, trained, *args)[0]
    wanted = reference(CASES[model], "adamw", 10, precision="bf16")
    print(max(abs(a / b - 1) for a, b in zip(found.losses, wanted.losses, strict=True)))
    assert found.losses == pytest.approx(wanted.losses, rel=2e-2)
    assert all(weight.dtype == torch.float32 for weight in found.weights.values())


# -- dropout ----------------------------------------------------------------------------------------------------------


def masks(text, held, weights, steps):
    """On every rank: what each dropout of each step kept, and the seed and shape of each attention's."""
    from autopar.job import load_program
    from autopar.runtime import Trainer

    trainer = Trainer(load_program(text), OPTIMIZERS["sgd"], "cpu")
    trainer.load_state_dict(weights)
    trainer.load_buffers(held)
    dropout, attention = F.dropout, F.scaled_dot_product_attention
    kept, seeds, losses = [], [], []

    def recorded(x, *args, **more):
        y = dropout(torch.ones_like(x), *args, **more)
        kept.append(y != 0)
        return x * y

    def seeded(query, *args, **more):
        assert more["dropout_p"] == 0.5
        seeds.append((torch.initial_seed(), query.shape))
        return attention(query, *args, **more)

    with patch.object(F, "dropout", recorded), patch.object(F, "scaled_dot_product_attention", seeded):
        for step in range(steps):
            losses.append(trainer.step(CASES["dropout"].batch(step)))
    return kept, seeds, losses


def test_masks_are_equal_on_replicas_and_differ_on_shards_and_over_dp(gloo):
    whole, split = 0, 0
    for fix, thin in (("dp=2,tp=2", False), ("dp=2,tp=2,zero=3", True)):  # whole, and along the sequence
        state = planned(CASES["dropout"], fix, thin=thin)
        by_rank = gloo.run(4, masks, state.program, buffers(state), CASES["dropout"].weights, 2)
        for kept in zip(*(rank[0] for rank in by_rank), strict=True):
            (a, b), (c, d) = kept[:2], kept[2:]  # the tp ranks of each dp rank
            assert not torch.equal(a, c) and not torch.equal(b, d), "dp ranks draw one mask"
            replicated = a.shape == (ROWS // 2, 16, 48)
            assert torch.equal(a, b) == torch.equal(c, d) == replicated
            assert all(0.45 < mask.float().mean() < 0.55 for mask in kept)
            whole, split = whole + replicated, split + (not replicated)
        for drawn in zip(*(rank[1] for rank in by_rank), strict=True):
            assert {tuple(shape) for _, shape in drawn} == {(6, 2, 16, 12)}, "heads are split"
            assert len({seed for seed, _ in drawn}) == 4
        drawn = [seed for seed, _ in by_rank[0][1]]
        assert len(set(drawn)) == len(drawn) == 4, "layers or steps share an attention mask"
        of_rank = by_rank[0][0]
        assert len(of_rank) == 2 * 5, "two steps of an embedding and two layers"
        assert not any(a.shape == b.shape and torch.equal(a, b) for i, a in enumerate(of_rank) for b in of_rank[:i])
    assert whole and split, "both kinds occur in these plans"


def gradients_of(text, held, weights):
    from autopar.job import load_program
    from autopar.runtime import Trainer

    trainer = Trainer(load_program(text), OPTIMIZERS["sgd"], "cpu")
    trainer.load_state_dict(weights)
    trainer.load_buffers(held)
    return trainer.backward(CASES["dropout"].batch(0)), trainer.full_gradients()


@pytest.mark.parametrize("fix", ("dp=2,tp=2", "dp=2,zero=3"))
def test_recompute_draws_the_same_masks_again(gloo, fix):
    found = []
    for more in ("none", "full"):
        state = planned(CASES["dropout"], f"{fix},recompute={more}")
        assert ("recompute(" in state.program) == (more == "full")
        args = (state.program, buffers(state), CASES["dropout"].weights)
        found.append(gloo.run(state.plan.mesh.devices, gradients_of, *args)[0])
    (loss, kept), (again_loss, again) = found
    assert again_loss == pytest.approx(loss, rel=1e-6)
    assert max(off(again[name], kept[name]) for name in kept) <= 1


# -- through the front door -------------------------------------------------------------------------------------------


def job_of(case, fix, **more):
    cluster = autopar.Cluster.preset(f"cpu:{dist.get_world_size()}")
    more = {"loss_fn": case.loss_fn, "optimizer": OPTIMIZERS["adamw"], "precision": "fp32"} | more
    return autopar.parallelize(case.build(), cluster, case.batch(0), fix=pins(fix), **more)


def own_rows(batch, part, parts):
    """The rows of one data-parallel rank."""
    size = ROWS // parts

    def cut(tensor):
        return tensor[part * size : (part + 1) * size]

    return {name: cut(t) for name, t in batch.items()} if isinstance(batch, dict) else tuple(map(cut, batch))


def through_parallelize(name, fix, sharded):
    """20 steps as a user writes them."""
    case = CASES[name]
    job = job_of(case, fix)
    before = {name: tensor.clone() for name, tensor in job._model.state_dict().items()}
    mesh = job.plan.mesh
    losses, gradients = [], []
    for step in range(STEPS):
        batch = case.batch(step)
        if sharded:
            batch = own_rows(batch, dist.get_rank() // mesh.tp, mesh.dp)
        if step in (0, STEPS - 1):
            assert job.evaluate(batch, sharded) == pytest.approx(job.backward(batch, sharded), rel=1e-6)
            gradients.append(job.full_gradients())
        losses.append(job.step(batch, sharded))
    after = job._model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "the user's model was changed"
    from models import Training

    return Training(tuple(losses), gradients[0], gradients[-1], job.state_dict())


@pytest.mark.parametrize(
    "name, fix, sharded",
    [("llama", "dp=2,tp=2", False), ("nanogpt", "dp=2", True), ("mlp", "dp=2,tp=2,zero=2", True), ("gpt2", "", False)],
)
def test_parallelize_trains_what_one_process_trains(gloo, name, fix, sharded):
    by_rank = gloo.run(4 if "tp" in fix else 2, through_parallelize, name, fix, sharded)
    assert all(rank.losses == by_rank[0].losses for rank in by_rank)
    assert all(rank.weights is None and rank.first is None for rank in by_rank[1:])
    worst = differences(under_first_names(by_rank[0], CASES[name]), reference(CASES[name], "adamw"))
    print(worst)
    assert all(value <= 1 for value, _ in worst.values()), worst


def round_trip(name, fix):
    """Weights out and in again, after a step; a step from them is the same step."""
    case = CASES[name]
    job = job_of(case, fix, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    job.step(case.batch(0))
    saved = [job.state_dict()]
    dist.broadcast_object_list(saved, src=0)
    loss = job.step(case.batch(1))
    after = job.state_dict()
    job.load_state_dict(saved[0])
    back = job.state_dict()
    assert job.step(case.batch(1)) == loss
    again = job.state_dict()
    if dist.get_rank() == 0:
        assert list(back) == list(case.build().state_dict()) or set(back) == set(case.build().state_dict())
        for name in back:
            assert torch.equal(back[name], saved[0][name]), name
            assert torch.equal(again[name], after[name]), name


@pytest.mark.parametrize("fix", ("tp=2", "dp=2,zero=3"))
def test_weights_come_back_bit_by_bit(gloo, fix):
    gloo.run(2, round_trip, "gpt2", fix)


def from_meta(fix):
    with torch.device("meta"):
        model = llama()
    cluster = autopar.Cluster.preset("cpu:2")
    job = autopar.parallelize(model, cluster, CASES["llama"].batch(0), precision="fp32", fix=pins(fix))
    return job.state_dict(), job.evaluate(CASES["llama"].batch(0))


def test_meta_model_is_initialised_alike_under_every_plan(gloo):
    (first, loss), *others = [gloo.run(2, from_meta, fix)[0] for fix in ("dp=2", "tp=2", "dp=2,zero=3")]
    for weights, other_loss in others:
        assert weights.keys() == first.keys()
        assert all(torch.equal(weights[name], first[name]) for name in first)
        assert other_loss == pytest.approx(loss, rel=1e-5)
    model = llama()  # its rotary tables are not in the weights
    model.load_state_dict(first)
    assert CASES["llama"].loss(model, CASES["llama"].batch(0)).item() == pytest.approx(loss, rel=1e-5)
    assert first["model.norm.weight"].eq(1).all()
    assert first["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert first["model.layers.0.mlp.up_proj.weight"].std() > 0.01
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])
