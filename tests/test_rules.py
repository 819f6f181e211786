"""Every rule is proved by execution: an operator runs whole and in slices, and both agree, gradients included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from costmodels.groups import Collective
from passes.graph import Arg, Atom, Op, Ref, Value
from passes.interpret import call
from passes.placements import I, P, Placement, R, S, local_shape
from passes.rules import FAMILIES, RULES, rule_of
from passes.rules.base import Dim, Factor, Rule, Site, Strategy, strategies
from passes.rules.pointwise import POINTWISE
from passes.rules.randomness import draws

# -- the harness --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An operator with its operands; floating-point operands have gradients."""

    site: Site
    tensors: Mapping[str, Tensor]

    @property
    def target(self) -> str:
        return self.site.op.target


def value(name: str, tensor: Tensor) -> Value:
    return Value(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


WITHOUT_DERIVATIVE = (
    "aten.floor_divide.default",
    "aten.floor_divide.Scalar",
    "aten.heaviside.default",
    "aten.copy.default",
)
NOT_SMOOTH = ("not differentiable with respect to argument", "Autograd not support dtype")


def case(target: str, *args: Any, smooth: int | None = 99, **kwargs: Any) -> Case:
    """A call as the graph would hold it; of its operands the first `smooth` have gradients (None: as they do now).

    Fewer where ATen does not differentiate with respect to the last ones (class weights, running statistics).
    """
    try:
        return _case(target, args, kwargs, 0 if target in WITHOUT_DERIVATIVE else smooth)
    except RuntimeError as error:
        if not smooth or not any(text in str(error) for text in NOT_SMOOTH):
            raise
        return case(target, *args, smooth=min(smooth, 6) - 1, **kwargs)


def _case(target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], smooth: int | None) -> Case:
    tensors: dict[str, Tensor] = {}

    def arg(given: Any) -> Arg:
        if isinstance(given, Tensor):
            name = f"t{len(tensors)}"
            leaf = given.detach().clone()
            differs = leaf.is_floating_point() or leaf.is_complex()
            has = given.requires_grad if smooth is None else len(tensors) < smooth
            tensors[name] = leaf.requires_grad_(differs and has)
            return Ref(name)
        if isinstance(given, (list, tuple)):
            return tuple(arg(inner) for inner in given)
        if given is None or isinstance(given, (bool, int, float, str)):
            return given
        return Atom("device" if isinstance(given, torch.device) else str(given))

    op = Op(target, tuple(map(arg, args)), tuple((k, arg(a)) for k, a in kwargs.items()), ())
    operands = tuple(value(name, tensors[name]) for name in op.operands)
    results = tuple(value(f"r{i}", out) for i, out in enumerate(call(op, tensors)))
    return Case(Site(replace(op, results=results), operands), tensors)


def slice_of(tensor: Tensor, placement: Placement, ranks: int, rank: int) -> Tensor:
    """One rank's slice: of every block, its part under torch.chunk."""
    if not isinstance(placement, S):
        return tensor
    blocks = tensor.chunk(placement.blocks, placement.dim)
    return torch.cat([block.chunk(ranks, placement.dim)[rank] for block in blocks], placement.dim)


def joined(slices: list[Tensor], placement: S) -> Tensor:
    """The whole tensor again: block by block."""
    parts = [part.chunk(placement.blocks, placement.dim) for part in slices]
    return torch.cat([part[block] for block in range(placement.blocks) for part in parts], placement.dim)


def addends(tensor: Tensor, ranks: int) -> list[Tensor]:
    """Random tensors whose sum is `tensor`."""
    parts = [torch.randn_like(tensor) for _ in range(ranks - 1)]
    return [*parts, tensor - sum(parts)]


def laid(tensor: Tensor, placement: Placement, ranks: int, summed: Placement) -> list[Tensor]:
    """What each rank holds of `tensor`: a slice, a summand where the placement is `summed`, or all of it."""
    if placement is summed:
        return addends(tensor, ranks)
    return [slice_of(tensor, placement, ranks, rank) for rank in range(ranks)]


def tolerance(site: Site) -> float:
    narrow = {"float32", "bfloat16", "float16", "complex64"}
    return 1e-4 if any(v.dtype in narrow for v in (*site.operands, *site.results)) else 1e-10


def assert_laid(
    whole: Tensor, parts: list[Tensor], placement: Placement, summed: Placement, what: str, exact: float
) -> None:
    found = [joined(parts, placement)] if isinstance(placement, S) else [sum(parts)] if placement is summed else parts
    for part in found:
        assert part.shape == whole.shape, f"{what}: {tuple(part.shape)} instead of {tuple(whole.shape)}"
        torch.testing.assert_close(part, whole, rtol=exact, atol=exact, equal_nan=True, msg=lambda m: f"{what}: {m}")


Locals = list[dict[str, Tensor]]
Results = list[tuple[Tensor, ...]]


def bias_on_one_rank(case: Case, op: Op, strategy: Strategy, parts: Locals) -> Results:
    """The bias counts on rank 0 only."""
    bias = op.operands[0 if op.target == "aten.addmm.default" else 2]
    return [call(op, {**own, bias: own[bias] * (rank == 0)}) for rank, own in enumerate(parts)]


def vocabulary_embedding(case: Case, op: Op, strategy: Strategy, parts: Locals) -> Results:
    """Ids of other ranks' rows give zeros."""
    table, ids = op.operands
    padding = op.arg(2, "padding_idx", -1)
    found = []
    for rank, own in enumerate(parts):
        rows = slice_of(torch.arange(len(case.tensors[table])), strategy.operands[0], len(parts), rank)
        mine = own[ids].unsqueeze(-1) == rows
        local = mine.to(torch.int64).argmax(-1)
        here = (rows == padding).nonzero().flatten().tolist()
        out = torch.ops.aten.embedding.default(own[table], local, here[0] if here else -1)
        found.append((out * mine.any(-1, keepdim=True),))
    return found


def vocabulary_loss(case: Case, op: Op, strategy: Strategy, parts: Locals) -> Results:
    """Ranks agree on the maximum, the sum and the target's score; the gradient needs nothing more."""
    scores, target = op.operands
    ranks, count = len(parts), case.tensors[scores].shape[1]
    ids, skipped = case.tensors[target], case.site.arg(4, "ignore_index", -100)
    valid = ids != skipped
    classes = [slice_of(torch.arange(count)[None], strategy.operands[0], ranks, rank) for rank in range(ranks)]
    mine = [ids.unsqueeze(-1) == own for own in classes]
    local = [own[scores] for own in parts]
    highest = torch.stack([x.detach().amax(1) for x in local]).amax(0)
    total = sum((x.detach() - highest[:, None]).exp().sum(1) for x in local)
    score = sum((x.detach() * hit).sum(1) for x, hit in zip(local, mine, strict=True))
    loss = (total.log() + highest - score) * valid
    found = []
    for x, hit in zip(local, mine, strict=True):
        probability = (x.detach() - highest[:, None]).exp() / total[:, None]
        slope = ((probability - hit.to(x.dtype)) * x).sum(1) * valid
        losses = loss + slope - slope.detach()
        reduction = case.site.arg(3, "reduction", 1)
        found.append((losses if reduction == 0 else losses.sum() / (valid.sum() if reduction == 1 else 1),))
    return found


FORMS: Mapping[tuple[str, str], Callable[[Case, Op, Strategy, Locals], Results]] = {
    ("aten.linear.default", "bias on one rank"): bias_on_one_rank,
    ("aten.addmm.default", "bias on one rank"): bias_on_one_rank,
    ("aten.embedding.default", "vocabulary"): vocabulary_embedding,
    ("aten.cross_entropy_loss.default", "vocabulary"): vocabulary_loss,
}


def local_op(site: Site, rule: Rule, placements: tuple[Placement, ...], ranks: int) -> Op:
    shapes = tuple(local_shape(p, v.sizes, ranks) for p, v in zip(placements, site.results, strict=True))
    return rule.localize(site, shapes) if rule.localize else site.op


def prove(case: Case, rule: Rule, strategy: Strategy, ranks: int) -> None:
    """Runs the operator whole and as `strategy` says, and compares results and gradients."""
    site, what = case.site, f"{case.site.op} on {ranks} ranks, {strategy}"
    whole = call(site.op, case.tensors)
    parts: Locals = [{} for _ in range(ranks)]
    for v, placement in zip(site.operands, strategy.operands, strict=True):
        for own, part in zip(parts, laid(case.tensors[v.name].detach(), placement, ranks, P), strict=True):
            own[v.name] = part.detach().clone().requires_grad_(v.grad)
    op = local_op(site, rule, strategy.results, ranks)
    if strategy.form:
        outs = FORMS[case.target, strategy.form](case, op, strategy, parts)
    else:
        outs = [call(op, own) for own in parts]
    for i, placement in enumerate(strategy.results):
        assert_laid(whole[i].detach(), [out[i].detach() for out in outs], placement, P, what, tolerance(site))

    smooth = [i for i, v in enumerate(site.results) if v.grad]
    incoming = [torch.randn_like(whole[i]) for i in smooth]
    shared = [laid(g, strategy.results[i], ranks, R) for i, g in zip(smooth, incoming, strict=True)]
    leaves = [v.name for v in site.operands if v.grad]
    expected = gradients([whole[i] for i in smooth], [case.tensors[name] for name in leaves], incoming)
    found = [
        gradients([out[i] for i in smooth], [own[name] for name in leaves], [grads[rank] for grads in shared])
        for rank, (out, own) in enumerate(zip(outs, parts, strict=True))
    ]
    for i, name in enumerate(leaves):
        placement = strategy.operands[site.op.operands.index(name)]
        assert_laid(
            expected[i], [own[i] for own in found], placement, R, f"{what}, gradient of {name}", tolerance(site)
        )


def gradients(outs: list[Tensor], leaves: list[Tensor], incoming: list[Tensor]) -> list[Tensor]:
    pairs = [(out, grad) for out, grad in zip(outs, incoming, strict=True) if out.requires_grad]
    if not pairs or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def wanted(site: Site) -> dict[str, frozenset[S]]:
    """All the cuts that consumers might want."""
    return {
        v.name: frozenset(S(d, k) for d, n in enumerate(v.sizes) for k in range(1, n // 2 + 1) if n % k == 0)
        for v in site.results
    }


def proved(case: Case, ranks: tuple[int, ...] = (2, 3), rule: Rule | None = None) -> set[str]:
    """Runs every strategy of the operator; the names of those that split it or pass partial sums on."""
    rule = rule or rule_of(case.target)
    assert rule is not None, f"no rule for {case.target}"
    torch.manual_seed(0)
    names: set[str] = set()
    for count in ranks:
        for strategy in strategies(case.site, rule, count, wanted(case.site)):
            if strategy.name != "repeat":
                prove(case, rule, strategy, count)
                names.add(strategy.name)
    return names - {"repeat, partial gradient"}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


UNSET = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")  # elements of no value


class Recorder(Interpreter):
    """Runs a traced call and keeps every operator that has a rule, with its operands."""

    def __init__(self, module: torch.fx.GraphModule, smooth: int | None) -> None:
        super().__init__(module)
        self.smooth = smooth
        self.cases: list[Case] = []

    def run_node(self, n: Node) -> Any:
        if n.op == "call_function" and str(n.target) in RULES and str(n.target) not in UNSET:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            with torch.enable_grad():
                self.cases.append(case(str(n.target), *args, smooth=self.smooth, **kwargs))
        return super().run_node(n)


def recorded_calls(module: torch.fx.GraphModule, *inputs: Tensor, smooth: int | None = None) -> list[Case]:
    """The operators of a traced module, as they are called on these inputs."""
    recorder = Recorder(module, smooth)
    with torch.set_grad_enabled(smooth is None):
        recorder.run(*inputs)
    return recorder.cases


# -- operators, and what each may be split along ------------------------------------------------------------------

torch.manual_seed(0)
MASK = ids(2, 2, 1, 6, 5).to(torch.bool).index_fill(3, torch.tensor([0]), True)
IGNORED = torch.tensor([1, -100, 2, 6, 3, 0])

CASES: tuple[tuple[str, tuple[Any, ...], dict[str, Any], str], ...] = (
    # products
    ("linear.default", (randn(2, 3, 4), randn(6, 4)), {}, "dim 0, dim 1, out, in, partial"),
    ("linear.default", (randn(2, 5, 4), randn(7, 4), randn(7)), {}, "dim 0, dim 1, out, in"),
    ("linear.default", (randn(4), randn(6, 4)), {}, "out, in, partial"),
    ("addmm.default", (randn(6), randn(5, 4), randn(4, 6)), {}, "rows, out, in"),
    ("addmm.default", (randn(5, 1), randn(5, 4), randn(4, 6)), {"beta": 2, "alpha": 3}, "rows, out, in"),
    ("baddbmm.default", (randn(4, 1, 6), randn(4, 5, 3), randn(4, 3, 6)), {"beta": 2}, "dim 0, rows, out"),
    ("matmul.default", (randn(2, 3, 5, 4), randn(3, 4, 6)), {}, "dim 0, dim 1, rows, columns, in, partial"),
    ("matmul.default", (randn(4), randn(4)), {}, "in, partial"),
    ("matmul.default", (randn(4), randn(2, 4, 3)), {}, "dim 0, columns, in, partial"),
    ("matmul.default", (randn(3, 5, 4), randn(4)), {}, "dim 0, rows, in, partial"),
    ("mm.default", (randn(3, 4), randn(4, 5)), {}, "rows, columns, in, partial"),
    ("bmm.default", (randn(2, 3, 4), randn(2, 4, 5)), {}, "dim 0, rows, columns, in, partial"),
    ("einsum.default", ("bij, bjk -> bik", [randn(3, 4, 5), randn(1, 5, 2)]), {}, "b, i, j, k, partial"),
    ("einsum.default", ("ij,jk", [randn(4, 5), randn(5, 2)]), {}, "i, j, k, partial"),
    ("einsum.default", ("...i,ij->...j", [randn(4, 5), randn(5, 2)]), {}, "partial"),
    (
        "_grouped_mm.default",
        (randn(8, 256).float(), randn(2, 256, 256).float(), torch.tensor([3, 8], dtype=torch.int32)),
        {},
        "out, in",
    ),
    ("_grouped_mm.default", (randn(8, 32).float(), randn(2, 32, 32).float(), torch.tensor([3, 8]).int()), {}, ""),
    # attention
    (
        "scaled_dot_product_attention.default",
        (randn(2, 4, 6, 3), randn(2, 4, 5, 3), randn(2, 4, 5, 2)),
        {},
        "dim 0, heads, queries",
    ),
    (
        "scaled_dot_product_attention.default",
        (randn(2, 4, 6, 3), randn(2, 4, 5, 3), randn(2, 4, 5, 3), MASK),
        {},
        "dim 0, heads, queries",
    ),
    (
        "scaled_dot_product_attention.default",
        (randn(2, 4, 6, 3), randn(2, 4, 5, 3), randn(2, 4, 5, 3), randn(4, 6, 5)),
        {"scale": 0.5},
        "dim 0, heads, queries",
    ),
    (
        "scaled_dot_product_attention.default",
        (randn(2, 6, 5, 3), randn(2, 3, 5, 3), randn(2, 3, 5, 3), None, 0.0, True),
        {"enable_gqa": True},
        "dim 0, heads",
    ),
    (
        "scaled_dot_product_attention.default",
        (randn(2, 8, 5, 3), randn(2, 4, 5, 3), randn(2, 4, 5, 3)),
        {"is_causal": True, "enable_gqa": True},
        "dim 0, heads",
    ),
    (
        "scaled_dot_product_attention.default",
        (randn(2, 5, 4, 3), randn(2, 1, 4, 3), randn(2, 1, 4, 3), None, 0.0, True),
        {"enable_gqa": True},
        "dim 0, heads",
    ),
    ("scaled_dot_product_attention.default", (randn(3, 6, 4), randn(3, 6, 4), randn(3, 6, 4)), {}, "heads, queries"),
    # normalisations
    ("layer_norm.default", (randn(2, 3, 6), [6], randn(6), randn(6)), {}, "dim 0, dim 1"),
    ("layer_norm.default", (randn(4, 3, 6), [3, 6]), {}, "dim 0"),
    ("rms_norm.default", (randn(2, 3, 6), [6], randn(6)), {}, "dim 0, dim 1"),
    ("group_norm.default", (randn(3, 4, 5), 2, randn(4), randn(4)), {}, "dim 0"),
    ("softmax.int", (randn(2, 3, 4), -1), {}, "dim 0, dim 1"),
    ("log_softmax.int", (randn(2, 3, 4), 1, torch.float64), {}, "dim 0, dim 2"),
    ("_softmax.default", (randn(2, 3, 4), -1, False), {}, "dim 0, dim 1"),
    ("_log_softmax.default", (randn(2, 3, 4), -1, False), {}, "dim 0, dim 1"),
    ("_safe_softmax.default", (randn(2, 3, 4), -1), {}, "dim 0, dim 1"),
    # look-ups
    ("embedding.default", (randn(7, 4), ids(7, 3, 5), 2), {}, "dim 0, dim 1, hidden, vocabulary"),
    ("embedding.default", (randn(8, 4), ids(8, 6)), {}, "dim 0, hidden, vocabulary"),
    ("embedding.default", (randn(7, 4), ids(7, 6), -1, True), {}, "hidden"),
    ("index.Tensor", (randn(3, 4, 5), [None, ids(4, 6)]), {}, "dim 0, dim 2, place 0, partial"),
    ("index.Tensor", (randn(3, 4, 5), [ids(3, 4, 1), ids(4, 6)]), {}, "dim 2, place 0, place 1, partial"),
    ("index.Tensor", (randn(3, 4, 5), [ids(3, 4), None, ids(5, 4)]), {}, "dim 1, place 0, partial"),
    ("index.Tensor", (randn(6, 2), [torch.tensor([True, False, True, True, False, True])]), {}, "partial"),
    ("index_put.default", (randn(3, 4, 5), [None, torch.tensor([1, 3])], randn(3, 2, 1)), {}, "dim 0, dim 2"),
    ("index_select.default", (randn(4, 5), 1, ids(5, 6)), {}, "dim 0, place, partial"),
    ("gather.default", (randn(4, 5), 1, ids(5, 4, 3)), {}, "dim 0, place, partial"),
    ("gather.default", (randn(4, 5), 1, ids(5, 3, 3)), {}, "place, partial"),
    ("scatter.value", (randn(4, 5), 1, ids(5, 4, 3), 2.0), {}, "dim 0"),
    ("scatter.src", (randn(4, 5), 1, torch.tensor([[0, 2, 4]] * 4), randn(4, 3)), {}, "dim 0"),
    ("scatter_add.default", (randn(4, 5), 1, ids(5, 4, 3), randn(4, 3)), {}, "dim 0"),
    ("index_add.default", (randn(4, 5), 1, ids(5, 3), randn(4, 3)), {}, "dim 0"),
    ("one_hot.default", (ids(5, 4, 3), 5), {}, "dim 0, dim 1"),
    ("one_hot.default", (ids(5, 4, 3),), {}, ""),
    # losses
    ("cross_entropy_loss.default", (randn(6, 7), IGNORED, None, 2), {}, "tokens, vocabulary"),
    ("cross_entropy_loss.default", (randn(6, 7), IGNORED, None, 0), {}, "tokens, vocabulary"),
    ("cross_entropy_loss.default", (randn(6, 7), IGNORED), {}, "vocabulary"),
    ("cross_entropy_loss.default", (randn(6, 7), ids(7, 6), None, 2, -100, 0.1), {}, "tokens"),
    ("cross_entropy_loss.default", (randn(6, 7), randn(6, 7), None, 2), {}, "tokens"),
    ("cross_entropy_loss.default", (randn(4, 5, 6), ids(5, 4, 6), None, 2), {}, "tokens, tokens, dim 2"),
    ("cross_entropy_loss.default", (randn(5), ids(5), None, 2), {}, ""),
    ("nll_loss.default", (randn(6, 7), IGNORED, None, 2), {}, "tokens"),
    ("nll_loss2d.default", (randn(4, 5, 3, 2), ids(5, 4, 3, 2), None, 2), {}, "tokens, tokens, dim 2, tokens, dim 3"),
    ("nll_loss_nd.default", (randn(4, 5, 6), ids(5, 4, 6), None, 0), {}, "tokens, tokens, dim 2"),
    ("mse_loss.default", (randn(4, 6), randn(4, 6), 2), {}, "dim 0, dim 1"),
    ("mse_loss.default", (randn(4, 6), randn(4, 6), 1), {}, ""),
    ("l1_loss.default", (randn(4, 6), randn(4, 1), 0), {}, "dim 0, dim 1"),
    ("smooth_l1_loss.default", (randn(4, 6), randn(4, 6), 2), {}, "dim 0, dim 1"),
    ("huber_loss.default", (randn(4, 6), randn(4, 6), 2), {}, "dim 0, dim 1"),
    (
        "soft_margin_loss.default",
        (
            randn(4, 6),
            randn(4, 6),
            2,
        ),
        {},
        "dim 0, dim 1",
    ),
    ("kl_div.default", (randn(4, 6), randn(4, 6).exp(), 2), {}, "dim 0, dim 1"),
    ("binary_cross_entropy.default", (randn(4, 6).sigmoid(), randn(4, 6).sigmoid(), randn(6), 2), {}, "dim 0, dim 1"),
    (
        "binary_cross_entropy_with_logits.default",
        (randn(4, 6), randn(4, 6).sigmoid(), None, randn(6).exp(), 2),
        {},
        "dim 0, dim 1",
    ),
    # reductions
    ("sum.default", (randn(4, 6),), {}, "sum over dim 0, sum over dim 1, partial"),
    ("sum.dim_IntList", (randn(3, 4, 6), [1], True), {}, "dim 0, sum over dim 1, dim 2, partial"),
    ("mean.default", (randn(4, 6),), {}, "partial"),
    ("mean.dim", (randn(3, 4, 6), [-1], True), {}, "dim 0, dim 1, partial"),
    ("amax.default", (randn(3, 4, 6), [1]), {}, "dim 0, dim 2"),
    ("max.dim", (randn(3, 4, 6), 1), {}, "dim 0, dim 2"),
    ("argmax.default", (randn(3, 4, 6), 1), {}, "dim 0, dim 2"),
    ("argmax.default", (randn(3, 4, 6),), {}, ""),
    ("any.dims", (ids(2, 3, 4, 6), [0, 1]), {}, "dim 2"),
    ("all.dims", (ids(2, 3, 4, 6), [0, 1]), {}, "dim 2"),
    ("var.dim", (randn(3, 4, 6), [1]), {}, "dim 0, dim 2"),
    ("std.dim", (randn(3, 4, 6), [1]), {}, "dim 0, dim 2"),
    ("count_nonzero.dim_IntList", (ids(2, 3, 4), [0]), {}, "dim 1"),
    ("norm.Scalar", (randn(3, 4),), {}, ""),
    ("norm.ScalarOpt_dim", (randn(3, 4), 2, [1]), {}, "dim 0"),
    ("cumsum.default", (randn(3, 4), 0), {}, "dim 1, partial"),
    ("topk.default", (randn(4, 6), 2), {}, "dim 0"),
    ("sort.default", (randn(4, 6), 0), {}, "dim 1"),
    ("argsort.default", (randn(4, 6),), {}, "dim 0"),
    # convolutions
    ("conv2d.default", (randn(2, 4, 5, 5), randn(6, 4, 3, 3)), {}, "dim 0, out, in, partial"),
    ("conv2d.default", (randn(3, 4, 5, 5), randn(5, 4, 3, 3), randn(5), [2, 2], [1, 1]), {}, "dim 0, out"),
    ("conv2d.default", (randn(4, 5, 5), randn(5, 4, 3, 3), randn(5)), {}, "out"),
    (
        "conv1d.default",
        (randn(2, 6, 5), randn(12, 1, 3), randn(12), [1], [1], [1], 6),
        {},
        "dim 0, channels",
    ),
    ("conv1d.default", (randn(2, 6, 5), randn(4, 3, 3), randn(4), [1], [1], [1], 2), {}, "dim 0"),
    ("conv1d.padding", (randn(2, 6, 5), randn(4, 6, 3), randn(4), [1], "same"), {}, "dim 0, out"),
    ("conv2d.padding", (randn(2, 6, 5, 5), randn(4, 6, 3, 3), None, [1, 1], "same"), {}, "dim 0, out, in, partial"),
    ("conv3d.default", (randn(2, 3, 4, 4, 4), randn(4, 3, 2, 2, 2)), {}, "dim 0, out, in, partial"),
    ("conv3d.padding", (randn(2, 3, 4, 4, 4), randn(4, 3, 2, 2, 2)), {}, "dim 0, out, in, partial"),
    ("max_pool2d.default", (randn(2, 3, 4, 4), [2, 2]), {}, "dim 0, dim 1"),
    ("max_pool1d.default", (randn(2, 3, 4), [2]), {}, "dim 0, dim 1"),
    ("upsample_nearest1d.vec", (randn(2, 3, 4), None, [2.0]), {}, "dim 0, dim 1"),
    ("upsample_nearest2d.vec", (randn(2, 3, 4, 4), None, [2.0, 2.0]), {}, "dim 0, dim 1"),
    ("upsample_bilinear2d.vec", (randn(2, 3, 4, 4), None, False, [2.0, 2.0]), {}, "dim 0, dim 1"),
    ("upsample_bicubic2d.vec", (randn(2, 3, 4, 4), None, False, [2.0, 2.0]), {}, "dim 0, dim 1"),
    # made from sizes
    ("zeros.default", ([4, 6],), {}, "dim 0, dim 1"),
    ("full.default", ([4, 6], 2.5), {}, "dim 0, dim 1"),
    ("new_ones.default", (randn(3), [4, 6]), {}, "dim 0, dim 1"),
    ("new_zeros.default", (ids(3, 4), [4, 1]), {}, "dim 0"),
    ("arange.default", (6,), {}, ""),
    ("arange.start", (2, 6), {}, ""),
    ("eye.m", (4, 6), {}, ""),
    # element by element, beyond those that the schemas make below
    ("where.self", (ids(2, 3, 4).to(torch.bool), randn(4), randn(3, 1)), {}, "dim 0, dim 1, partial"),
    ("where.ScalarOther", (ids(2, 3, 4).to(torch.bool), randn(4), 0.0), {}, "dim 0, dim 1, partial"),
    ("masked_fill.Scalar", (randn(3, 4), ids(2, 4).to(torch.bool), 0), {}, "dim 0, dim 1, partial"),
    ("masked_fill.Scalar", (randn(3, 4), ids(2, 4).to(torch.bool), -1e9), {}, "dim 0, dim 1"),
    ("add.Tensor", (randn(2, 3, 4), randn(4)), {"alpha": 2}, "dim 0, dim 1, dim 2, partial"),
    ("add.Tensor", (randn(2, 3), 1.0), {}, "dim 0, dim 1"),
    ("mul.Tensor", (randn(2, 3), randn(3)), {}, "dim 0, dim 1, partial"),
    ("div.Tensor", (randn(2, 3), 4), {}, "dim 0, dim 1, partial"),
    ("expand_as.default", (randn(3, 1), randn(2, 3, 4)), {}, "dim 0, dim 1, dim 2"),
    ("prelu.default", (randn(2, 3, 4), randn(3)), {}, "dim 0, dim 1, dim 2"),
    ("glu.default", (randn(2, 3, 10),), {}, "dim 0, dim 1, halves"),
    ("dropout.default", (randn(4, 3), 0.0, True), {}, "dim 0, dim 1"),
    ("native_dropout.default", (randn(4, 3), 0.0, True), {}, "dim 0, dim 1"),
    ("alpha_dropout.default", (randn(4, 3), 0.0, True), {}, "dim 0, dim 1"),
)


def same_names(found: set[str], expected: str) -> None:
    names = {name.strip() for name in expected.replace("tokens, dim", "tokens; dim").split(",") if name}
    assert found == {name.replace("tokens; dim", "tokens, dim") for name in names}


@pytest.mark.parametrize(("target", "args", "kwargs", "expected"), CASES, ids=[row[0] for row in CASES])
def test_operator_splits_along(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], expected: str) -> None:
    same_names(proved(case(f"aten.{target}", *args, **kwargs)), expected)
    proved(case(f"aten.{target}", *args, smooth=1, **kwargs), ranks=(2,))  # frozen weights, masks of floats


# -- every elementwise operator, with arguments made from its schema ----------------------------------------------

RANDOM = sorted(target for target in RULES if target.startswith("aten.") and draws(Op(target, (), (), ())))
OTHERWISE = ("aten.glu.default", "aten.prelu.default", "aten.expand_as.default", "aten.empty_like.default")
ELEMENTWISE = sorted(set(POINTWISE) - set(RANDOM) - set(OTHERWISE))
SHAPES = ((2, 3, 1, 4), (3, 5, 4), (5, 1))
NUMBERS = {"number": 2, "int": 1, "float": 0.5, "str": "floor"}


def made_from_schema(target: str, make: Callable[..., Tensor]) -> Case:
    """A call whose tensors broadcast together, with small numbers for the other arguments."""
    _, name, overload = target.split(".")
    shapes = iter(SHAPES)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in getattr(getattr(torch.ops.aten, name), overload)._schema.arguments:
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if kind == "Tensor":
            args.append(make(next(shapes)))
        elif argument.kwarg_only and not argument.has_default_value():
            kwargs[argument.name] = NUMBERS[kind]
        elif kind == "number" and not argument.kwarg_only:
            args.append(NUMBERS[kind])
    if name in ("fill", "masked_fill") and overload == "Tensor":
        args[-1] = make(())
    if name in ("masked_fill", "where"):
        mask = int(name == "masked_fill")
        args[mask] = args[mask] > 0.5
    return case(target, *args, **kwargs)


def in_domain(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def whole_numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(1, 5, shape)


def in_float32(shape: tuple[int, ...]) -> Tensor:
    return in_domain(shape).to(torch.float32)


@pytest.mark.parametrize("target", ELEMENTWISE)
def test_elementwise_operator_splits_along_every_dim(target: str) -> None:
    torch.manual_seed(1)
    for make in (in_domain, whole_numbers, in_float32):
        try:
            made = made_from_schema(target, make)
        except (RuntimeError, NotImplementedError):
            continue  # not for this type
        shape = made.site.results[0].sizes
        assert proved(made) - {"partial"} == {f"dim {d}" for d, n in enumerate(shape) if n > 1}
        return
    pytest.fail(f"{target} ran on no type")


def test_operators_that_draw_numbers_are_told_from_others() -> None:
    words = ("rand", "normal", "drop", "bernoulli", "uniform", "exponential", "geometric", "cauchy", "poisson",
             "multinomial")  # fmt: skip
    assert {t for t in RULES if any(word in t for word in words)} == set(RANDOM)


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        ("dropout.default", (None, 0.1, True), True),
        ("dropout.default", (None, 0.0, True), False),
        ("dropout.default", (None, 0.1, False), False),
        ("feature_dropout.default", (None, 0.1, True), True),
        ("rrelu.default", (None, 0.1, 0.3, True), True),
        ("rrelu.default", (None, 0.1, 0.3), False),
        ("scaled_dot_product_attention.default", (), False),
        ("scaled_dot_product_attention.default", (None, None, None, None, 0.1), True),
        ("lstm.input", (None, (), (), True, 2, 0.1, True, False, True), True),
        ("lstm.input", (None, (), (), True, 2, 0.0, True, False, True), False),
        ("multinomial.default", (None, 2), True),
        ("randint.default", (9, (2,)), True),
        ("cauchy_.default", (), True),
        ("relu.default", (), False),
    ],
)
def test_a_call_draws_numbers(target: str, args: tuple[Arg, ...], expected: bool) -> None:
    assert draws(Op(f"aten.{target}", args, (), ())) is expected


# -- what the harness would catch ---------------------------------------------------------------------------------

WRONG: tuple[tuple[str, Case, Factor], ...] = (
    (
        "a reduction along an operand's other dim",
        case("aten.matmul.default", randn(4, 4), randn(4, 4)),
        Factor("in", (Dim(0), Dim(0)), (None,)),
    ),
    (
        "a bias that every rank adds",
        case("aten.linear.default", randn(4, 6), randn(4, 6), randn(4)),
        Factor("in", (Dim(1), Dim(1), None), (None,)),
    ),
    ("a mean of parts", case("aten.mean.dim", randn(4, 6), [1]), Factor("sum over dim 1", (Dim(1),), (None,))),
    (
        "queries under a causal mask",
        case("aten.scaled_dot_product_attention.default", *(randn(1, 2, 6, 4),) * 3, None, 0.0, True),
        Factor("queries", (Dim(2), None, None), (Dim(2),)),
    ),
    (
        "heads of a fused projection cut contiguously",
        case("aten.split.Tensor", randn(2, 12), 4, 1),
        Factor("parts", (Dim(1),), (Dim(1), Dim(1), Dim(1))),
    ),
    (
        "the inner dim of a merge taken for the outer",
        case("aten.reshape.default", randn(4, 6), [24]),
        Factor("dim 1", (Dim(1),), (Dim(0),)),
    ),
    (
        "a merged dim cut unevenly",
        case("aten.reshape.default", randn(5, 4), [20]),
        Factor("dim 0", (Dim(0),), (Dim(0),)),
    ),
    (
        "a running sum cut along its dim",
        case("aten.cumsum.default", randn(4, 6), 1),
        Factor("dim 1", (Dim(1),), (Dim(1),)),
    ),
    (
        "an operand whose gradient is not summed",
        case("aten.mul.Tensor", randn(4, 6), randn(1, 6)),
        Factor("dim 0", (Dim(0), Dim(1)), (Dim(0),)),
    ),
    ("a maximum taken for a sum", case("aten.amax.default", randn(4, 6), [1]), Factor("sum", (Dim(1),), (None,))),
)


@pytest.mark.parametrize(("what", "wrong", "factor"), WRONG, ids=[row[0] for row in WRONG])
def test_wrong_factor_is_caught(what: str, wrong: Case, factor: Factor) -> None:
    rule = replace(RULES[wrong.target], factors=lambda site: (factor,))
    with pytest.raises((AssertionError, RuntimeError)):
        proved(wrong, ranks=(2,), rule=rule)


def test_wrong_linearity_is_caught() -> None:
    rule = replace(RULES["aten.mul.Tensor"], linear=lambda site: (frozenset({0, 1}),))
    with pytest.raises(AssertionError, match="partial"):
        proved(case("aten.mul.Tensor", randn(4, 6), randn(4, 6)), rule=rule)


# -- what is refused, and what is priced --------------------------------------------------------------------------


def test_every_target_is_an_operator_of_torch() -> None:
    for target in RULES:
        namespace, name, overload = target.split(".")
        assert namespace != "aten" or overload in getattr(torch.ops.aten, name).overloads(), target


def test_families_do_not_overlap() -> None:
    assert sum(map(len, FAMILIES)) == len(RULES)


def test_operator_without_rule_is_only_repeated() -> None:
    site = case("aten.histc.default", randn(6), 4).site
    assert rule_of(site.op.target) is None
    assert [s.name for s in strategies(site, None, 2, {})] == ["repeat"]


def test_grouped_heads_that_do_not_divide_are_not_cut() -> None:
    made = case(
        "aten.scaled_dot_product_attention.default",
        *(randn(1, 8, 4, 2), randn(1, 2, 4, 2), randn(1, 2, 4, 2)),
        is_causal=True,
        enable_gqa=True,
    )
    assert "heads" in proved(made, ranks=(2,))
    assert "heads" not in proved(made, ranks=(4,))


def test_vocabulary_loss_states_its_two_all_reduces() -> None:
    made = case("aten.cross_entropy_loss.default", randn(6, 8), ids(8, 6), None, 2)
    (found,) = (s for s in strategies(made.site, rule_of(made.target), 2, {}) if s.form == "vocabulary")
    assert found.operands == (S(1), I)
    assert found.results == (I,)
    # the maximum of each of 6 rows; then the sum of exponentials beside the target's score
    assert found.inside == ((Collective.ALL_REDUCE, 4 * 6), (Collective.ALL_REDUCE, 8 * 6))


@pytest.mark.parametrize(
    ("made", "forward", "backward"),
    [
        (case("aten.linear.default", randn(2, 3, 4), randn(5, 4)), 2 * 6 * 4 * 5, 2 * 2 * 6 * 4 * 5),
        (case("aten.linear.default", randn(2, 3, 4), randn(5, 4), smooth=1), 2 * 6 * 4 * 5, 2 * 6 * 4 * 5),
        (case("aten.einsum.default", "bij,bjk->bik", [randn(2, 3, 4), randn(2, 4, 5)]), 2 * 120, 2 * 2 * 120),
        (case("aten.conv2d.default", randn(2, 3, 4, 4), randn(5, 3, 4, 4)), 2 * 10 * 48, 2 * 2 * 10 * 48),
        (
            case("aten.scaled_dot_product_attention.default", *(randn(2, 3, 4, 5),) * 3),
            4 * 2 * 3 * 4 * 4 * 5,
            10 * 2 * 3 * 4 * 4 * 5,
        ),
        (
            case("aten.scaled_dot_product_attention.default", *(randn(2, 3, 4, 5),) * 3, is_causal=True),
            2 * 2 * 3 * 4 * 4 * 5,
            5 * 2 * 3 * 4 * 4 * 5,
        ),
        (case("aten.add.Tensor", randn(2), randn(2)), 0, 0),
    ],
)
def test_flop_of(made: Case, forward: int, backward: int) -> None:
    assert RULES[made.target].flop(made.site) == (forward, backward)
