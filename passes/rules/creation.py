"""Tensors made from sizes: each rank makes its own part, of equal size.

A tensor whose elements differ (arange, eye) is made whole on every rank; a slice of it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.operators import OperatorClass
from passes.graph import CONSTANT, Op
from passes.rules.base import Dim, Factor, Rule, Site
from passes.rules.common import Shapes, with_arg


def made(site: Site) -> tuple[Factor, ...]:
    """zeros(size), and x.new_zeros(size), which does not read x."""
    return tuple(
        Factor(f"dim {d}", tuple(None for _ in site.operands), (Dim(d),), even=True)
        for d, size in enumerate(site.results[0].sizes)
        if size > 1
    )


def made_of_size(position: int) -> Rule:
    """The rule of an operator whose list of sizes stands at `position`."""

    def local_size(site: Site, results: Shapes) -> Op:
        return with_arg(site.op, position, "size", results[0])

    return Rule(OperatorClass.POINTWISE, made, localize=local_size)


def whole(site: Site) -> tuple[Factor, ...]:
    return ()


_FROM_SIZE = "zeros.default ones.default full.default empty.memory_format"
_FROM_TENSOR = "new_zeros.default new_ones.default new_full.default new_empty.default"
_RANDOM = (
    (0, "rand.default"), (0, "randn.default"), (1, "randint.default"), (2, "randint.low"), (2, "normal.float_float"),
)  # fmt: skip
_WHOLE = "arange.default arange.start arange.start_step eye.default eye.m linspace.default scalar_tensor.default"

SIZED: Mapping[str, Rule] = {  # what they make is alike wherever it stands in the tensor, or drawn
    **{f"aten.{name}": made_of_size(0) for name in _FROM_SIZE.split()},
    **{f"aten.{name}": made_of_size(1) for name in _FROM_TENSOR.split()},
    **{f"aten.{name}": made_of_size(position) for position, name in _RANDOM},
}
CREATION: Mapping[str, Rule] = {
    **SIZED,
    **{f"aten.{name}": Rule(OperatorClass.POINTWISE, whole) for name in _WHOLE.split()},
    CONSTANT: Rule(OperatorClass.POINTWISE, whole),
}
