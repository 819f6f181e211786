"""Runs a graph, operator by operator: how a rewrite is compared with its original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from passes.graph import CONSTANT, Arg, Atom, Graph, Op, Ref, Rows


def overload(op: Op) -> Any:
    """The ATen overload that an operator calls."""
    found: Any = torch.ops
    for part in op.target.split("."):
        found = getattr(found, part)
    return found


def schema(op: Op) -> torch.FunctionSchema:
    """PyTorch's own declaration of an operator: its arguments and results."""
    declared: torch.FunctionSchema = overload(op)._schema
    return declared


def is_random(op: Op) -> bool:
    """Whether the operator draws random numbers."""
    return op.target != CONSTANT and torch.Tag.nondeterministic_seeded in overload(op).tags


def may_alias(op: Op, dtype: str) -> bool:
    """Whether a result may share memory with the first operand, of `dtype`: PyTorch's schema says so."""
    if op.target == CONSTANT or (op.target.startswith("aten.to.") and op.results[0].dtype != dtype):
        return False
    if op.target == "aten.broadcast_tensors.default":  # the one that does not say so
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema(op).returns)


def call(op: Op, tensors: Mapping[str, torch.Tensor], rows: int = 1, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """The results of one operator on real (or fake) tensors; `rows` is the global batch."""
    if op.target == CONSTANT:
        return (torch.tensor(op.args[0], dtype=getattr(torch, op.results[0].dtype), device=device),)

    def value(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return tensors[arg.name]
        if isinstance(arg, Atom):
            return torch.device(device) if arg.source == "device" else getattr(torch, arg.source.removeprefix("torch."))
        if isinstance(arg, Rows):
            return arg.per_row * rows
        if isinstance(arg, tuple):
            return [value(inner) for inner in arg]
        return arg

    out = overload(op)(*map(value, op.args), **{k: value(a) for k, a in op.kwargs})
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


def run(graph: Graph, tensors: Mapping[str, torch.Tensor], rows: int = 1) -> dict[str, torch.Tensor]:
    """Every value of `graph`, given its inputs and parameters by value name."""
    found = dict(tensors)
    for op in graph.ops:
        found |= zip((v.name for v in op.results), call(op, found, rows), strict=True)
    return found
