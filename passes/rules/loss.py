"""Losses: a sum over tokens splits along them, a mean does not (its parts would have to be weighted)."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.groups import Collective
from costmodels.operators import OperatorClass
from passes.graph import FLOATS
from passes.rules.base import Dim, Factor, Rule, Site
from passes.rules.common import aligned

NONE, MEAN, SUM = 0, 1, 2  # ATen's codes of `reduction`
VOCABULARY = "vocabulary"  # each rank has the scores of its classes; they agree on maximum, sum and target's score


def by_class(site: Site) -> tuple[Factor, ...]:
    """scores[n, c, ..], target[n, ..] (or, for cross entropy, probabilities like scores), weight[c]"""
    scores, target = site.operands[:2]
    reduction = site.arg(3, "reduction", MEAN)
    rank = len(scores.sizes)
    likely = target.dtype in FLOATS
    found: list[Factor] = []
    for d, size in enumerate(scores.sizes):
        if reduction == MEAN or d == min(1, rank - 1) or size == 1:
            continue
        own = Dim(d if likely or d == 0 else d - 1)
        kept = Dim(0 if d == 0 else d - 1) if reduction == NONE else None
        name = "tokens" if d == 0 else f"tokens, dim {d}"
        found.append(Factor(name, (Dim(d), own, *(None for _ in site.operands[2:])), (kept,)))
    return tuple(found)


def cross_entropy(site: Site) -> tuple[Factor, ...]:
    scores, target = site.operands[:2]
    found = by_class(site)
    plain = len(site.operands) == 2 and not site.arg(5, "label_smoothing", 0.0)
    if len(scores.sizes) == 2 and target.dtype not in FLOATS and plain:
        # the maximum of each row, then the sum of exponentials beside the target's score
        both = ((Collective.ALL_REDUCE, 4 * scores.sizes[0]), (Collective.ALL_REDUCE, 8 * scores.sizes[0]))
        vocabulary = Factor("vocabulary", (Dim(1), None), (None,), form=VOCABULARY, inside=both, partial=False)
        found += (vocabulary,)
    return found


def elementwise(position: int) -> Rule:
    """The rule of a loss that compares element by element; its reduction stands at `position`."""

    def factors(site: Site) -> tuple[Factor, ...]:
        reduction = site.arg(position, "reduction", MEAN)
        if reduction == MEAN:
            return ()
        rank = max(len(v.sizes) for v in site.operands)
        where = [aligned(v, rank) for v in site.operands]
        return tuple(
            Factor(f"dim {d}", tuple(dims[d] for dims in where), (Dim(d) if reduction == NONE else None,))
            for d in range(rank)
            if any(dims[d] for dims in where)
        )

    return Rule(OperatorClass.LOSS, factors)


LOSS: Mapping[str, Rule] = {
    "aten.cross_entropy_loss.default": Rule(OperatorClass.LOSS, cross_entropy),
    "aten.nll_loss.default": Rule(OperatorClass.LOSS, by_class),
    "aten.nll_loss_nd.default": Rule(OperatorClass.LOSS, by_class),
    "aten.nll_loss2d.default": Rule(OperatorClass.LOSS, by_class),
    "aten.mse_loss.default": elementwise(2),
    "aten.l1_loss.default": elementwise(2),
    "aten.smooth_l1_loss.default": elementwise(2),
    "aten.huber_loss.default": elementwise(2),
    "aten.soft_margin_loss.default": elementwise(2),
    "aten.kl_div.default": elementwise(2),
    "aten.binary_cross_entropy.default": elementwise(3),
    "aten.binary_cross_entropy_with_logits.default": elementwise(4),
}
