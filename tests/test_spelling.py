"""What is written of an operator, evaluated as Python, gives what the operator gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from passes.graph import CONSTANT, Atom, Op, Ref, Rows, Value
from passes.interpret import call
from passes.rules.randomness import draws
from passes.spelling import Speller, Text
from test_rules import CASES, Case, case
from test_rules_views import CASES as VIEWS

X = Value("x", (2, 3), "float32", False)
SPELLER = Speller(lambda name: Text(name), "x.device")


def op(target: str, *args: object, result: Value = X, **kwargs: object) -> Op:
    return Op(f"aten.{target}", args, tuple(kwargs.items()), (result,))  # type: ignore[arg-type]


x, y, w, ids = Ref("x"), Ref("y"), Ref("w"), Ref("ids")
COLUMN = Value("c", (2, 1), "float32", False)

TEXTS = [
    (op("add.Tensor", x, y), "x + y"),
    (op("add.Tensor", x, y, alpha=2), "torch.add(x, y, alpha=2)"),
    (op("div.Scalar", x, Rows(1)), "x / ROWS"),
    (op("div.Scalar", x, Rows(12)), "x / (ROWS * 12)"),
    (op("neg.default", x), "-x"),
    (op("pow.Tensor_Scalar", x, 2), "x ** 2"),
    (op("to.dtype", x, Atom("torch.float32")), "x.to(torch.float32)"),
    (op("slice.Tensor", x, 1, 1, 2**63 - 1, result=COLUMN), "x[:, 1:]"),
    (op("slice.Tensor", x, 0, 0, -1, 2), "x[:-1:2]"),
    (op("reshape.default", x, (3, 2)), "x.reshape(3, 2)"),
    (op("transpose.int", x, 0, 1), "x.transpose(0, 1)"),
    (op("split.Tensor", x, 2, 1), "x.split(2, 1)[0]"),
    (op("linear.default", x, w), "F.linear(x, w)"),
    (op("layer_norm.default", x, (3,), w, None, 1e-05, False), "F.layer_norm(x, (3,), w, None, 1e-05)"),
    (op("group_norm.default", x, 1, w, None, 1e-05, False), "F.group_norm(x, 1, w, None, 1e-05)"),
    (
        op("batch_norm.default", x, w, None, Ref("mean"), Ref("var"), True, 0.1, 1e-05, False),
        "F.batch_norm(x, mean, var, w, None, True, 0.1, 1e-05)",
    ),
    (op("embedding.default", w, ids, 0), "F.embedding(ids, w, padding_idx=0)"),
    (op("index.Tensor", x, (None, ids)), "x[:, ids]"),
    (
        op("scaled_dot_product_attention.default", x, y, w, None, 0.0, True, scale=0.5),
        "F.scaled_dot_product_attention(x, y, w, dropout_p=0.0, is_causal=True, scale=0.5)",
    ),
    (op("cross_entropy_loss.default", x, ids, None, 2, 7), 'F.cross_entropy(x, ids, reduction="sum", ignore_index=7)'),
    (op("masked_fill.Scalar", x, y, float("-inf")), 'x.masked_fill(y, float("-inf"))'),
    (op("full.default", (2,), float("nan"), device=Atom("device")), 'torch.full((2,), float("nan"), device=x.device)'),
    (op("relu.default", x), "torch.relu(x)"),
    (op("add_.Tensor", x, 1), "x.add_(1)"),
    (op("_safe_softmax.default", x, -1), "torch.ops.aten._safe_softmax.default(x, -1)"),
    (
        Op(CONSTANT, ((1, 2),), (), (Value("c", (2,), "int64", False),)),
        "torch.tensor((1, 2), dtype=torch.int64, device=x.device)",
    ),
]


@pytest.mark.parametrize(("made", "text"), TEXTS, ids=[made.target for made, _ in TEXTS])
def test_operator_is_written_as_a_person_would(made, text):
    assert SPELLER.write(made).source.replace("'", '"') == text


def test_an_operand_that_is_an_expression_is_put_in_parentheses():
    speller = Speller(lambda name: Text("a + b", atomic=False) if name == "y" else Text(name), "x.device")
    assert speller.write(op("mul.Tensor", x, y)).source == "x * (a + b)"
    assert speller.write(op("sum.default", y)).source == "torch.sum(a + b)"
    assert speller.write(op("t.default", y)).source == "(a + b).t()"


def evaluates_to_the_same(made: Case) -> None:
    names = {name: f"v{i}" for i, name in enumerate(dict.fromkeys(made.site.op.operands))}
    text = Speller(lambda name: Text(names[name]), '"cpu"').write(made.site.op).source
    found = eval(text, {"torch": torch, "F": F, "ROWS": 1} | {names[name]: made.tensors[name] for name in names})
    results = (found,) if isinstance(found, torch.Tensor) else tuple(found)
    for one, other in zip(results, call(made.site.op, made.tensors), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, msg=lambda difference: f"{text}: {difference}")


A, B, C = (torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(3))
SIGN = torch.tensor([1.0, -1.0, 1.0, -1.0])


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        ("triplet_margin_loss.default", (A, B, C), {}),
        ("triplet_margin_loss.default", (A, B, C, 0.5, 1.0, 1e-6, True, 2), {}),
        ("cosine_embedding_loss.default", (A, B, SIGN), {}),
        ("cosine_embedding_loss.default", (A, B, SIGN, 0.2, 0), {}),
        ("margin_ranking_loss.default", (A[:, 0], B[:, 0], SIGN), {}),
        ("margin_ranking_loss.default", (A[:, 0], B[:, 0], SIGN, 0.1), {"reduction": 2}),
        ("hinge_embedding_loss.default", (A[:, 0], SIGN), {}),
        ("soft_margin_loss.default", (A[:, 0], SIGN), {}),
        ("poisson_nll_loss.default", (A, B.abs(), True, False, 1e-8, 1), {}),
        ("multi_margin_loss.default", (A, torch.tensor([0, 2, 1, 1]), 1, 1.0, B[0].abs()), {}),
        ("kl_div.default", (A.log_softmax(-1), B.softmax(-1)), {}),
    ],
)
def test_a_loss_says_how_it_is_reduced(target, args, kwargs):
    evaluates_to_the_same(case(f"aten.{target}", *args, **kwargs))


@pytest.mark.filterwarnings("ignore")
def test_the_cases_of_every_rule_evaluate_to_the_same():
    for target, args, kwargs, _ in CASES:
        evaluates_to_the_same(case(f"aten.{target}", *args, **kwargs))
    for target, args, _ in VIEWS:
        evaluates_to_the_same(case(f"aten.{target}", *args))


def samples() -> Iterator[Case]:
    """PyTorch's own sample calls of operators with a rule."""
    pytest.importorskip("expecttest", reason="op_db needs it")
    from test_rules_samples import NAMES, SKIPPED, op_db, recorded

    for info in op_db:
        if info.name in NAMES and info.name not in SKIPPED:
            yield from recorded(info)


@pytest.mark.filterwarnings("ignore")
def test_pytorchs_samples_evaluate_to_the_same():
    reached = 0
    for made in samples():
        if not draws(made.site.op):
            evaluates_to_the_same(made)
            reached += 1
    assert reached > 400
