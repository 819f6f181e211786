"""`parallelize`: a model and a cluster in, a job out that plans, writes its program, and trains under torchrun."""

from __future__ import annotations

import linecache
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.runtime import Program, Trainer, mesh
from autopar.weights import checksums, full_buffers, full_weights
from autopar.write import write_output
from costmodels.cluster import Cluster
from costmodels.errors import AutoparError, BadInput, PlanMismatch
from passes.capture import BatchInput, batch_leaves
from passes.pipeline import Compiled, compile_model
from passes.plan import Fix, Plan
from passes.variant import OPTIMIZER_COSTS

PLANNING_TIMEOUT = timedelta(hours=1)
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
# optimizers whose update of an element depends on that element alone: right on any slice of a parameter
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop")


def parallelize(
    model: nn.Module,
    cluster: Cluster,
    batch: Any = None,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Optimizer | None = None,
    global_batch: int | None = None,
    precision: str = "bf16",
    fix: Fix | None = None,
    clip_grad_norm: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Job:
    """Plan the training of `model` on `cluster`, and make it ready to run.

    `batch` is an example of the global batch: a mapping (keys that forward accepts go there, the rest is for
    `loss_fn(output, batch)`), a tuple (positional) or a tensor; its first dim counts rows. Without `batch`, the model
    must offer `dummy_inputs` or `example_batch()`. `global_batch` rows per optimizer step (default: those of `batch`).
    `optimizer` makes an optimizer of parameters (default: AdamW, lr 1e-3, fused).

    Weights of the model are used as they are; a model on meta is initialised by its own initialisers. The model
    itself is never changed. Raises BadInput, CaptureError or NoPlanFits.
    """
    if batch is None:
        batch = _example(model)
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        if not dist.is_initialized():
            mesh.init_process_group(torch.device(cluster.device.kind))
        if dist.get_world_size() != cluster.devices:
            raise PlanMismatch(
                f"torchrun started {dist.get_world_size()} processes, but cluster {cluster.name} has "
                f"{cluster.devices} devices"
            )

    def compiled() -> Compiled:
        return compile_model(
            model,
            cluster,
            batch,
            loss_fn,
            global_batch=global_batch,
            precision=precision,
            optimizer=_optimizer_name(optimizer),
            fused=_is_fused(optimizer),
            fix=fix,
            progress=progress,
        )

    made = _on_rank_0(compiled) if distributed else _Made.of(compiled())
    if distributed and made.plan.mesh.devices != cluster.devices:
        raise PlanMismatch(
            f"the plan uses {made.plan.mesh.devices} of {cluster.devices} devices, since no more divide a global batch "
            f"of {made.plan.workload.global_batch}; start as many processes, or change the batch"
        )
    return Job(made, model, cluster, optimizer, clip_grad_norm, seed)


@dataclass(frozen=True)
class _Made:
    """What every rank needs of a compilation."""

    plan: Plan
    program: str
    buffers: Mapping[str, torch.Tensor]
    inputs: tuple[BatchInput, ...]

    @classmethod
    def of(cls, compiled: Compiled) -> _Made:
        return cls(compiled.plan, compiled.program, compiled.buffers, compiled.captured.inputs)


def _on_rank_0(compiled: Callable[[], Compiled]) -> _Made:
    """Plan on one rank and tell the others, failures included."""
    sent: list[Any] = [None]
    ours: Exception | None = None  # a fault of autopar or of the model: with its traceback where it happened
    if dist.get_rank() == 0:
        try:
            sent = [pickle.dumps(_Made.of(compiled()))]
        except AutoparError as error:
            sent = [error.with_traceback(None)]
            sent[0].__cause__ = None
        except Exception as error:
            ours = error
            sent = [AutoparError(f"planning failed on rank 0: {type(error).__name__}: {error}")]
    patient = dist.new_group(backend="gloo", timeout=PLANNING_TIMEOUT)  # planning outlasts a training step's timeout
    dist.broadcast_object_list(sent, src=0, group=patient)
    dist.destroy_process_group(patient)
    if ours is not None:
        raise ours
    if isinstance(sent[0], AutoparError):
        raise sent[0]
    found: _Made = pickle.loads(sent[0])
    return found


class Job:
    """A planned training. `plan` and `save` need no process group; the rest runs under torchrun, on all ranks."""

    def __init__(
        self,
        made: _Made,
        model: nn.Module,
        cluster: Cluster,
        optimizer: Optimizer | None,
        clip_grad_norm: float | None,
        seed: int,
    ) -> None:
        self.plan = made.plan
        self.program = made.program
        self._made, self._model, self._cluster = made, model, cluster
        self._optimizer, self._clip_grad_norm, self._seed = optimizer, clip_grad_norm, seed
        self._trainer: Trainer | None = None

    def save(self, folder: str | Path) -> None:
        """Write plan.yaml and program.py (and buffers.pt where the model has buffers that no checkpoint holds)."""
        write_output(Path(folder), self.plan, self.program, full_buffers(self._model) | dict(self._made.buffers))

    @property
    def trainer(self) -> Trainer:
        """The engine, built with the model's weights on first use. Collective."""
        if self._trainer is None:
            trainer = Trainer(
                load_program(self.program),
                self._optimizer,
                self._cluster.device.kind,
                seed=self._seed,
                clip_grad_norm=self._clip_grad_norm,
            )
            weights, buffers = full_weights(self._model), full_buffers(self._model) | dict(self._made.buffers)
            _check_that_ranks_agree({**buffers, **weights})
            trainer.load_state_dict(weights)
            trainer.load_buffers(buffers)
            self._trainer = trainer
        return self._trainer

    def step(self, batch: Any, sharded: bool = False) -> float:
        """One optimizer step; the global loss, on every rank.

        `batch` is the global batch, the same on every rank, or with `sharded` this data-parallel rank's rows.
        """
        return self.trainer.step(self._tensors(batch, sharded), sharded)

    def backward(self, batch: Any, sharded: bool = False) -> float:
        """A step without the optimizer: the gradients stay."""
        return self.trainer.backward(self._tensors(batch, sharded), sharded)

    def evaluate(self, batch: Any, sharded: bool = False) -> float:
        """The loss without gradients."""
        return self.trainer.evaluate(self._tensors(batch, sharded), sharded)

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Full weights under the user's own names, on the CPU of rank 0; None elsewhere."""
        return self.trainer.state_dict()

    def full_gradients(self) -> dict[str, torch.Tensor] | None:
        """Full gradients under the user's own names, on the CPU of rank 0; None elsewhere."""
        return self.trainer.full_gradients()

    def load_state_dict(self, full: Mapping[str, torch.Tensor]) -> None:
        """Take full weights, the same on every rank, and keep this rank's slices."""
        trainer = self.trainer
        _check_that_ranks_agree(full)
        try:
            trainer.load_state_dict(full)
        except ValueError as error:
            raise BadInput(str(error)) from None

    def _tensors(self, batch: Any, sharded: bool) -> dict[str, torch.Tensor]:
        """The batch by the names of the program's inputs, of which each is as the program declares it."""
        leaves = batch_leaves(batch)
        missing = [str(one.key) for one in self._made.inputs if one.key not in leaves]
        if missing:
            raise BadInput(f"the batch lacks {', '.join(missing)}; it has {', '.join(map(str, leaves))}")
        named = {one.name: leaves[one.key] for one in self._made.inputs}
        keys = {one.name: one.key if isinstance(one.key, str) else f"batch[{one.key}]" for one in self._made.inputs}
        trainer = self.trainer
        try:
            trainer.program.ordered(named, trainer.dp_rank if sharded else None, keys)
        except ValueError as error:
            raise BadInput(str(error)) from None
        return named


def _check_that_ranks_agree(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise BadInput on every rank where they hold other tensors: slices of different wholes make no model."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = checksums(tensors)
    sent = [own]
    dist.broadcast_object_list(sent, src=0)
    differing = [name for name in sent[0] | own if sent[0].get(name) != own.get(name)]
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, differing[0] if differing else None)
    for rank, name in enumerate(found):
        if name is not None:
            raise BadInput(
                f"{name} on rank {rank} is not that on rank 0, but every rank is to hold the same whole weights: "
                "seed alike, or load the checkpoint on every rank"
            )


def load_program(text: str, name: str = "<program.py>") -> Program:
    """The Program of a generated file. Its lines show in tracebacks."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, name, "exec"), scope)
    program: Program = scope["PROGRAM"]
    return program


def _optimizer_name(optimizer: Optimizer | None) -> str:
    """How the planner counts the optimizer's states; raises BadInput where slices of a parameter would be wrong."""
    if optimizer is None:
        return "adamw"
    one = nn.Parameter(torch.zeros(1))
    try:
        trial = optimizer([one])
    except Exception as error:
        raise BadInput(f"the optimizer cannot be made of a parameter: {type(error).__name__}: {error}") from error
    if not isinstance(trial, torch.optim.Optimizer):
        raise BadInput(
            f"the optimizer is a {type(trial).__name__}; make a torch.optim.Optimizer of the parameters given"
        )
    kind = type(trial).__name__
    if kind not in ELEMENTWISE:
        raise BadInput(
            f"the optimizer {kind} may look at whole parameters, which no rank holds; "
            f"use one of {', '.join(ELEMENTWISE)}"
        )
    if any(p is not one for group in trial.param_groups for p in group["params"]):
        raise BadInput(f"the optimizer {kind} is to be made of the parameters that it is given, and of no others")
    name = "sgd" if kind in ("SGD", "Adagrad", "RMSprop", "ASGD", "Rprop") else "adamw"
    states = _states(trial, one)
    fitting = [name, *(other for other, cost in OPTIMIZER_COSTS.items() if cost.states == states)]
    counted = next((one for one in fitting if states <= OPTIMIZER_COSTS[one].states), None)
    if counted is None:
        most = max(cost.states for cost in OPTIMIZER_COSTS.values())
        raise BadInput(
            f"the optimizer {kind} keeps {states} states per parameter with these options, and plans count at most "
            f"{most}: the memory would be too low; leave out the option that adds one (amsgrad, centered)"
        )
    return counted


def _is_fused(optimizer: Optimizer | None) -> bool:
    """Whether a step of the optimizer holds no temporaries; torch fuses only what is asked to be."""
    return optimizer is None or bool(optimizer([nn.Parameter(torch.zeros(1))]).defaults.get("fused"))


def _states(trial: torch.optim.Optimizer, one: nn.Parameter) -> int:
    """The tensors that the optimizer keeps of a parameter, seen after a step."""
    one.grad = torch.ones_like(one)
    try:
        trial.step()
    except Exception:  # it may work on GPUs only (capturable): trust its name
        return 0
    return sum(isinstance(t, torch.Tensor) and t.shape == one.shape for t in trial.state[one].values())


def _example(model: nn.Module) -> Any:
    """A batch that the model itself offers."""
    example = getattr(model, "example_batch", None)
    if callable(example):
        return example()
    offered = getattr(model, "dummy_inputs", None)
    if offered is None:
        raise BadInput(
            f"{type(model).__name__} offers no example batch; pass batch=, a dict, tuple or tensor whose first dim "
            "counts rows"
        )
    batch = dict(offered)
    if "input_ids" in batch and "labels" not in batch:
        batch["labels"] = batch["input_ids"].clone()
    return batch
