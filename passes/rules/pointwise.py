"""Operators that work element by element, with broadcasting: any dim of the result may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from costmodels.operators import OperatorClass
from passes.rules.base import Dim, Factor, Rule, Site
from passes.rules.common import Sets, broadcast, dims, in_all, in_each, in_first, nowhere, same_dims

_NOT_LINEAR = """
abs.default acos.default acosh.default addcdiv.default addcmul.default angle.default asin.default asinh.default
atan.default atan2.default atanh.default ceil.default celu.default clamp.default clamp.Tensor clamp_max.default
clamp_max.Tensor clamp_min.default clamp_min.Tensor clip.default copysign.Tensor copysign.Scalar cos.default
cosh.default deg2rad.default digamma.default elu.default erf.default erfc.default erfinv.default exp.default
exp2.default expm1.default float_power.Tensor_Scalar float_power.Tensor_Tensor floor.default fmax.default fmin.default
fmod.Scalar fmod.Tensor frac.default gelu.default hardshrink.default hardsigmoid.default hardswish.default
hardtanh.default heaviside.default hypot.default i0.default leaky_relu.default lerp.Scalar lerp.Tensor lgamma.default
log.default log10.default log1p.default log2.default log_sigmoid.default logaddexp.default logaddexp2.default
logit.default max.other maximum.default min.other minimum.default mish.default nan_to_num.default pow.Scalar
pow.Tensor_Scalar pow.Tensor_Tensor rad2deg.default reciprocal.default relu.default relu6.default remainder.Scalar
remainder.Tensor round.default round.decimals rsqrt.default selu.default sgn.default sigmoid.default sign.default
silu.default sin.default sinc.default sinh.default softplus.default softshrink.default
special_expit.default special_erf.default special_xlogy.default sqrt.default square.default tan.default tanh.default
threshold.default trunc.default xlogy.Tensor polar.default complex.default rsub.Scalar
div.Tensor_mode div.Scalar_mode floor_divide.default floor_divide.Scalar true_divide.Scalar
eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor
isclose.default isfinite.default isinf.default isnan.default isposinf.default isneginf.default signbit.default
logical_and.default logical_or.default logical_not.default logical_xor.default bitwise_and.Tensor bitwise_and.Scalar
bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar bitwise_not.default __and__.Tensor
__and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar bitwise_left_shift.Tensor
bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar __lshift__.Scalar
__lshift__.Tensor __rshift__.Scalar __rshift__.Tensor
where.Scalar where.ScalarSelf masked_fill.Tensor fill.Scalar fill.Tensor full_like.default ones_like.default
zeros_like.default empty_like.default expand_as.default
"""

# x -> a * x, elementwise
_LINEAR_IN_FIRST = """
neg.default positive.default div.Tensor div.Scalar true_divide.Tensor divide.Tensor mul.Scalar
"""

_RANDOM = """
dropout.default native_dropout.default alpha_dropout.default bernoulli.default bernoulli.p rand_like.default
randn_like.default randint_like.default randint_like.low_dtype rrelu.default normal_functional.default
uniform.default exponential.default geometric.default cauchy.default log_normal.default poisson.default
normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor random.default random.from random.to
"""


def sum_of_two(site: Site) -> Sets:
    """x + y is linear in both together; x + 1 is not."""
    return in_all(site) if len(site.operands) == 2 else ()


def where_of_two(site: Site) -> Sets:
    return (frozenset({1, 2}),) if len(site.operands) == 3 else ()


def where_else_zero(site: Site) -> Sets:
    return (frozenset({1}),) if site.arg(2, "other") == 0 else ()


def filled_with_zero(site: Site) -> Sets:
    return (frozenset({0}),) if site.arg(2, "value") == 0 else ()


_LINEAR = {
    "add.Tensor": sum_of_two,
    "sub.Tensor": sum_of_two,
    "rsub.Tensor": sum_of_two,
    "mul.Tensor": in_each,
    "multiply.Tensor": in_each,
    "where.self": where_of_two,
    "where.ScalarOther": where_else_zero,
    "masked_fill.Scalar": filled_with_zero,
    "add.Scalar": nowhere,
    "sub.Scalar": nowhere,
    **{name: in_first for name in _LINEAR_IN_FIRST.split()},
}


def glu(site: Site) -> tuple[Factor, ...]:
    """x[2n] -> x[:n] * sigmoid(x[n:]): the halves are two blocks of the cut dim."""
    (gated,) = dims(site.arg(1, "dim", -1), len(site.operands[0].sizes))
    halves = Factor("halves", (Dim(gated, Fraction(2)),), (Dim(gated),))
    return (*same_dims(site, skip=(gated,)), halves)


def features(site: Site) -> tuple[Factor, ...]:
    """One number for each feature of each sample, x[n, c, ...]: the rest is dropped together."""
    return same_dims(site, skip=range(2, len(site.operands[0].sizes)))


def drawn_from_rows(site: Site) -> tuple[Factor, ...]:
    """Samples from the distributions in the last dim."""
    return same_dims(site, skip=(len(site.operands[0].sizes) - 1,))


def prelu(site: Site) -> tuple[Factor, ...]:
    """x[n, c, ...], slope[c]"""
    x, slope = site.operands
    return tuple(
        Factor(f"dim {d}", (Dim(d), Dim(0) if d == 1 and slope.elements > 1 else None), (Dim(d),))
        for d, size in enumerate(x.sizes)
        if size > 1
    )


POINTWISE: Mapping[str, Rule] = {
    **{f"aten.{name}": Rule(OperatorClass.POINTWISE, broadcast) for name in _NOT_LINEAR.split()},
    **{f"aten.{name}": Rule(OperatorClass.POINTWISE, broadcast, linear) for name, linear in _LINEAR.items()},
    **{f"aten.{name}": Rule(OperatorClass.POINTWISE, broadcast) for name in _RANDOM.split()},
    "aten.feature_dropout.default": Rule(OperatorClass.POINTWISE, features),
    "aten.feature_alpha_dropout.default": Rule(OperatorClass.POINTWISE, features),
    "aten.multinomial.default": Rule(OperatorClass.POINTWISE, drawn_from_rows),
    "aten.glu.default": Rule(OperatorClass.POINTWISE, glu),
    "aten.prelu.default": Rule(OperatorClass.POINTWISE, prelu),
}
