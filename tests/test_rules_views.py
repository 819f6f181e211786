"""Views under cuts: every shape, view and placement against the whole tensor, and fused projections."""

from __future__ import annotations

import random
from itertools import product
from math import prod
from typing import Any

import pytest
import torch

from passes.graph import Atom, Op
from passes.interpret import call
from passes.placements import S, is_even, is_valid, local_shape
from passes.rules import rule_of
from passes.rules.base import Strategy, strategies
from passes.rules.views import groups
from test_rules import Case, case, one_thread, proved, randn, same_names, slice_of, wanted  # noqa: F401  (a fixture)

Pair = tuple[S, S]

CASES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("view.default", (randn(2, 6, 12), [2, 6, 3, 4]), "dim 0, dim 1, dim 2 as dim 2, dim 2 as dim 3, partial"),
    ("reshape.default", (randn(4, 6), [-1]), "dim 0 as dim 0, dim 1 as dim 0, partial"),
    ("reshape.default", (randn(5, 1, 6), [5, 6, 1]), "dim 0, dim 2, partial"),
    ("_unsafe_view.default", (randn(4, 5, 1), [1, 4, 5]), "dim 0, dim 1, partial"),
    ("view_as.default", (randn(4, 6), randn(24)), "dim 0 as dim 0, dim 1 as dim 0, partial"),
    ("reshape_as.default", (randn(5, 3), randn(5, 1, 3)), "dim 0, dim 1, partial"),
    ("flatten.using_ints", (randn(5, 2, 6), 1), "dim 0, dim 1 as dim 1, dim 2 as dim 1, partial"),
    ("flatten.using_ints", (randn(()),), "partial"),
    ("unflatten.int", (randn(5, 12), -1, [3, 4]), "dim 0, dim 1 as dim 1, dim 1 as dim 2, partial"),
    ("unflatten.int", (randn(4, 5), 1, [1, -1]), "dim 0, dim 1, partial"),
    ("unsqueeze.default", (randn(4, 5), 1), "dim 0, dim 1, partial"),
    ("squeeze.default", (randn(2, 1, 3),), "dim 0, dim 2, partial"),
    ("squeeze.dim", (randn(2, 1, 3), 0), "dim 0, dim 2, partial"),
    ("squeeze.dims", (randn(2, 1, 3), [0, 1]), "dim 0, dim 2, partial"),
    ("expand.default", (randn(3, 1), [2, -1, 4]), "dim 0, dim 1, dim 2, partial"),
    ("expand.default", (randn(1, 5), [6, 5]), "dim 0, dim 1, partial"),
    ("repeat.default", (randn(2, 3), [2, 1, 3]), "dim 0, partial"),
    ("repeat_interleave.self_int", (randn(2, 6, 4), 2, 1), "dim 0, dim 1, dim 2, partial"),
    ("transpose.int", (randn(2, 3, 4), 1, -1), "dim 0, dim 1, dim 2, partial"),
    ("transpose.int", (randn(()), 0, 0), "partial"),
    ("permute.default", (randn(2, 3, 4), [2, 0, 1]), "dim 0, dim 1, dim 2, partial"),
    ("t.default", (randn(3, 4),), "dim 0, dim 1, partial"),
    ("t.default", (randn(3),), "dim 0, partial"),
    ("mT.default", (randn(2, 3, 4),), "dim 0, dim 1, dim 2, partial"),
    ("adjoint.default", (randn(2, 3, 4),), "dim 0, dim 1, dim 2, partial"),
    ("numpy_T.default", (randn(3, 4),), "dim 0, dim 1, partial"),
    ("swapaxes.default", (randn(3, 4), 0, 1), "dim 0, dim 1, partial"),
    ("swapdims.default", (randn(3, 4), 0, 1), "dim 0, dim 1, partial"),
    ("movedim.int", (randn(2, 3, 4), 0, 2), "dim 0, dim 1, dim 2, partial"),
    ("movedim.intlist", (randn(2, 3, 4), [0, 1], [-1, 0]), "dim 0, dim 1, dim 2, partial"),
    ("select.int", (randn(2, 3, 4), 1, -1), "dim 0, dim 2, partial"),
    ("unbind.int", (randn(2, 3, 4), 1), "dim 0, dim 2, partial"),
    ("slice.Tensor", (randn(3, 4, 6), 1, 1, 3), "dim 0, dim 2, partial"),
    ("slice.Tensor", (randn(3, 4), 1, 0, 4), "dim 0, dim 1, partial"),
    ("narrow.default", (randn(3, 4), 1, 0, 4), "dim 0, partial"),
    ("split.Tensor", (randn(3, 15), 5, -1), "dim 0, parts of dim 1, partial"),
    ("split.Tensor", (randn(3, 7), 4, 1), "dim 0, partial"),
    ("split.sizes", (randn(3, 8), [4, 4], 1), "dim 0, parts of dim 1, partial"),
    ("split.default", (randn(3, 8), [4, 4], 1), "dim 0, parts of dim 1, partial"),
    ("split_with_sizes.default", (randn(3, 8), [4, 2, 2], 1), "dim 0, partial"),
    ("split_with_sizes.default", (randn(8, 3), [4, 4]), "dim 1, parts of dim 0, partial"),
    ("chunk.default", (randn(3, 4), 3, 1), "dim 0, parts of dim 1, partial"),
    ("chunk.default", (randn(3, 5), 2, 1), "dim 0, partial"),
    ("tensor_split.sections", (randn(3, 8), 2, 1), "dim 0, parts of dim 1, partial"),
    ("cat.default", ([randn(3, 5), randn(3, 5)], 1), "dim 0, parts of dim 1, partial"),
    ("cat.default", ([randn(3, 1), randn(3, 6)], 1), "dim 0, partial"),
    ("cat.default", ([randn(0), randn(3, 6)], 1), "partial"),
    ("concat.default", ([randn(3, 5), randn(3, 5)], 1), "dim 0, parts of dim 1, partial"),
    ("concatenate.default", ([randn(3, 5), randn(3, 5)], 1), "dim 0, parts of dim 1, partial"),
    ("stack.default", ([randn(3, 5), randn(3, 5)], 1), "dim 0, dim 1, partial"),
    ("pad.default", (randn(3, 4, 5), [0, 1]), "dim 0, dim 1, partial"),
    ("pad.default", (randn(3, 4, 5), [0, 0, 1, 0], "constant", -100.0), "dim 0, dim 2"),
    ("constant_pad_nd.default", (randn(3, 4), [1, 1]), "dim 0, partial"),
    ("roll.default", (randn(3, 4), [1], [1]), "dim 0, partial"),
    ("roll.default", (randn(3, 4), [1]), "partial"),
    ("flip.default", (randn(3, 4), [0]), "dim 1, partial"),
    ("tril.default", (randn(2, 4, 4),), "dim 0, partial"),
    ("triu.default", (randn(2, 4, 4), 1), "dim 0, partial"),
    ("unfold.default", (randn(3, 6), 1, 2, 2), "dim 0, partial"),
    ("diff.default", (randn(3, 6), 1, -1, randn(3, 1)), "dim 0, partial"),
    ("slice_scatter.default", (randn(3, 4), randn(3, 2), 1, 1, 3), "dim 0, partial"),
    ("select_scatter.default", (randn(3, 4, 2), randn(3, 2), 1, 0), "dim 0, dim 2, partial"),
    ("contiguous.default", (randn(3, 4),), "dim 0, dim 1, partial"),
    ("clone.default", (randn(3, 4),), "dim 0, dim 1, partial"),
    ("alias.default", (randn(3, 4),), "dim 0, dim 1, partial"),
    ("detach.default", (randn(3, 4),), "dim 0, dim 1"),
    ("lift_fresh_copy.default", (randn(3),), "dim 0, partial"),
    ("lift_fresh.default", (randn(3),), "dim 0, partial"),
    ("to.dtype", (randn(3, 4), torch.float32), "dim 0, dim 1, partial"),
    ("to.dtype", (randn(3, 4), torch.int64), "dim 0, dim 1"),
    ("to.device", (randn(3, 4), torch.device("cpu"), torch.float32), "dim 0, dim 1, partial"),
    ("to.other", (randn(3, 4), randn(5)), "dim 0, dim 1, partial"),
    ("type_as.default", (randn(3, 4), randn(5)), "dim 0, dim 1, partial"),
    ("view_as_complex.default", (randn(3, 4, 2),), "dim 0, dim 1"),
    ("view_as_real.default", (torch.complex(randn(3, 4), randn(3, 4)),), "dim 0, dim 1"),
    ("conj.default", (torch.complex(randn(3, 4), randn(3, 4)),), "dim 0, dim 1"),
    ("_conj.default", (torch.complex(randn(3, 4), randn(3, 4)),), "dim 0, dim 1"),
    ("copy.default", (randn(3, 4), randn(4)), "dim 0, dim 1"),
)


@pytest.mark.parametrize(("target", "args", "expected"), CASES, ids=[row[0] for row in CASES])
def test_operator_splits_along(target: str, args: tuple[Any, ...], expected: str) -> None:
    same_names(proved(case(f"aten.{target}", *args)), expected)


BY_KEYWORD = ("aten.to.dtype_layout", "aten._to_copy.default")


@pytest.mark.parametrize("target", BY_KEYWORD)
def test_cast_by_keyword_splits_along_every_dim(target: str) -> None:
    same_names(proved(case(target, randn(3, 4), dtype=torch.float32)), "dim 0, dim 1, partial")


# -- exhaustively -------------------------------------------------------------------------------------------------


def shape_of(factors: list[int], draw: random.Random) -> tuple[int, ...]:
    """The factors multiplied together in neighbourly groups, with ones strewn in."""
    sizes = [factors[0]]
    for factor in factors[1:]:
        if draw.random() < 0.5:
            sizes.append(factor)
        else:
            sizes[-1] *= factor
    for _ in range(draw.randrange(3)):
        sizes.insert(draw.randrange(len(sizes) + 1), 1)
    return tuple(sizes)


def cuts(shape: tuple[int, ...], ranks: int) -> list[S]:
    """Every cut that leaves each rank a slice."""
    found = [S(d, k) for d, n in enumerate(shape) for k in range(1, n + 1) if n % k == 0]
    return [cut for cut in found if is_valid(cut, shape, ranks)]


def is_same_cut(before: tuple[int, ...], after: tuple[int, ...], pair: Pair, ranks: int) -> bool:
    """Whether the local view of the one cut is the other, on every rank."""
    whole = torch.arange(prod(before)).reshape(before)
    for rank in range(ranks):
        part, expected = (slice_of(x, p, ranks, rank) for x, p in zip((whole, whole.reshape(after)), pair, strict=True))
        if part.numel() != expected.numel() or not torch.equal(part.reshape(expected.shape), expected):
            return False
    return True


@pytest.mark.parametrize("seed", range(60))
def test_view_offers_exactly_the_cuts_that_are_the_same(seed: int) -> None:
    draw = random.Random(seed)
    factors = [draw.choice((2, 2, 2, 3, 3, 5)) for _ in range(draw.randrange(1, 6))]
    before, after = shape_of(factors, draw), shape_of(draw.sample(factors, len(factors)), draw)
    made = case("aten.reshape.default", randn(*before), list(after))
    for ranks in (2, 3):
        offered = {
            (s.operands[0], s.results[0])
            for s in strategies(made.site, rule_of(made.target), ranks, wanted(made.site))
            if s.split
        }
        pairs = list(product(cuts(before, ranks), cuts(after, ranks)))
        same = {pair for pair in pairs if is_same_cut(before, after, pair, ranks)}
        assert offered <= same
        even = {(a, b) for a, b in same if is_even(a, before, ranks) and is_even(b, after, ranks)}
        assert even <= offered
    proved(made)


def test_groups_of_a_view() -> None:
    assert groups((2, 1, 6, 4), (2, 2, 3, 4)) == (((0,), (0,)), ((2,), (1, 2)), ((3,), (3,)))
    assert groups((4, 6), (3, 8)) == (((0, 1), (0, 1)),)
    assert groups((1, 1), (1,)) == ()
    assert groups((0, 4), (4, 0)) == ()


# -- several axes of the mesh at once -----------------------------------------------------------------------------

# the dims that each axis cuts in operand 0 and in the results, with its ranks
Axes = tuple[tuple[S, S, int], ...]

TOGETHER: tuple[tuple[str, tuple[Any, ...], Axes], ...] = (
    ("reshape.default", (randn(5, 7, 12), [5, 7, 4, 3]), ((S(0), S(0), 2), (S(1), S(1), 3), (S(2), S(2), 2))),
    ("reshape.default", (randn(5, 7, 4, 3), [5, 7, 12]), ((S(0), S(0), 3), (S(1), S(1), 2), (S(2), S(2), 4))),
    ("reshape.default", (randn(4, 6, 5), [24, 5]), ((S(1), S(0, 4), 3), (S(2), S(1), 2))),
    ("reshape.default", (randn(24, 5), [4, 6, 5]), ((S(0), S(0), 2), (S(1), S(2), 3))),
    ("reshape.default", (randn(5, 6), [5, 1, 6]), ((S(0), S(0), 2), (S(1), S(2), 3))),
    ("unflatten.int", (randn(5, 7, 12), 2, [4, 3]), ((S(0), S(0), 2), (S(1), S(1), 3), (S(2), S(2), 2))),
    ("flatten.using_ints", (randn(5, 7, 4, 3), 2), ((S(0), S(0), 2), (S(1), S(1), 3), (S(2), S(2), 2))),
    ("split.Tensor", (randn(5, 7, 15), 5, 2), ((S(0), S(0), 2), (S(2, 3), S(2), 3))),
    ("expand.default", (randn(5, 1, 7, 3), [5, 4, 7, 3]), ((S(0), S(0), 2), (S(2), S(2), 3))),
)


@pytest.mark.parametrize(("target", "args", "axes"), TOGETHER, ids=[row[0] for row in TOGETHER])
def test_local_arguments_are_right_on_every_rank_of_a_mesh(target: str, args: tuple[Any, ...], axes: Axes) -> None:
    made = case(f"aten.{target}", *args)
    rule = rule_of(made.target)
    assert rule is not None
    for given, result, ranks in axes:
        offered = strategies(made.site, rule, ranks, wanted(made.site))
        assert any(s.operands[0] == given and s.results[0] == result for s in offered)
    shapes = [v.sizes for v in made.site.results]
    for _, result, ranks in axes:
        shapes = [local_shape(result, shape, ranks) for shape in shapes]
    op = rule.localize(made.site, tuple(shapes)) if rule.localize else made.site.op
    whole = call(made.site.op, made.tensors)
    (name,) = made.tensors
    for place in product(*(range(ranks) for _, _, ranks in axes)):
        part = made.tensors[name]
        expected = list(whole)
        for (given, result, ranks), rank in zip(axes, place, strict=True):
            part = slice_of(part, given, ranks, rank)
            expected = [slice_of(out, result, ranks, rank) for out in expected]
        for out, right in zip(call(op, {name: part}), expected, strict=True):
            assert torch.equal(out, right)


# -- fused projections --------------------------------------------------------------------------------------------


def offered(made: Case, ranks: int, wants: S) -> list[Strategy]:
    names = {v.name: frozenset({wants}) for v in made.site.results}
    return list(strategies(made.site, rule_of(made.target), ranks, names))


def test_fused_projection_is_cut_per_head_when_heads_are_wanted() -> None:
    """[b, s, 3 * h] -> split -> 3 x [b, s, heads, e]: heads over ranks means S(2, 3) of the projection."""
    view = case("aten.reshape.default", randn(2, 3, 8), [2, 3, 4, 2])
    (heads,) = (s for s in offered(view, 2, S(2)) if s.results[0] == S(2))
    assert heads.operands == (S(2),)
    split = case("aten.split.Tensor", randn(2, 3, 24), 8, 2)
    (parts,) = (s for s in offered(split, 2, S(2)) if s.results[0] == S(2))
    assert parts.operands == (S(2, 3),)
    linear = case("aten.linear.default", randn(2, 3, 4), randn(24, 4), randn(24))
    (out,) = (s for s in offered(linear, 2, S(2, 3)) if s.results[0] == S(2, 3))
    assert out.operands[1:] == (S(0, 3), S(0, 3))


def test_projection_with_heads_outermost_is_cut_contiguously() -> None:
    """[heads * 3 * e] -> [heads, 3 * e]: q, k and v of a head lie side by side."""
    view = case("aten.reshape.default", randn(2, 24), [2, 4, 6])
    (heads,) = (s for s in offered(view, 2, S(1)) if s.results[0] == S(1))
    assert heads.operands == (S(1),)


def test_sequence_of_a_flattened_batch_is_cut_in_as_many_blocks() -> None:
    merge = case("aten.reshape.default", randn(2, 6, 4), [12, 4])
    (found,) = (s for s in offered(merge, 3, S(0, 2)) if s.results[0] == S(0, 2))
    assert found.operands == (S(1),)


def test_view_offers_nothing_that_nobody_wants() -> None:
    merge = case("aten.reshape.default", randn(2, 6, 4), [12, 4])
    found = [s.results[0] for s in strategies(merge.site, rule_of(merge.target), 2, {}) if s.split]
    assert found == [S(1)]


# -- what the program will say ------------------------------------------------------------------------------------


def local(made: Case, *shapes: tuple[int, ...]) -> Op:
    rule = rule_of(made.target)
    assert rule is not None and rule.localize is not None
    return rule.localize(made.site, shapes)


def test_local_view_leaves_the_uneven_dim_open() -> None:
    made = case("aten.reshape.default", randn(5, 6, 4), [5, 24])
    assert local(made, (3, 24)).args[1] == (-1, 24)
    assert local(made, (3, 12)).args[1] == (-1, 12)
    assert local(made, (5, 12)).args[1] == (5, 12)
    assert local(made, (5, 24)) is made.site.op


def test_local_view_of_two_uneven_dims_names_neither() -> None:
    made = case("aten.reshape.default", randn(5, 7, 12), [5, 7, 4, 3])
    op = local(made, (3, 4, 2, 3))
    assert (op.target, op.args[1:]) == ("aten.unflatten.int", (2, (-1, 3)))


def test_local_split_says_the_number_of_parts() -> None:
    op = local(case("aten.split.Tensor", randn(2, 15), 5, 1), (2, 3), (2, 3), (2, 3))
    assert (op.target, op.args[1:]) == ("aten.chunk.default", (3, 1))


def test_local_squeeze_keeps_a_dim_cut_down_to_one() -> None:
    made = case("aten.squeeze.default", randn(2, 1, 3))
    assert local(made, (1, 3)).args[1] == (1,)
    assert local(case("aten.squeeze.dim", randn(2, 3), 0), (1, 3)).args[1] == ()


def test_atoms_stay_as_they_are() -> None:
    made = case("aten.zeros.default", [4, 6], dtype=torch.float64)
    op = local(made, (2, 6))
    assert op.args == ((2, 6),)
    assert dict(op.kwargs) == {"dtype": Atom("torch.float64")}
