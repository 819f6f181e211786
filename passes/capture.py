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
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from costmodels.errors import BadInput, CaptureError
from passes.graph import FLOATS, Arg, Graph, Op, Ref, map_op, mutates
from passes.interpret import may_alias
from passes.records import Traced, is_user_code, records
from passes.shallow import make_shallow, with_sizes_of

ROWS = 2  # the batch that is traced; a symbol stands for it (0 and 1 would be specialised by torch)
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
        if parameter.dtype == torch.bfloat16 and precision == "fp32":
            raise BadInput(f"{name} is bfloat16 and precision is fp32; use model.float() first, or precision bf16")
    leaves = batch_leaves(batch)
    nested = [str(key) for key, leaf in leaves.items() if not isinstance(leaf, torch.Tensor) and _holds_tensors(leaf)]
    if nested:
        raise BadInput(f"the batch holds tensors inside {', '.join(nested)}; put every tensor at the top of the batch")
    tensors = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    if not tensors:
        raise BadInput("the batch holds no tensor; pass a dict, a tuple or a tensor whose first dim counts rows")
    rows = next((t.shape[0] for t in tensors.values() if t.dim()), 1)
    by_rows = frozenset(key for key, t in tensors.items() if t.dim() and t.shape[0] == rows)

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    dtype = COMPUTE_DTYPES[precision]
    whole = _fake_copy(model, mode, dtype)

    few = {  # rows for a trace in which they are a symbol
        key: torch.empty((ROWS, *t.shape[1:]), dtype=t.dtype, device="meta") if key in by_rows else t
        for key, t in tensors.items()
    }

    def trace(module: nn.Module, tensors: Mapping[str | int, torch.Tensor], symbols: frozenset[str | int]) -> Traced:
        return _traced(_Step(module, loss_fn, batch, tuple(tensors), dtype), mode, tensors, symbols)

    def trace_twin() -> Traced | None:
        twin = _fake_copy(model, mode, dtype)
        if not make_shallow(twin):
            return None
        try:
            shallow, deep = trace(twin, few, by_rows), trace(whole, few, frozenset())
        except (CaptureError, BadInput):
            return None
        graph = with_sizes_of(shallow.graph, deep.graph, ROWS)
        return replace(deep, graph=graph) if graph is not None else None

    coupled = ""
    try:
        traced = trace_twin() or trace(whole, few, by_rows)
    except CaptureError as error:
        try:  # a loss that couples the rows of a batch is specialised to it: trace this one size
            traced = trace(whole, tensors, frozenset())
        except CaptureError:
            raise error from None
        why = str(error).splitlines()[0].removeprefix(f"{type(model).__name__} cannot be captured").lstrip(": ")
        coupled = f"the rows of a batch are not independent: {why}"
        if len(by_rows) > 1:
            names = ", ".join(str(key) for key in tensors if key in by_rows)
            coupled += f"; {names} are taken to go by rows: give one that does not another first dim"
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
        self._loss_fn, self.batch, self._keys, self._dtype = loss_fn, batch, keys, dtype

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        leaves = batch_leaves(self.batch) | dict(zip(self._keys, tensors, strict=True))
        whole = refilled(self.batch, leaves)
        args, kwargs = forward_arguments(self.model.forward, whole, self._loss_fn)

        def low(leaf: Any) -> Any:
            is_float = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
            return leaf.to(self._dtype) if is_float and self._dtype != torch.float32 else leaf

        with preserve_node_meta(), _Located():
            with contextlib.nullcontext() if self._dtype == torch.float32 else _OneDtype(self._dtype):
                output = self.model(*map(low, args), **{k: low(v) for k, v in kwargs.items()})
            if self._loss_fn is not None:
                output = _upcast(output)
                try:
                    output = self._loss_fn(output, whole)
                except Exception as error:
                    error.add_note(_IN_LOSS)
                    raise
        loss = loss_of(output)
        if loss is None:
            raise _NoLoss(
                "loss_fn(output, batch) does not return a scalar tensor"
                if self._loss_fn is not None
                else f"{type(self.model).__name__} returns no scalar loss; pass loss_fn=, a function of (output, batch)"
            )
        return (loss,)


_PRODUCTS = frozenset(  # torch's functions, and operators of the same name
    ["linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm",
     "einsum", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
     "scaled_dot_product_attention", "multi_head_attention_forward"]
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


_IN_LOSS = "in loss_fn"


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


def _traced(
    step: _Step, mode: FakeTensorMode, tensors: Mapping[str | int, torch.Tensor], symbols: frozenset[str | int]
) -> Traced:
    """The step on tensors of these shapes; the first dim of those in `symbols` is a symbol."""
    program = _export(step, mode, tensors, symbols)
    traced = records(program, step.model, tuple(tensors))
    _leaves_parameters_alone(traced.graph)
    _multiplies_one_dtype(traced.graph)
    try:
        return replace(traced, graph=functional(traced.graph))
    except CaptureError:  # writes through views: torch's own functionalization, at the price of a second trace
        _detach_blocks(program.graph_module)
        with _quiet():
            program = program.run_decompositions({})
        traced = records(program, step.model, tuple(tensors))
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
    step: _Step, mode: FakeTensorMode, tensors: Mapping[str | int, torch.Tensor], symbols: frozenset[str | int]
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
            raise CaptureError(_explain(error, step)) from error


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


def _explain(error: Exception, step: _Step) -> str:
    """What failed, in which line of the user's code, and what to do."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_user_code(f.filename)]
    where = f" at {own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else ""
    in_loss = _IN_LOSS in getattr(error, "__notes__", ())
    text = f"{type(error).__name__}: {error}"
    said = str(error).strip().splitlines() or [type(error).__name__]
    what = next((remedy for mark, remedy in _REMEDIES.items() if mark in text), said[0][:300])
    if isinstance(error, KeyError):
        what = text
    if (in_loss and isinstance(error, KeyError)) or (not own and isinstance(error, TypeError)):  # forward's own call
        what += f"; the batch has {', '.join(map(str, batch_leaves(step.batch)))}"
    return f"{type(step.model).__name__} cannot be captured{' with this loss_fn' if in_loss else ''}{where}: {what}"


def _notes(model: nn.Module, leaves: Mapping[str | int, Any]) -> Iterator[str]:
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        yield "the model's own gradient checkpointing is ignored: recompute is planned here"
    for key, leaf in leaves.items():
        if isinstance(leaf, (int, float)):
            yield f"batch entry {key} is {leaf} for good: numbers are part of the program; a tensor may vary"


def _multiplies_one_dtype(graph: Graph) -> None:
    """Raises CaptureError where a product's operands have two dtypes: real tensors refuse them, fake ones may not."""
    for op in graph.ops:
        name = op.target.split(".")[1]
        if name in _PRODUCTS and "attention" not in name:  # which looks at its own, and whose mask may have another
            kinds = sorted({graph.values[one].dtype for one in op.operands if graph.values[one].dtype in FLOATS})
            if len(kinds) > 1:
                raise CaptureError(f"{op.source}: {name} takes tensors of one dtype, not {' and '.join(kinds)}")


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
