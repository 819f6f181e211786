"""Trains a program: one optimizer step over a global batch, and its weights in and out as whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime import gradients, mesh
from autopar.runtime.engine import Alone, engine
from autopar.runtime.layout import P, R
from autopar.runtime.module import Randomness, ShardedModule, method, name_modules, randomness
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.program import OPTIMIZERS, Batch, Optimizer, Program, balanced
from autopar.runtime.shared import Shared
from autopar.runtime.weights import draw, gather, scatter

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Value = TypeVar("Value")


def _on_its_mesh(
    done: Callable[Concatenate[Trainer, Arguments], Result],
) -> Callable[Concatenate[Trainer, Arguments], Result]:
    """The method with the trainer's own mesh the current one: another trainer may have been made since."""

    @wraps(done)
    def inside(self: Trainer, /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
        with mesh.using(self._mesh):
            return done(self, *args, **named)

    return inside


class Trainer:
    """The training of a program on this process: all ranks construct it and call its methods together.

    `optimizer` makes one of a list of parameters (None: the program's own, lr 1e-3). Parameters that nobody has
    loaded are drawn from `seed` before the first use. `clip_grad_norm` clips the norm over the whole model, of order
    2 or inf (`norm_type`).
    """

    def __init__(
        self,
        program: Program,
        optimizer: Optimizer | None = None,
        device: str | torch.device | None = None,
        *,
        seed: int = 0,
        clip_grad_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> None:
        if norm_type not in (2.0, float("inf")):
            raise ValueError(f"norm_type is {norm_type}, not 2 or inf")
        self.program = program
        self.seed = seed
        self.clip_grad_norm = clip_grad_norm
        self.norm_type = norm_type
        self.steps = 0
        self._norm: Tensor | None = None

        self._mesh = mesh.init(program.mesh if "dp" in program.mesh else {"dp": 1, **program.mesh}, device)
        self.device = self._mesh.device
        self._dp = mesh.axis("dp")
        self._tp = mesh.axis_or_none("tp")
        self._pp = mesh.axis_or_none("pp")
        self._models = self._build()
        self._layouts = _united(ShardedModule.layouts(model) for model in self._models.values())
        self._buffer_layouts = _united(ShardedModule.buffer_layouts(model) for model in self._models.values())
        self._aliases = _united(ShardedModule.aliases(model) for model in self._models.values())
        if program.schedule == "none":
            self._engine = engine(self._models[0], program)
        else:
            self._pipeline = Pipeline(program, self._models)
        self._parameters = _united(dict(model.named_parameters()) for model in self._models.values())
        self._partial = [p for name, p in self._parameters.items() if self._layouts[name].placement is R]
        self._shared = Shared(program, self._pp.rank if self._pp else 0, self._parameters)
        self._everywhere = self._names()
        self._drawn = False
        self._missing_buffers = set(self._buffer_layouts)
        trained = [p for p in self._parameters.values() if p.requires_grad]
        # an optimizer wants a parameter, and a stage may have none
        self.optimizer = (optimizer or OPTIMIZERS[program.optimizer])(trained or [nn.Parameter(torch.empty(0))])

    def _build(self) -> dict[int, ShardedModule]:
        """The models of this rank's stages by number. What several of them have is there once."""
        program, models = self.program, dict[int, ShardedModule]()
        held: dict[str, Tensor] = {}
        for number, stage in enumerate(program.stages):
            if program.rank_of(number) != (self._pp.rank if self._pp else 0):
                continue
            with self.device:
                model = stage.model()
            name_modules(model)
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                path, _, leaf = name.rpartition(".")
                owner = model.get_submodule(path)
                store = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
                store[leaf] = held.setdefault(name, tensor)  # type: ignore[assignment]
            models[number] = model
        return models

    def _names(self) -> dict[str, str]:
        """Every name of a parameter or buffer of any stage, and the name under which it is held."""
        own = {**{name: name for name in (*self._layouts, *self._buffer_layouts)}, **self._aliases}
        if self._pp is None or self._pp.size == 1:
            return own
        found: list[dict[str, str]] = [{} for _ in range(self._pp.size)]
        dist.all_gather_object(found, own, group=self._pp.group)
        return _united(found)

    @property
    def engines(self) -> tuple[Alone, ...]:
        """What trains the model over dp, or each of this rank's stages."""
        return (self._engine,) if self.program.schedule == "none" else tuple(self._pipeline.engines.values())

    @property
    def model(self) -> nn.Module:
        """What this rank holds: the model, or the stages of a pipeline in a list."""
        models = list(self._models.values())
        return models[0] if len(models) == 1 else nn.ModuleList(models)

    # Training

    @_on_its_mesh
    def step(self, batch: Batch, sharded: bool = False) -> float:
        """One optimizer step; the loss over the global batch, on every rank.

        `batch` is the global batch, the same on every rank, by input name or in the order of the inputs; with
        `sharded` the rows of this data-parallel rank alone.
        """
        return self.advance(batch, sharded)()

    @_on_its_mesh
    def advance(self, batch: Batch, sharded: bool = False) -> Callable[[], float]:
        """The step alone; a function that waits for its loss."""
        loss = self._backward(batch, sharded)
        if self.clip_grad_norm is not None:
            found = self._gradients()
            self._norm = gradients.norm(self._shared.counted(found), self._layouts, self.norm_type)
            gradients.clip(found.values(), self._norm, self.clip_grad_norm)
        self.optimizer.step()
        self.steps += 1
        return loss

    @_on_its_mesh
    def backward(self, batch: Batch, sharded: bool = False) -> float:
        """A step without the optimizer and clipping: the gradients are those of this batch alone."""
        return self._backward(batch, sharded)()

    def _backward(self, batch: Batch, sharded: bool) -> Callable[[], float]:
        """Leaves the gradients; a function that waits for the global loss, which nothing of a step needs."""
        microbatches = self._microbatches(batch, sharded)
        self._prepare()
        for parameter in self._parameters.values():
            parameter.grad = None
        at = Randomness(self.seed, self.steps)
        if self.program.schedule == "none":
            global_loss = self._straight(self._inputs(0, microbatches), at)
        else:
            losses = self._pipeline.run({n: self._inputs(n, microbatches) for n in self._models}, at)
            global_loss = self._global_loss(losses)
        gradients.sum_over_tp([p.grad for p in self._partial if p.grad is not None])
        self._shared.sum_gradients()
        return global_loss

    def _straight(self, microbatches: list[tuple[Tensor, ...]], at: Randomness) -> Callable[[], float]:
        """One microbatch after the other, forward and backward."""
        losses: list[Tensor] = []
        for i, inputs in enumerate(microbatches):
            last = i == len(microbatches) - 1
            with randomness(replace(at, microbatch=i)):
                loss = self._engine.loss(inputs, last)
                losses.append(loss.detach())
                if last:
                    global_loss = self._global_loss(losses)  # travels while the backward pass computes
                self._engine.backward(loss)
        self._engine.finish()
        return global_loss

    @_on_its_mesh
    @torch.no_grad()
    def evaluate(self, batch: Batch, sharded: bool = False) -> float:
        """The loss over the global batch, without gradients; dropout and batch norms stay as they are in training.

        Changes nothing: running statistics are put back.
        """
        microbatches = self._microbatches(batch, sharded)
        self._prepare()
        at = Randomness(self.seed, self.steps)
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            if self.program.schedule != "none":
                losses = self._pipeline.evaluate({n: self._inputs(n, microbatches) for n in self._models}, at)
            else:
                losses = []
                for i, inputs in enumerate(self._inputs(0, microbatches)):
                    with randomness(replace(at, microbatch=i)):
                        losses.append(self._engine.loss(inputs, last=True))
                self._engine.rest()
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
        return self._global_loss(losses)()

    @property
    def dp_rank(self) -> int:
        """Which rows of a sharded batch are this process' own."""
        return self._dp.rank

    @property
    def last_grad_norm(self) -> float | None:
        """The norm of the whole gradient before the last step clipped it; None where nothing was clipped."""
        return None if self._norm is None else self._norm.item()

    def _microbatches(self, batch: Batch, sharded: bool) -> list[dict[str, Tensor]]:
        """This rank's rows of every input by name, for each microbatch."""
        program = self.program
        first, rows = program.own_rows(self._dp.rank)
        tensors = program.ordered(batch, self._dp.rank if sharded else None)
        parts: list[dict[str, Tensor]] = [{} for _ in range(program.microbatches)]
        own = [program.stages[number] for number in self._models]
        read = {name for stage in own for name in (*stage.reads, *stage.counts)}
        for one, tensor in zip(program.inputs, tensors, strict=True):
            if one.name not in read:
                continue
            if one.rows and not sharded:
                tensor = tensor[first : first + rows]
            tensor = tensor.to(self.device, non_blocking=True)
            for i, part in enumerate(parts):
                part[one.name] = tensor.narrow(0, *balanced(rows, len(parts), i)) if one.rows else tensor
        return parts

    @torch.no_grad()
    def _inputs(self, number: int, microbatches: list[dict[str, Tensor]]) -> list[tuple[Tensor, ...]]:
        """What a stage reads of each microbatch, and what its loss divides by, summed over microbatches and dp."""
        stage = self.program.stages[number]
        inputs, counted = (
            [tuple(part[name] for name in names) for part in microbatches] for names in (stage.reads, stage.counts)
        )
        sums = [method(self._models[number], "normalizers")(*one) for one in counted]
        totals = [torch.stack(parts).sum(0) for parts in zip(*sums, strict=True)]
        if totals and self._dp.size > 1:
            flat = torch.cat([total.reshape(-1).double() for total in totals])  # exact for counts below 2**53
            dist.all_reduce(flat, group=self._dp.group)
            summed = flat.split([total.numel() for total in totals])
            totals = [one.view(total.shape).to(total.dtype) for one, total in zip(summed, totals, strict=True)]
        return [(*one, *totals) for one in inputs]

    @torch.no_grad()
    def _global_loss(self, losses: list[Tensor]) -> Callable[[], float]:
        """Start to sum the loss over microbatches and ranks; the function waits for the sum."""
        partial = self.program.loss is P
        if losses:
            total = torch.stack(losses).double().sum()
        else:  # of a stage that is not the last
            total = torch.zeros((), dtype=torch.float64, device=self.device)
        size, group, same = self._dp.size, self._dp.group, 1
        if self._pp is not None or (partial and self._tp is not None):  # over every rank: there are but these axes
            size, group = dist.get_world_size(self._mesh.world), self._mesh.world
            same = 1 if partial or self._tp is None else self._tp.size
        work = dist.all_reduce(total, group=group, async_op=True) if size > 1 else None

        def wait() -> float:
            if work is not None:
                work.wait()
            return total.item() / same

        return wait

    # Weights

    @_on_its_mesh
    def init_parameters(self, seed: int) -> None:
        """Draw all parameters: the same whole tensors whatever the plan, each a function of its name and the seed."""
        scatter(self._parameters, self._layouts, lambda name: draw(name, self._layouts[name].shape, seed))
        self._drawn = True

    @_on_its_mesh
    def load_state_dict(self, full: Mapping[str, Tensor] | Callable[[str], Tensor]) -> None:
        """Take every parameter and persistent buffer from whole tensors, the same on every rank.

        `full` is a state dict under the user's own names, or a function that gives one tensor at a time (and raises
        KeyError where it has none). A tied tensor may come under any of its names.
        """
        names: dict[str, tuple[str, ...]] = {name: (name,) for name in (*self._parameters, *self._persistent)}
        for alias, of in self._aliases.items():
            names[of] = (*names[of], alias)
        faults = []
        if isinstance(full, Mapping):
            faults = [f"{name} is unexpected" for name in full if name not in self._everywhere]

        def whole(name: str) -> Tensor | None:
            for one in names[name]:
                with suppress(KeyError):
                    return full[one] if isinstance(full, Mapping) else full(one)
            return None

        faults += scatter(self._parameters, self._layouts, whole)
        faults += scatter(self._persistent, self._buffer_layouts, whole)
        if self._pp is not None and self._pp.size > 1:  # no stage goes on without another
            every: list[list[str]] = [[] for _ in range(self._pp.size)]
            dist.all_gather_object(every, faults, group=self._pp.group)
            faults = list(dict.fromkeys(fault for part in every for fault in part))
        if faults:
            more = f" and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise ValueError(f"this state dict does not fit the program: {'; '.join(faults[:10])}{more}")
        self._drawn = True
        self._missing_buffers -= set(self._persistent)
        if isinstance(full, Mapping):
            self.load_buffers({name: full[name] for name in self._missing_buffers if name in full})

    @_on_its_mesh
    def load_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Take buffers, persistent or not, from whole tensors; those that are not in `values` stay as they are."""
        known = {name: buffer for name, buffer in self._buffers.items() if name in values}
        if faults := scatter(known, self._buffer_layouts, values.get):
            raise ValueError(f"these buffers do not fit the program: {'; '.join(faults)}")
        self._missing_buffers -= set(known)

    @property
    def missing_buffers(self) -> list[str]:
        """Buffers that nobody has loaded yet; nothing runs before they are."""
        return sorted(self._missing_buffers)

    @_on_its_mesh
    def state_dict(self) -> dict[str, Tensor] | None:
        """Whole CPU tensors under the user's own names, tied names included, on rank 0; None elsewhere. Collective."""
        self._prepare_parameters()
        found = gather({**self._parameters, **self._persistent}, {**self._layouts, **self._buffer_layouts})
        if found is not None:
            found |= {alias: found[of] for alias, of in self._everywhere.items() if alias != of}
        return found

    @_on_its_mesh
    def full_gradients(self) -> dict[str, Tensor] | None:
        """The gradients of the last batch as whole CPU tensors on rank 0; None elsewhere. Collective."""
        return gather(self._gradients(), self._layouts)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    @property
    def _persistent(self) -> dict[str, Tensor]:
        # state_dict() knows which buffers are persistent, and detaches without copying
        return _united(
            {name: buffer for name, buffer in model.named_buffers() if name in names}
            for model in self._models.values()
            for names in [model.state_dict().keys()]
        )

    @property
    def _buffers(self) -> dict[str, Tensor]:
        return _united(dict(model.named_buffers()) for model in self._models.values())

    def _prepare_parameters(self) -> None:
        if not self._drawn:
            self.init_parameters(self.seed)

    def _prepare(self) -> None:
        self._prepare_parameters()
        if self._missing_buffers:
            raise RuntimeError(f"buffers were never loaded: {', '.join(self.missing_buffers)}")


def _united(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """What the stages of this rank have by name; what they share is the same in each."""
    return {name: value for part in parts for name, value in part.items()}
