"""CAPTURE: the user's model and loss become one graph of typed records, for every batch size at once.

`torch.export` (torch.fx, training mode, no decompositions) traces the model with every parameter replaced by a
FakeTensor on the CPU, memoised by id so that ties stay tied: weights are never materialised and the user's
model is never touched. The rows of the batch are one symbol; every size becomes `a * batch + b`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.symbol import SymT, symbol_is_type

from costmodels.errors import BadInput, CaptureError
from passes.graph import (
    COMPLEX,
    CONSTANT,
    FLOATS,
    Arg,
    Atom,
    Graph,
    Op,
    Parameter,
    Ref,
    Size,
    Value,
    map_op,
    mutates,
    refs,
)
from passes.interpret import may_alias
from passes.shallow import make_shallow, with_sizes_of

LARGEST_LITERAL = 64  # elements of a tensor made inside forward that is written into the program
ROWS = 2  # the batch that is traced; a symbol stands for it (0 and 1 would be specialised by torch)
FUNCTIONAL_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
DIFFERENTIABLE = FLOATS | COMPLEX
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

LossFn = Callable[[Any, Any], torch.Tensor]
Batch = Any  # a mapping, a tuple or one tensor


@dataclass(frozen=True)
class BatchInput:
    """One tensor of the user's batch: its key or position, and whether its first dim counts rows."""

    key: str | int
    name: str  # of the value in the graph
    rows: bool


@dataclass(frozen=True)
class Captured:
    """The graph, and what ties it to the user's model and batch."""

    name: str
    graph: Graph
    inputs: tuple[BatchInput, ...]
    constants: Mapping[
        str, torch.Tensor
    ]  # tensors made inside forward that are too large to write down, by buffer name
    example_rows: int
    seq_len: int | None
    coupled: str  # why rows cannot be separated, "" where they can
    notes: tuple[str, ...]


def capture(model: nn.Module, batch: Batch, loss_fn: LossFn | None, precision: str = "fp32") -> Captured:
    """Trace `loss_fn(model(batch), batch)`, or the loss that the model itself returns.

    Raises CaptureError with the user's file and line where the model cannot be traced, and BadInput where it
    returns no loss or the batch holds no tensor.
    """
    if precision not in COMPUTE_DTYPES:
        raise BadInput(f"precision {precision!r} is not known; use one of {', '.join(COMPUTE_DTYPES)}")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in COMPUTE_DTYPES.values():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise BadInput(f"{name} is {kind}, and only fp32 and bf16 parameters are trained; use model.float() first")
    leaves = batch_leaves(batch)
    nested = [str(key) for key, leaf in leaves.items() if not isinstance(leaf, torch.Tensor) and _holds_tensors(leaf)]
    if nested:
        raise BadInput(f"the batch holds tensors inside {', '.join(nested)}; put every tensor at the top of the batch")
    tensors = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    if not tensors:
        raise BadInput("the batch holds no tensor; pass a dict, a tuple or a tensor whose first dim counts rows")
    rows = next((t.shape[0] for t in tensors.values() if t.dim()), 1)
    by_rows = {key for key, t in tensors.items() if t.dim() and t.shape[0] == rows}

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    dtype = COMPUTE_DTYPES[precision]
    whole = _fake_copy(model, mode, dtype)

    few = {  # rows for a trace in which they are a symbol
        key: torch.empty((ROWS, *t.shape[1:]), dtype=t.dtype, device="meta") if key in by_rows else t
        for key, t in tensors.items()
    }

    def trace(module: nn.Module, tensors: Mapping[str | int, torch.Tensor], symbols: set[str | int]) -> _Traced:
        return _traced(_Step(module, loss_fn, batch, tuple(tensors), dtype), mode, tensors, symbols)

    def trace_twin() -> _Traced | None:
        twin = _fake_copy(model, mode, dtype)
        if not make_shallow(twin):
            return None
        try:
            shallow, deep = trace(twin, few, by_rows), trace(whole, few, set())
        except (CaptureError, BadInput):
            return None
        graph = with_sizes_of(shallow.graph, deep.graph, ROWS)
        return replace(deep, graph=graph) if graph is not None else None

    coupled = ""
    try:
        traced = trace_twin() or trace(whole, few, by_rows)
    except CaptureError as error:
        try:  # a loss that couples the rows of a batch is specialised to it: trace this one size
            traced = trace(whole, tensors, set())
        except CaptureError:
            raise error from None
        coupled = f"the rows of a batch are not independent: {str(error).splitlines()[0]}"
    sequence = next((t.shape[1] for k, t in tensors.items() if k in by_rows and t.dim() == 2), None)
    return Captured(
        name=type(model).__name__,
        graph=traced.graph,
        inputs=tuple(
            BatchInput(key, traced.inputs[i], key in by_rows) for i, key in enumerate(tensors) if i in traced.inputs
        ),
        constants=traced.constants,
        example_rows=rows,
        seq_len=sequence if any(not t.is_floating_point() for t in tensors.values() if t.dim() == 2) else None,
        coupled=coupled,
        notes=tuple(_notes(model, leaves)),
    )


def batch_leaves(batch: Batch) -> dict[str | int, Any]:
    """The entries of a batch by key (mapping) or position (sequence, single tensor)."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    return dict(enumerate(batch if isinstance(batch, (tuple, list)) else (batch,)))


def refilled(batch: Batch, leaves: Mapping[Any, Any]) -> Batch:
    """A batch of the form of `batch` with other entries: the inverse of `batch_leaves`."""
    if isinstance(batch, Mapping):
        return dict(leaves)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # loss_fn may ask for batch.y
        return type(batch)(*leaves.values())
    return tuple(leaves.values()) if isinstance(batch, (tuple, list)) else leaves[0]


def _holds_tensors(leaf: Any) -> bool:
    if isinstance(leaf, Mapping):
        return any(map(_holds_tensors, leaf.values()))
    return isinstance(leaf, torch.Tensor) or (isinstance(leaf, (tuple, list)) and any(map(_holds_tensors, leaf)))


def forward_arguments(
    forward: Callable[..., Any], batch: Batch, loss_fn: LossFn | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What of a batch goes to `forward`: all keys that it accepts, or as many positions as it takes.

    With a `loss_fn`, positions after the first only fill parameters without a default: what is left of (x, y) after
    forward(x, mask=None) took its own is the target. A batch that is a dict says which is which.
    """
    parameters = inspect.signature(forward).parameters
    kinds = {p.kind for p in parameters.values()}
    if isinstance(batch, Mapping):
        every = inspect.Parameter.VAR_KEYWORD in kinds and len(parameters) <= 2
        return (), {k: v for k, v in batch.items() if every or k in parameters}
    leaves = tuple(batch_leaves(batch).values())
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return leaves, {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes = [p for p in parameters.values() if p.kind in positional]
    needs = [p for p in takes if p.default is inspect.Parameter.empty]
    return leaves[: max(1, len(needs)) if loss_fn is not None and takes else len(takes)], {}


def loss_of(output: Any) -> torch.Tensor | None:
    """The scalar loss in what a model returned: `.loss`, `["loss"]`, the tensor itself, or a tuple's first."""
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 else None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, (tuple, list)):
        return next((o for o in output if isinstance(o, torch.Tensor) and o.dim() == 0), None)
    return found if isinstance(found, torch.Tensor) and found.dim() == 0 else None


def _upcast(output: Any) -> Any:
    """What a model returned, with its tensors of low precision in fp32: losses are taken in fp32."""
    leaves = tree_leaves(output)
    if isinstance(output, MutableMapping) and len(leaves) == 1 and leaves[0] is output:  # torch does not know its class
        upcast = copy.copy(output)
        upcast.update({key: _upcast(value) for key, value in output.items()})
        return upcast
    low = (torch.bfloat16, torch.float16)
    return tree_map(lambda t: t.float() if isinstance(t, torch.Tensor) and t.dtype in low else t, output)


class _Step(nn.Module):
    """The user's model and loss as one module that takes the batch's tensors and returns the loss."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, batch: Batch, keys: tuple[str | int, ...], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.model = model
        self._loss_fn, self._batch, self._keys, self._dtype = loss_fn, batch, keys, dtype

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        leaves = batch_leaves(self._batch) | dict(zip(self._keys, tensors, strict=True))
        whole = refilled(self._batch, leaves)
        args, kwargs = forward_arguments(self.model.forward, whole, self._loss_fn)

        def low(leaf: Any) -> Any:
            is_float = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
            return leaf.to(self._dtype) if is_float and self._dtype != torch.float32 else leaf

        with preserve_node_meta(), _Located():
            with contextlib.nullcontext() if self._dtype == torch.float32 else _OneDtype(self._dtype):
                output = self.model(*map(low, args), **{k: low(v) for k, v in kwargs.items()})
            if self._loss_fn is not None:
                output = self._loss_fn(_upcast(output), whole)
        loss = loss_of(output)
        if loss is None:
            raise _NoLoss(
                "loss_fn(output, batch) does not return a scalar tensor"
                if self._loss_fn is not None
                else f"{type(self.model).__name__} returns no scalar loss; pass loss_fn=, a function of (output, batch)"
            )
        return (loss,)


_PRODUCTS = frozenset(
    ["linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d",
     "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
     "multi_head_attention_forward"]
)  # fmt: skip
_NORMS = frozenset(["layer_norm", "rms_norm", "group_norm", "instance_norm", "prelu"])


class _OneDtype(TorchFunctionMode):
    """Where fp32 (a buffer of the user's) meets the low dtype, operators take one of them, as under autocast.

    Products run in the low dtype. Norms run in that of their input, batch norm's weights in that of its statistics.
    """

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _PRODUCTS or name in _NORMS or name == "batch_norm":
            floats = [t.dtype for t in tree_leaves((args, kwargs)) if self.is_float(t)]
            if len(set(floats)) > 1:
                first = floats[0] if name in _NORMS else self.low
                if name == "batch_norm":
                    args = (args[0], *tree_map(lambda t: self.cast(t, torch.float32), args[1:]))
                    kwargs = tree_map(lambda t: self.cast(t, torch.float32), kwargs)
                else:
                    args, kwargs = tree_map(lambda t: self.cast(t, first), (args, kwargs))
        return func(*args, **kwargs)

    def is_float(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype in (self.low, torch.float32)

    def cast(self, leaf: Any, dtype: torch.dtype) -> Any:
        return leaf.to(dtype) if self.is_float(leaf) and leaf.dtype != dtype else leaf


TORCH_ROOT = str(Path(torch.__file__).parent)
OWN_ROOTS = tuple(f"{Path(__file__).parent.parent / name}{os.sep}" for name in ("autopar", "passes", "costmodels"))


class _Located(TorchFunctionMode):
    """Every operator is traced with the line of the user's code that called it.

    Torch would note the whole stack of each, at a fifth of the time of an export, and only below a `forward`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_user_code(frame.f_code.co_filename):
            frame = frame.f_back if frame.f_code is not _Step.forward.__code__ else None  # who called is not asked
        set_stack_trace([f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'] if frame is not None else [])
        try:
            return func(*args, **(kwargs or {}))
        finally:
            set_stack_trace([])


def is_user_code(file: str) -> bool:
    """Whether a line of this file is worth naming: not torch's, and not ours."""
    return not (file.startswith((TORCH_ROOT, *OWN_ROOTS, "<")) or file.endswith("contextlib.py"))


class _NoLoss(Exception):
    pass


def _fake_copy(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """A copy of the model whose parameters and buffers are FakeTensors on the CPU; parameters in `dtype`."""
    memo: dict[int, Any] = {}
    computed = (t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor) and not t.is_leaf)
    for tensor in (*model.parameters(), *model.buffers(), *computed):
        if id(tensor) in memo:
            continue
        if is_lazy(tensor):
            raise BadInput(f"{type(model).__name__} has lazy parameters; run one batch through it first")
        parameter = isinstance(tensor, nn.Parameter)
        low = dtype if parameter and tensor.dtype == torch.float32 else tensor.dtype
        with mode:
            fake = torch.empty(tensor.shape, dtype=low, device="cpu")
        memo[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if parameter else fake
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever the model's own attributes raise
        raise CaptureError(f"{type(model).__name__} cannot be copied: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class _Traced:
    """One trace: its graph, the value of each batch input by position, and the tensors made inside forward."""

    graph: Graph
    inputs: Mapping[int, str]
    constants: Mapping[str, torch.Tensor]


def _traced(
    step: _Step, mode: FakeTensorMode, tensors: Mapping[str | int, torch.Tensor], symbols: set[str | int]
) -> _Traced:
    """The step on tensors of these shapes; the first dim of those in `symbols` is a symbol."""
    program = _export(step, mode, tensors, symbols)
    traced = _records(program, step.model, tuple(tensors))
    _leaves_parameters_alone(traced.graph)
    try:
        return replace(traced, graph=functional(traced.graph))
    except CaptureError:  # writes through views: torch's own functionalization, at the price of a second trace
        _detach_blocks(program.graph_module)
        with _quiet():
            program = program.run_decompositions({})
        traced = _records(program, step.model, tuple(tensors))
        return replace(traced, graph=functional(traced.graph))


def _detach_blocks(module: torch.fx.GraphModule) -> None:
    """Detach what blocks of no_grad give: torch's decomposition puts their operators in place and forgets no_grad."""
    for inner in module.modules():
        if not isinstance(inner, torch.fx.GraphModule):
            continue
        for block in inner.graph.nodes:
            if str(block.target) == "wrap_with_set_grad_enabled" and not block.args[0]:
                for result in [user for user in block.users if isinstance(user.meta.get("val"), torch.Tensor)]:
                    with inner.graph.inserting_after(result):
                        detached = inner.graph.call_function(torch.ops.aten.detach.default)
                    result.replace_all_uses_with(detached)
                    detached.args, detached.meta = (result,), dict(result.meta)
        inner.recompile()


def _export(
    step: _Step, mode: FakeTensorMode, tensors: Mapping[str | int, torch.Tensor], symbols: set[str | int]
) -> ExportedProgram:
    rows = Dim("batch", min=2)
    examples, shapes = [], []
    for key, tensor in tensors.items():
        examples.append(mode.from_tensor(torch.empty(tensor.shape, dtype=tensor.dtype)))
        shapes.append({0: rows} if key in symbols else None)
    with _quiet():
        try:
            return torch.export.export(
                step, tuple(examples), dynamic_shapes=(tuple(shapes),) if symbols else None, strict=False
            )
        except _NoLoss as error:
            raise BadInput(str(error)) from None
        except Exception as error:  # torch.export raises whatever the model's own code raised
            raise CaptureError(_explain(error, step.model)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export prints its whole graph on stderr when it fails; the message below says more."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_REMEDIES = {
    "GuardOnDataDependent": "its forward decides on the values of a tensor; "
    "use torch.where or torch.cond, or make it static",
    "DataDependentOutput": "its forward reads a value out of a tensor (.item()); "
    "compute it outside, or keep it a tensor",
    "DynamicOutputShape": "its forward makes a shape from the values of a tensor; use a fixed capacity or torch.where",
    "Constraints violated": "its forward or loss makes a plain int of the number of rows (len(x), int()); "
    "use x.shape[0]",
}


def _explain(error: Exception, model: nn.Module) -> str:
    """What failed, in which line of the user's code, and what to do."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_user_code(f.filename)]
    where = f" at {own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else ""
    text = f"{type(error).__name__}: {error}"
    said = str(error).strip().splitlines() or [type(error).__name__]
    what = next((remedy for mark, remedy in _REMEDIES.items() if mark in text), said[0][:300])
    return f"{type(model).__name__} cannot be captured{where}: {what}"


def _notes(model: nn.Module, leaves: Mapping[str | int, Any]) -> Iterator[str]:
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        yield "the model's own gradient checkpointing is ignored: recompute is planned here"
    for key, leaf in leaves.items():
        if isinstance(leaf, (int, float)):
            yield f"batch entry {key} is {leaf} for good: numbers are part of the program; a tensor may vary"


# -- the border: every fx node becomes a record, once ------------------------------------------------------------


def _records(program: ExportedProgram, model: nn.Module, keys: tuple[str | int, ...]) -> _Traced:
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
    return _Traced(Graph(tuple(inputs), tuple(parameters.values()), tuple(reader.ops), loss), input_names, constants)


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


# -- no operator writes in place, buffers excepted ----------------------------------------------------------------


def _leaves_parameters_alone(graph: Graph) -> None:
    """Raises CaptureError where forward writes into a parameter, or a view of one: ranks hold parts of it."""
    owner = {p.value.name: p.name for p in graph.parameters if not p.buffer}
    for op in graph.ops:
        first = op.operands[0] if op.operands else ""
        if first in owner and mutates(op):
            raise CaptureError(
                f"{op.source}: {op.target.split('.')[1]} changes the parameter {owner[first]} in place; "
                "forward may only read parameters, so change it after the optimizer's step"
            )
        if first in owner and may_alias(op, graph.values[first].dtype):
            owner |= {v.name: owner[first] for v in op.results}


def functional(graph: Graph) -> Graph:
    """In-place operators on activations become functional; later readers read the new value.

    x.relu_(); y = x + 1   ->   x1 = relu(x); y = x1 + 1. Raises CaptureError where the tensor shares its memory
    with another value (a view), since other readers would then miss the change. Buffers are updated in place.
    """
    buffers = {p.value.name for p in graph.parameters if p.buffer}
    inputs = {v.name for v in graph.inputs}
    aliased: set[str] = set()
    newest: dict[str, str] = {}
    ops: list[Op] = []

    def now(arg: Arg) -> Arg:
        return Ref(newest.get(arg.name, arg.name)) if isinstance(arg, Ref) else arg

    for op in graph.ops:
        op = map_op(op, now)
        if op.operands and may_alias(op, graph.values[op.operands[0]].dtype):
            aliased.update(op.operands, (v.name for v in op.results))
        if mutates(op) and op.operands[0] in buffers:
            newest[op.name] = op.operands[0]
        elif mutates(op):
            first = op.operands[0]
            if first in aliased or first in inputs:
                what = "an input of the model" if first in inputs else "a tensor that shares memory with a view"
                raise CaptureError(f"{op.source}: {op.target} changes {what} in place; use the functional form")
            op = _functional(op)
            newest |= {old: op.name for old, new in newest.items() if new == first} | {first: op.name}
        ops.append(op)
    return replace(graph, ops=tuple(ops), loss=newest.get(graph.loss, graph.loss))


_BLOCKS = {"wrap_with_set_grad_enabled": 0, "wrap_with_autocast": 2}  # position of `enabled`


FUNCTIONAL = {  # where the name without its underscore is none
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.normal_.default": "aten.normal_functional.default",
}


def _functional(op: Op) -> Op:
    """The operator that returns what `op` writes in place. Raises CaptureError where torch has none."""
    namespace, name, overload = op.target.split(".")
    target = FUNCTIONAL.get(op.target, f"{namespace}.{name.removesuffix('_')}.{overload}")
    packet, _, overload = target.removeprefix("aten.").partition(".")
    if namespace != "aten" or not hasattr(getattr(torch.ops.aten, packet, None), overload):
        raise CaptureError(f"{op.source}: {name} has no form that returns a new tensor; use torch.where or arithmetic")
    if op.target == "aten.bernoulli_.float" and op.arg(1, "p") is None:
        return replace(op, target=target, args=(*op.args, 0.5))
    return replace(op, target=target)


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
