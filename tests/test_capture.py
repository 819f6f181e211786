"""What CAPTURE records of a model, what it refuses and in which words, and what it leaves alone."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels.errors import BadInput, CaptureError
from passes.capture import BatchInput, Captured, capture, forward_arguments
from passes.graph import CONSTANT, Graph, Op, Size
from passes.interpret import run

ROWS = 4
BATCH = {"x": torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)), "y": torch.ones(ROWS, 3)}
WIDE = {"x": BATCH["x"], "y": torch.ones(ROWS, 6)}


class Small(nn.Module):
    """Runs `compute(self, x)`; keyword arguments become its modules, parameters and (tensors) buffers."""

    def __init__(self, compute: Callable[[Any, Tensor], Any], **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def mse(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch["y"])


def captured(compute: Callable[[Any, Tensor], Any], loss_fn: Any = mse, batch: Any = BATCH, **members: Any) -> Captured:
    """The capture of a `Small` with a linear layer `a`."""
    return capture(Small(compute, a=linear(), **members), batch, loss_fn)


def targets(graph: Graph) -> list[str]:
    return [op.target.removeprefix("aten.") for op in graph.ops]


def op_of(graph: Graph, target: str) -> Op:
    """The one operator of that name."""
    (found,) = (op for op in graph.ops if op.target.removeprefix("aten.").startswith(target))
    return found


def computed(model: nn.Module, found: Captured, batch: Any = BATCH) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the captured graph on the model's own weights, and the buffers afterwards."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **found.constants}
    held = {
        p.value.name: state[p.name].detach().clone().to(getattr(torch, p.value.dtype)) for p in found.graph.parameters
    }
    given = {one.name: batch[one.key] for one in found.inputs}
    loss = run(found.graph.at(ROWS), held | given, rows=ROWS)[found.graph.loss]
    return loss, {p.name: held[p.value.name] for p in found.graph.parameters if p.buffer}


# -- rows and inputs --------------------------------------------------------------------------------------------------


def test_rows_are_a_size_and_everything_else_is_a_number():
    graph = captured(lambda self, x: self.a(x.unsqueeze(1).expand(-1, 2, -1)).reshape(-1, 6), batch=WIDE).graph
    assert [v.shape for v in graph.inputs] == [(Size(1), 3), (Size(1), 6)]
    assert op_of(graph, "linear").results[0].shape == (Size(1), 2, 3)


def test_merged_dims_are_multiples_of_the_batch():
    graph = captured(lambda self, x: self.a(x.view(-1, 3)).view(-1, 6), batch={"x": WIDE["y"], "y": WIDE["y"]}).graph
    assert op_of(graph, "linear").results[0].shape == (Size(2), 3)


def test_inputs_whose_first_dim_is_another_have_no_rows():
    batch = BATCH | {"scale": torch.ones(3), "factor": torch.tensor(2.0)}
    found = captured(lambda self, x: self.a(x), lambda o, b: mse(o * b["scale"], b) * b["factor"], batch)
    assert [(one.key, one.rows) for one in found.inputs] == [
        ("x", True), ("y", True), ("scale", False), ("factor", False),
    ]  # fmt: skip


def test_two_equal_tensors_stay_two_inputs():
    same = BATCH["x"]
    found = captured(lambda self, x: self.a(x), batch={"x": same, "y": same})
    assert [one.name for one in found.inputs] == ["x", "y"]
    assert op_of(found.graph, "broadcast_tensors").operands == ("linear", "y")


@pytest.mark.parametrize("batch", [(BATCH["x"], BATCH["y"]), [BATCH["x"], BATCH["y"]]])
def test_positions_of_a_sequence_are_inputs(batch):
    found = captured(lambda self, x: self.a(x), lambda o, b: F.mse_loss(o, b[1]), batch)
    assert found.inputs == (BatchInput(0, "input_0", True), BatchInput(1, "input_1", True))


def test_one_tensor_is_a_batch():
    found = captured(lambda self, x: self.a(x), F.mse_loss, BATCH["x"])
    assert found.inputs == (BatchInput(0, "input_0", True),)


def test_an_input_named_like_an_operator_is_not_confused_with_it():
    batch = {"x": BATCH["x"], "t": BATCH["y"]}
    model = Small(lambda self, x: x @ self.a.weight.t(), a=linear())
    found = capture(model, batch, lambda o, b: F.mse_loss(o, b["t"]))
    expected = F.mse_loss(batch["x"] @ model.a.weight.t(), batch["t"])
    torch.testing.assert_close(computed(model, found, batch)[0], expected.detach())


def test_keys_that_are_no_names_become_names():
    found = captured(
        lambda self, x: self.a(x), lambda o, b: F.mse_loss(o, b["a target"]), {"x": BATCH["x"], "a target": BATCH["y"]}
    )
    assert [one.name for one in found.inputs] == ["x", "input_a_target"]


def test_numbers_in_the_batch_are_part_of_the_program_and_noted():
    found = captured(lambda self, x: self.a(x), lambda o, b: mse(o, b) * b["factor"], BATCH | {"factor": 3})
    assert [one.key for one in found.inputs] == ["x", "y"]
    assert found.notes == ("batch entry factor is 3 for good: numbers are part of the program; a tensor may vary",)


def test_tensors_deeper_in_the_batch_are_refused():
    with pytest.raises(BadInput, match="the batch holds tensors inside y; put every tensor at the top"):
        captured(lambda self, x: self.a(x), lambda o, b: o.sum(), {"x": BATCH["x"], "y": {"z": BATCH["y"]}})


@pytest.mark.parametrize("batch", [{}, (), {"text": "no tensor"}])
def test_a_batch_without_tensors_is_refused(batch):
    with pytest.raises(BadInput, match="the batch holds no tensor"):
        captured(lambda self, x: self.a(x), mse, batch)


def test_a_batch_of_one_row_serves_every_batch_size():
    found = captured(lambda self, x: self.a(x), batch={k: v[:1] for k, v in BATCH.items()})
    assert (found.example_rows, found.graph.inputs[0].shape) == (1, (Size(1), 3))


class Masked(Small):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return self.compute(self, x if mask is None else x * mask)


@pytest.mark.parametrize("make", [tuple, lambda leaves: Pair(*leaves)])
def test_the_target_of_a_tuple_is_no_optional_argument(make):
    batch = make((BATCH["x"], BATCH["y"]))
    graph = capture(Masked(lambda self, x: self.a(x), a=linear()), batch, lambda o, b: F.mse_loss(o, b[1])).graph
    assert "mul.Tensor" not in targets(graph)


def test_a_model_that_returns_its_loss_takes_optional_positions():
    model = Masked(lambda self, x: self.a(x).sum(), a=linear())
    assert "mul.Tensor" in targets(capture(model, (BATCH["x"], BATCH["y"]), None).graph)


def test_forward_takes_one_position_even_if_all_are_optional():
    def forward(x=None, mask=None):
        pass

    assert forward_arguments(forward, (1, 2), mse) == ((1,), {})
    assert forward_arguments(forward, (1, 2)) == ((1, 2), {})


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_a_named_tuple_keeps_its_names_for_the_loss():
    found = captured(lambda self, x: self.a(x), lambda o, b: F.mse_loss(o, b.y), Pair(BATCH["x"], BATCH["y"]))
    assert op_of(found.graph, "mse_loss").results and [one.key for one in found.inputs] == [0, 1]


# -- parameters, buffers, literals ------------------------------------------------------------------------------------


def test_a_tied_weight_is_one_parameter_with_all_its_names():
    def tied(self, x):
        return self.a(x) @ self.b.weight

    model = Small(tied, a=linear(), b=linear())
    model.b.weight = model.a.weight
    graph = capture(model, BATCH, mse).graph
    assert [p.names for p in graph.parameters] == [("a.weight", "b.weight"), ("a.bias",), ("b.bias",)]
    assert op_of(graph, "matmul").operands[1] == op_of(graph, "linear").operands[1]


def test_frozen_and_unused_parameters_are_kept_and_only_frozen_ones_have_no_gradient():
    found = captured(lambda self, x: self.a(x), b=linear(), c=nn.Parameter(torch.zeros(2), requires_grad=False))
    assert {p.name: p.value.grad for p in found.graph.parameters} == {
        "c": False, "a.weight": True, "a.bias": True, "b.weight": True, "b.bias": True,
    }  # fmt: skip


def test_nothing_behind_detach_has_a_gradient():
    graph = captured(lambda self, x: self.a(x).detach() + x).graph
    assert [v.grad for op in graph.ops for v in op.results if v.dtype == "float32"] == [True] + 5 * [False]


def test_buffers_are_parameters_without_gradient():
    model = Small(lambda self, x: self.a(x) + self.kept + self.shown, a=linear(), kept=torch.ones(3))
    model.register_buffer("shown", torch.ones(3), persistent=False)
    buffers = [p for p in capture(model, BATCH, mse).graph.parameters if p.buffer]
    assert [(p.name, p.persistent, p.value.grad) for p in buffers] == [("kept", True, False), ("shown", False, False)]


def test_small_literals_are_written_down_and_large_ones_are_kept_aside():
    model = Small(lambda self, x: self.a(x) * torch.tensor([1.0, 2.0, 3.0]), a=linear())
    found = capture(model, BATCH, mse)
    assert op_of(found.graph, CONSTANT).args == ((1.0, 2.0, 3.0),)
    large = Small(lambda self, x: self.a(x) + torch.tensor([float(i) for i in range(99)])[:3], a=linear())
    kept = capture(large, BATCH, mse)
    assert {name: len(value) for name, value in kept.constants.items()} == {"constants.literal_0": 99}
    torch.testing.assert_close(computed(large, kept)[0], mse(large(BATCH["x"]), BATCH).detach())


def test_old_weight_norm_is_captured_from_its_two_parameters():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Small(lambda self, x: self.a(x), a=nn.utils.weight_norm(linear()))
    assert {p.name for p in capture(model, BATCH, mse).graph.parameters} == {"a.bias", "a.weight_g", "a.weight_v"}


def test_lazy_parameters_are_refused():
    with pytest.raises(BadInput, match="lazy parameters; run one batch through it first"):
        capture(Small(lambda self, x: self.b(x), b=nn.LazyLinear(3)), BATCH, mse)


# -- what is written in place -----------------------------------------------------------------------------------------


def same_as_eager(compute: Callable[[Any, Tensor], Tensor], **members: Any) -> Captured:
    """The captured graph gives the loss and the buffers of the model itself."""
    model = Small(compute, a=linear(), **members)
    found = capture(model, BATCH, mse)
    loss, buffers = computed(model, found)
    torch.testing.assert_close(loss, mse(model(BATCH["x"].clone()), BATCH).detach())
    for name, value in model.named_buffers():
        torch.testing.assert_close(buffers[name], value)
    return found


def test_in_place_operators_on_activations_become_functional():
    def compute(self, x):
        h = self.a(x)
        h.relu_()
        h += 1
        return h

    graph = same_as_eager(compute).graph
    assert targets(graph)[:3] == ["linear.default", "relu.default", "add.Tensor"]


@pytest.mark.parametrize(
    ("fill", "target"),
    [
        (lambda t: t.bernoulli_(0.5), "bernoulli.p"),
        (lambda t: t.bernoulli_(), "bernoulli.p"),
        (lambda t: t.normal_(), "normal_functional.default"),
        (lambda t: t.uniform_(), "uniform.default"),
    ],
)
def test_tensors_filled_with_random_numbers_become_functional(fill, target):
    model = Small(lambda self, x: self.a(x) * fill(x.new_empty(x.shape[0], 1)).div_(0.5), a=linear())
    found = capture(model, BATCH, mse)
    assert targets(found.graph)[1:4] == ["new_empty.default", target, "div.Tensor"]
    assert computed(model, found)[0].isfinite()


def test_writes_into_views_become_functional():
    def compute(self, x):
        h = self.a(x)
        h[:, 1:] = x[:, :-1]
        h[:, 0] = 7.0
        return h

    graph = same_as_eager(compute).graph
    assert not [t for t in targets(graph) if t.endswith("_.default")]


def test_a_write_is_seen_through_an_alias_that_no_view_shows():
    def compute(self, x):
        h = self.a(x)
        same = h.contiguous()
        h.mul_(3)
        return same

    same_as_eager(compute)


def test_a_write_into_an_input_is_seen_by_later_readers():
    def compute(self, x):
        x.mul_(2)
        x[:, 0] = 0
        return self.a(x)

    same_as_eager(compute)


def test_counters_and_moving_averages_stay_writes():
    def compute(self, x):
        h = self.a(x)
        self.count += 1
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.mean

    graph = same_as_eager(compute, count=torch.tensor(0), mean=torch.ones(3)).graph
    assert [t for t in targets(graph) if "_." in t] == ["add_.Tensor", "mul_.Tensor", "add_.Tensor"]


def test_a_write_into_a_view_of_a_buffer_is_stored_at_the_end():
    def compute(self, x):
        self.table[0] += 1
        return self.a(x) + self.table

    graph = same_as_eager(compute, table=torch.zeros(3)).graph
    assert targets(graph)[-1] == "copy_.default"


@pytest.mark.parametrize(
    ("compute", "operator", "parameter"),
    [
        (lambda self, x: self.b(x.long()).sum(1), "embedding_renorm_", "b.weight"),
        (lambda self, x: x @ self.a.weight.detach().clamp_(-1, 1), "clamp_", "a.weight"),
        (lambda self, x: self.a(x) + self.c.mul_(2), "mul_", "c"),
        (lambda self, x: self.a(x) + self.c[1:].mul_(2).sum(), "mul_", "c"),
    ],
)
def test_a_write_into_a_parameter_is_refused(compute, operator, parameter):
    members = {"b": nn.Embedding(9, 3, max_norm=1.0), "c": nn.Parameter(torch.ones(3), requires_grad=False)}
    with pytest.raises(CaptureError) as error:
        captured(compute, **members)
    line = compute.__code__.co_firstlineno
    assert str(error.value).startswith(f"{__file__}:{line}: {operator} changes the parameter {parameter} in place; ")


def test_batch_norm_updates_its_statistics():
    found = same_as_eager(lambda self, x: self.norm(self.a(x)), norm=nn.BatchNorm1d(3))
    assert op_of(found.graph, "batch_norm").args[5] is True


def test_batch_norm_updates_its_statistics_beside_writes_into_views():
    def compute(self, x):
        h = self.a(x)
        h[:, 0] = 1.0
        return self.norm(self.norm(h))

    graph = same_as_eager(compute, norm=nn.BatchNorm1d(3)).graph
    assert targets(graph).count("batch_norm.default") == 2


def test_modules_keep_their_own_training_mode():
    model = Small(lambda self, x: self.norm(self.a(x)), a=linear(), norm=nn.BatchNorm1d(3)).train()
    model.norm.eval()
    assert op_of(capture(model, BATCH, mse).graph, "batch_norm").args[5] is False


# -- blocks of no_grad and autocast -----------------------------------------------------------------------------------


def taught(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        t = self.b(h).tanh()
        first, second, third = (t * 2).split(1, -1)
        with torch.enable_grad():
            h = h + self.b(x)
        third = third + h[:, :1]
    return h + t * first - second * third


def gradients(loss: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    return {name: g for name, g in zip(tensors, found, strict=True) if g is not None}


def same_gradients(model: nn.Module) -> Graph:
    """The captured graph gives the model's own loss and gradients."""
    found = capture(model, BATCH, mse)
    names = {p.value.name: p.name for p in found.graph.parameters}
    held = {name: model.get_parameter(own).detach().clone().requires_grad_() for name, own in names.items()}
    given = {one.name: BATCH[str(one.key)] for one in found.inputs}
    loss = run(found.graph.at(ROWS), held | given, rows=ROWS)[found.graph.loss]
    own = mse(model(BATCH["x"]), BATCH)
    torch.testing.assert_close(loss, own)
    torch.testing.assert_close(
        gradients(loss, {own: held[name] for name, own in names.items()}),
        gradients(own, dict(model.named_parameters())),
    )
    return found.graph


def test_what_no_grad_computes_is_detached():
    torch.manual_seed(0)
    graph = same_gradients(Small(taught, a=nn.Linear(3, 3), b=nn.Linear(3, 3)))
    detached = [op for op in graph.ops if op.target == "aten.detach.default"]
    assert len(detached) >= 3 and not any(op.results[0].grad for op in detached)
    assert {op.source.rpartition(":")[0] for op in detached} == {__file__}


def test_no_grad_around_writes_into_views():
    def compute(self, x):
        h = self.a(x)
        with torch.no_grad():
            t = self.b(x)
            t[:, 0] = 3.0
        return h + t

    graph = same_gradients(Small(compute, a=linear(), b=linear()))
    assert not [t for t in targets(graph) if t.endswith("_.default")]


def test_no_grad_over_what_has_no_gradient_needs_no_detach():
    def compute(self, x):
        with torch.no_grad():
            scale = x.cos()
        return self.a(x) * scale

    assert not [t for t in targets(same_gradients(Small(compute, a=linear()))) if t.startswith("detach")]


def test_a_buffer_is_updated_under_no_grad():
    def compute(self, x):
        h = self.a(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h - self.mean

    graph = same_as_eager(compute, mean=torch.ones(3)).graph
    assert [t for t in targets(graph) if "_." in t] == ["mul_.Tensor", "add_.Tensor"]


def test_an_activation_that_no_grad_writes_into_is_refused():
    def compute(self, x):
        h = self.a(x)
        with torch.no_grad():
            h.mul_(2)
        return h

    line = here(-3)
    with pytest.raises(CaptureError) as error:
        captured(compute)
    assert str(error.value) == f"{line}: mul_: under no_grad, it changes a tensor in place that has a gradient"


def test_autocast_is_refused_unless_it_is_off():
    def compute(self, x, enabled=True):
        with torch.autocast("cpu", enabled=enabled):
            return self.a(x)

    line = here(-2)
    with pytest.raises(CaptureError) as error:
        captured(compute)
    assert str(error.value) == (f"{line}: torch.autocast: precision is chosen with precision=; remove the autocast")
    graph = same_gradients(Small(lambda self, x: compute(self, x, enabled=False), a=linear()))
    assert targets(graph)[0] == "linear.default"


# -- precision --------------------------------------------------------------------------------------------------------


def test_bf16_computes_in_bf16_and_takes_the_loss_in_fp32():
    graph = capture(Small(lambda self, x: self.a(x), a=linear()), BATCH, mse, "bf16").graph
    assert op_of(graph, "linear").results[0].dtype == "bfloat16"
    assert op_of(graph, "mse_loss").results[0].dtype == "float32"
    assert {v.dtype for v in graph.inputs} == {"float32"}


class Answer(UserDict[str, Any]):
    """A mapping that torch does not know."""


@pytest.mark.parametrize(
    ("wrap", "first"),
    [
        (lambda h: (h, {"hidden": h}), lambda o: o[0] + o[1]["hidden"]),
        (lambda h: {"pred": h, "of": None}, lambda o: o["pred"]),
        (lambda h: {"pred": h}, lambda o: o["pred"]),
        (lambda h: Answer(pred=h), lambda o: o["pred"]),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_output_of_bf16_reaches_the_loss_in_fp32(wrap, first, precision):
    low = torch.bfloat16
    model = Small(lambda self, x: wrap(F.linear(x.to(low), self.a.weight.to(low))), a=linear())
    graph = capture(model, BATCH, lambda o, b: mse(first(o), b), precision).graph
    assert op_of(graph, "linear").results[0].dtype == "bfloat16"
    assert {graph.values[name].dtype for name in op_of(graph, "mse_loss").operands} == {"float32"}


def test_bf16_runs_where_a_buffer_of_fp32_meets_it():
    def compute(self, x):
        h = self.norm(self.a(x) + self.positions)
        return self.b(h) + self.batch(self.conv((h * self.positions).unsqueeze(-1)).squeeze(-1))

    model = Small(
        compute, a=linear(), b=linear(), positions=torch.full((3,), 0.5), norm=nn.LayerNorm(3), conv=nn.Conv1d(3, 3, 1),
        batch=nn.BatchNorm1d(3),
    )  # fmt: skip
    found = capture(model, BATCH, mse, "bf16")
    dtypes = {op.target.split(".")[1]: op.results[0].dtype for op in found.graph.ops}
    assert (dtypes["linear"], dtypes["layer_norm"], dtypes["conv1d"]) == ("bfloat16", "float32", "bfloat16")
    loss, _ = computed(model, found)
    torch.testing.assert_close(loss, mse(model(BATCH["x"]), BATCH).detach(), rtol=0.05, atol=0.05)


def test_an_unknown_precision_is_refused():
    with pytest.raises(BadInput, match="precision 'fp8' is not known; use one of fp32, bf16"):
        capture(Small(lambda self, x: self.a(x), a=linear()), BATCH, mse, "fp8")


@pytest.mark.parametrize(("dtype", "name"), [(torch.float64, "float64"), (torch.float16, "float16")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_of_other_dtypes_are_refused(dtype, name, precision):
    with pytest.raises(BadInput, match=f"a.weight is {name}, and only fp32 and bf16 parameters are trained"):
        capture(Small(lambda self, x: self.a(x), a=linear().to(dtype)), BATCH, mse, precision)


# -- what cannot be captured ------------------------------------------------------------------------------------------


def here(offset: int) -> str:
    """This file and a line relative to the caller's."""
    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


def test_a_decision_on_values_names_the_line_and_a_remedy():
    def compute(self, x):
        if x.sum() > 0:
            return self.a(x)
        return x

    line = here(-4)
    with pytest.raises(CaptureError) as error:
        captured(compute)
    assert str(error.value) == (
        f"Small cannot be captured at {line} (if x.sum() > 0:): its forward decides on the values of a tensor; "
        "use torch.where or torch.cond, or make it static"
    )


@pytest.mark.parametrize(
    ("compute", "what"),
    [
        (lambda self, x: self.a(x) * x.sum().item(), "mul: it computes with the number .*; keep it a tensor"),
        (lambda self, x: self.a(x[x[:, 0] > 0]), "index: a tensor's size depends on values; use torch.where"),
        (lambda self, x: self.a(x)[x > 0], "index: a tensor's size depends on values; use torch.where"),
    ],
)
def test_values_that_become_numbers_or_sizes_are_refused(compute, what):
    with pytest.raises(CaptureError, match=f"test_capture.py:[0-9]+: {what}"):
        captured(compute, lambda o, b: o.sum())


def test_the_users_own_error_is_shown_with_its_line():
    def compute(self, x):
        raise ValueError("three heads are too many")

    line = here(-2)
    with pytest.raises(CaptureError) as error:
        captured(compute)
    assert f"{line} (" in str(error.value) and str(error.value).endswith("three heads are too many")


def test_an_error_of_loss_fn_is_said_to_be_of_loss_fn():
    def loss_fn(output, batch):
        return F.mse_loss(output, batch["labels"])

    line = here(-2)
    with pytest.raises(CaptureError) as error:
        captured(lambda self, x: self.a(x), loss_fn)
    assert str(error.value).startswith(f"Small cannot be captured with this loss_fn at {line} (")
    assert str(error.value).endswith("): KeyError: 'labels'; the batch has x, y")


def test_a_key_that_forward_itself_misses_is_not_the_batchs():
    with pytest.raises(CaptureError, match=r"KeyError: 'q'$"):
        captured(lambda self, x: self.a({}["q"]))


def test_what_forward_misses_is_said_beside_what_the_batch_has():
    with pytest.raises(CaptureError, match=r"missing 1 required positional argument: 'x'; the batch has X, y$"):
        captured(lambda self, x: self.a(x), batch={"X": BATCH["x"], "y": BATCH["y"]})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "compute",
    [
        lambda self, x: self.a(x.to(torch.float16)),
        lambda self, x: F.linear(x, weight=self.a.weight.double()),
        lambda self, x: (self.a.weight.double() @ x[0]) + x,
    ],
)
def test_products_of_two_dtypes_are_refused_as_on_real_tensors(compute, precision):
    with pytest.raises(RuntimeError):
        compute(Small(compute, a=linear()), BATCH["x"])
    with pytest.raises(CaptureError, match=r"test_capture.py:\d+: .* takes tensors of one dtype, not .*float"):
        capture(Small(compute, a=linear()), BATCH, mse, precision)


def test_products_of_two_dtypes_in_loss_fn_are_refused():
    with pytest.raises(CaptureError, match="takes tensors of one dtype, not float32 and float64"):
        captured(lambda self, x: self.a(x), lambda o, b: (o @ torch.ones(3, 3, dtype=torch.float64)).sum())


def test_a_mask_may_have_another_dtype():
    def attend(self, x):
        q = self.a(x)[None].half()
        return F.scaled_dot_product_attention(q, q, q, torch.zeros(x.shape[0], x.shape[0])).float()[0]

    assert targets(captured(attend, loss_fn=lambda o, b: o.sum()).graph)


def test_parameters_of_bf16_are_trained_in_bf16_only():
    model = Small(lambda self, x: self.a(x.to(torch.bfloat16)), a=linear().to(torch.bfloat16))
    assert op_of(capture(model, BATCH, mse, "bf16").graph, "linear").results[0].dtype == "bfloat16"
    with pytest.raises(BadInput, match=r"^a.weight is bfloat16 and precision is fp32; use model.float\(\) first"):
        capture(model, BATCH, mse, "fp32")


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (None, "Small returns no scalar loss; pass loss_fn=, a function of (output, batch)"),
        (lambda output, batch: output.sum(1), "loss_fn(output, batch) does not return a scalar tensor"),
        (lambda output, batch: None, "loss_fn(output, batch) does not return a scalar tensor"),
    ],
)
def test_no_loss_is_bad_input(loss_fn, message):
    with pytest.raises(BadInput) as error:
        captured(lambda self, x: self.a(x), loss_fn)
    assert str(error.value) == message


def test_nothing_of_torchs_own_report_is_printed(capfd):
    level = logging.root.manager.disable
    with pytest.raises(CaptureError):
        captured(lambda self, x: self.a(x) if x.sum() > 0 else x)
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == level


# -- rows that cannot be told apart -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (lambda o, b: mse(o, b) * len(o), "makes a plain int of the number of rows .*; use x.shape"),
        (lambda o, b: F.cross_entropy(o @ o.t(), torch.arange(ROWS)), "Expected input batch_size"),
        (lambda o, b: (o.unsqueeze(1) * o).reshape(-1, 3).sum(), r"depends on the batch as \w+\*\*2"),
        (lambda o, b: mse(o, b) * (1 / o.shape[0]), "computes with the number"),
    ],
)
def test_a_loss_that_fixes_the_rows_is_captured_for_them_alone(loss_fn, why):
    found = captured(lambda self, x: self.a(x), loss_fn)
    assert found.coupled.startswith("the rows of a batch are not independent: ")
    assert found.graph.inputs[0].shape == (ROWS, 3)
    assert re.search(why, found.coupled), found.coupled


def test_an_entry_that_may_not_go_by_rows_is_named():
    batch = {**BATCH, "table": torch.rand(ROWS, 3)}
    found = captured(lambda self, x: self.a(x), lambda o, b: mse(o, b) + (F.pad(o, (0, 1)) @ b["table"]).sum(), batch)
    assert found.coupled.endswith("; x, y, table are taken to go by rows: give one that does not another first dim")


# -- what is left alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_users_model_is_untouched(device):
    model = Small(lambda self, x: self.norm(self.a(x)), a=linear(), norm=nn.BatchNorm1d(3)).to(device)
    model.norm.eval()

    def picture():
        tensors = {name: (id(t), t._version) for name, t in (*model.named_parameters(), *model.named_buffers())}
        return tensors, [(name, m.training, set(vars(m))) for name, m in model.named_modules()]

    before = picture()
    capture(model, BATCH, mse, "bf16")
    assert picture() == before


def test_weights_are_never_materialised():
    wide = 100_000  # 40 GB of fp32: building it for real would not go unnoticed
    with torch.device("meta"):
        model = Small(lambda self, x: self.b(self.a(x)), a=nn.Linear(3, wide), b=nn.Linear(wide, wide))
    graph = capture(model, {"x": BATCH["x"]}, lambda o, b: o.sum()).graph
    assert op_of(graph, "sum").operands == ("linear_1",)


# -- models of the Hugging Face ---------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=41, n_embd=12, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


IDS = torch.randint(0, 41, (ROWS, 6), generator=torch.Generator().manual_seed(0))


def test_a_cache_in_the_output_is_no_obstacle():
    ids = {"input_ids": IDS, "labels": IDS}
    model = gpt2()
    assert model.config.use_cache
    found = capture(model, ids, None)
    assert (found.coupled, found.seq_len, found.notes) == ("", 6, ())
    assert ("transformer.wte.weight", "lm_head.weight") in [p.names for p in found.graph.parameters]
    torch.testing.assert_close(computed(model, found, ids)[0], model(**ids).loss.detach())


def test_gradient_checkpointing_is_noted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = gpt2()
        model.gradient_checkpointing_enable()
    notes = capture(model, {"input_ids": IDS, "labels": IDS}, None).notes
    assert notes == ("the model's own gradient checkpointing is ignored: recompute is planned here",)


def test_operators_know_their_module_and_line():
    graph = capture(gpt2(), {"input_ids": IDS, "labels": IDS}, None).graph
    attention = op_of(graph, "scaled_dot_product_attention")
    assert attention.module == "transformer.h.0.attn"
    assert "sdpa_attention.py:" in attention.source


def test_the_loss_function_is_the_source_of_its_operators():
    def loss_fn(output, batch):
        return (output - batch["y"]).abs().mean()

    assert op_of(captured(lambda self, x: self.a(x), loss_fn).graph, "abs").source == here(-2)
