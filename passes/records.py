"""The border: every fx node of a trace becomes a record, once, and knows the user's line."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from costmodels.errors import CaptureError
from passes.graph import COMPLEX, CONSTANT, FLOATS, Arg, Atom, Graph, Op, Parameter, Ref, Size, Value, mutates, refs

LARGEST_LITERAL = 64  # elements of a tensor made inside forward that is written into the program
FUNCTIONAL_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
DIFFERENTIABLE = FLOATS | COMPLEX
TORCH_ROOT = str(Path(torch.__file__).parent)
OWN_ROOTS = tuple(f"{Path(__file__).parent.parent / name}{os.sep}" for name in ("autopar", "passes", "costmodels"))


@dataclass(frozen=True)
class Traced:
    """One trace: its graph, the value of each batch input by position, and the tensors made inside forward."""

    graph: Graph
    inputs: Mapping[int, str]
    constants: Mapping[str, torch.Tensor]


def records(program: ExportedProgram, model: nn.Module, keys: tuple[str | int, ...]) -> Traced:
    """The trace as records."""
    signature = program.graph_signature
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    user = {name: i for i, name in enumerate(signature.user_inputs)}
    owned = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tied = _ties(model)
    value_of: dict[str, str] = {}  # fx name -> value name (tied parameters share one)
    parameters: dict[str, Parameter] = {}
    inputs: list[Value] = []
    input_names: dict[int, str] = {}
    constants: dict[str, torch.Tensor] = {}
    literals: list[Op] = []
    taken = {node.name for node in program.graph.nodes}
    for node in placeholders:
        fake = node.meta["val"]
        if node.name in owned:
            path = owned[node.name].removeprefix("model.")
            names = tied.get(path, (path,))
            if names[0] not in parameters:
                value = _value(node.name, fake, grad=node.name in signature.inputs_to_parameters and fake.requires_grad)
                is_buffer = node.name in signature.inputs_to_buffers
                persistent = not is_buffer or owned[node.name] not in signature.non_persistent_buffers
                parameters[names[0]] = Parameter(value, names, buffer=is_buffer, persistent=persistent)
            value_of[node.name] = parameters[names[0]].value.name
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            constant = program.constants[signature.inputs_to_lifted_tensor_constants[node.name]]
            if isinstance(constant, FakeTensor):
                raise CaptureError(
                    "a tensor made from numbers or by .data in forward was not kept; make it a buffer, or use .detach()"
                )
            value = _value(node.name, fake, grad=False)
            if constant.numel() <= LARGEST_LITERAL:
                literals.append(Op(CONSTANT, (_nested(constant.tolist()),), (), (value,)))
            else:
                path = f"constants.literal_{len(constants)}"
                constants[path] = constant
                parameters[path] = Parameter(value, (path,), buffer=True, persistent=False)
        else:
            key = str(keys[user[node.name]])
            name = _unused(key if key.isidentifier() else "input_" + re.sub(r"\W", "_", key), taken)
            inputs.append(_value(name, fake, grad=False))
            input_names[user[node.name]] = value_of[node.name] = name
    known = (*inputs, *(p.value for p in parameters.values()), *(op.results[0] for op in literals))
    reader = _Reader(program.graph_module, value_of, {v.name: v for v in known}, taken)
    reader.ops.extend(literals)
    for node in program.graph.nodes:
        if node.op == "call_function":
            reader.read(node)
    for changed, path in signature.buffers_to_mutate.items():
        reader.store(changed, parameters[tied[path.removeprefix("model.")][0]].value)
    (loss,) = signature.user_outputs
    loss = reader.value_of.get(loss, loss)
    # parameters that the loss never reads still belong to the model: they get no gradient, and stay as they are
    return Traced(Graph(tuple(inputs), tuple(parameters.values()), tuple(reader.ops), loss), input_names, constants)


def _unused(name: str, taken: set[str]) -> str:
    """`name`, or with a number behind it where the graph has a node of that name; taken from now on."""
    numbered = (f"{name}_{i}" for i in itertools.count(2))
    free = name if name not in taken else next(n for n in numbered if n not in taken)
    taken.add(free)
    return free


def _nested(values: Any) -> Arg:
    return tuple(map(_nested, values)) if isinstance(values, list) else values


def _ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every parameter and buffer name -> all names of the same tensor, in the model's order."""
    groups: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        groups.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


def _value(name: str, fake: torch.Tensor, grad: bool) -> Value:
    return Value(name, tuple(_size(n) for n in fake.shape), str(fake.dtype).removeprefix("torch."), grad)


def _size(size: int | torch.SymInt) -> int | Size:
    """A symbolic size as `a * batch + b`. Raises CaptureError where it is not of that form."""
    if isinstance(size, int):
        return size
    return _linear(size.node.expr)


@lru_cache(maxsize=10_000)
def _linear(expression: Any) -> int | Size:
    symbols = sorted(expression.free_symbols, key=str)
    if not symbols:
        return int(expression)
    at = [expression.subs({s: n for s in symbols}) for n in (0, 1, 5)]
    if any(symbol_is_type(s, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)) for s in symbols):
        raise CaptureError("a tensor's size depends on values; use torch.where, a mask or a fixed capacity")
    if len(symbols) > 1 or at[2] - at[0] != 5 * (at[1] - at[0]) or not all(n.is_Integer for n in at):
        raise CaptureError(f"a tensor's size depends on the batch as {expression}, which is not a*batch + b")
    return Size(int(at[1] - at[0]), int(at[0]))


_BLOCKS = {"wrap_with_set_grad_enabled": 0, "wrap_with_autocast": 2}  # position of `enabled`


class _Reader:
    """Turns call_function nodes into Ops; `getitem` nodes name the results of the node that they index.

    A `with` block (no_grad, autocast) comes as an operator on a graph of its own. Another reader, with `outer`, puts
    the operators of that graph in its place, under names that are still free.
    """

    def __init__(
        self,
        module: nn.Module,
        value_of: dict[str, str],
        values: dict[str, Value],
        taken: set[str],
        outer: _Reader | None = None,
        no_grad: bool = False,
    ) -> None:
        self.module, self.value_of, self.values, self.taken = module, value_of, values, taken
        self.nested, self.no_grad = outer is not None, no_grad
        self.ops: list[Op] = outer.ops if outer is not None else []
        self.cut: set[str] = outer.cut if outer is not None else set()  # values that have no gradient by no_grad alone

    def read(self, node: Node) -> None:
        fake = node.meta.get("val")
        target = str(node.target)
        if isinstance(fake, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return  # a size or a number: readers take its value
        if "getitem" in target:
            return
        if target in _BLOCKS:
            self.inline(node, target)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(f"{_place(node)}: {target} is not an operator that autopar can split or repeat")
        if fake is None and not target.startswith("aten._assert"):
            raise CaptureError(f"{_place(node)}: {target} returns no tensor")
        if fake is None:
            return
        try:
            self.record(node, target, fake)
        except CaptureError as error:
            raise CaptureError(f"{_place(node)}: {target.split('.')[1]}: {error}") from None

    def inline(self, node: Node, target: str) -> None:
        """The operators of a `with` block, in its place; what no_grad keeps from the gradient is detached behind it."""
        at = next(i for i, arg in enumerate(node.args) if isinstance(arg, Node) and arg.op == "get_attr")
        switch = node.args[_BLOCKS[target]]
        (attribute, *given) = node.args[at:]
        assert isinstance(attribute, Node)
        block = self.module.get_submodule(str(attribute.target))
        assert isinstance(block, torch.fx.GraphModule)
        nodes = list(block.graph.nodes)
        if target == "wrap_with_autocast" and switch:
            line = next((where(inner) for inner in nodes if where(inner)), "") or _place(node)
            raise CaptureError(f"{line}: torch.autocast: precision is chosen with precision=; remove the autocast")
        no_grad = not switch if target == "wrap_with_set_grad_enabled" else self.no_grad
        reader = _Reader(block, {}, self.values, self.taken, outer=self, no_grad=no_grad)
        for placeholder, arg in zip((n for n in nodes if n.op == "placeholder"), given, strict=True):
            read = self.arg(arg)
            if isinstance(read, Ref):
                reader.value_of[placeholder.name] = read.name
        for inner in nodes:
            if inner.op == "call_function":
                reader.read(inner)
        (outputs,) = nodes[-1].args
        assert isinstance(outputs, (tuple, list))
        for user in node.users:
            index = user.args[1]
            assert isinstance(index, int)
            result = outputs[index]
            if not isinstance(result, Node) or not isinstance(result.meta.get("val"), torch.Tensor):
                continue
            name = reader.value_of.get(result.name, result.name)
            if name in reader.cut and not self.no_grad:
                detached = replace(self.values[name], name=self.name(user.name))
                last = next(op for op in reversed(self.ops) if name in (v.name for v in op.results))
                self.ops.append(last.instead("aten.detach.default", (Ref(name),), detached))
                self.values[detached.name] = detached
                name = detached.name
            self.value_of[user.name] = name

    def name(self, node: str) -> str:
        """The value name of an fx name: the same, or a free one where a block's names may be taken."""
        if self.nested:
            self.value_of[node] = _unused(node, self.taken)
        return self.value_of[node] if self.nested else node

    def record(self, node: Node, target: str, fake: Any) -> None:
        args = tuple(self.arg(a) for a in node.args)
        kwargs = tuple((k, self.arg(a)) for k, a in node.kwargs.items())
        reads = [self.values[name] for name in refs((*args, *(a for _, a in kwargs)))]
        flows = not stops_gradients(target) and any(v.grad or v.name in self.cut for v in reads)
        grad = flows and not self.no_grad
        fakes = fake if isinstance(fake, (tuple, list)) else (fake,)
        names = {user.args[1]: user.name for user in node.users if "getitem" in str(user.target)}
        names = {i: self.name(name) for i, name in names.items()}
        results = []
        for i, one in enumerate(fakes):
            name = (
                names.get(i) or _unused(f"{node.name}_{i}", self.taken)
                if isinstance(fake, (tuple, list))
                else self.name(node.name)
            )
            dtype = str(one.dtype).removeprefix("torch.")
            results.append(_value(name, one, grad=grad and dtype in DIFFERENTIABLE))
        # several getitem nodes of one index read the same result
        for user in node.users:
            if "getitem" in str(user.target):
                self.value_of[user.name] = names[user.args[1]]
        if target == FUNCTIONAL_BATCH_NORM:  # the form that writes its running statistics itself has a gradient
            for statistic, new in zip(args[3:5], results[3:5], strict=True):
                assert isinstance(statistic, Ref)
                self.value_of[new.name] = statistic.name
            target, args, results = "aten.batch_norm.default", (*args, False), results[:1]
        self.values |= {v.name: v for v in results}
        op = Op(
            target, args, kwargs, tuple(results), module_path(node), where(node) or module_class(node), in_loss(node)
        )
        if flows and self.no_grad:
            self.cut.update(v.name for v in results if v.dtype in DIFFERENTIABLE)
            activation = any(reads[0] in made.results for made in self.ops)
            if mutates(op) and reads[0].grad and activation:
                raise CaptureError("under no_grad, it changes a tensor in place that has a gradient")
        self.ops.append(op)

    def store(self, changed: str, buffer: Value) -> None:
        """A buffer takes its new value at the end (torch's functionalization has put the write off)."""
        new = self.value_of.get(changed, changed)
        if new != buffer.name:
            stored = replace(buffer, name=f"{buffer.name}_stored")
            self.ops.append(Op("aten.copy_.default", (Ref(buffer.name), Ref(new)), (), (stored,)))

    def arg(self, arg: Any) -> Arg:
        if isinstance(arg, Node):
            fake = arg.meta.get("val")
            if isinstance(fake, torch.SymInt):
                return _size(fake)
            if isinstance(fake, (torch.SymFloat, torch.SymBool)):
                raise CaptureError(
                    f"it computes with the number {fake}, which is not known before the step; keep it a tensor"
                )
            if isinstance(fake, (int, float, bool)):
                return fake
            return Ref(self.value_of.get(arg.name, arg.name))
        if isinstance(arg, torch.SymInt):
            return _size(arg)
        if isinstance(arg, (tuple, list)):
            return tuple(self.arg(inner) for inner in arg)
        if isinstance(arg, torch.device):
            return Atom("device")
        if isinstance(arg, (torch.dtype, torch.layout, torch.memory_format)):
            return Atom(str(arg))
        if arg is None or isinstance(arg, (int, float, bool, str)):
            return arg
        raise CaptureError(f"an operator has an argument of type {type(arg).__name__}, which is not supported")


def stops_gradients(target: str) -> bool:
    """Whether an operator takes of its operand no more than shape, dtype and device, or detaches it."""
    name = target.split(".")[1]
    return name in ("detach", "detach_") or name.endswith("_like") or name.startswith("new_")


def module_path(node: Node) -> str:
    """The user's module path in which the node was traced."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return paths[-1].removeprefix("model").removeprefix(".") if paths and not in_loss(node) else ""


def module_class(node: Node) -> str:
    """The class of the module in which the node was traced."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    kind = stack[-1][1] if stack else ""
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def in_loss(node: Node) -> bool:
    """Whether the node was traced in loss_fn, outside the model."""
    stack = node.meta.get("nn_module_stack") or {}
    return bool(stack) and not any(entry[0].split(".")[0] == "model" for entry in stack.values())


def _place(node: Node) -> str:
    """Where the node was traced, as an error names it."""
    module = f"{module_path(node)} ({module_class(node)})" if module_path(node) else "the model's own forward"
    return where(node) or ("loss_fn" if in_loss(node) else module)


def where(node: Node) -> str:
    """The user's file and line, as `_Located` noted it; or the innermost that is not torch's where torch noted all."""
    found = ""
    for line in (node.meta.get("stack_trace") or "").splitlines():
        line = line.strip()
        if line.startswith("File ") and is_user_code(line.split('"')[1]):
            found = line.split('"')[1] + ":" + line.split("line ")[1].split(",")[0]
    return found


def is_user_code(file: str) -> bool:
    """Whether a line of this file is worth naming: not torch's, and not ours."""
    return not (file.startswith((TORCH_ROOT, *OWN_ROOTS, "<")) or file.endswith("contextlib.py"))
