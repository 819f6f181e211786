"""parallelize from the user's side: what it accepts, what it refuses, and training on one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.job import load_program

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
