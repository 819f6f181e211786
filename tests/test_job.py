"""parallelize from the user's side: what it accepts, what it refuses, and training on one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.job import _is_fused, _optimizer_name, load_program

BATCH = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), "y": torch.ones(4, 2)}


def mse(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch["y"])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))


class Named(nn.Module):
    """Takes x by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def job(made: nn.Module | None = None, batch: Any = BATCH, **options: Any) -> autopar.Job:
    options = {"loss_fn": mse, "precision": "fp32"} | options
    return autopar.parallelize(made or Named(), autopar.Cluster.preset("cpu:1"), batch, **options)


# -- the door ---------------------------------------------------------------------------------------------------------


def in_a_fresh_interpreter(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_autopar_loads_nothing_yet():
    code = "import sys, autopar; print([m for m in ('torch', 'ortools', 'passes', 'costmodels') if m in sys.modules])"
    assert in_a_fresh_interpreter(code) == "[]"


def test_the_public_names_are_what_is_there():
    assert sorted(autopar.__all__) == autopar.__all__ == dir(autopar)
    assert all(getattr(autopar, name) for name in autopar.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Plna'"):
        autopar.Plna  # noqa: B018


# -- training on one process ------------------------------------------------------------------------------------------


def test_a_step_is_a_step_of_the_model():
    reference = Named()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    made = job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for _ in range(3):
        loss = mse(reference(BATCH["x"]), BATCH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert made.step(BATCH) == pytest.approx(loss.item(), rel=1e-5)
    for name, value in made.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name])


def test_evaluate_changes_nothing_and_backward_stops_before_the_optimizer():
    made = job()
    before = made.state_dict()
    assert made.evaluate(BATCH) == made.backward(BATCH) == made.evaluate(BATCH)
    assert made.full_gradients().keys() == before.keys()
    for name, value in made.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_the_users_model_is_never_changed():
    mine = Named()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    made = job(mine)
    made.step(BATCH)
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert all(p.grad is None for p in mine.parameters())


def test_a_saved_program_is_the_jobs_program(tmp_path):
    made = job()
    made.save(tmp_path)
    assert (tmp_path / "program.py").read_text() == made.program
    assert (tmp_path / "plan.yaml").exists()
    assert load_program(made.program).rows == 4


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "loss_fn"),
    [
        ((BATCH["x"], BATCH["y"]), lambda o, b: F.mse_loss(o, b[1])),
        (BATCH["x"], lambda o, b: (o - b[:, :2]).pow(2).mean()),
    ],
    ids=["tuple", "tensor"],
)
def test_batches_that_are_no_mapping(batch, loss_fn):
    output = Named()(BATCH["x"])
    assert job(batch=batch, loss_fn=loss_fn).evaluate(batch) == pytest.approx(loss_fn(output, batch).item(), rel=1e-5)


def test_a_batch_that_lacks_a_key_is_told():
    with pytest.raises(autopar.BadInput) as error:
        job().step({"x": BATCH["x"], "z": BATCH["y"]})
    assert str(error.value) == "the batch lacks y; it has x, z"


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (BATCH["x"][:3], "{} of the global batch has shape [3, 3], but the program is for [4, 3]"),
        (BATCH["x"].numpy(), "{} of the global batch is a ndarray, but the program reads a tensor"),
        (BATCH["x"].double(), "{} of the global batch is float64, but the program is for float32"),
    ],
    ids=["rows", "numpy", "float64"],
)
def test_an_entry_that_does_not_fit_is_named(made, made_of_tuple, x, sentence):
    for call in (made.step, made.backward, made.evaluate):
        with pytest.raises(autopar.BadInput) as error:
            call(BATCH | {"x": x})
        assert str(error.value) == sentence.format("x")
    with pytest.raises(autopar.BadInput) as error:
        made_of_tuple.step((x, BATCH["y"]))
    assert str(error.value) == sentence.format("batch[0]")


@pytest.fixture(scope="module")
def made():
    return job()


@pytest.fixture(scope="module")
def made_of_tuple():
    return job(batch=tuple(BATCH.values()), loss_fn=lambda output, batch: F.mse_loss(output, batch[1]))


def test_a_state_dict_that_does_not_fit_is_bad_input(made):
    state = made.state_dict() | {"net.0.bias": torch.zeros(7)}
    state["net.0.weight"] = state["net.0.weight"].numpy()
    del state["net.2.bias"]
    with pytest.raises(autopar.BadInput) as error:
        made.load_state_dict(state)
    assert str(error.value) == (
        "this state dict does not fit the program: net.0.weight is a ndarray, not a tensor; "
        "net.0.bias has shape [7], not [8]; net.2.bias is missing"
    )


def test_keys_that_were_not_there_at_first_are_left_out():
    made = job()
    assert made.evaluate(BATCH | {"more": torch.ones(9)}) == made.evaluate(BATCH)


class Offering(nn.Module):
    """Computes its own loss from x and labels, and offers an example."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.table(input_ids)).flatten(0, 1), labels.flatten())}


IDS = torch.arange(8).view(2, 4)


def test_the_models_own_example_batch_is_taken():
    mine = Offering()
    mine.example_batch = lambda: {"input_ids": IDS, "labels": IDS}
    made = autopar.parallelize(mine, autopar.Cluster.preset("cpu:1"), precision="fp32")
    assert (made.plan.workload.global_batch, made.plan.workload.seq_len) == (2, 4)


def test_dummy_inputs_get_labels():
    mine = Offering()
    mine.dummy_inputs = {"input_ids": IDS}
    made = autopar.parallelize(mine, autopar.Cluster.preset("cpu:1"), precision="fp32")
    expected = mine(IDS, IDS)["loss"].item()
    assert made.evaluate({"input_ids": IDS, "labels": IDS}) == pytest.approx(expected, rel=1e-5)


def test_without_an_example_the_error_says_what_to_pass():
    with pytest.raises(autopar.BadInput, match="Sequential offers no example batch; pass batch="):
        autopar.parallelize(model(), autopar.Cluster.preset("cpu:1"))


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_optimizers_that_look_at_whole_parameters_are_refused(kind):
    with pytest.raises(autopar.BadInput, match=f"the optimizer {kind.__name__} may look at whole parameters"):
        job(optimizer=kind)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop", "Adagrad"])
def test_elementwise_optimizers_are_taken(kind):
    assert job(optimizer=lambda parameters: getattr(torch.optim, kind)(parameters, lr=1e-3)).plan.status == "optimal"


def test_an_optimizer_with_more_states_than_a_plan_counts_is_refused():
    with pytest.raises(autopar.BadInput, match=r"AdamW keeps 3 states per parameter .* plans count at most 2"):
        job(optimizer=lambda parameters: torch.optim.AdamW(parameters, amsgrad=True))


@pytest.mark.parametrize(
    ("kind", "options", "counted"),
    [
        ("SGD", {}, "sgd"),  # fewer than counted
        ("SGD", {"momentum": 0.9}, "sgd"),
        ("RMSprop", {"momentum": 0.9}, "adamw"),
        ("Rprop", {}, "adamw"),
        ("NAdam", {}, "adamw"),
    ],
)
def test_states_are_counted_by_a_trial(kind, options, counted):
    assert _optimizer_name(lambda parameters: getattr(torch.optim, kind)(parameters, lr=0.1, **options)) == counted


def test_an_optimizer_that_cannot_be_made_is_bad_input():
    with pytest.raises(autopar.BadInput, match="cannot be made of a parameter: ValueError: Invalid learning rate: -1"):
        job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=-1))
    with pytest.raises(autopar.BadInput, match="the optimizer is a NoneType"):
        job(optimizer=lambda parameters: None)
    mine = Named()
    with pytest.raises(autopar.BadInput, match="made of the parameters that it is given, and of no others"):
        job(mine, optimizer=lambda parameters: torch.optim.SGD(mine.parameters()))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"precision": "fp8"}, "precision 'fp8' is not known; use one of fp32, bf16"),
        ({"global_batch": 0}, "a global batch of 0 rows is not possible"),
        ({"fix": {"tp": 3}}, "--fix dp=1,tp=3 needs 3 devices; there are 1"),
        ({"loss_fn": None}, "Named returns no scalar loss; pass loss_fn="),
    ],
)
def test_options_that_cannot_be_are_bad_input(options, sentence):
    with pytest.raises(autopar.BadInput) as error:
        job(**options)
    assert sentence in str(error.value)


def test_a_larger_global_batch_than_the_example():
    made = job(global_batch=8)
    whole = {name: torch.cat([value, 2 * value]) for name, value in BATCH.items()}
    assert made.evaluate(whole) == pytest.approx(mse(Named()(whole["x"]), whole).item(), rel=1e-5)


def test_a_model_on_meta_is_planned_and_initialised_by_its_own_initialisers():
    with torch.device("meta"):
        mine = Named()
    made = job(mine)
    assert all(p.is_meta for p in mine.parameters())
    assert made.evaluate(BATCH) > 0


# -- ranks that are not alike -----------------------------------------------------------------------------------------


def on_2_ranks(made: nn.Module, **options: Any) -> autopar.Job:
    cluster = autopar.Cluster.preset("cpu:2")
    return autopar.parallelize(made, cluster, BATCH, **{"loss_fn": mse, "precision": "fp32"} | options)


def seed_by_rank(what: str) -> str:
    made = on_2_ranks(Named(), fix={"dp": 2})
    with torch.no_grad():
        if what == "seed":
            made._model.net[2].weight += dist.get_rank()
        if what == "load":
            made.trainer  # noqa: B018
            state = Named().state_dict() | {"net.0.bias": torch.full((8,), 1.0 + dist.get_rank())}
    with pytest.raises(autopar.BadInput) as error:
        made.step(BATCH) if what == "seed" else made.load_state_dict(state)
    return str(error.value)


@pytest.mark.parametrize(("what", "name"), [("seed", "net.2.weight"), ("load", "net.0.bias")])
def test_weights_that_differ_by_rank_are_refused_on_every_rank(gloo, what, name):
    expected = (
        f"{name} on rank 1 is not that on rank 0, but every rank is to hold the same whole weights: "
        "seed alike, or load the checkpoint on every rank"
    )
    assert gloo.run(2, seed_by_rank, what) == [expected] * 2


def fail_on_rank_0() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.job.compile_model", _fail)  # runs on rank 0 alone
        try:
            on_2_ranks(Named())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "went on"


def _fail(*args: Any, **named: Any) -> None:
    raise LookupError("no such thing")


def test_any_fault_of_planning_ends_all_ranks(gloo):
    first, second = gloo.run(2, fail_on_rank_0, timeout_s=20)
    assert first == "LookupError: no such thing"
    assert second == "AutoparError: planning failed on rank 0: LookupError: no such thing"


def test_only_a_fused_optimizer_updates_without_temporaries():
    assert _is_fused(None)
    assert _is_fused(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True))
    assert not _is_fused(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
