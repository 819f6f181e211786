"""The memory of a program: its own text, run on fake tensors, block by block.

Nothing is estimated from formulas that could be observed: every class of program.py is run once on one rank's
shapes, forward and backward, and the bytes of live tensors are followed. The root runs with its layers closed: a
closed layer keeps what the open one keeps of its inputs and outputs, and gives tensors of the right shape.
Collectives are stood in for by functions that allocate what the real ones allocate, on the first rank.

    root     |- stretch -| call |- stretch -| call |- stretch -| loss
                          ^ what this one holds inside is in its BlockMemory
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

from passes.kernels import applied
from passes.lower import LocalRegion, Lowered
from passes.placements import local_shape
from passes.stages import LocalStage, stages
from passes.stand_ins import built, moved, runtime_names, same


@dataclass(frozen=True)
class Held:
    """A parameter on this rank, before the data-parallel engine cuts it."""

    shape: tuple[int, ...]
    trained: bool


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one microbatch in one layer, beside its parameters, inputs and outputs.

    A gradient of a parameter either stays where it came, or passes: it is added elsewhere, and freed, at once.
    """

    saved_bytes: int  # from the forward to the backward
    forward_peak_bytes: int  # with the outputs
    backward_peak_bytes: int  # with what was saved and the gradients of inputs and outputs, if gradients stay
    passing_peak_bytes: int  # if they pass
    pinned_peak_bytes: int  # as backward_peak_bytes, if the gradients of outputs stay to the end
    pinned_passing_peak_bytes: int
    left_bytes: int  # the gradients of the inputs
    parameters: tuple[Held, ...]


@dataclass(frozen=True)
class SplitMemory:
    """Bytes of one microbatch in one layer where the gradients of inputs come first, and those of weights later.

    Torch keeps all that was saved until then, and the gradients that those of weights are made of.
    """

    input_peak_bytes: int  # with what was saved and the gradients of inputs and outputs
    waiting_bytes: int  # between the two, beside the gradients of the inputs
    weight_peak_bytes: int  # with what was waiting, if gradients stay
    passing_peak_bytes: int  # if they pass
    left_bytes: int  # what goes only when the last layer has its gradients


@dataclass(frozen=True)
class Stretch:
    """What the root holds between two calls of layers. Gradients of parameters are counted apart."""

    peak_bytes: int  # if gradients stay
    passing_peak_bytes: int  # if they pass
    live_bytes: int  # at its end, beside the gradients of parameters
    gradient_bytes: int  # of the root's parameters that are complete at its end


@dataclass(frozen=True)
class RootMemory:
    """The root's stretches: `forward[k]` ends with the call of layer k, `backward[k]` with its backward."""

    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]
    calls: tuple[int, ...]  # the block of each call
    backward_calls: tuple[int, ...]  # which call each backward is of
    parameters: tuple[Held, ...]
    received_bytes: int  # from the stage before, kept from the forward to the backward
    returned_bytes: int  # the gradients of that
    pinned: bool  # whether the gradients of the last layer's outputs are those of what the stage gives, which stay
    split: RootSplit | None = None


@dataclass(frozen=True)
class RootSplit:
    """The root where the backward is split: stretches as in its whole backward, what waits then, and its weights."""

    inputs: tuple[Stretch, ...]
    waiting_bytes: int  # with outputs, their gradients, and those of inputs
    copied_bytes: int  # of gradients of inputs that are not contiguous, which are copied to be sent
    viewed_bytes: int  # what gradients of inputs that are views keep alive beside themselves
    weights: Stretch


@dataclass(frozen=True)
class Rehearsal:
    """The memory of the root, or of a stage of it, and of each block.

    `recomputed` is each block under activation recompute.
    """

    root: RootMemory
    blocks: tuple[BlockMemory, ...]
    recomputed: tuple[BlockMemory, ...]
    parameters: tuple[Held, ...]  # of the whole model or stage, in its order
    input_bytes: int  # of one microbatch, what is read of the batch
    buffer_bytes: int  # of the whole model or stage
    split: tuple[SplitMemory, ...] = ()  # of each block, where the backward is split
    counting_bytes: int = 0  # before the first microbatch, of what its loss divides by
    counted_bytes: int = 0  # of one microbatch, what is read of the batch for that alone


@dataclass(frozen=True)
class _Layer:
    """A rehearsed layer, the same recomputed, and how it looks from outside."""

    kept: BlockMemory
    again: BlockMemory
    closed: _Closed
    buffer_bytes: int


class Rehearser:
    """Runs every class of the programs of one sharding once, on fake tensors, and follows its bytes.

    Wherever the root is cut, its layers stay what they are, and so does a stage that begins and ends where another did.
    """

    def __init__(self, lowered: Lowered, dtype: torch.dtype) -> None:
        self.lowered, self.dtype = lowered, dtype
        self._layers: tuple[_Layer, ...] | None = None
        self._split: tuple[SplitMemory, ...] | None = None
        self._stages: dict[_StageKey, Rehearsal] = {}

    def rehearse(
        self,
        parts: Sequence[LocalStage],
        text: Callable[[], str],
        *,
        split: bool = False,
        counts: Callable[[LocalStage], tuple[str, ...]] = lambda part: (),
    ) -> tuple[Rehearsal, ...]:
        """The memory of each of these stages (one: of the whole); `text` is that of their program.

        `split`: whether their backward is. `counts`: the inputs that a stage's normalizers are made of.
        """
        keys = [(*_stage_key(number, parts), split and number > 0) for number in range(len(parts))]
        if any(key not in self._stages for key in keys):
            scope = runtime_names(self.lowered, self.dtype)
            own = r"from autopar\.runtime import \(.*?\)\n|import torch\.nn\.functional as F\n"
            source = re.sub(own, "", text(), flags=re.S)
            exec(compile(source, "program.py", "exec"), scope)
            with FakeTensorMode(allow_non_fake_inputs=True):
                if self._layers is None:
                    self._layers = tuple(self._layer(number, scope) for number in range(len(self.lowered.blocks)))
                if split and self._split is None:
                    self._split = tuple(self._layer_split(number, scope) for number in range(len(self._layers)))
                for block, layer in zip(self.lowered.program.blocks, self._layers, strict=True):
                    scope[block.name] = partial(_ClosedLayer, layer.closed)  # the loops of the model make these instead
                for number, (key, part) in enumerate(zip(keys, parts, strict=True)):
                    if key not in self._stages:
                        name = "Model" if len(parts) == 1 else f"Stage{number}"
                        model = built(scope[name])
                        found = self._stage(part, model, self._layers, split and number > 0)
                        self._stages[key] = self._counting(part, model, counts(part), found)
        return tuple(self._stages[key] for key in keys)

    def _layer(self, number: int, scope: dict[str, Any]) -> _Layer:
        region = self.lowered.blocks[number]
        layer = built(scope[self.lowered.program.blocks[number].name])
        kept, again, like = _layer(layer, _inputs(region, region.inputs, self.lowered.sharding.axis.ranks))
        return _Layer(kept, again, replace(like, number=number), _bytes(layer.buffers()))

    def _layer_split(self, number: int, scope: dict[str, Any]) -> SplitMemory:
        region = self.lowered.blocks[number]
        layer = built(scope[self.lowered.program.blocks[number].name])
        return _layer_split(layer, _inputs(region, region.inputs, self.lowered.sharding.axis.ranks))

    def _stage(self, part: LocalStage, model: nn.Module, layers: Sequence[_Layer], split: bool) -> Rehearsal:
        ranks = self.lowered.sharding.axis.ranks
        received, read = (_inputs(part.region, names, ranks) for names in (part.received, part.reads))
        root = _root(model, received, read)
        if split:
            root = replace(root, split=_root_split(model, received, read))
        order = [
            held
            for module in model.modules()
            for held in (
                layers[module.like.number].kept.parameters if isinstance(module, _ClosedLayer) else _held(module)
            )
        ]
        return Rehearsal(
            root,
            tuple(layer.kept for layer in layers),
            tuple(layer.again for layer in layers),
            tuple(order),
            _bytes(read),
            sum(layers[call.block].buffer_bytes for call in part.calls) + _bytes(model.buffers()),
            (self._split or ()) if split else (),
        )

    def _counting(self, part: LocalStage, model: nn.Module, counts: tuple[str, ...], rehearsal: Rehearsal) -> Rehearsal:
        """With what is summed over rows before the first microbatch."""
        if not counts:
            return rehearsal
        values = {value.name: value for value in self.lowered.program.inputs}
        inputs = {name: torch.empty(values[name].sizes, dtype=getattr(torch, values[name].dtype)) for name in counts}
        tracker = Tracker()
        tracker.ignore(*inputs.values(), *model.buffers())
        with tracker, torch.no_grad():
            cast(Any, model).normalizers(*inputs.values())
        alone = _bytes(tensor for name, tensor in inputs.items() if name not in part.reads)
        return replace(rehearsal, counting_bytes=tracker.peak, counted_bytes=alone)


_StageKey: TypeAlias = tuple[object, ...]


def _stage_key(number: int, parts: Sequence[LocalStage]) -> _StageKey:
    """What the memory of a stage depends on, beside the sharding: statements are told apart by identity."""
    region = parts[number].region
    ends = number == 0, number == len(parts) - 1  # the first holds what is never read, the last the loss
    return tuple(map(id, region.statements)), region.inputs, region.outputs, ends


def rehearse(
    text: str,
    lowered: Lowered,
    dtype: torch.dtype,
    parts: Sequence[LocalStage] | None = None,
    split: bool = False,
) -> tuple[Rehearsal, ...]:
    """The memory of a program by itself: of each stage, or of the whole."""
    return Rehearser(lowered, dtype).rehearse(parts or stages(lowered, ()), lambda: text, split=split)


# -- following bytes --------------------------------------------------------------------------------------------------


class Tracker(TorchDispatchMode):
    """Follows the bytes of storages that operators make, from their birth to their release."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.gradients = 0  # of parameters, complete
        self.peak = 0  # of everything
        self.passing_peak = 0  # of all but complete gradients of parameters
        self.pinned_peak = self.pinned_passing_peak = 0  # the same if what is pinned stayed
        self.sizes: dict[int, int] = {}
        self.pins: set[int] = set()
        self.unpinned = 0  # released though it was pinned

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; the guard costs as much as the operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.watch(tensor)
        return out

    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = size = storage.nbytes()
        self.live += size
        self.look()
        weakref.finalize(storage, self.release, key)

    def release(self, key: int) -> None:
        size = self.sizes.pop(key, 0)
        self.live -= size
        if key in self.pins:
            self.pins.remove(key)
            self.unpinned += size

    def pin(self, tensors: Iterable[Tensor]) -> None:
        """These are counted as if they stayed, in the pinned peaks."""
        self.pins.update(t.untyped_storage()._cdata for t in tensors)

    def ignore(self, *tensors: Tensor) -> None:
        """These are counted elsewhere."""
        self.sizes.update((t.untyped_storage()._cdata, 0) for t in tensors)

    def complete(self, parameter: Tensor) -> None:
        """The gradient of a parameter is whole."""
        assert parameter.grad is not None, "called once it is there"
        self.gradients += parameter.grad.untyped_storage().nbytes()
        self.look()

    def look(self) -> None:
        self.peak = max(self.peak, self.live)
        self.passing_peak = max(self.passing_peak, self.live - self.gradients)
        self.pinned_peak = max(self.pinned_peak, self.live + self.unpinned)
        self.pinned_passing_peak = max(self.pinned_passing_peak, self.live + self.unpinned - self.gradients)

    def stretch(self, elsewhere: int = 0) -> Stretch:
        """What happened since the last call of this; `elsewhere` bytes of what is live now are counted by others."""
        found = Stretch(self.peak, self.passing_peak, self.live - self.gradients - elsewhere, self.gradients)
        self.peak = self.passing_peak = self.pinned_peak = self.pinned_passing_peak = 0
        self.look()
        return found


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Sizes of the storages of tensors, each once."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(_storages(tensors).values())


def _held(module: nn.Module, recurse: bool = False) -> tuple[Held, ...]:
    return tuple(Held(tuple(p.shape), p.requires_grad) for p in module.parameters(recurse))


def _inputs(region: LocalRegion, names: Iterable[str], ranks: int) -> tuple[Tensor, ...]:
    """What a rank is given under these local names."""
    made = []
    for local in (region.locals[name] for name in names):
        shape, dtype = local_shape(local.placement, local.value.sizes, ranks), getattr(torch, local.value.dtype)
        made.append(torch.empty(shape, dtype=dtype).requires_grad_(local.value.grad))
    return tuple(made)


def _layer(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[BlockMemory, BlockMemory, _Closed]:
    """A layer, the same layer recomputed, and how it looks from outside."""
    tracker = Tracker()
    tracker.ignore(*inputs, *layer.parameters(), *layer.buffers())
    with tracker, torch.no_grad():  # recompute, too, keeps nothing of its first pass
        layer(*inputs)
    keeps_nothing = tracker.stretch()
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(tracker.complete)
    packed: set[int] = set()
    needed = 0  # the most that is live until all that the backward needs is there: recompute stops at that point

    def pack(tensor: Tensor) -> Tensor:
        nonlocal needed
        packed.add(tensor.untyped_storage()._cdata)
        needed = tracker.peak
        return tensor

    with tracker, saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(*inputs)
    outputs = out if isinstance(out, tuple) else (out,)
    specs = tuple((tuple(t.shape), t.dtype) for t in outputs)
    trained = any(t.requires_grad for t in outputs)
    given = _storages(outputs)
    places = [t.untyped_storage()._cdata for t in outputs]
    end = applied(_End, tracker.pin, *outputs)
    del out, outputs
    kept_outputs = tuple(key in tracker.sizes for key in places)
    saved = tracker.live - sum(tracker.sizes.get(key, 0) for key in given)
    forward = tracker.stretch()
    with tracker:
        if trained:
            end.backward()
    pinned, pinned_passing = tracker.pinned_peak, tracker.pinned_passing_peak
    backward = tracker.stretch()
    keys = [t.untyped_storage()._cdata for t in inputs]
    like = _Closed(-1, trained, specs, tuple(key in packed for key in keys), kept_outputs)
    plain = BlockMemory(
        saved_bytes=saved,
        forward_peak_bytes=forward.peak_bytes,
        backward_peak_bytes=backward.peak_bytes,
        passing_peak_bytes=backward.passing_peak_bytes,
        pinned_peak_bytes=pinned,
        pinned_passing_peak_bytes=pinned_passing,
        left_bytes=backward.live_bytes,
        parameters=_held(layer, recurse=True),
    )
    # in its backward the layer runs again, beside the gradients of its outputs
    again = sum(given.values()) + needed
    recomputed = replace(
        plain,
        forward_peak_bytes=keeps_nothing.peak_bytes,
        saved_bytes=_bytes(t for t in inputs if t.untyped_storage()._cdata not in packed),  # it keeps all of them
        backward_peak_bytes=max(again, plain.backward_peak_bytes),
        passing_peak_bytes=max(again, plain.passing_peak_bytes),
        pinned_peak_bytes=max(again, plain.pinned_peak_bytes),
        pinned_passing_peak_bytes=max(again, plain.pinned_passing_peak_bytes),
    )
    return plain, recomputed, like


def _layer_split(layer: nn.Module, inputs: tuple[Tensor, ...]) -> SplitMemory:
    """A layer under a split backward, with other layers behind it."""
    tracker = Tracker()
    tracker.ignore(*inputs, *layer.parameters(), *layer.buffers())
    with tracker:
        out = layer(*inputs)
        outputs = out if isinstance(out, tuple) else (out,)
        places = [t.untyped_storage()._cdata for t in outputs]
        nodes = [t.grad_fn for t in outputs]  # the layer behind it holds them
        end = applied(_End, tracker.pin, *outputs)
        del out, outputs
        tracker.stretch()
        groups = _inputs_backward([end], None, inputs, layer)
        del end
        elsewhere = sum(tracker.sizes.get(key, 0) for key in places) + _bytes(x.grad for x in inputs)
        inputs_done = tracker.stretch(elsewhere)
        _weights_backward(groups, layer, tracker)
        elsewhere = sum(tracker.sizes.get(key, 0) for key in places) + _bytes(x.grad for x in inputs)
        weights_done = tracker.stretch(elsewhere)
        del nodes
    return SplitMemory(
        inputs_done.peak_bytes,
        inputs_done.live_bytes,
        weights_done.peak_bytes - elsewhere,
        weights_done.passing_peak_bytes - elsewhere,
        weights_done.live_bytes,
    )


def _root_split(model: nn.Module, received: tuple[Tensor, ...], read: tuple[Tensor, ...]) -> RootSplit:
    tracker = Tracker()
    tracker.ignore(*received, *read, *model.parameters(), *model.buffers())
    inputs: list[Stretch] = []
    nodes: list[Any] = []  # of the layers: their weights hold them until they have gradients
    for layer in model.modules():
        if isinstance(layer, _ClosedLayer):
            layer.called, layer.nodes = lambda like: 0, nodes
            layer.reached = lambda _, of_outputs, kept: inputs.append(tracker.stretch(_bytes(of_outputs) + kept))
    for one in (*received, *model.parameters()):
        one.grad = None
    with tracker:
        given = model(*received, *read)
        # torch detaches in place what it was given, so that programs give it tensors which are no views
        outputs = [moved(t, torch.detach, same) for t in (given if isinstance(given, tuple) else (given,))]
        del given
        gradients = None if outputs[0].ndim == 0 else [torch.empty_like(t) for t in outputs]
        tracker.stretch()
        groups = _inputs_backward(outputs, gradients, received, model)
        inputs.append(tracker.stretch())
        waiting = tracker.live
        copied = sum(x.grad.nbytes for x in received if x.grad is not None and not x.grad.is_contiguous())
        viewed = _bytes(x.grad for x in received) - sum(x.grad.nbytes for x in received if x.grad is not None)
        _weights_backward(groups, model, tracker)
        weights = tracker.stretch()
    nodes.clear()
    return RootSplit(tuple(inputs), waiting, copied, max(0, viewed), weights)


def _inputs_backward(
    outputs: list[Tensor], gradients: list[Tensor] | None, inputs: Sequence[Tensor], module: nn.Module
) -> list[dict[str, Any]]:
    """Torch's own backward of inputs, and what it leaves for that of weights."""
    return stage_backward_input(outputs, gradients, list(inputs), module.parameters())[1]


def _weights_backward(groups: list[dict[str, Any]], module: nn.Module, tracker: Tracker) -> None:
    """Torch's own backward of weights, a group at a time so that it is seen which gradients are whole."""
    complete: set[int] = set()
    while groups:
        stage_backward_weight(module.parameters(), [groups.pop(0)])
        for parameter in module.parameters():
            if parameter.grad is not None and id(parameter) not in complete:
                complete.add(id(parameter))
                tracker.complete(parameter)


def _root(model: nn.Module, received: tuple[Tensor, ...], read: tuple[Tensor, ...]) -> RootMemory:
    tracker = Tracker()
    tracker.ignore(*received, *read, *model.parameters(), *model.buffers())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(tracker.complete)
    layers = [module for module in model.modules() if isinstance(module, _ClosedLayer)]
    forward: list[Stretch] = []
    backward: list[Stretch] = []
    calls: list[int] = []
    backward_calls: list[int] = []
    gradients: list[Tensor | None] = []  # of what is given
    pinned = False

    def called(like: _Closed) -> int:
        forward.append(tracker.stretch())
        calls.append(like.number)
        return len(calls) - 1

    def reached(call: int, of_outputs: Sequence[Tensor | None], kept: int) -> None:
        nonlocal pinned
        pinned |= not backward and not _storages(gradients).keys().isdisjoint(_storages(of_outputs))
        backward.append(tracker.stretch(_bytes(of_outputs) + kept))
        backward_calls.append(call)

    for layer in layers:
        layer.called, layer.reached = called, reached
    with tracker:
        given = model(*received, *read)
        outputs = given if isinstance(given, tuple) else (given,)
        forward.append(tracker.stretch())
        trained = [t for t in outputs if t.requires_grad]
        # a loss has no gradient to receive; a pipeline holds on to outputs and their gradients
        gradients += [None if t.ndim == 0 else torch.empty_like(t) for t in trained]
        if trained:
            torch.autograd.backward(trained, gradients)
        backward.append(tracker.stretch())
    return RootMemory(
        tuple(forward),
        tuple(backward),
        tuple(calls),
        tuple(backward_calls),
        _held(model, recurse=True),
        _bytes(received),
        _bytes(t for t in received if t.requires_grad),
        pinned,
    )


class _End(torch.autograd.Function):
    """What follows a layer: it keeps nothing, and its gradients come into being in the backward."""

    @staticmethod
    def forward(ctx: Any, made: Callable[[Iterable[Tensor]], None], *outputs: Tensor) -> Tensor:
        ctx.made = made
        ctx.specs = [(t.shape, t.dtype) if t.dtype.is_floating_point else None for t in outputs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        gradients = [spec and torch.empty(spec[0], dtype=spec[1]) for spec in ctx.specs]
        ctx.made(g for g in gradients if g is not None)
        return None, *gradients


@dataclass(frozen=True)
class _Closed:
    """A layer from outside: its block, its outputs, and which inputs and outputs it keeps for its backward."""

    number: int
    trained: bool
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    keeps_inputs: tuple[bool, ...]
    keeps_outputs: tuple[bool, ...]


class _ClosedLayer(nn.Module):
    called: Callable[[_Closed], int]
    reached: Callable[[int, Sequence[Tensor | None], int], None]
    nodes: list[Any] | None = None  # where its own in the graph of a forward are to be held

    def __init__(self, like: _Closed) -> None:
        super().__init__()
        self.like = like

    def forward(self, *inputs: Tensor) -> Any:
        # what a layer returns is trained if the layer is, whatever it is given
        anchor = torch.empty(0, requires_grad=self.like.trained)
        out = applied(_Call, self, anchor, *inputs)
        return out[0] if len(out) == 1 else out


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: _ClosedLayer, _anchor: Tensor, *inputs: Tensor) -> Any:
        like = layer.like
        ctx.layer, ctx.call = layer, layer.called(like)
        if layer.nodes is not None:
            layer.nodes.append(ctx)
        outputs = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in like.outputs)
        ctx.kept = [t for t, kept in zip(outputs, like.keeps_outputs, strict=True) if kept]
        ctx.save_for_backward(*(t for t, kept in zip(inputs, like.keeps_inputs, strict=True) if kept), *ctx.kept)
        ctx.kept = _bytes(ctx.kept)
        ctx.specs = [
            (x.shape, x.dtype) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad[2:], strict=True)
        ]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.layer.reached(ctx.call, gradients, ctx.kept)
        return None, None, *(spec and torch.empty(spec[0], dtype=spec[1]) for spec in ctx.specs)
