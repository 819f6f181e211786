"""What autograd keeps of an operator for its backward: found by running it on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.graph import Op, numbered
from passes.interpret import call
from passes.rules.base import Site


@dataclass(frozen=True)
class Saved:
    """Positions of the operands and results whose memory is kept, and bytes kept beside them."""

    operands: frozenset[int]
    results: frozenset[int]
    extra_bytes: int


def saved_operands(site: Site) -> frozenset[int]:
    return saved(site).operands


def saved_results(site: Site) -> frozenset[int]:
    return saved(site).results


def saved(site: Site) -> Saved:
    """What one operator keeps, for contiguous operands."""
    if not any(v.grad for v in site.results):
        return Saved(frozenset(), frozenset(), 0)
    return _saved(numbered(site.op), tuple((v.sizes, v.dtype, v.grad) for v in site.operands))


@lru_cache(maxsize=20_000)
def _saved(op: Op, described: tuple[tuple[tuple[int, ...], str, bool], ...]) -> Saved:
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors: dict[str, torch.Tensor] = {}
        for name, (shape, dtype, grad) in zip(op.operands, described, strict=True):
            if name not in tensors:
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype)).requires_grad_(grad)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = call(op, tensors)
        of_operands = {tensors[name].untyped_storage()._cdata: i for i, name in reversed(tuple(enumerate(op.operands)))}
        of_results = {t.untyped_storage()._cdata: i for i, t in enumerate(results)}
        operands = frozenset(of_operands[c] for c in kept if c in of_operands)
        own = frozenset(of_results[c] for c in kept if c in of_results and c not in of_operands)
        extra = sum(size for c, size in kept.items() if c not in of_operands and c not in of_results)
    return Saved(operands, own, extra)
