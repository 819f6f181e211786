"""What several rule families share: reading arguments, and the factors of operators that keep their dims."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from passes.graph import Arg, Op, Value
from passes.rules.base import Dim, Factor, Site

Sets = tuple[frozenset[int], ...]
Shapes = tuple[tuple[int, ...], ...]


# -- arguments ----------------------------------------------------------------------------------------------------


def ints(arg: Arg) -> tuple[int, ...]:
    """A list of sizes or dims; a single number is a list of one, None is an empty list."""
    if arg is None:
        return ()
    if isinstance(arg, int):
        return (arg,)
    assert isinstance(arg, tuple), f"{arg} is not a list of numbers"
    return tuple(whole(n) for n in arg)


def whole(arg: Arg) -> int:
    assert isinstance(arg, int), f"{arg} is not a whole number"
    return arg


def dims(arg: Arg, rank: int) -> tuple[int, ...]:
    """The dims that an argument names, counted from the front. (A scalar may be addressed as if it had one.)"""
    return tuple(d % max(rank, 1) for d in ints(arg))


def with_arg(op: Op, position: int, keyword: str, value: Arg) -> Op:
    """`op` with one argument changed, wherever it stands."""
    if position < len(op.args):
        return replace(op, args=(*op.args[:position], value, *op.args[position + 1 :]))
    return replace(op, kwargs=(*((k, a) for k, a in op.kwargs if k != keyword), (keyword, value)))


# -- jointly linear operands --------------------------------------------------------------------------------------


def nowhere(site: Site) -> Sets:
    return ()


def in_first(site: Site) -> Sets:
    return (frozenset({0}),)


def in_second(site: Site) -> Sets:
    return (frozenset({1}),)


def in_each(site: Site) -> Sets:
    """A product: linear in each operand while the others are whole."""
    return tuple(frozenset({i}) for i in range(len(site.operands)))


def in_all(site: Site) -> Sets:
    """A sum: linear in all operands together."""
    return (frozenset(range(len(site.operands))),)


# -- factors ------------------------------------------------------------------------------------------------------


def aligned(value: Value, rank: int) -> tuple[Dim | None, ...]:
    """For each of `rank` result dims, the operand's own dim under broadcasting; None where it has one element."""
    lacks = rank - len(value.sizes)
    return tuple(Dim(d - lacks) if d >= lacks and value.sizes[d - lacks] > 1 else None for d in range(rank))


def broadcast(site: Site, skip: Collection[int] = ()) -> tuple[Factor, ...]:
    """One factor per result dim not in `skip`: the operands are broadcast together, all results have one shape."""
    shape = site.results[0].sizes
    where = [aligned(value, len(shape)) for value in site.operands]
    return tuple(
        Factor(f"dim {d}", tuple(dims[d] for dims in where), tuple(Dim(d) for _ in site.results))
        for d, size in enumerate(shape)
        if size > 1 and d not in skip
    )


def carried(site: Site, pairs: Iterable[tuple[int, int]]) -> tuple[Factor, ...]:
    """One factor per (dim of operand 0, dim of the results) that pass through; further operands are read whole."""
    return tuple(
        Factor(
            f"dim {i}",
            (Dim(i), *(None for _ in site.operands[1:])),
            tuple(Dim(j) for _ in site.results),
        )
        for i, j in pairs
        if site.operands[0].sizes[i] > 1
    )


def same_dims(site: Site, skip: Collection[int] = ()) -> tuple[Factor, ...]:
    """Dims of operand 0 that stand at the same place in the results, except `skip`."""
    return carried(site, ((d, d) for d in range(len(site.operands[0].sizes)) if d not in skip))


def parallel_dims(site: Site, skip: Collection[int] = ()) -> tuple[Factor, ...]:
    """Dims that all operands and results have in common, of one size, except `skip`."""
    shape = site.results[0].sizes
    return tuple(
        Factor(f"dim {d}", tuple(Dim(d) for _ in site.operands), tuple(Dim(d) for _ in site.results))
        for d, size in enumerate(shape)
        if d not in skip and size > 1 and all(len(v.sizes) == len(shape) and v.sizes[d] == size for v in site.operands)
    )
