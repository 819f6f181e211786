"""Table look-ups: cut along the ids, the hidden dim, or the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.operators import OperatorClass
from passes.rules.base import Dim, Factor, Rule, Site

VOCABULARY = "vocabulary"  # ids of other ranks' rows give zeros


def embedding(site: Site) -> tuple[Factor, ...]:
    """w[v, h], ids[..] -> y[.., h]: gradients scaled by frequency count all ids, which then stay together."""
    ids = site.operands[1].sizes
    hidden = Factor("hidden", (Dim(1), None), (Dim(len(ids)),))
    if site.arg(3, "scale_grad_by_freq", False):
        return (hidden,)
    return (
        *(Factor(f"dim {d}", (None, Dim(d)), (Dim(d),)) for d, size in enumerate(ids) if size > 1),
        hidden,
        Factor("vocabulary", (Dim(0), None), (None,), form=VOCABULARY),
    )


EMBEDDING: Mapping[str, Rule] = {"aten.embedding.default": Rule(OperatorClass.EMBEDDING, embedding)}
