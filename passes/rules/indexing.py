"""Reading and writing at computed places: the dims of the places may be cut, and those that places do not index.

The indexed dim itself is read whole. Masks as indices have results of unknown size, and no factors.
"""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.operators import OperatorClass
from passes.graph import Ref
from passes.rules.base import Dim, Factor, Rule, Site
from passes.rules.common import aligned, carried, dims, in_first, parallel_dims

Layout = tuple[tuple[int, ...], int, dict[int, int]]


def layout(site: Site, rank: int) -> Layout | None:
    """Of x[indices]: the dims indexed, where the indices' dims begin in the result, and each other dim's place there.

    Indices of neighbouring dims are put in their place, others at the front (NumPy's rule).
    """
    listed = site.arg(1, "indices")
    assert isinstance(listed, tuple)
    indexed = tuple(d for d, index in enumerate(listed) if isinstance(index, Ref))
    places = site.operands[1 : 1 + len(indexed)]
    if not indexed or any(v.dtype in ("bool", "uint8") for v in places):
        return None
    width = max(len(v.sizes) for v in places)
    together = indexed[-1] - indexed[0] + 1 == len(indexed)
    start = indexed[0] if together else 0
    others = [d for d in range(rank) if d not in indexed]
    place = {d: n if n < start else n + width for n, d in enumerate(others)}
    return indexed, start, place


def index(site: Site) -> tuple[Factor, ...]:
    """x[.., places, ..]"""
    x, *places = site.operands
    found = layout(site, len(x.sizes))
    if found is None:
        return ()
    _, start, place = found
    width = max(len(v.sizes) for v in places)
    where = [aligned(v, width) for v in places]
    looked_up = tuple(
        Factor(f"place {d}", (None, *(own[d] for own in where)), (Dim(start + d),))
        for d in range(width)
        if any(own[d] for own in where)
    )
    return (*carried(site, place.items()), *looked_up)


def index_put(site: Site) -> tuple[Factor, ...]:
    """x[.., places, ..] = values: dims that are not indexed."""
    x, *places, values = site.operands
    found = layout(site, len(x.sizes))
    if found is None:
        return ()
    indexed, _, place = found
    rank = len(x.sizes) - len(indexed) + max(len(v.sizes) for v in places)
    where = aligned(values, rank)
    return tuple(
        Factor(f"dim {d}", (Dim(d), *(None for _ in places), where[at]), (Dim(d),))
        for d, at in place.items()
        if x.sizes[d] > 1
    )


def _dim(site: Site) -> int:
    (dim,) = dims(site.arg(1, "dim"), len(site.operands[0].sizes))
    return dim


def index_select(site: Site) -> tuple[Factor, ...]:
    dim = _dim(site)
    others = carried(site, ((d, d) for d in range(len(site.operands[0].sizes)) if d != dim))
    return (*others, Factor("place", (None, Dim(0) if site.operands[1].sizes else None), (Dim(dim),)))


def gather(site: Site) -> tuple[Factor, ...]:
    """y[a, b] = x[places[a, b], b]"""
    dim = _dim(site)
    if not site.results[0].sizes:
        return ()
    return (*parallel_dims(site, skip=(dim,)), Factor("place", (None, Dim(dim)), (Dim(dim),)))


def scatter(site: Site) -> tuple[Factor, ...]:
    """y[places[a, b], b] = source[a, b]: dims of one size in all."""
    return parallel_dims(site, skip=(_dim(site),))


def index_add(site: Site) -> tuple[Factor, ...]:
    """y[places[a], b] += source[a, b]"""
    dim = _dim(site)
    return tuple(
        Factor(f"dim {d}", (Dim(d), None, Dim(d)), (Dim(d),))
        for d, size in enumerate(site.operands[0].sizes)
        if d != dim and size > 1 and len(site.operands[2].sizes) == len(site.operands[0].sizes)
    )


def one_hot(site: Site) -> tuple[Factor, ...]:
    """Where the number of classes is told; else each rank would count its own."""
    classes = site.arg(1, "num_classes", -1)
    told = isinstance(classes, int) and classes > 0
    return carried(site, ((d, d) for d in range(len(site.operands[0].sizes)))) if told else ()


COST = OperatorClass.OTHER

INDEXING: Mapping[str, Rule] = {
    "aten.index.Tensor": Rule(COST, index, in_first),
    "aten.index_put.default": Rule(COST, index_put),
    "aten.index_select.default": Rule(COST, index_select, in_first),
    "aten.gather.default": Rule(COST, gather, in_first),
    "aten.scatter.src": Rule(COST, scatter),
    "aten.scatter.value": Rule(COST, scatter),
    "aten.scatter_add.default": Rule(COST, scatter),
    "aten.index_add.default": Rule(COST, index_add),
    "aten.one_hot.default": Rule(COST, one_hot),
}
