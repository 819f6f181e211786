"""Scaled dot-product attention: cut along the batch, the heads, or the queries."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from costmodels.operators import OperatorClass
from passes.rules.base import Dim, Factor, Rule, Site
from passes.rules.common import aligned


def attention(site: Site) -> tuple[Factor, ...]:
    """q[.., h, s, e], k[.., h, t, e], v[.., h, t, f], mask[.., s, t] -> y[.., h, s, f]

    With enable_gqa the heads of k and v are a divisor of q's: equal shares of both belong together.
    """
    query, key, value = site.operands[:3]
    shape = site.results[0].sizes
    rank = len(shape)
    where = [aligned(operand, rank) for operand in site.operands]
    found: list[Factor] = []
    for d in range(rank - 2):
        if shape[d] > 1:
            heads = d == rank - 3
            grouped = heads and any(1 < other.sizes[d] < shape[d] for other in (key, value))
            name = "heads" if heads else f"dim {d}"
            found.append(Factor(name, tuple(dims[d] for dims in where), (Dim(d),), even=grouped))
    if not site.arg(5, "is_causal", False) and query.sizes[-2] > 1:
        mask = tuple(dims[rank - 2] for dims in where[3:])
        found.append(Factor("queries", (where[0][rank - 2], None, None, *mask), (Dim(rank - 2),)))
    return tuple(found)


def attention_flop(site: Site) -> tuple[int, int]:
    """Two products forward; five backward, since the scores are computed again. Causal: half of each."""
    query, key, value = site.operands[:3]
    batch = prod(site.results[0].sizes[:-2])
    forward = 2 * batch * query.sizes[-2] * key.sizes[-2] * (query.sizes[-1] + value.sizes[-1])
    if site.arg(5, "is_causal", False):
        forward //= 2
    return forward, forward * 5 // 2 if site.results[0].grad else 0


ATTENTION: Mapping[str, Rule] = {
    "aten.scaled_dot_product_attention.default": Rule(OperatorClass.ATTENTION, attention, flop=attention_flop),
}
