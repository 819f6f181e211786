"""BLOCKS: layers of one kind become one `Block`, written once and called once per layer.

A layer is a child of a numbered container (`layers.0`, `layers.1`, ...). Layers whose operators are the same, one by
one, in arguments, shapes and wiring, share a block: one decision, one price, one class in the program. Layers of one
Python class that differ (a first layer with extra weights) get a block each.
"""

from __future__ import annotations

import builtins
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from passes.graph import Arg, Graph, Op, Parameter, Ref, Value, map_op, op_at, value_at

SMALLEST_LAYER = 3  # operators


@dataclass(frozen=True)
class Block:
    """One kind of layer. `inputs` and `outputs` are named as in its first instance; parameter names are relative."""

    name: str
    paths: tuple[str, ...]
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]

    @cached_property
    def values(self) -> dict[str, Value]:
        found = {v.name: v for v in self.inputs} | {p.value.name: p.value for p in self.parameters}
        return found | {v.name: v for op in self.ops for v in op.results}


@dataclass(frozen=True)
class Call:
    """One layer: block `block`, instance `instance`, with the values it is given and the ones it returns."""

    block: int
    instance: int
    args: tuple[str, ...]
    results: tuple[Value, ...]


Statement: TypeAlias = "Op | Call"


@dataclass(frozen=True)
class Blocked:
    """The graph with its layers taken out: parameters that belong to no layer, and a body of operators and calls."""

    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    body: tuple[Statement, ...]
    blocks: tuple[Block, ...]
    loss: str

    @cached_property
    def values(self) -> dict[str, Value]:
        found = {v.name: v for v in self.inputs} | {p.value.name: p.value for p in self.parameters}
        return found | {v.name: v for statement in self.body for v in statement.results}

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        return tuple(s for s in self.body if isinstance(s, Call))

    def regions(self) -> Iterator[tuple[Mapping[str, Value], tuple[Op, ...], int]]:
        """The operators outside of layers, then those of each kind of layer, with the number of such layers."""
        yield self.values, tuple(s for s in self.body if isinstance(s, Op)), 1
        for block in self.blocks:
            yield block.values, block.ops, len(block.paths)

    def all_parameters(self) -> tuple[tuple[str, Parameter], ...]:
        """Every parameter and buffer of the model with its full name."""
        own = [(p.name, p) for p in self.parameters]
        return (*own, *((f"{path}.{p.name}", p) for b in self.blocks for path in b.paths for p in b.parameters))

    def at(self, batch: int) -> Blocked:
        """The same program for `batch` rows."""
        return replace(
            self,
            inputs=tuple(value_at(v, batch) for v in self.inputs),
            body=tuple(
                op_at(s, batch)
                if isinstance(s, Op)
                else replace(s, results=tuple(value_at(v, batch) for v in s.results))
                for s in self.body
            ),
            blocks=tuple(
                replace(
                    b,
                    inputs=tuple(value_at(v, batch) for v in b.inputs),
                    ops=tuple(op_at(op, batch) for op in b.ops),
                )
                for b in self.blocks
            ),
        )


def block(graph: Graph, classes: Mapping[str, str], reserved: Collection[str] = ()) -> Blocked:
    """`classes` gives the Python class of each numbered child by module path; no block is named as in `reserved`."""
    layers = _layers(graph, classes)
    body: list[Statement] = []
    found: dict[tuple[str, tuple[object, ...]], list[_Layer]] = {}
    order: list[tuple[str, tuple[object, ...]]] = []
    at: dict[int, _Layer] = {}
    inside: set[int] = set()
    for layer in layers:
        key = (classes[layer.path], layer.signature)
        if key not in found:
            order.append(key)
        found.setdefault(key, []).append(layer)
        at[layer.positions[0]] = layer
        inside.update(layer.positions)
    blocks: list[Block] = []
    names = _class_names([kind for kind, _ in order], reserved)
    index = {key: i for i, key in enumerate(order)}
    for key, name in zip(order, names, strict=True):
        same = found[key]
        first = same[0]
        blocks.append(
            Block(
                name=name,
                paths=tuple(layer.path for layer in same),
                inputs=tuple(graph.values[name] for name in first.inputs),
                parameters=first.parameters,
                ops=first.ops,
                outputs=first.outputs,
            )
        )
    for position, op in enumerate(graph.ops):
        if position in at:
            layer = at[position]
            key = (classes[layer.path], layer.signature)
            results = tuple(graph.values[name] for name in layer.outputs)
            body.append(Call(index[key], found[key].index(layer), layer.inputs, results))
        if position not in inside:
            body.append(op)
    owned = {p.value.name for layer in layers for p in layer.parameters}
    rest = tuple(p for p in graph.parameters if p.value.name not in owned)
    return Blocked(graph.inputs, rest, tuple(body), tuple(blocks), graph.loss)


def _class_names(kinds: list[str], reserved: Collection[str]) -> list[str]:
    """A name for each block: that of the user's class, numbered where it is taken or means something else."""
    taken: set[str] = {*reserved, *dir(builtins)}
    names: list[str] = []
    for kind in kinds:
        name, count = kind, 1
        while name in taken or (count > 1 and name in kinds):
            count += 1
            name = f"{kind}{count}"
        taken.add(name)
        names.append(name)
    return names


@dataclass(frozen=True)
class _Layer:
    path: str
    positions: tuple[int, ...]
    inputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    signature: tuple[object, ...]


def _layers(graph: Graph, classes: Mapping[str, str]) -> list[_Layer]:
    """The outermost numbered children of one class, at least two per container, that can be called one by one."""
    positions: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(graph.ops):
        parts = op.module.split(".")
        for depth, part in enumerate(parts):
            if part.isdigit():
                positions[".".join(parts[: depth + 1])].append(i)
    containers: dict[str, list[str]] = defaultdict(list)
    for path in positions:
        containers[path.rpartition(".")[0]].append(path)
    taken: list[_Layer] = []
    done: list[str] = []
    readers: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(graph.ops):
        for name in op.operands:
            readers[name].append(i)
    readers[graph.loss].append(len(graph.ops))
    for container in sorted(containers, key=lambda c: (c.count("."), c)):
        if any(container.startswith(f"{path}.") or container == path for path in done):
            continue
        by_class: dict[str, list[str]] = defaultdict(list)
        for path in containers[container]:
            if path in classes and len(positions[path]) >= SMALLEST_LAYER:
                by_class[classes[path]].append(path)
        for paths in by_class.values():
            if len(paths) < 2:
                continue
            layers = [_layer(graph, path, positions[path], readers) for path in paths]
            if all(layer is not None for layer in layers):
                taken.extend(layer for layer in layers if layer is not None)
                done.extend(paths)
    return sorted(taken, key=lambda layer: layer.positions[0])


def _layer(graph: Graph, path: str, positions: list[int], readers: Mapping[str, list[int]]) -> _Layer | None:
    """The layer at `path`, or None where it cannot be called on its own.

    Operators of others run in between, or its parameters are read by others too (who could not, while ZeRO has them
    sharded).
    """
    if positions != list(range(positions[0], positions[-1] + 1)):
        return None
    span = set(positions)
    ops = tuple(graph.ops[i] for i in positions)
    made = {v.name: (i, j) for i, op in enumerate(ops) for j, v in enumerate(op.results)}
    own = {p.value.name: p for p in graph.parameters if any(n.startswith(f"{path}.") for n in p.names)}
    for name, parameter in own.items():
        if not all(n.startswith(f"{path}.") for n in parameter.names) or not span.issuperset(readers[name]):
            return None
    inputs: dict[str, int] = {}
    parameters: dict[str, Parameter] = {}

    def canonical(arg: Arg) -> Arg:
        if not isinstance(arg, Ref):
            return arg
        if arg.name in made:
            return Ref(f"%{made[arg.name]}")
        if arg.name in own:
            relative = tuple(n.removeprefix(f"{path}.") for n in own[arg.name].names)
            parameters.setdefault(arg.name, replace(own[arg.name], names=relative))
            return Ref(f"p:{relative[0]}")
        return Ref(f"x:{inputs.setdefault(arg.name, len(inputs))}")

    lines: list[object] = []
    for op in ops:
        plain = map_op(op, canonical)
        shapes = tuple((v.shape, v.dtype, v.grad) for v in op.results)
        lines.append((plain.target, plain.args, plain.kwargs, shapes, op.module.removeprefix(path)))
    outputs = tuple(name for name in made if any(i not in span for i in readers[name]))
    taken = tuple((graph.values[n].shape, graph.values[n].dtype, graph.values[n].grad) for n in inputs)
    kept = tuple((p.names, p.value.shape, p.value.dtype, p.value.grad, p.buffer) for p in parameters.values())
    signature = (tuple(lines), taken, kept, tuple(made[name] for name in outputs))
    return _Layer(path, tuple(positions), tuple(inputs), tuple(parameters.values()), ops, outputs, signature)
