"""Convolutions and pooling: cut along samples and channels, never along positions (neighbours would be missing)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from costmodels.operators import OperatorClass
from passes.graph import Op
from passes.rules.base import Dim, Factor, Rule, Site
from passes.rules.common import Sets, Shapes, same_dims, with_arg
from passes.rules.matmul import backward

GROUPS = 6  # where `groups` stands among the arguments


def convolution(site: Site) -> tuple[Factor, ...]:
    """x[n, i, ..], w[o, i, ..], b[o] -> y[n, o, ..]; depthwise (a group for each input channel): x's i goes with o."""
    x, weight, *bias = site.operands
    channel = len(x.sizes) - len(weight.sizes) + 1  # 0 where there is no batch dim
    groups = site.arg(GROUPS, "groups", 1)
    none, out = tuple(None for _ in bias), tuple(Dim(0) for _ in bias)
    found: tuple[Factor, ...] = ()
    if channel:
        found += (Factor("dim 0", (Dim(0), None, *none), (Dim(0),)),)
    if groups == 1:
        found += (Factor("out", (None, Dim(0), *out), (Dim(channel),)),)
        if not bias:
            found += (Factor("in", (Dim(channel), Dim(1)), (None,)),)
    elif groups == x.sizes[channel]:
        found += (Factor("channels", (Dim(channel), Dim(0), *out), (Dim(channel),), even=True),)
    return found


def local_convolution(site: Site, results: Shapes) -> Op:
    """Fewer groups where the channels of a depthwise convolution are cut."""
    groups = site.arg(GROUPS, "groups", 1)
    x, weight = site.operands[:2]
    channel = len(x.sizes) - len(weight.sizes) + 1
    whole, part = site.results[0].sizes[channel], results[0][channel]
    if groups == 1 or whole == part:
        return site.op
    return with_arg(site.op, GROUPS, "groups", x.sizes[channel] * part // whole)


def without_bias(site: Site) -> Sets:
    return (frozenset({0}), frozenset({1})) if len(site.operands) == 2 else ()


def convolution_flop(site: Site) -> tuple[int, int]:
    x, weight = site.operands[:2]
    return backward(2 * site.results[0].elements * prod(weight.sizes[1:]), x, weight)


def pooling(kernel_dims: int) -> Rule:
    """The rule of a pooling over the last `kernel_dims` dims."""

    def factors(site: Site) -> tuple[Factor, ...]:
        rank = len(site.operands[0].sizes)
        return same_dims(site, skip=range(rank - kernel_dims, rank))

    return Rule(OperatorClass.POINTWISE, factors)


_POOLINGS = {
    1: "max_pool1d.default avg_pool1d.default adaptive_avg_pool1d.default upsample_nearest1d.vec",
    2: """max_pool2d.default avg_pool2d.default adaptive_avg_pool2d.default upsample_nearest2d.vec
          upsample_bilinear2d.vec upsample_bicubic2d.vec""",
}
_CONVOLUTION = Rule(OperatorClass.CONV, convolution, without_bias, convolution_flop, local_convolution)

CONVOLUTION: Mapping[str, Rule] = {
    **{f"aten.conv{n}d.{kind}": _CONVOLUTION for n in (1, 2, 3) for kind in ("default", "padding")},
    **{f"aten.{name}": pooling(n) for n, names in _POOLINGS.items() for name in names.split()},
}
