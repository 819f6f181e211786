"""Normalisations and softmax: every dim may be cut that is not normalised."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.operators import OperatorClass
from passes.rules.base import Dim, Factor, Rule, Site
from passes.rules.common import broadcast, dims, ints, same_dims


def last_dims(site: Site) -> tuple[Factor, ...]:
    """layer_norm(x, shape, weight, bias): the last dims, which weight and bias have."""
    rank = len(site.operands[0].sizes)
    return broadcast(site, skip=range(rank - len(ints(site.arg(1))), rank))


def samples(site: Site) -> tuple[Factor, ...]:
    """group_norm(x[n, c, ..], groups, weight[c], bias[c]): a group mixes channels and positions."""
    return same_dims(site, skip=range(1, len(site.operands[0].sizes)))


def channels(site: Site) -> tuple[Factor, ...]:
    """batch_norm(x[n, c, ..], weight[c], ..): while training, a channel's statistics mix all samples."""
    found = (Factor("channels", (Dim(1), *(Dim(0) for _ in site.operands[1:])), (Dim(1),)),)
    return found if site.arg(5, "training") else (*same_dims(site, skip=(1,)), *found)


def one_dim(site: Site) -> tuple[Factor, ...]:
    return broadcast(site, skip=dims(site.arg(1, "dim"), len(site.operands[0].sizes)))


COST = OperatorClass.NORM
_NAMES = {
    last_dims: "layer_norm.default rms_norm.default",
    samples: "group_norm.default",
    channels: "batch_norm.default",
    one_dim: "softmax.int log_softmax.int _softmax.default _log_softmax.default _safe_softmax.default",
}

NORM: Mapping[str, Rule] = {
    f"aten.{name}": Rule(COST, factors) for factors, names in _NAMES.items() for name in names.split()
}
