"""Which operators draw random numbers, and so run under a seed of their own."""

from __future__ import annotations

from passes.graph import CONSTANT, Op
from passes.interpret import is_random, schema

UNTAGGED = frozenset(("feature_dropout", "feature_alpha_dropout", "scaled_dot_product_attention"))
CHANCES = ("p", "dropout", "dropout_p")
MODES = ("train", "training")


def draws(op: Op) -> bool:
    """Whether this call draws numbers: PyTorch tags the operator, or gives it a generator, or it drops elements.

    A call that drops with probability 0, or outside training, draws none.
    """
    if op.target == CONSTANT:
        return False
    declared = schema(op).arguments
    given = {a.name: op.arg(i, a.name, a.default_value) for i, a in enumerate(declared)}
    if any(given.get(name) == 0.0 for name in CHANCES) or any(given.get(name) is False for name in MODES):
        return False
    seeded = any("Generator" in str(a.type) for a in declared)
    return is_random(op) or seeded or op.target.split(".")[1] in UNTAGGED
