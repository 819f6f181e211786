"""The captured training step as typed records: what every later pass reads instead of `node.meta`.

A `Graph` is a straight-line program: parameters, buffers and inputs come in, operators run in order,
one scalar loss goes out. Sizes that grow with the batch are `Size` objects until `Graph.at(batch)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TypeAlias

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})
COMPLEX = frozenset({"complex64", "complex128"})


CONSTANT = "autopar.constant.default"  # args: the values, nested as the shape


@dataclass(frozen=True)
class Size:
    """`per_batch * batch + fixed` elements."""

    per_batch: int
    fixed: int = 0

    def at(self, batch: int) -> int:
        return self.per_batch * batch + self.fixed

    def __str__(self) -> str:
        grows = "batch" if self.per_batch == 1 else f"{self.per_batch}*batch"
        return grows if not self.fixed else f"{grows}{self.fixed:+d}"


@dataclass(frozen=True)
class Rows:
    """`per_row` times the rows of the whole global batch, whatever part of it one call sees: a loss's divisor."""

    per_row: int

    def __str__(self) -> str:
        return "global batch" if self.per_row == 1 else f"{self.per_row} * global batch"


@dataclass(frozen=True)
class Ref:
    """A tensor argument: the name of the value it reads."""

    name: str


@dataclass(frozen=True)
class Atom:
    """An argument that is not a number or a tensor (dtype, device, memory format), as Python source."""

    source: str


Arg: TypeAlias = "Ref | Atom | Size | Rows | int | float | bool | str | tuple[Arg, ...] | None"


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its name, shape, dtype, and whether a gradient flows into it."""

    name: str
    shape: tuple[int | Size, ...]
    dtype: str
    grad: bool

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The shape once the batch is known."""
        assert all(isinstance(n, int) for n in self.shape), f"{self.name} still depends on the batch: {self.shape}"
        return tuple(n for n in self.shape if isinstance(n, int))

    @cached_property
    def elements(self) -> int:
        return prod(self.sizes)

    @cached_property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Op:
    """One operator call. `target` is an ATen overload ("aten.linear.default") or one of ours ("autopar.…")."""

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[Value, ...]
    module: str = ""  # the user's module path
    source: str = ""  # the user's file and line, or the class of a module that is torch's own
    in_loss: bool = False  # traced in loss_fn, outside the model

    @property
    def name(self) -> str:
        return self.results[0].name

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensor arguments, in the order in which they stand (a name read twice stands twice)."""
        return tuple(refs((*self.args, *(value for _, value in self.kwargs))))

    def arg(self, position: int, keyword: str = "", default: Arg = None) -> Arg:
        """The argument at `position`, or by `keyword`, or `default`."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(keyword, default)

    def instead(self, target: str, args: tuple[Arg, ...], *results: Value) -> Op:
        """Another operator, from the same place of the user's code."""
        return replace(self, target=target, args=args, kwargs=(), results=results)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.results))} = {self.target}({', '.join(self.operands)})"


def refs(arg: Arg) -> Iterator[str]:
    """Every tensor name in an argument, depth first."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for inner in arg:
            yield from refs(inner)


def leaves(arg: Arg) -> Iterator[Arg]:
    """Every argument in an argument that is no tuple, depth first."""
    if isinstance(arg, tuple):
        for inner in arg:
            yield from leaves(inner)
    else:
        yield arg


def map_arg(arg: Arg, change: Callable[[Arg], Arg]) -> Arg:
    """`arg` with `change` applied to each leaf."""
    if isinstance(arg, tuple):
        return tuple(map_arg(inner, change) for inner in arg)
    return change(arg)


def map_op(op: Op, change: Callable[[Arg], Arg]) -> Op:
    """`op` with `change` applied to each leaf of its arguments."""
    return replace(
        op,
        args=tuple(map_arg(a, change) for a in op.args),
        kwargs=tuple((k, map_arg(a, change)) for k, a in op.kwargs),
    )


def mutates(op: Op) -> bool:
    """Whether the operator writes into its first operand (name_ in PyTorch's convention)."""
    name = op.target.split(".")[1]
    return name.endswith("_") and not name.endswith("__")


def numbered(op: Op) -> Op:
    """`op` with operands and results named by their position, of no place: equal for operators that do the same."""
    numbers = {name: str(i) for i, name in enumerate(dict.fromkeys(op.operands))}
    plain = map_op(op, lambda a: Ref(numbers[a.name]) if isinstance(a, Ref) else a)
    results = tuple(replace(v, name=f"r{i}") for i, v in enumerate(op.results))
    return replace(plain, results=results, module="", source="", in_loss=False)


def rename(op: Op, names: dict[str, str]) -> Op:
    """`op` reading and writing under other names."""
    op = map_op(op, lambda a: Ref(names.get(a.name, a.name)) if isinstance(a, Ref) else a)
    return replace(op, results=tuple(replace(v, name=names.get(v.name, v.name)) for v in op.results))


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer: its value in the graph, and every name the user's model has for it (ties)."""

    value: Value
    names: tuple[str, ...]
    buffer: bool = False
    persistent: bool = True

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Graph:
    """One microbatch of the training step, forward only; the loss is a scalar."""

    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]  # buffers included
    ops: tuple[Op, ...]
    loss: str

    @cached_property
    def values(self) -> dict[str, Value]:
        found = {v.name: v for v in self.inputs}
        found |= {p.value.name: p.value for p in self.parameters}
        return found | {v.name: v for op in self.ops for v in op.results}

    def at(self, batch: int) -> Graph:
        """The same graph for `batch` rows: no `Size` is left."""
        return Graph(
            inputs=tuple(value_at(v, batch) for v in self.inputs),
            parameters=self.parameters,
            ops=tuple(op_at(op, batch) for op in self.ops),
            loss=self.loss,
        )

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))


def value_at(value: Value, batch: int) -> Value:
    return replace(value, shape=tuple(n.at(batch) if isinstance(n, Size) else n for n in value.shape))


def op_at(op: Op, batch: int) -> Op:
    op = map_op(op, lambda a: a.at(batch) if isinstance(a, Size) else a)
    return replace(op, results=tuple(value_at(v, batch) for v in op.results))
