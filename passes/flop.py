"""The floating-point operations of an operator: its rule's, or else what PyTorch counts when it runs on shapes."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from passes.graph import Op, numbered
from passes.interpret import call
from passes.rules.base import Rule, Site


def flop(site: Site, rule: Rule | None) -> tuple[int, int]:
    """Of the forward and of the backward."""
    if rule is not None:
        return rule.flop(site)
    forward = _counted(numbered(site.op), tuple((v.sizes, v.dtype) for v in site.operands))
    return forward, 2 * forward if any(v.grad for v in site.results) else 0


Shapes = tuple[tuple[tuple[int, ...], str], ...]


@lru_cache(maxsize=20_000)
def _counted(op: Op, operands: Shapes) -> int:
    """Of the products, convolutions and attention that the operator is made of; 0 where it does not run as it stands.

    On the meta device, where no fused LSTM hides its products from the counter.
    """
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in zip(op.operands, operands, strict=True)
    }
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call(op, tensors, device="meta")
    except RuntimeError:  # what it gives depends on values
        return 0
    return int(counter.get_total_flops())
