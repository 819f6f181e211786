"""Where the rows of the batch lie, what must be summed over them first, and which operators mix them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.batch import BatchInfo, Partial, batch_info, split_prologue
from passes.capture import capture
from passes.graph import Graph, Op, Ref, Size, Value
from passes.normalize import normalize
from passes.placements import S
from test_capture import BATCH, IDS, Small, gpt2, linear

TARGETS = torch.tensor([0, 2, -100, 1])
LOSSES = BATCH | {"classes": TARGETS}


def analysed(model: nn.Module, batch: Any = LOSSES, loss_fn: Any = None) -> tuple[Graph, BatchInfo]:
    found = capture(model, batch, loss_fn)
    assert found.coupled == ""
    graph, _ = normalize(found.graph)
    return graph, batch_info(graph, frozenset(one.name for one in found.inputs if one.rows))


def coupled_by(loss_fn: Callable[[Tensor, Any], Tensor], compute: Any = None, **members: Any) -> str:
    model = Small(compute or (lambda self, x: self.a(x)), a=linear(), **members)
    return analysed(model, loss_fn=loss_fn)[1].coupled


def line_of(function: Callable[..., Any]) -> str:
    """Where a function of one statement computes."""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + 1}"


# -- hand-written graphs ----------------------------------------------------------------------------------------------

X = Value("x", (Size(1), 6, 4), "float32", False)


def one_op(target: str, *args: Any, shape: tuple[Any, ...], then: tuple[Op, ...] = (), loss: str = "y") -> BatchInfo:
    """The analysis of a graph with one operator on x [batch, 6, 4], and others behind it."""
    op = Op(f"aten.{target}", (Ref("x"), *args), (), (Value("y", shape, "float32", True),))
    return batch_info(Graph((X,), (), (op, *then), loss), frozenset(["x"]))


@pytest.mark.parametrize(
    ("target", "args", "shape", "lies"),
    [
        ("relu.default", (), (Size(1), 6, 4), S(0)),
        ("transpose.int", (0, 1), (6, Size(1), 4), S(1)),
        ("reshape.default", ((Size(6), 4),), (Size(6), 4), S(0)),
        ("sum.dim_IntList", ((1,),), (Size(1), 4), S(0)),
        ("sum.dim_IntList", ((0,),), (6, 4), Partial()),
        ("sum.default", (), (), Partial()),
        ("softmax.int", (-1,), (Size(1), 6, 4), S(0)),
    ],
)
def test_rows_lie(target, args, shape, lies):
    assert one_op(target, *args, shape=shape).spread["y"] == lies


def test_rows_that_are_not_the_first_dim_are_cut_in_blocks_when_merged():
    swapped = Op("aten.reshape.default", (Ref("y"), (Size(6), 4)), (), (Value("z", (Size(6), 4), "float32", True),))
    info = one_op("transpose.int", 0, 1, shape=(6, Size(1), 4), then=(swapped,), loss="z")
    assert info.spread["z"] == S(0, 6)


@pytest.mark.parametrize(
    ("target", "args", "shape"),
    [
        ("softmax.int", (0,), (Size(1), 6, 4)),
        ("cumsum.default", (0,), (Size(1), 6, 4)),
        ("mean.dim", ((0,),), (6, 4)),
        ("select.int", (0, 0), (6, 4)),
        ("flip.default", ((0,),), (Size(1), 6, 4)),
        ("bincount.default", (), (4,)),  # no rule
    ],
)
def test_rows_are_mixed_by(target, args, shape):
    assert one_op(target, *args, shape=shape).coupled.startswith(
        f"{target.partition('.')[0]} in the model's own forward () mixes the rows"
    )


def test_a_loss_per_row_and_a_loss_without_rows_are_refused():
    assert one_op("sum.dim_IntList", (1, 2), shape=(Size(1),)).coupled == "the loss has one value per row"
    fresh = Op("aten.zeros.default", ((),), (), (Value("z", (), "float32", True),))
    assert (
        one_op("relu.default", shape=X.shape, then=(fresh,), loss="z").coupled == "the loss is the same for every row"
    )


# -- normalizers ------------------------------------------------------------------------------------------------------


def test_the_count_of_valid_targets_is_summed_first():
    graph, info = analysed(
        Small(lambda self, x: self.a(x), a=linear()), loss_fn=lambda o, b: F.cross_entropy(o, b["classes"])
    )
    assert (info.normalizers, info.coupled) == (("cross_entropy_loss_count",), "")
    main, prologue = split_prologue(graph, info)
    assert [op.target for op in prologue] == ["aten.ne.Scalar", "aten.sum.default"]
    assert [v.name for v in main.inputs] == ["x", "y", "classes", "cross_entropy_loss_count"]
    assert not {op.name for op in main.ops} & {op.name for op in prologue}


def test_two_losses_may_have_two_counts():
    def loss_fn(o: Tensor, b: Any) -> Tensor:
        return F.cross_entropy(o, b["classes"]) + F.cross_entropy(-o, b["classes"].abs() % 3, ignore_index=1)

    _, info = analysed(Small(lambda self, x: self.a(x), a=linear()), loss_fn=loss_fn)
    assert info.normalizers == ("cross_entropy_loss_count", "cross_entropy_loss_1_count")


def test_a_sum_of_what_is_trained_cannot_be_taken_first():
    def loss_fn(o: Tensor, b: Any) -> Tensor:
        return (o * b["y"]).sum() / o.sum()

    assert (
        coupled_by(loss_fn)
        == f"the loss is not a sum or mean over rows because of div in loss_fn ({line_of(loss_fn)}), "
        "which needs the sum over all rows of sum_2 first"
    )


def test_weights_of_classes_may_be_a_buffer_but_no_frozen_parameter():
    def compute(self: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(self.a(x), x[:, 0].long(), weight=self.w)

    def analysed_with(w: Tensor) -> BatchInfo:
        return analysed(Small(compute, a=linear(), w=w), BATCH)[1]

    assert analysed_with(torch.ones(3)).normalizers == ("cross_entropy_loss_count",)
    why = analysed_with(nn.Parameter(torch.ones(3), requires_grad=False)).coupled
    assert why.endswith("which reads a frozen parameter; make it a buffer")


def test_modules_of_torch_are_named_by_path_and_class():
    model = nn.Sequential(nn.Linear(3, 3), nn.Flatten(0), nn.Softmax(0))
    why = analysed(model, (BATCH["x"],), lambda o, b: o.sum())[1].coupled
    assert why == "softmax in 2 (Softmax) mixes the rows of a batch"


def test_a_loss_that_is_a_module_is_the_loss():
    class Spread(nn.Module):
        def forward(self, o: Tensor, b: Any) -> Tensor:
            return o.var()

    assert coupled_by(Spread()).startswith("var in loss_fn (")


def test_the_models_own_forward_is_not_the_loss():
    why = coupled_by(lambda o, b: F.mse_loss(o, b["y"]), lambda self, x: self.a(x).softmax(0))
    assert why.startswith("softmax in the model's own forward (")


# -- rows that are mixed ----------------------------------------------------------------------------------------------


def contrastive(o: Tensor, b: Any) -> Tensor:
    return F.cross_entropy(o @ b["y"].t(), torch.arange(o.shape[0]))


def by_row_number(o: Tensor, b: Any) -> Tensor:
    return (o.sum(1) * torch.arange(o.shape[0])).sum()


def spread_of_the_batch(o: Tensor, b: Any) -> Tensor:
    return o.var()


def one_less(o: Tensor, b: Any) -> Tensor:
    return o.sum() / (o.shape[0] - 1)


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (contrastive, "matmul in loss_fn ({}) mixes the rows of a batch"),
        (spread_of_the_batch, "var in loss_fn ({}) mixes the rows of a batch"),
        (by_row_number, "mul in loss_fn ({}) computes with the number of a row in the batch"),
        (one_less, "div in loss_fn ({}) computes with a number of rows that is no multiple of the batch"),
    ],
)
def test_a_loss_that_mixes_rows_is_named_with_its_line(loss_fn, why):
    assert coupled_by(loss_fn) == why.format(line_of(loss_fn))


def test_batch_norm_in_training_mixes_rows_and_in_evaluation_does_not():
    def loss_fn(o: Tensor, b: Any) -> Tensor:
        return F.mse_loss(o, b["y"])

    def normed(norm: nn.Module) -> str:
        return coupled_by(loss_fn, lambda self, x: self.norm(self.a(x)), norm=norm)

    why = "BatchNorm `norm` counts statistics over the whole batch; use GroupNorm or LayerNorm, or .eval() to freeze it"
    assert normed(nn.BatchNorm1d(3)) == why
    assert normed(nn.BatchNorm1d(3, track_running_stats=False)) == why
    assert normed(nn.BatchNorm1d(3).eval()) == ""


def test_a_buffer_that_changes_changes_once_per_step():
    def compute(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return self.a(x)

    why = coupled_by(lambda o, b: F.mse_loss(o, b["y"]), compute, count=torch.tensor(0))
    assert why.startswith("add_ in ") and why.endswith("changes a buffer, once per step and not once per microbatch")


def test_row_numbers_may_look_up_rows():
    assert coupled_by(lambda o, b: o[torch.arange(o.shape[0])].sum()) == ""
    assert coupled_by(lambda o, b: o[torch.arange(o.shape[0]), b["classes"].clamp(min=0)].sum()) == ""


@pytest.mark.parametrize(
    "compute",
    [
        lambda o: o[torch.arange(o.shape[0]) // 2],
        lambda o: o - o[torch.arange(o.shape[0]) ^ 1],
        lambda o: o.repeat(1, 2).view(-1, 3)[torch.arange(o.shape[0])],  # the first half of more rows
        lambda o: o[torch.arange(2 * o.shape[0]).view(-1, 2)[:, 0] // 2],
        lambda o: o[torch.arange(1, o.shape[0] + 1) - 1],
        lambda o: o + torch.ones(9, 3)[torch.arange(o.shape[0])],
        lambda o: o + torch.ones(9, 3)[: o.shape[0]],
        lambda o: o * torch.linspace(0, 1, o.shape[0])[:, None],
        lambda o: o + torch.eye(o.shape[0], 3),
        lambda o: o[torch.randperm(o.shape[0])],
    ],
)
def test_what_depends_on_the_place_of_a_row_is_refused(compute):
    model = Small(lambda self, x: compute(self.a(x)), a=linear())
    found = capture(model, LOSSES, lambda o, b: o.square().sum())
    graph, _ = normalize(found.graph)
    info = batch_info(graph, frozenset(one.name for one in found.inputs if one.rows))
    assert "number of a row" in info.coupled or found.coupled, info.coupled


def test_row_numbers_may_be_moved_before_they_look_up_rows():
    def look_up(o: Tensor, b: Any) -> Tensor:
        rows = torch.arange(o.shape[0])[:, None].expand(-1, 2).to(torch.int32)
        return o[rows, b["classes"].clamp(min=0)[:, None]].sum()

    assert coupled_by(look_up) == ""


def test_rows_that_are_dropped_at_random_are_told_apart():
    def dropped(self: Any, x: Tensor) -> Tensor:
        return self.a(x) * x.new_empty(x.shape[0], 1).bernoulli_(0.5).div_(0.5)

    assert coupled_by(lambda o, b: F.mse_loss(o, b["y"]), dropped) == ""


def test_a_value_for_every_pair_of_rows_is_refused():
    why = coupled_by(lambda o, b: o.unsqueeze(1).expand(-1, o.shape[0], -1).sum())
    assert why.startswith("expand in ") and why.endswith("makes a value for every pair of rows")


def test_row_numbers_in_another_dim_are_refused():
    assert "number of a row" in coupled_by(
        lambda o, b: o[b["classes"].clamp(min=0), torch.arange(o.shape[0]) % 3].sum()
    )


# -- models of the Hugging Face ---------------------------------------------------------------------------------------


def hugging_face(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    small = {
        "vocab_size": 41,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
    }
    language = {"input_ids": IDS, "labels": IDS}
    if name == "gpt2":
        return gpt2(), language
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)), language
    if name == "bert":
        mask = torch.ones_like(IDS)
        return transformers.BertForMaskedLM(transformers.BertConfig(**small)), language | {"attention_mask": mask}
    if name == "t5":
        config = transformers.T5Config(
            vocab_size=41, d_model=12, d_kv=4, d_ff=20, num_layers=1, num_heads=3, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config), language
    config = transformers.ViTConfig(**small, image_size=8, patch_size=4, num_labels=5)
    pixels = torch.ones(4, 3, 8, 8)
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels, "labels": TARGETS.clamp(min=0)}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5"])
def test_rows_are_followed_through(name):
    model, batch = hugging_face(name)
    graph, info = analysed(model.train(), batch)
    assert (info.coupled, info.normalizers) == ("", ("cross_entropy_loss_count",))
    logits = next(op for op in graph.ops if "cross_entropy" in op.target).operands[0]
    assert info.spread[logits] == S(0)


def test_a_loss_divided_by_what_is_drawn_at_random_is_refused():
    def loss_fn(o: Tensor, b: Any) -> Tensor:
        kept = torch.rand(o.shape[0], 3) < 0.5
        return (o * kept).sum() / kept.sum()

    assert coupled_by(loss_fn).startswith("the loss is divided by what rand in loss_fn (")
