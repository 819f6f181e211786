"""Reductions and scans: dims that stay may be cut; of those that go, only a sum's."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.operators import OperatorClass
from passes.rules.base import Dim, Factor, Rule, Site
from passes.rules.common import broadcast, carried, dims, in_first, nowhere

# where the reduced dims stand among the arguments; None: the operator reduces everything
_SUMS = {"sum.default": None, "sum.dim_IntList": 1}
_LINEAR = {"mean.default": None, "mean.dim": 1}
_OTHERS = {
    "amax.default": 1, "amin.default": 1, "max.default": None, "min.default": None, "max.dim": 1, "min.dim": 1,
    "argmax.default": 1, "argmin.default": 1, "any.default": None, "any.dim": 1, "any.dims": 1, "all.default": None,
    "all.dim": 1, "all.dims": 1, "var.default": None, "var.dim": 1, "var.correction": 1, "std.default": None,
    "std.dim": 1, "std.correction": 1, "var_mean.correction": 1, "prod.default": None, "prod.dim_int": 1,
    "logsumexp.default": 1, "linalg_vector_norm.default": 2, "norm.Scalar": None, "norm.ScalarOpt_dim": 2,
    "median.dim": 1, "count_nonzero.dim_IntList": 1,
}  # fmt: skip
_SCANS = {"cumsum.default": in_first, "cumprod.default": nowhere, "logcumsumexp.default": nowhere}


def reduced(site: Site, position: int | None) -> frozenset[int]:
    """The dims that are reduced: all of them where none are named."""
    rank = len(site.operands[0].sizes)
    named = () if position is None else dims(site.arg(position, "dim"), rank)
    return frozenset(named or range(rank))


def kept(site: Site, gone: frozenset[int]) -> tuple[Factor, ...]:
    rank = len(site.operands[0].sizes)
    keepdim = len(site.results[0].sizes) == rank
    stay = [d for d in range(rank) if d not in gone]
    return carried(site, ((d, d if keepdim else place) for place, d in enumerate(stay)))


def reduction(position: int | None, sums: bool = False, linear: bool = False) -> Rule:
    def factors(site: Site) -> tuple[Factor, ...]:
        gone = reduced(site, position)
        found = kept(site, gone)
        if sums:
            found += tuple(
                Factor(f"sum over dim {d}", (Dim(d),), (None,)) for d in sorted(gone) if site.operands[0].sizes[d] > 1
            )
        return found

    return Rule(OperatorClass.POINTWISE, factors, in_first if linear else nowhere)


def scan(site: Site) -> tuple[Factor, ...]:
    """Running sums, and sorting: along one dim."""
    return broadcast(site, skip=dims(site.arg(1, "dim", -1), len(site.operands[0].sizes)))


def ranked(position: int) -> Rule:
    """sort and topk: values and indices, along one dim."""

    def factors(site: Site) -> tuple[Factor, ...]:
        rank = len(site.operands[0].sizes)
        gone = dims(site.arg(position, "dim", -1), rank)
        return carried(site, ((d, d) for d in range(rank) if d not in gone))

    return Rule(OperatorClass.OTHER, factors)


REDUCTION: Mapping[str, Rule] = {
    **{f"aten.{name}": reduction(at, sums=True, linear=True) for name, at in _SUMS.items()},
    **{f"aten.{name}": reduction(at, linear=True) for name, at in _LINEAR.items()},
    **{f"aten.{name}": reduction(at) for name, at in _OTHERS.items()},
    **{f"aten.{name}": Rule(OperatorClass.POINTWISE, scan, linear) for name, linear in _SCANS.items()},
    "aten.sort.default": ranked(1),
    "aten.argsort.default": ranked(1),
    "aten.topk.default": ranked(2),
}
