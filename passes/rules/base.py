"""What a rule says of an operator: its factors, the named loops it runs over.

A `Factor` names, for every tensor operand and every result, the dim that the loop indexes. Splitting the
loop over the ranks of a mesh axis cuts those dims (S); an operand without the dim is read whole and gets
partial gradients (R); a result without it is a partial sum (P). `linear: x[.., i], w[o, i], b[o] -> y[.., o]`
has one factor per leading dim, one for `o`, and `i`, which reduces.

The number of blocks k of a cut S(d, k) is carried through: every dim of a factor is cut into `k * scale` blocks,
with scale 1 except where an operator merges, splits, chunks or joins dims (views, split, cat).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from costmodels.groups import Collective
from costmodels.operators import OperatorClass
from passes.graph import FLOATS, Arg, Op, Value
from passes.placements import I, P, Placement, R, S, is_even, is_valid

ONE = Fraction(1)


@dataclass(frozen=True)
class Dim:
    """A dim that a factor indexes; a cut of the factor into k blocks is a cut of this dim into k * scale."""

    dim: int
    scale: Fraction = ONE

    def cut(self, blocks: Fraction) -> S | None:
        """The placement for `blocks` blocks of the factor, None where that is not a whole number."""
        count = blocks * self.scale
        return S(self.dim, int(count)) if count.denominator == 1 and count >= 1 else None


@dataclass(frozen=True)
class Factor:
    """One loop of an operator.

    `even`: only slices of equal size are right (the dim is merged or split further).
    `free`: block counts offered whatever the consumers want (views offer only what is wanted).
    `form`: the name of a local form that differs from the operator itself, "" where the operator runs as it is.
    `inside`: collectives that the local form runs itself (kind, bytes of the full tensor), forward and backward.
    `partial`: results without the dim are partial sums; False where the local form makes them whole (placement I).
    """

    name: str
    operands: tuple[Dim | None, ...]
    results: tuple[Dim | None, ...]
    even: bool = False
    free: tuple[int, ...] = (1,)
    form: str = ""
    inside: tuple[tuple[Collective, int], ...] = ()
    partial: bool = True


@dataclass(frozen=True)
class Site:
    """An operator with the values it reads and writes: what a rule looks at."""

    op: Op
    operands: tuple[Value, ...]

    @classmethod
    def of(cls, op: Op, values: Mapping[str, Value]) -> Site:
        """The operator among the values that it reads."""
        return cls(op, tuple(values[name] for name in op.operands))

    @property
    def results(self) -> tuple[Value, ...]:
        return self.op.results

    def arg(self, position: int, keyword: str = "", default: Arg = None) -> Arg:
        return self.op.arg(position, keyword, default)


@dataclass(frozen=True)
class Rule:
    """All that the compiler knows of one operator.

    `linear`: sets of operand positions in which the operator is jointly linear: it passes partial sums through
    when exactly those operands are partial and the rest is read as R.
    `flop`: floating-point operations of the forward and of the backward, for the shapes given.
    `localize`: the local arguments (sizes of a view, of a split), given local operand and result shapes.
    """

    cost: OperatorClass
    factors: Callable[[Site], tuple[Factor, ...]]
    linear: Callable[[Site], tuple[frozenset[int], ...]] = lambda site: ()
    flop: Callable[[Site], tuple[int, int]] = lambda site: (0, 0)
    localize: Callable[[Site, tuple[tuple[int, ...], ...]], Op] | None = None


@dataclass(frozen=True)
class Strategy:
    """One way of running an operator on one mesh axis."""

    name: str  # the factor's name, or "repeat" / "repeat, partial gradient" / "partial"
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    split: bool  # whether each rank does only its share of the work
    form: str = ""
    inside: tuple[tuple[Collective, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"


Wanted = Mapping[str, frozenset[S]]  # what consumers would like, by value name


@dataclass
class _Unique:
    """Strategies in the order found, each pair of placements once."""

    found: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], Strategy] = field(default_factory=dict)

    def add(self, strategy: Strategy) -> None:
        self.found.setdefault((strategy.operands, strategy.results), strategy)


def block_counts(factor: Factor, site: Site, wanted: Wanted) -> tuple[Fraction, ...]:
    """The block counts worth offering for a factor: the free ones and those that consumers of the results want."""
    counts = {Fraction(k) for k in factor.free}
    for value, dim in zip(site.results, factor.results, strict=True):
        if dim is not None:
            counts |= {cut.blocks / dim.scale for cut in wanted.get(value.name, ()) if cut.dim == dim.dim}
    return tuple(sorted(counts))


def strategies(site: Site, rule: Rule | None, ranks: int, wanted: Wanted) -> tuple[Strategy, ...]:
    """Every way of running the operator over `ranks` ranks. Without a rule it is only ever repeated.

    Values without a gradient are never R or P (see placements.py): where a strategy would say so, they are I,
    and a partial sum of integers is not offered.
    """
    whole_in = tuple(I for _ in site.operands)
    whole_out = tuple(I for _ in site.results)
    unique = _Unique()
    unique.add(Strategy("repeat", whole_in, whole_out, split=False))
    grads_in = tuple(v.grad for v in site.operands)
    grads_out = tuple(v.grad for v in site.results)

    def settle(placement: Placement, grad: bool) -> Placement:
        return I if placement is R and not grad else placement

    if any(grads_out):
        unique.add(
            Strategy(
                "repeat, partial gradient",
                tuple(R if g else I for g in grads_in),
                tuple(R if g else I for g in grads_out),
                split=False,
            )
        )
    if rule is None:
        return tuple(unique.found.values())

    for partial in rule.linear(site):
        if all(grads_in[i] for i in partial) and all(grads_out):
            operands = tuple(P if i in partial else settle(R, g) for i, g in enumerate(grads_in))
            unique.add(Strategy("partial", operands, tuple(P for _ in grads_out), split=False))
    for factor in rule.factors(site):
        for blocks in block_counts(factor, site, wanted):
            found = _split(site, factor, blocks, ranks)
            if found is not None:
                unique.add(found)
    return tuple(unique.found.values())


def _split(site: Site, factor: Factor, blocks: Fraction, ranks: int) -> Strategy | None:
    """The strategy that splits `factor`, cut into `blocks` blocks; None where shapes or dtypes forbid it."""
    placed: list[Placement] = []
    for values, dims, absent in (
        (site.operands, factor.operands, R),
        (site.results, factor.results, P if factor.partial else I),
    ):
        for value, dim in zip(values, dims, strict=True):
            placement: Placement = absent
            if dim is not None:
                cut = dim.cut(blocks)
                if cut is None or not is_valid(cut, value.sizes, ranks):
                    return None
                if factor.even and not is_even(cut, value.sizes, ranks):
                    return None
                placement = cut
            elif absent is R and not value.grad:
                placement = I
            elif absent is P and (not value.grad or value.dtype not in FLOATS):
                return None
            placed.append(placement)
    count = len(site.operands)
    return Strategy(
        factor.name, tuple(placed[:count]), tuple(placed[count:]), split=True, form=factor.form, inside=factor.inside
    )
