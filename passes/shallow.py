"""A shallow twin of a deep model: with it, the batch is traced as a symbol through a few layers instead of all.

Symbolic sizes make a trace twice as slow. So the twin, two layers of every kind, is traced with a symbol for the rows,
the model itself with a fixed number of them, and every operator of the model takes its sizes from the operator of the
twin that comes from the same line of code, with the same arguments, of the same operands. Where one finds no partner,
or two that disagree, the answer is None, and the model is traced with the symbol.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TypeAlias

from torch import nn

from passes.graph import Graph, Op, Value, numbered, rename
from passes.normalize import without_noops

KEPT = 2  # layers of each kind: the first may take its input from elsewhere
Look: TypeAlias = tuple[object, ...]


def make_shallow(model: nn.Module) -> bool:
    """Take all layers but the first KEPT of every kind out of the model's lists; whether that took out most of it.

    Layers are of one kind if they have the same class and the same parameters and buffers, by shape.
    """
    before = sum(1 for _ in model.modules())
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.ModuleList, nn.Sequential)):
                seen: Counter[Look] = Counter()
                kept = []
                for layer in child:
                    kind = look(layer)
                    seen[kind] += 1
                    if seen[kind] <= KEPT:
                        kept.append(layer)
                if len(kept) < len(child):
                    setattr(parent, name, type(child)(kept) if isinstance(child, nn.ModuleList) else type(child)(*kept))
    return 2 * sum(1 for _ in model.modules()) <= before


def look(layer: nn.Module) -> Look:
    """What layers of one kind share."""
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return (type(layer), *((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors))


def with_sizes_of(twin: Graph, graph: Graph, rows: int) -> Graph | None:
    """`graph`, traced with `rows` rows, with the sizes that grow with the batch as `twin` has them; None if unclear.

    Both lose what changes nothing: with a symbol, slices of everything are slices, and else aliases.
    """
    twin, graph = without_noops(twin), without_noops(graph)
    partners: dict[Look, Op | None] = {}
    for op, fixed in zip(twin.ops, twin.at(rows).ops, strict=True):
        key = outlook(fixed, [twin.values[name] for name in op.operands])
        mine = numbered(op)
        partners[key] = mine if partners.setdefault(key, mine) == mine else None
    inputs = {v.name: v for v in twin.inputs}
    if any(v.name not in inputs for v in graph.inputs):
        return None
    values = {v.name: inputs[v.name] for v in graph.inputs} | {p.value.name: p.value for p in graph.parameters}
    ops = []
    for op in graph.ops:
        partner = partners.get(outlook(op, [values[name] for name in op.operands]))
        if partner is None:
            return None
        ops.append(renamed(partner, op))
        values |= {v.name: v for v in ops[-1].results}
    return replace(graph, inputs=tuple(values[v.name] for v in graph.inputs), ops=tuple(ops))


def outlook(op: Op, operands: list[Value]) -> Look:
    """All that an operator is but for names: its line, its arguments, and its operands with their symbols."""
    return op.source, numbered(op), *((v.shape, v.dtype, v.grad) for v in operands)


def renamed(partner: Op, op: Op) -> Op:
    """The twin's numbered operator in the place of `op`, under its names."""
    names = {str(i): name for i, name in enumerate(dict.fromkeys(op.operands))}
    names |= {f"r{i}": v.name for i, v in enumerate(op.results)}
    return replace(rename(partner, names), module=op.module, source=op.source, in_loss=op.in_loss)
