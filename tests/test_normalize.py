"""Each rewrite gives the same values: both graphs are run. Losses written as sums add up over unequal parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.batch import batch_info, split_prologue
from passes.capture import Captured, capture, forward_arguments
from passes.graph import Atom, Graph, Op, Parameter, Ref, Rows, Size, Value
from passes.interpret import run
from passes.normalize import normalize, repeated_names
from test_capture import BATCH, IDS, ROWS, Small, captured, gpt2, linear, mse, op_of, targets

TARGETS = torch.tensor([0, 2, -100, 1])
WEIGHTS = torch.tensor([1.0, 2.0, 0.5])
LOSSES = BATCH | {"classes": TARGETS, "mask": torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]])}


def weights_of(model: nn.Module, found: Captured) -> dict[str, Tensor]:
    """The model's parameters by value name, ready for gradients."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **found.constants}
    return {
        p.value.name: state[p.name].detach().clone().to(getattr(torch, p.value.dtype)).requires_grad_(p.value.grad)
        for p in found.graph.parameters
    }


def inputs_of(found: Captured, batch: Any, first: int = 0, last: int = ROWS) -> dict[str, Tensor]:
    return {one.name: batch[one.key][first:last] if one.rows else batch[one.key] for one in found.inputs}


def unchanged(model: nn.Module, batch: Any, loss_fn: Any = None) -> Graph:
    """The normalized graph, after running it: it gives the model's own loss and gradients."""
    return compared(model, batch, loss_fn)[1]


def compared(model: nn.Module, batch: Any, loss_fn: Any) -> tuple[Captured, Graph]:
    """The capture and the normalized graph, which gives the model's own loss and gradients."""
    found = capture(model, batch, loss_fn)
    graph, _ = normalize(found.graph)
    assert repeated_names(graph) == []
    tensors = weights_of(model, found)
    loss = run(graph.at(ROWS), tensors | inputs_of(found, batch), ROWS)[graph.loss]
    args, kwargs = forward_arguments(model.forward, batch)
    output = model(*args, **kwargs)
    expected = output.loss if loss_fn is None else loss_fn(output, batch)
    torch.testing.assert_close(loss, expected.detach())
    trained = [p for p in found.graph.parameters if not p.buffer]
    gradients = torch.autograd.grad(expected, [model.get_parameter(p.name) for p in trained], allow_unused=True)
    own = torch.autograd.grad(loss, [tensors[p.value.name] for p in trained], allow_unused=True)
    for parameter, one, other in zip(trained, own, gradients, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=parameter.name: f"{name}: {text}")
    return found, graph


def rewritten(compute: Callable[[Any, Tensor], Any], loss_fn: Any = mse, batch: Any = BATCH, **members: Any) -> Graph:
    return unchanged(Small(compute, a=linear(), **members), batch, loss_fn)


# -- no-ops -----------------------------------------------------------------------------------------------------------


def nothing(name: str) -> Callable[[Any, Tensor], Tensor]:
    """The linear layer's output after an operator that changes nothing."""
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "cast to its dtype": lambda h: h.float(),
        "cast to its device": lambda h: h.to("cpu"),
        "contiguous": lambda h: h.contiguous(),
        "clone": lambda h: h.clone(),
        "dropout of nothing": lambda h: F.dropout(h, 0.0),
        "dropout in evaluation": lambda h: F.dropout(h, 0.5, training=False),
        "plus zero": lambda h: h + 0,
        "times one": lambda h: h * 1.0,
        "view to its shape": lambda h: h.view(-1, 3),
        "expand to its shape": lambda h: h.expand(-1, -1),
        "slice of everything": lambda h: h[:, :],
        "join with an empty tensor": lambda h: torch.cat([torch.tensor([]), h], dim=-1),
    }
    return lambda self, x: steps[name](self.a(x))


NOTHING = [
    "cast to its dtype", "cast to its device", "contiguous", "clone", "dropout of nothing", "dropout in evaluation",
    "plus zero", "times one", "view to its shape", "expand to its shape", "slice of everything",
    "join with an empty tensor",
]  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_what_changes_nothing_goes(name):
    graph = rewritten(nothing(name))
    assert targets(graph) == ["linear.default", "mse_loss.default", "div.Scalar"]


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (lambda h: h.double(), "to.dtype"),
        (lambda h: h + 1, "add.Tensor"),
        (lambda h: h * True, "mul.Tensor"),
        (lambda h: h.view(-1, 1, 3).squeeze(1), "reshape.default"),
        (lambda h: torch.cat([h, h], -1)[:, ::2], "slice.Tensor"),
    ],
)
def test_what_changes_something_stays(step, kept):
    graph = rewritten(lambda self, x: step(self.a(x)))
    assert kept in targets(graph)


def test_dropout_that_drops_stays():
    found = captured(lambda self, x: F.dropout(self.a(x), 0.5))
    assert "dropout.default" in targets(normalize(found.graph)[0])


def test_what_the_loss_does_not_need_goes_and_writes_to_buffers_stay():
    def compute(self, x):
        self.count += 1
        self.a(x).exp()
        return x @ self.a.weight

    found = captured(compute, count=torch.tensor(0))
    assert targets(normalize(found.graph)[0]) == ["add_.Tensor", "matmul.default", "mse_loss.default", "div.Scalar"]


def test_a_copy_of_a_buffer_that_is_then_written_is_no_no_op():
    def compute(self, x):
        before = self.mean.clone()
        self.mean.add_(1)
        return self.a(x) + before

    model = Small(compute, a=linear(), mean=torch.zeros(3))
    found = capture(model, BATCH, mse)
    graph, _ = normalize(found.graph)
    loss = run(graph.at(ROWS), weights_of(model, found) | inputs_of(found, BATCH), ROWS)[graph.loss]
    torch.testing.assert_close(loss, mse(model(BATCH["x"]), BATCH))


@pytest.mark.parametrize(
    "fresh", [lambda h: h.new_zeros(3), lambda h: torch.ones_like(h), lambda h: h.new_full((1, 3), 2.0)]
)
def test_tensors_made_like_another_do_not_read_it(fresh):
    graph = rewritten(lambda self, x: self.a(x) + fresh(self.a(x).exp()))
    assert "exp.default" not in targets(graph)


@pytest.mark.parametrize(
    "write",
    [
        lambda h, x: h[:, 1:].copy_(x[:, :-1]),
        lambda h, x: h[:, :1].mul_(2),
        lambda h, x: h[:, -2:-1].zero_(),
        lambda h, x: h[:, 2].copy_(x[:, 0]),
        lambda h, x: h[:, 1:1].mul_(2),
    ],
)
def test_writes_into_slices_become_joins(write):
    def compute(self, x):
        h = self.a(x)
        write(h, x)
        return h

    graph = rewritten(compute)
    assert not [t for t in targets(graph) if "scatter" in t]


# -- masks ------------------------------------------------------------------------------------------------------------

HEADS = {"q": nn.Linear(3, 8, bias=False), "k": nn.Linear(3, 8, bias=False)}
LONG = {"x": torch.randn(ROWS, 5, 3, generator=torch.Generator().manual_seed(2)), "y": torch.ones(ROWS, 5, 3)}


def attending(mask: Callable[[Any, Tensor], Tensor | None], **members: Any) -> Op:
    """The attention operator of a small model with two heads whose mask is as given, after normalizing."""

    def compute(self, x):
        q, k = (f(x).view(-1, 5, 2, 4).transpose(1, 2) for f in (self.q, self.k))
        h = F.scaled_dot_product_attention(q, k, k, attn_mask=mask(self, x))
        return self.o(h.transpose(1, 2).reshape(-1, 5, 8))

    graph = rewritten(compute, batch=LONG, o=nn.Linear(8, 3, bias=False), **HEADS, **members)
    return op_of(graph, "scaled_dot_product_attention")


def ones() -> Tensor:
    return torch.ones(5, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    "mask",
    [
        lambda self, x: ones().tril(),
        lambda self, x: torch.arange(5)[None, :] <= torch.arange(5)[:, None],
        lambda self, x: torch.full((5, 5), float("-inf")).triu(1),
        lambda self, x: torch.full((5, 5), torch.finfo(torch.float32).min).triu(1),
        lambda self, x: ones().tril()[None, None].expand(x.shape[0], 1, 5, 5),
    ],
)
def test_a_triangle_is_causal(mask):
    attention = attending(mask)
    assert len(attention.operands) == 3 and attention.arg(5, "is_causal") is True


@pytest.mark.parametrize("mask", [lambda self, x: ones(), lambda self, x: torch.zeros(5, 5), lambda self, x: None])
def test_an_empty_mask_goes(mask):
    attention = attending(mask)
    assert len(attention.operands) == 3 and attention.arg(5, "is_causal", False) is False


@pytest.mark.parametrize(
    "mask",
    [
        lambda self, x: ones().tril() & ones().triu(-1),  # a sliding window
        lambda self, x: torch.full((5, 5), -1.0).triu(1),  # discouraged, not hidden
        lambda self, x: ones().tril(1),
        lambda self, x: ones().triu(),
        lambda self, x: (x[:, :, 0] < 9)[:, None, None, :],  # padding
    ],
)
def test_any_other_mask_stays(mask):
    attention = attending(mask)
    assert len(attention.operands) == 4 and attention.arg(5, "is_causal", False) is False


def test_a_mask_in_a_buffer_stays_for_its_values_may_change():
    attention = attending(lambda self, x: self.bias, bias=ones().tril())
    assert len(attention.operands) == 4


def test_repeated_keys_and_values_are_grouped_queries():
    def repeated(h: Tensor) -> Tensor:
        b, kv, s, d = h.shape
        return h[:, :, None].expand(b, kv, 2, s, d).reshape(b, kv * 2, s, d)

    def compute(self, x):
        q, k = (f(x).view(-1, 5, heads, 4).transpose(1, 2) for f, heads in ((self.q, 4), (self.k, 2)))
        h = F.scaled_dot_product_attention(q, repeated(k), repeated(k))
        return self.o(h.transpose(1, 2).reshape(-1, 5, 16))

    graph = rewritten(compute, batch=LONG, o=nn.Linear(16, 3, bias=False), q=nn.Linear(3, 16, bias=False), k=HEADS["k"])
    attention = op_of(graph, "scaled_dot_product_attention")
    assert attention.arg(7, "enable_gqa") is True
    assert graph.values[attention.operands[1]].shape == (Size(1), 2, 5, 4)


def test_keys_repeated_in_another_order_are_not_grouped_queries():
    def compute(self, x):
        q, k = (f(x).view(-1, 5, heads, 4).transpose(1, 2) for f, heads in ((self.q, 4), (self.k, 2)))
        tiled = k.repeat(1, 2, 1, 1)
        return self.o(F.scaled_dot_product_attention(q, tiled, tiled).transpose(1, 2).reshape(-1, 5, 16))

    members = {"o": nn.Linear(16, 3, bias=False), "q": nn.Linear(3, 16, bias=False), "k": HEADS["k"]}
    attention = op_of(rewritten(compute, batch=LONG, **members), "scaled_dot_product_attention")
    assert attention.arg(7, "enable_gqa", False) is False


# -- losses -----------------------------------------------------------------------------------------------------------


def adds_up(loss_fn: Callable[[Tensor, Any], Tensor], batch: Any = LOSSES) -> Graph:
    """Loss and gradients of one row and of the three others add up to those of all four."""
    model = Small(lambda self, x: self.a(x), a=linear())
    found, graph = compared(model, batch, loss_fn)
    info = batch_info(graph, frozenset(one.name for one in found.inputs if one.rows))
    assert info.coupled == ""
    main, prologue = split_prologue(graph, info)
    whole, parts = weights_of(model, found), weights_of(model, found)
    expected = run(graph.at(ROWS), whole | inputs_of(found, batch), ROWS)[graph.loss]
    expected.backward()
    cuts = [(0, 1), (1, ROWS)]
    counts: dict[str, Any] = {}
    for first, last in cuts:
        small = replace(graph, ops=prologue).at(last - first)
        values = run(small, parts | inputs_of(found, batch, first, last), ROWS)
        counts |= {name: counts.get(name, 0) + values[name] for name in info.normalizers}
    total = torch.zeros(())
    for first, last in cuts:
        values = run(main.at(last - first), parts | inputs_of(found, batch, first, last) | counts, ROWS)
        values[graph.loss].backward()
        total += values[graph.loss].detach()
    torch.testing.assert_close(total, expected.detach())
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name].grad, tensor.grad, msg=name)
    return graph


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o, b: F.cross_entropy(o, b["classes"]),
        lambda o, b: F.cross_entropy(o, b["classes"], WEIGHTS),
        lambda o, b: F.cross_entropy(o, b["classes"], label_smoothing=0.1),
        lambda o, b: F.cross_entropy(o, b["classes"], WEIGHTS, label_smoothing=0.1),
        lambda o, b: F.cross_entropy(o, b["classes"].abs() % 3, ignore_index=2),
        lambda o, b: F.nll_loss(o.log_softmax(-1), b["classes"], WEIGHTS),
    ],
    ids=["plain", "weights", "smoothing", "weights and smoothing", "ignored class", "nll"],
)
def test_class_losses_are_divided_by_the_count_of_all_parts(loss_fn):
    graph = adds_up(loss_fn)
    assert targets(graph)[-1] == "div.Tensor"


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o, b: F.cross_entropy(o, b["y"].softmax(-1)),
        lambda o, b: F.cross_entropy(o, b["y"].softmax(-1), WEIGHTS, label_smoothing=0.2),
        lambda o, b: F.mse_loss(o, b["y"]),
        lambda o, b: F.l1_loss(o, b["y"]),
        lambda o, b: F.smooth_l1_loss(o, b["y"], beta=0.3),
        lambda o, b: F.huber_loss(o, b["y"], delta=0.3),
        lambda o, b: F.binary_cross_entropy(o.sigmoid(), b["mask"]),
        lambda o, b: F.binary_cross_entropy_with_logits(o, b["mask"], pos_weight=WEIGHTS),
        lambda o, b: F.kl_div(o.log_softmax(-1), b["y"].softmax(-1), reduction="batchmean"),
        lambda o, b: ((o - b["y"]) ** 2).mean(),
        lambda o, b: ((o - b["y"]) ** 2).mean((0, 1)),
        lambda o, b: ((o - b["y"]) ** 2).mean(0).sum(),
        lambda o, b: ((o - b["y"]) ** 2).sum() / o.shape[0],
        lambda o, b: ((o - b["y"]) ** 2).sum() / o.numel() * o.shape[0],
    ],
    ids=[
        "class probabilities", "weighted probabilities", "mse", "l1", "smooth l1", "huber", "bce", "bce with logits",
        "kl", "mean of everything", "mean over named dims", "mean over the rows", "by the rows", "times the rows",
    ],
)  # fmt: skip
def test_means_over_the_rows_are_divided_by_the_global_batch(loss_fn):
    graph = adds_up(loss_fn)
    assert any(isinstance(a, Rows) for op in graph.ops for a in op.args)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o, b: F.cross_entropy(o, b["classes"], reduction="sum"),
        lambda o, b: ((o - b["y"]) ** 2 * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
        lambda o, b: o[torch.arange(o.shape[0]), b["classes"].clamp(min=0)].sum(),
    ],
    ids=["sum", "masked mean", "picked by row number"],
)
def test_sums_and_masked_means_add_up_as_they_are(loss_fn):
    graph = adds_up(loss_fn)
    assert not any(isinstance(a, Rows) for op in graph.ops for a in op.args)


def test_a_mean_along_a_row_stays():
    graph = adds_up(lambda o, b: ((o - b["y"]) ** 2).mean(1).sum())
    assert "mean.dim" in targets(graph)


def test_a_part_without_valid_targets_gives_no_nan():
    batch = LOSSES | {"classes": torch.tensor([-100, 2, 1, 1])}
    adds_up(lambda o, b: F.cross_entropy(o, b["classes"]), batch)


def weighted(output: Tensor) -> Tensor:
    return F.cross_entropy(output, TARGETS, weight=WEIGHTS.to(output.dtype))


@pytest.mark.parametrize(
    "loss",
    [
        lambda h, y: F.mse_loss(h, y),
        lambda h, y: F.mse_loss(h, h.detach() + 1),
        lambda h, y: 0.5 * F.mse_loss(h, y) + F.l1_loss(h, y).sqrt(),  # one cast for both
        lambda h, y: weighted(h),
        lambda h, y: F.cross_entropy(h, h.detach().softmax(-1)),
        lambda h, y: F.mse_loss(h, y, reduction="none").mean(),
    ],
)
def test_every_loss_of_bf16_is_taken_in_fp32(loss):
    model = Small(lambda self, x: loss(self.a(x[:, :3]), x[:, 3:]), a=linear())
    batch = {"x": torch.cat([BATCH["x"], BATCH["y"]], 1)}
    found = capture(model, batch, None, "bf16")
    graph, _ = normalize(found.graph)
    assert repeated_names(graph) == []
    values = run(graph.at(ROWS), weights_of(model, found) | inputs_of(found, batch), ROWS)
    assert {name: str(t.dtype) for name, t in values.items()} == {
        name: f"torch.{v.dtype}" for name, v in graph.values.items()
    }
    assert graph.values[graph.loss].dtype == "float32"
    torch.testing.assert_close(values[graph.loss], model(**batch), rtol=0.03, atol=0.03)


def test_losses_of_bf16_are_taken_in_fp32():
    model = Small(
        lambda self, x: {"loss": F.cross_entropy(self.a(x), TARGETS.clamp(min=0)[:1].expand(x.shape[0]))}, a=linear()
    )
    graph = normalize(capture(model, {"x": BATCH["x"]}, None, "bf16").graph)[0]
    loss = op_of(graph, "cross_entropy_loss")
    assert (loss.results[0].dtype, graph.values[loss.operands[0]].dtype) == ("float32", "float32")
    assert op_of(graph, "linear").results[0].dtype == "bfloat16"


# -- hand-written graphs ----------------------------------------------------------------------------------------------


def test_a_rewrite_keeps_the_names_of_values():
    x, w = Value("x", (Size(1), 3), "float32", False), Value("w", (3, 3), "float32", True)
    h = Value("h", (Size(1), 3), "float32", True)
    ops = (
        Op("aten.linear.default", (Ref("x"), Ref("w")), (), (h,)),
        Op("aten.to.dtype", (Ref("h"), Atom("torch.float32")), (), (replace(h, name="same"),)),
        Op("aten.mean.default", (Ref("same"),), (), (Value("loss", (), "float32", True),)),
    )
    graph, notes = normalize(Graph((x,), (Parameter(w, ("w",)),), ops, "loss"))
    assert str(graph) == (
        "h: float32[batch, 3] = aten.linear.default(x, w)\n"
        "loss_sum: float32[] = aten.sum.default(h)\n"
        "loss: float32[] = aten.div.Scalar(loss_sum)"
    )
    assert (graph.ops[-1].args[1], notes) == (Rows(3), ())


# -- models of the Hugging Face ---------------------------------------------------------------------------------------

PADDED = torch.ones(ROWS, 6, dtype=torch.long).index_put_(
    (torch.tensor([1, 1, 3]), torch.tensor([4, 5, 5])), torch.tensor(0)
)


def test_gpt2_attends_causally_without_a_mask():
    graph = unchanged(gpt2(), {"input_ids": IDS, "labels": IDS})
    attention = op_of(graph, "scaled_dot_product_attention")
    assert len(attention.operands) == 3 and attention.arg(5, "is_causal") is True
    assert not [t for t in targets(graph) if "assert" in t or t.startswith("cat")]


def test_gpt2_keeps_a_padding_mask():
    graph = unchanged(gpt2(), {"input_ids": IDS, "labels": IDS, "attention_mask": PADDED})
    assert len(op_of(graph, "scaled_dot_product_attention").operands) == 4


@pytest.mark.parametrize(("window", "masks"), [(None, 0), (3, 1)], ids=["causal", "sliding window"])
def test_mistral_has_grouped_queries_and_keeps_only_a_sliding_window(window, masks):
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        vocab_size=41, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).train()
    attention = op_of(unchanged(model, {"input_ids": IDS, "labels": IDS}), "scaled_dot_product_attention")
    assert len(attention.operands) == 3 + masks
    assert (attention.arg(5, "is_causal", False), attention.arg(7, "enable_gqa")) == (not masks, True)
