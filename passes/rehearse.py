"""The memory of a program: its own text, run on fake tensors, block by block.

Nothing is estimated from formulas that could be observed: every class of program.py is executed on one rank's
shapes, forward and backward, and the bytes of live tensors are followed. Collectives are stood in for by functions
that give tensors of the right shape and keep what the real ones keep.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from passes.lower import LocalRegion, Lowered
from passes.placements import I, P, Placement, R, S, local_shape


@dataclass(frozen=True)
class RegionMemory:
    """Bytes of one microbatch through one layer (or through what is outside of layers), parameters excluded.

    `saved`: held from the forward to the backward, inputs excluded, outputs included where they are needed.
    `forward_peak`, `backward_peak`: the most that is live beside inputs, and beside what was saved.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    input_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Rehearsal:
    """The memory of the root and of each block; `recomputed` is each block under activation recompute."""

    root: RegionMemory
    before_calls_bytes: int  # what the root holds when the first layer is called
    blocks: tuple[RegionMemory, ...]
    recomputed: tuple[RegionMemory, ...]


class _Tracker(TorchDispatchMode):
    """Follows the bytes of storages that operators make, from their birth to their release."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.watch(tensor)
        return out

    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def release() -> None:
            self.known.discard(key)
            self.live -= size

        weakref.finalize(storage, release)

    def ignore(self, *tensors: Tensor) -> None:
        """Inputs and parameters are counted elsewhere."""
        self.known.update(t.untyped_storage()._cdata for t in tensors)

    def restart(self) -> int:
        self.peak = self.live
        return self.live


class _Scope(nn.Module):
    """A module whose numbered children can be indexed."""

    def __getitem__(self, number: int) -> Any:
        return getattr(self, str(number))


class _Like(torch.autograd.Function):
    """A collective: another shape forward, the old one backward; it keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], fresh: bool) -> Tensor:
        ctx.shape, ctx.fresh = x.shape, fresh
        return x.new_empty(shape) if fresh else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0].new_empty(ctx.shape) if ctx.fresh else grads[0]), None, None


class _Opaque(torch.autograd.Function):
    """A layer seen from outside: outputs of the right shape, gradients for its inputs."""

    @staticmethod
    def forward(ctx: Any, shapes: Any, note: Callable[[], None], *inputs: Tensor) -> Any:
        note()
        ctx.shapes = [(x.shape, x.dtype) for x in inputs]
        ctx.device = inputs[0].device
        return tuple(torch.empty(s, dtype=d, device=ctx.device) for s, d in shapes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (
            None,
            None,
            *(torch.empty(s, dtype=d, device=ctx.device) if d.is_floating_point else None for s, d in ctx.shapes),
        )


class _Stage:
    """The names that program.py takes from the runtime, for one rank of `ranks`, on fake tensors."""

    def __init__(self, lowered: Lowered, dtype: torch.dtype) -> None:
        self.ranks, self.dtype = lowered.sharding.axis.ranks, dtype
        self.lowered = lowered
        self.opaque = True
        self.note: Callable[[], None] = lambda: None

    def names(self) -> dict[str, Any]:
        stage = self

        class ShardedModule(_Scope):
            def parameter(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, **where: Any) -> None:
                placement: Placement = where.get(stage.lowered.sharding.axis.name, I)
                low = stage.dtype if dtype == torch.float32 else dtype
                tensor = torch.empty(local_shape(placement, shape, stage.ranks), dtype=low)
                stage.attach(self, name, nn.Parameter(tensor, requires_grad=where.get("requires_grad", True)))

            def buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, **where: Any) -> None:
                placement: Placement = where.get(stage.lowered.sharding.axis.name, I)
                stage.attach(self, name, torch.empty(local_shape(placement, shape, stage.ranks), dtype=dtype))

            def blocks(self, path: str, modules: list[nn.Module]) -> None:
                stage.attach(self, path, nn.ModuleList(map(stage.outside, modules)))

            def alias(self, name: str, of: str) -> None:
                """Holds nothing."""

            def rng(self, site: int, axes: tuple[str, ...] = ()) -> Any:
                return nullcontext()

        return {
            "torch": torch,
            "F": nn.functional,
            "S": S,
            "R": R,
            "I": I,
            "P": P,
            "ShardedModule": ShardedModule,
            "Program": lambda **_: None,
            "Input": lambda *_, **__: None,
            "main": lambda _: None,
            "all_gather": self.all_gather,
            "reduce_scatter": self.cut,
            "shard": self.shard,
            "all_reduce": lambda x, axis, backward="all_reduce": _Like.apply(x, x.shape, True),
            "replicate": lambda x, axis, backward="all_reduce": _Like.apply(x, x.shape, False),
            "all_to_all": self.all_to_all,
            "bias_on_one_rank": lambda bias, axis: bias,
            "vocabulary_embedding": self.vocabulary_embedding,
            "vocabulary_cross_entropy": self.vocabulary_cross_entropy,
            "recompute": self.recompute,
        }

    @staticmethod
    def attach(module: nn.Module, path: str, value: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, _Scope())
            module = getattr(module, parent)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)

    def all_gather(self, x: Tensor, dim: int, axis: str, blocks: int = 1, size: int | None = None, **_: Any) -> Any:
        return _Like.apply(x, resized(x, dim, size or x.shape[dim] * self.ranks), True)

    def cut(self, x: Tensor, dim: int, axis: str, blocks: int = 1, size: int | None = None, **_: Any) -> Any:
        return _Like.apply(x, local_shape(S(dim, blocks), tuple(x.shape), self.ranks), True)

    def shard(self, x: Tensor, dim: int, axis: str, blocks: int = 1, **_: Any) -> Any:
        share = local_shape(S(dim, blocks), tuple(x.shape), self.ranks)[dim]
        return x.narrow(dim, 0, share)

    def all_to_all(
        self, x: Tensor, gather_dim: int, scatter_dim: int, axis: str, scatter_blocks: int = 1, **sizes: Any
    ) -> Any:
        whole = resized(x, gather_dim, sizes.get("gather_size") or x.shape[gather_dim] * self.ranks)
        return _Like.apply(x, local_shape(S(scatter_dim, scatter_blocks), whole, self.ranks), True)

    def vocabulary_embedding(self, ids: Tensor, weight: Tensor, axis: str, size: int, **_: Any) -> Tensor:
        outside = (ids < 0) | (ids >= weight.shape[0])
        rows = nn.functional.embedding(ids.masked_fill(outside, 0), weight)
        return rows.masked_fill(outside.unsqueeze(-1), 0)

    def vocabulary_cross_entropy(self, logits: Tensor, target: Tensor, axis: str, size: int, **how: Any) -> Tensor:
        return nn.functional.cross_entropy(logits, target, reduction=how.get("reduction", "sum"))

    def recompute(self, layer: Any, *inputs: Tensor) -> Any:
        return layer(*inputs) if self.opaque else checkpoint(layer, *inputs, use_reentrant=False)

    def outside(self, layer: nn.Module) -> nn.Module:
        """The layer as the root sees it."""
        program = self.lowered.program
        index = next(i for i, block in enumerate(program.blocks) if block.name == type(layer).__name__)
        block, region = program.blocks[index], self.lowered.blocks[index]
        shapes = [local_of(region, name, self.ranks) for name in region.outputs]
        stage = self

        class Outside(nn.Module):
            def forward(self, *inputs: Tensor) -> Any:
                out = _Opaque.apply(shapes, lambda: stage.note(), *inputs)
                return out[0] if len(block.outputs) == 1 else out

        return Outside()


def resized(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def local_of(region: LocalRegion, name: str, ranks: int) -> tuple[tuple[int, ...], torch.dtype]:
    local = region.locals[name]
    return local_shape(local.placement, local.value.sizes, ranks), getattr(torch, local.value.dtype)


def rehearse(text: str, lowered: Lowered, dtype: torch.dtype) -> Rehearsal:
    """Run every class of the program once, on fake tensors, and follow its bytes."""
    stage = _Stage(lowered, dtype)
    names = stage.names()
    source = re.sub(r"from autopar\.runtime import \(.*?\)\n", "", text, flags=re.S)
    exec(compile(source, "program.py", "exec"), names | {"__name__": "rehearsal"}, scope := {})
    names.update(scope)
    for item in scope.values():  # methods look their globals up in the module that defined them
        if isinstance(item, type):
            for method in vars(item).values():
                if callable(method) and hasattr(method, "__globals__"):
                    method.__globals__.update(names)
    with FakeTensorMode(allow_non_fake_inputs=True):
        blocks, recomputed = [], []
        for block, region in zip(lowered.program.blocks, lowered.blocks, strict=True):
            stage.opaque = False
            layer = names[block.name]()
            blocks.append(_measure(layer, _inputs(region, block.inputs, stage.ranks), lambda m, x: m(*x)))
            recomputed.append(
                _measure(layer, _inputs(region, block.inputs, stage.ranks), lambda m, x: stage.recompute(m, *x))
            )
        stage.opaque = True
        model = names["Model"]()
        before: list[int] = []
        root = _measure(
            model, _inputs(lowered.root, lowered.program.inputs, stage.ranks), lambda m, x: m(*x), stage, before
        )
    return Rehearsal(root, before[0] if before else 0, tuple(blocks), tuple(recomputed))


def _inputs(region: LocalRegion, values: Any, ranks: int) -> tuple[Tensor, ...]:
    made = []
    for value in values:
        shape, dtype = local_of(region, value.name, ranks)
        made.append(torch.empty(shape, dtype=dtype).requires_grad_(value.grad))
    return tuple(made)


@contextmanager
def _tracking(tracker: _Tracker) -> Iterator[None]:
    with tracker:
        yield


def _measure(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    run: Callable[[nn.Module, tuple[Tensor, ...]], Any],
    stage: _Stage | None = None,
    before: list[int] | None = None,
) -> RegionMemory:
    tracker = _Tracker()
    tracker.ignore(*inputs, *module.parameters(), *module.buffers())
    if stage is not None and before is not None:
        stage.note = lambda: before.append(tracker.live)
    with _tracking(tracker):
        out = run(module, inputs)
        outputs = out if isinstance(out, tuple) else (out,)
        saved, forward_peak = tracker.live, tracker.peak
        output_bytes = sum(t.untyped_storage().nbytes() for t in outputs)
        trained = [t for t in outputs if t.requires_grad]
        grads = [torch.empty_like(t) for t in trained]
        del out, outputs
        start = tracker.restart()
        torch.autograd.backward(trained, grads)
        own = sum(p.grad.untyped_storage().nbytes() for p in module.parameters() if p.grad is not None)
        backward_peak = max(0, tracker.peak - start - own)
    input_bytes = sum(t.untyped_storage().nbytes() for t in inputs)
    return RegionMemory(saved, forward_peak, backward_peak, input_bytes, output_bytes)
