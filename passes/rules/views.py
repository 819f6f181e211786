"""Operators that move elements and change none: views, permutations, splits, concatenations, casts.

A view that merges or splits dims keeps, for a cut S(d, k), one number: the blocks outside it in flattened order,
K = k * (product of the group's sizes before d). Cuts of the two sides with the same K are the same cut:

    [batch, seq] -> [batch * seq]       S(1) has K = batch      =      S(0, batch)
    [3 * heads * e] -> [3, heads, e]    S(0, 3) has K = 3       =      S(1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import prod

from costmodels.operators import OperatorClass
from passes.graph import Op
from passes.rules.base import Dim, Factor, Rule, Site
from passes.rules.common import (
    Sets,
    Shapes,
    aligned,
    carried,
    dims,
    in_all,
    in_first,
    in_second,
    ints,
    parallel_dims,
    same_dims,
    with_arg,
)

Group = tuple[tuple[int, ...], tuple[int, ...]]  # dims of the operand, dims of the result, both of one product


# -- views that merge and split dims ------------------------------------------------------------------------------


def groups(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Group, ...]:
    """The smallest runs of dims with equal products; dims of one element belong to none.

    [2, 1, 6, 4] -> [2, 2, 3, 4]   gives   ((0,), (0,)), ((2,), (1, 2)), ((3,), (3,))
    """
    if prod(before) == 0:
        return ()
    left = [d for d, size in enumerate(before) if size > 1]
    right = [d for d, size in enumerate(after) if size > 1]
    found: list[Group] = []
    while left:
        ins, outs = [left.pop(0)], [right.pop(0)]
        while (a := prod(before[d] for d in ins)) != (b := prod(after[d] for d in outs)):
            if a < b:
                ins.append(left.pop(0))
            else:
                outs.append(right.pop(0))
        found.append((tuple(ins), tuple(outs)))
    return tuple(found)


def _scale(dim: int, group: tuple[int, ...], shape: tuple[int, ...]) -> Fraction:
    return Fraction(1, prod(shape[d] for d in group if d < dim))


def view(site: Site) -> tuple[Factor, ...]:
    """A factor whose block count is K for each pair of dims that a cut may pass between (module docstring).

    view_as reads a second operand for its shape, which is the result's.
    """
    before, after = site.operands[0].sizes, site.results[0].sizes
    models = len(site.operands) - 1
    found: list[Factor] = []
    for ins, outs in groups(before, after):
        if len(ins) == len(outs) == 1:
            out = Dim(outs[0])
            found.append(Factor(f"dim {ins[0]}", (Dim(ins[0]), *(out,) * models), (out,)))
            continue
        for i in ins:
            for j in outs:
                cut, out = Dim(i, _scale(i, ins, before)), Dim(j, _scale(j, outs, after))
                found.append(Factor(f"dim {i} as dim {j}", (cut, *(out,) * models), (out,), even=True, free=()))
    return tuple(found)


def local_view(site: Site, results: Shapes) -> Op:
    """The view with local sizes. Only dims that pass through as they are may be cut unevenly: one of them is -1.

    Where several are cut, the view becomes flatten or unflatten, which name no dim that passes through.
    """
    before, after, local = site.operands[0].sizes, site.results[0].sizes, results[0]
    parts = groups(before, after)
    through = {outs[0] for ins, outs in parts if len(ins) == len(outs) == 1}
    cut = [d for d, (n, m) in enumerate(zip(after, local, strict=True)) if n != m]
    if not cut:
        return site.op
    loose = [d for d in cut if d in through]
    if len(loose) > 1:
        named = _merge_or_split(site, local)
        if named is not None:
            return named
        uneven = [d for d in loose if after[d] % local[d]]
        assert len(uneven) < 2, f"{site.op}: dims {uneven} are cut unevenly, and a view can leave open only one"
        loose = uneven or loose
    hole = loose[0] if loose else None
    return replace(
        site.op, args=(site.op.args[0], tuple(-1 if d == hole else n for d, n in enumerate(local))), kwargs=()
    )


def _merge_or_split(site: Site, local: tuple[int, ...]) -> Op | None:
    """flatten or unflatten, where the view does nothing else."""
    before, after, first = site.operands[0].sizes, site.results[0].sizes, site.op.args[0]
    more = len(before) - len(after)
    for d in range(min(len(before), len(after))):
        if more > 0 and (*before[:d], prod(before[d : d + more + 1]), *before[d + more + 1 :]) == after:
            return replace(site.op, target="aten.flatten.using_ints", args=(first, d, d + more), kwargs=())
        if more < 0 and (*after[:d], prod(after[d : d - more + 1]), *after[d - more + 1 :]) == before:
            sizes = _open(after[d : d - more + 1], local[d : d - more + 1])
            return replace(site.op, target="aten.unflatten.int", args=(first, d, sizes), kwargs=())
    return None


def _open(after: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    """Local sizes of a split, the cut one left open: -1."""
    cut = [d for d, (n, m) in enumerate(zip(after, local, strict=True)) if n != m]
    return tuple(-1 if [d] == cut else n for d, n in enumerate(local))


def local_unflatten(site: Site, results: Shapes) -> Op:
    rank = len(site.operands[0].sizes)
    (dim,) = dims(site.arg(1, "dim"), rank)
    end = dim + len(results[0]) - rank + 1
    return with_arg(site.op, 2, "sizes", _open(site.results[0].sizes[dim:end], results[0][dim:end]))


def local_squeeze(site: Site, results: Shapes) -> Op:
    """Names the dims that go: a dim that is cut down to one element stays."""
    shape = site.operands[0].sizes
    if not shape:
        return site.op
    named = dims(site.arg(1, "dim"), len(shape)) if site.arg(1, "dim") is not None else range(len(shape))
    gone = tuple(d for d in named if shape[d] == 1)
    return replace(site.op, target="aten.squeeze.dims", args=(site.op.args[0], gone), kwargs=())


# -- expand and repeat --------------------------------------------------------------------------------------------


def expand(site: Site) -> tuple[Factor, ...]:
    """An expanded dim is read whole: each rank makes its own part."""
    shape = site.results[0].sizes
    where = aligned(site.operands[0], len(shape))
    return tuple(
        Factor(f"dim {d}", (where[d],), (Dim(d),), even=where[d] is None) for d, size in enumerate(shape) if size > 1
    )


def local_expand(site: Site, results: Shapes) -> Op:
    """-1 where the dim is the operand's own."""
    before, after = site.operands[0].sizes, site.results[0].sizes
    lacks = len(after) - len(before)
    sizes = tuple(-1 if d >= lacks and before[d - lacks] == after[d] else n for d, n in enumerate(results[0]))
    return with_arg(site.op, 1, "size", sizes)


def repeat(site: Site) -> tuple[Factor, ...]:
    """Dims that are not repeated."""
    lacks = len(site.results[0].sizes) - len(site.operands[0].sizes)
    times = ints(site.arg(1, "repeats"))
    return carried(site, ((d - lacks, d) for d, n in enumerate(times) if d >= lacks and n == 1))


def repeat_interleave(site: Site) -> tuple[Factor, ...]:
    """[a, b] -> [a, a, b, b]: contiguous slices stay contiguous."""
    if site.arg(2, "dim") is None or site.arg(3, "output_size") is not None:
        return ()
    (dim,) = dims(site.arg(2, "dim"), len(site.operands[0].sizes))
    repeated = Factor(f"dim {dim}", (Dim(dim),), (Dim(dim),), even=True)
    return (*same_dims(site, skip=(dim,)), repeated)


# -- permutations -------------------------------------------------------------------------------------------------


def _order(site: Site) -> tuple[int, ...]:
    """The operand's dim at each place of the result."""
    rank, name = len(site.operands[0].sizes), site.op.target.split(".")[1]
    order = list(range(rank))
    if rank < 2:
        return tuple(order)
    if name == "permute":
        return dims(site.arg(1, "dims"), rank)
    if name in ("transpose", "swapaxes", "swapdims"):
        (a,), (b,) = dims(site.arg(1), rank), dims(site.arg(2), rank)
        order[a], order[b] = b, a
    elif name in ("t", "mT", "mH", "adjoint"):
        order[-2:] = order[:-3:-1]
    elif name == "numpy_T":
        order.reverse()
    elif name == "movedim":
        moved = dict(zip(dims(site.arg(2), rank), dims(site.arg(1), rank), strict=True))
        stay = iter(d for d in range(rank) if d not in moved.values())
        order = [moved[d] if d in moved else next(stay) for d in range(rank)]
    return tuple(order)


def permutation(site: Site) -> tuple[Factor, ...]:
    return carried(site, ((i, j) for j, i in enumerate(_order(site))))


# -- parts of a dim -----------------------------------------------------------------------------------------------


def select(site: Site) -> tuple[Factor, ...]:
    """The selected dim goes; so with unbind."""
    rank = len(site.operands[0].sizes)
    (gone,) = dims(site.arg(1, "dim", 0), rank)
    return carried(site, ((d, d - (d > gone)) for d in range(rank) if d != gone))


def sliced(site: Site) -> tuple[Factor, ...]:
    """Dims whose size does not change. (A slice that keeps all of a dim is the dim itself.)"""
    before, after = site.operands[0].sizes, site.results[0].sizes
    return same_dims(site, skip=[d for d in range(len(before)) if before[d] != after[d]])


def along(position: int, keyword: str, cost: OperatorClass = OperatorClass.POINTWISE) -> Rule:
    """The rule of an operator that works along the dims it names."""

    def factors(site: Site) -> tuple[Factor, ...]:
        named = dims(site.arg(position, keyword), len(site.operands[0].sizes))
        return same_dims(site, skip=named) if named else ()

    return Rule(cost, factors, in_first)


def lower_triangle(site: Site) -> tuple[Factor, ...]:
    rank = len(site.operands[0].sizes)
    return same_dims(site, skip=(rank - 2, rank - 1))


def pad(site: Site) -> tuple[Factor, ...]:
    """Dims that are not padded; the list of pads begins with the last dim."""
    pads, rank = ints(site.arg(1, "pad")), len(site.operands[0].sizes)
    padded = {rank - 1 - place // 2 for place, n in enumerate(pads) if n}
    return same_dims(site, skip=padded)


def padded_with_zeros(site: Site) -> Sets:
    if site.op.target == "aten.pad.default":
        mode, fill = site.arg(2, "mode", "constant"), site.arg(3, "value")
        return (frozenset({0}),) if mode != "constant" or not fill else ()
    return (frozenset({0}),) if not site.arg(2, "value", 0) else ()


# -- split and join -----------------------------------------------------------------------------------------------


def _split_dim(site: Site) -> tuple[int, int]:
    """The dim that is split, and the number of parts if they are equal, else 0."""
    shape = site.operands[0].sizes
    (dim,) = dims(site.arg(2, "dim", 0), len(shape))
    parts = [value.sizes[dim] for value in site.results]
    if site.op.target.split(".")[1] in ("split_with_sizes", "split") and isinstance(site.arg(1), tuple):
        parts = list(ints(site.arg(1)))
    equal = parts[0] > 0 and len(set(parts)) == 1 and shape[dim] % parts[0] == 0
    return dim, shape[dim] // parts[0] if equal else 0


def split(site: Site) -> tuple[Factor, ...]:
    """m equal parts are m blocks of the split dim: S(d, m) -> S(d) of each part."""
    dim, parts = _split_dim(site)
    found = same_dims(site, skip=(dim,))
    if parts:
        found += (Factor(f"parts of dim {dim}", (Dim(dim, Fraction(parts)),), tuple(Dim(dim) for _ in site.results)),)
    return found


def local_split(site: Site, results: Shapes) -> Op:
    """chunk says the number of parts where split says a size, which differs between the ranks."""
    dim, parts = _split_dim(site)
    if not parts or results[0][dim] == site.results[0].sizes[dim]:
        return site.op
    return replace(site.op, target="aten.chunk.default", args=(site.op.args[0], parts, dim), kwargs=())


def cat(site: Site) -> tuple[Factor, ...]:
    """m tensors of one size become m blocks of the joined dim: S(d) of each -> S(d, m)."""
    rank = len(site.results[0].sizes)
    (dim,) = dims(site.arg(1, "dim", 0), rank)
    if any(len(value.sizes) != rank for value in site.operands):
        return ()
    found = parallel_dims(site, skip=(dim,))
    if len({value.sizes[dim] for value in site.operands}) == 1:
        joined = Dim(dim, Fraction(len(site.operands)))
        found += (Factor(f"parts of dim {dim}", tuple(Dim(dim) for _ in site.operands), (joined,)),)
    return found


def stack(site: Site) -> tuple[Factor, ...]:
    (new,) = dims(site.arg(1, "dim", 0), len(site.results[0].sizes))
    return tuple(
        Factor(f"dim {d}", tuple(Dim(d) for _ in site.operands), (Dim(d + (d >= new)),))
        for d, size in enumerate(site.operands[0].sizes)
        if size > 1
    )


def scatter_back(site: Site) -> tuple[Factor, ...]:
    """slice_scatter(x, part, dim): writes a part of one dim; the others are common to both."""
    (dim,) = dims(site.arg(2, "dim", 0), len(site.operands[0].sizes))
    return parallel_dims(site, skip=(dim,))


def select_back(site: Site) -> tuple[Factor, ...]:
    """select_scatter(x, part, dim): the part lacks the dim."""
    rank = len(site.operands[0].sizes)
    (gone,) = dims(site.arg(2, "dim"), rank)
    return tuple(
        Factor(f"dim {d}", (Dim(d), Dim(d - (d > gone))), (Dim(d),))
        for d, size in enumerate(site.operands[0].sizes)
        if d != gone and size > 1
    )


def diff(site: Site) -> tuple[Factor, ...]:
    """x[1:] - x[:-1] of one dim, with something joined before or after."""
    rank = len(site.operands[0].sizes)
    (dim,) = dims(site.arg(2, "dim", -1), rank)
    return parallel_dims(site, skip=(dim,))


def copied(site: Site) -> tuple[Factor, ...]:
    """copy(x, y): the elements of y in the shape of x."""
    rank = len(site.results[0].sizes)
    where = aligned(site.operands[1], rank)
    return tuple(
        Factor(f"dim {d}", (Dim(d), where[d]), (Dim(d),)) for d, size in enumerate(site.results[0].sizes) if size > 1
    )


# -- the table ----------------------------------------------------------------------------------------------------

FREE, MOVES = OperatorClass.VIEW, OperatorClass.POINTWISE

_SAME = "alias.default detach.default"
_COMPLEX = "view_as_real.default view_as_complex.default conj.default _conj.default resolve_conj.default"
_COPIED = """
contiguous.default clone.default lift_fresh_copy.default lift_fresh.default to.dtype to.dtype_layout to.device to.other
_to_copy.default type_as.default
"""
_PERMUTED = """
transpose.int permute.default t.default swapaxes.default swapdims.default mT.default mH.default adjoint.default
numpy_T.default movedim.int movedim.intlist
"""


def identity(site: Site) -> tuple[Factor, ...]:
    """Dims that the result keeps; a second operand lends only its dtype. (A complex view adds or takes a last dim.)"""
    common = min(len(site.operands[0].sizes), len(site.results[0].sizes))
    return carried(site, ((d, d) for d in range(common)))


_SPLIT = Rule(FREE, split, in_first, localize=local_split)
_CAT = Rule(MOVES, cat, in_all)

VIEWS: Mapping[str, Rule] = {
    **{f"aten.{name}": Rule(FREE, identity, in_first) for name in _SAME.split()},
    **{f"aten.{name}": Rule(FREE, identity) for name in _COMPLEX.split()},
    **{f"aten.{name}": Rule(MOVES, identity, in_first) for name in _COPIED.split()},
    **{f"aten.{name}": Rule(FREE, permutation, in_first) for name in _PERMUTED.split()},
    "aten.view.default": Rule(FREE, view, in_first, localize=local_view),
    "aten._unsafe_view.default": Rule(FREE, view, in_first, localize=local_view),
    "aten.reshape.default": Rule(FREE, view, in_first, localize=local_view),
    "aten.view_as.default": Rule(FREE, view, in_first),
    "aten.reshape_as.default": Rule(FREE, view, in_first),
    "aten.flatten.using_ints": Rule(FREE, view, in_first),
    "aten.unflatten.int": Rule(FREE, view, in_first, localize=local_unflatten),
    "aten.unsqueeze.default": Rule(FREE, view, in_first),
    "aten.squeeze.default": Rule(FREE, view, in_first, localize=local_squeeze),
    "aten.squeeze.dim": Rule(FREE, view, in_first, localize=local_squeeze),
    "aten.squeeze.dims": Rule(FREE, view, in_first, localize=local_squeeze),
    "aten.expand.default": Rule(FREE, expand, in_first, localize=local_expand),
    "aten.repeat.default": Rule(MOVES, repeat, in_first),
    "aten.repeat_interleave.self_int": Rule(MOVES, repeat_interleave, in_first),
    "aten.select.int": Rule(FREE, select, in_first),
    "aten.unbind.int": Rule(FREE, select, in_first),
    "aten.slice.Tensor": Rule(FREE, sliced, in_first),
    "aten.narrow.default": along(1, "dim", FREE),
    "aten.split.Tensor": _SPLIT,
    "aten.split.sizes": _SPLIT,
    "aten.split.default": _SPLIT,
    "aten.split_with_sizes.default": _SPLIT,
    "aten.chunk.default": _SPLIT,
    "aten.tensor_split.sections": _SPLIT,
    "aten.cat.default": _CAT,
    "aten.concat.default": _CAT,
    "aten.concatenate.default": _CAT,
    "aten.stack.default": Rule(MOVES, stack, in_all),
    "aten.pad.default": Rule(MOVES, pad, padded_with_zeros),
    "aten.constant_pad_nd.default": Rule(MOVES, pad, padded_with_zeros),
    "aten.roll.default": along(2, "dims"),
    "aten.flip.default": along(1, "dims"),
    "aten.tril.default": Rule(MOVES, lower_triangle, in_first),
    "aten.triu.default": Rule(MOVES, lower_triangle, in_first),
    "aten.unfold.default": along(1, "dimension", FREE),
    "aten.diff.default": Rule(MOVES, diff, in_all),
    "aten.copy.default": Rule(MOVES, copied, in_second),
    "aten.slice_scatter.default": Rule(MOVES, scatter_back, in_all),
    "aten.select_scatter.default": Rule(MOVES, select_back, in_all),
}
