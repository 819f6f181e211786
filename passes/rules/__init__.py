"""The operators that autopar can split, one family per file."""

from __future__ import annotations

from collections.abc import Mapping

from passes.rules.attention import ATTENTION
from passes.rules.base import Rule
from passes.rules.convolution import CONVOLUTION
from passes.rules.creation import CREATION
from passes.rules.embedding import EMBEDDING
from passes.rules.indexing import INDEXING
from passes.rules.loss import LOSS
from passes.rules.matmul import MATMUL
from passes.rules.norm import NORM
from passes.rules.pointwise import POINTWISE
from passes.rules.reduction import REDUCTION
from passes.rules.views import VIEWS

FAMILIES = (
    POINTWISE, VIEWS, MATMUL, ATTENTION, NORM, EMBEDDING, LOSS, REDUCTION, CONVOLUTION, CREATION, INDEXING,
)  # fmt: skip

RULES: Mapping[str, Rule] = {target: rule for family in FAMILIES for target, rule in family.items()}


def rule_of(target: str) -> Rule | None:
    """What is known of an operator; None means that it can only be repeated on every rank."""
    return RULES.get(target)
