"""Matrix products: rows and columns are cut freely, the inner dim reduces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from costmodels.operators import OperatorClass
from passes.graph import DTYPE_BYTES, Value
from passes.rules.base import Dim, Factor, Rule, Site
from passes.rules.common import Sets, aligned, in_each

BIAS_ONCE = "bias on one rank"  # rank 0 adds the bias to its partial sum; elsewhere the bias gets no gradient


def backward(forward: int, left: Value, right: Value) -> tuple[int, int]:
    """One product for each factor that has a gradient."""
    return forward, forward * (left.grad + right.grad)


def linear(site: Site) -> tuple[Factor, ...]:
    """x[.., i], w[o, i], b[o] -> y[.., o]"""
    rank = len(site.operands[0].sizes)
    bias = site.operands[2:]
    none, out = tuple(None for _ in bias), tuple(Dim(0) for _ in bias)
    leading = tuple(Factor(f"dim {d}", (Dim(d), None, *none), (Dim(d),)) for d in range(rank - 1))
    return (
        *leading,
        Factor("out", (None, Dim(0), *out), (Dim(rank - 1),)),
        Factor("in", (Dim(rank - 1), Dim(1), *none), (None,), form=BIAS_ONCE if bias else ""),
    )


def linear_without_bias(site: Site) -> Sets:
    return (frozenset({0}), frozenset({1})) if len(site.operands) == 2 else ()


def linear_flop(site: Site) -> tuple[int, int]:
    x, weight = site.operands[:2]
    return backward(2 * site.results[0].elements * x.sizes[-1], x, weight)


def matmul(site: Site) -> tuple[Factor, ...]:
    """a[.., m, i], b[.., i, n] -> c[.., m, n], the leading dims broadcast; a vector lacks m or n."""
    a, b = site.operands
    shape = site.results[0].sizes
    rows, columns = len(a.sizes) > 1, len(b.sizes) > 1
    batch = len(shape) - rows - columns
    a_batch, b_batch = (aligned(v, batch + 2)[:batch] if len(v.sizes) > 1 else (None,) * batch for v in (a, b))
    found = [Factor(f"dim {d}", (a_batch[d], b_batch[d]), (Dim(d),)) for d in range(batch) if shape[d] > 1]
    inner = (Dim(len(a.sizes) - 1), Dim(len(b.sizes) - 2 if columns else 0))
    if rows:
        found.append(Factor("rows", (Dim(len(a.sizes) - 2), None), (Dim(batch),)))
    if columns:
        found.append(Factor("columns", (None, Dim(len(b.sizes) - 1)), (Dim(len(shape) - 1),)))
    return (*found, Factor("in", inner, (None,)))


def matmul_flop(site: Site) -> tuple[int, int]:
    a, b = site.operands
    return backward(2 * site.results[0].elements * a.sizes[-1], a, b)


def added_product(site: Site) -> tuple[Factor, ...]:
    """bias[.., m, n] + a[.., m, i] @ b[.., i, n]: the bias is broadcast. With leading dims, i is not cut."""
    rank = len(site.results[0].sizes)
    where = aligned(site.operands[0], rank)
    inner = (Factor("in", (None, Dim(1), Dim(0)), (None,), form=BIAS_ONCE),) if rank == 2 else ()
    return (
        *(Factor(f"dim {d}", (where[d], Dim(d), Dim(d)), (Dim(d),)) for d in range(rank - 2)),
        Factor("rows", (where[rank - 2], Dim(rank - 2), None), (Dim(rank - 2),)),
        Factor("out", (where[rank - 1], None, Dim(rank - 1)), (Dim(rank - 1),)),
        *inner,
    )


def added_product_flop(site: Site) -> tuple[int, int]:
    _, a, b = site.operands
    return backward(2 * site.results[0].elements * a.sizes[-1], a, b)


def einsum_terms(site: Site) -> tuple[tuple[str, ...], str]:
    """The letters of each operand and of the result; empty where the equation has dots or a repeated letter."""
    equation = str(site.arg(0)).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = tuple(left.split(","))
    if "." in equation or any(len(set(term)) < len(term) for term in terms):
        return (), ""
    if not arrow:
        right = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    return terms, right


def einsum(site: Site) -> tuple[Factor, ...]:
    """A factor for each letter; it reduces where the result lacks it."""
    terms, result = einsum_terms(site)
    found: list[Factor] = []
    for letter in sorted(set("".join(terms))):
        own = [Dim(term.index(letter)) if letter in term else None for term in terms]
        sizes = [v.sizes[dim.dim] if dim else 1 for v, dim in zip(site.operands, own, strict=True)]
        if max(sizes) > 1:
            cut = tuple(dim if n > 1 else None for dim, n in zip(own, sizes, strict=True))
            found.append(Factor(letter, cut, (Dim(result.index(letter)) if letter in result else None,)))
    return tuple(found)


def einsum_flop(site: Site) -> tuple[int, int]:
    terms, _ = einsum_terms(site)
    if len(site.operands) != 2:
        return 0, 0
    if not terms:
        return backward(2 * site.results[0].elements, *site.operands)
    size: dict[str, int] = {}
    for term, value in zip(terms, site.operands, strict=True):
        size |= {c: max(n, size.get(c, 1)) for c, n in zip(term, value.sizes, strict=True)}
    return backward(2 * prod(size.values()), *site.operands)


def grouped(site: Site) -> tuple[Factor, ...]:
    """x[t, i], w[e, i, o], ends[e] -> y[t, o]: rows of x belong to experts by position, so they are not cut."""
    x, weight, *rest = site.operands
    if len(x.sizes) != 2 or len(weight.sizes) != 3 or len(rest) != 1:
        return ()
    return Factor("out", (None, Dim(2), None), (Dim(1),)), Factor("in", (Dim(1), Dim(1), None), (None,))


def grouped_in_one_kernel(site: Site) -> tuple[Factor, ...]:
    """The kernel wants rows of whole 16 bytes: dims whose equal shares over up to 64 ranks have them."""
    if len(site.operands[1].sizes) != 3:
        return ()
    _, inner, outer = site.operands[1].sizes
    whole = {"out": outer, "in": inner}
    return tuple(
        replace(factor, even=True)
        for factor in grouped(site)
        if whole[factor.name] * DTYPE_BYTES[site.operands[1].dtype] % (64 * 16) == 0
    )


def grouped_flop(site: Site) -> tuple[int, int]:
    x, weight = site.operands[:2]
    return backward(2 * site.results[0].elements * x.sizes[-1], x, weight)


COST = OperatorClass.MATMUL
_PRODUCT = Rule(COST, matmul, in_each, matmul_flop)
_ADDED = Rule(COST, added_product, flop=added_product_flop)

MATMUL: Mapping[str, Rule] = {
    "aten.linear.default": Rule(COST, linear, linear_without_bias, linear_flop),
    "aten.matmul.default": _PRODUCT,
    "aten.bmm.default": _PRODUCT,
    "aten.mm.default": _PRODUCT,
    "aten.mv.default": _PRODUCT,
    "aten.dot.default": _PRODUCT,
    "aten.addmm.default": _ADDED,
    "aten.baddbmm.default": _ADDED,
    "aten.einsum.default": Rule(COST, einsum, in_each, einsum_flop),
    "aten._grouped_mm.default": Rule(COST, grouped_in_one_kernel, flop=grouped_flop),
    "transformers.grouped_mm_fallback.default": Rule(COST, grouped, flop=grouped_flop),
}
