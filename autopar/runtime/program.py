"""What a generated file says about its program: the model, the mesh, the batch, and how to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from autopar.runtime.layout import I, Layout, P, Placement
from autopar.runtime.module import ShardedModule, derived_seed

Batch = Mapping[str, Tensor] | Sequence[Tensor]
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Input:
    """One tensor of the batch: `shape` without the dim of the rows (all of it where there is none, `rows=False`).

    `low` and `high` bound the random integers that stand in for data.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    low: float = 0
    high: float = 2
    rows: bool = True

    def random(self, rows: int, seed: int) -> Tensor:
        """Random data of `rows` rows: [rows, *shape]. Normal for floats, uniform in [low, high) for integers."""
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, *self.shape) if self.rows else self.shape
        dtype: torch.dtype = getattr(torch, self.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(int(self.low), int(self.high), shape, generator=generator).to(dtype)


class Edge:
    """A tensor that one stage hands to the next: the shape of the whole of it, its dtype, how it lies over tp.

    `grad`: whether its gradient comes back.
    """

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, tp: Placement = I, grad: bool = True) -> None:
        self.layout = Layout(shape, tp)
        self.dtype, self.grad = dtype, grad

    def local_shape(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The shape of what a rank of tp holds of it."""
        return self.layout.local_shape(rank, ranks)


@dataclass(frozen=True)
class Stage:
    """A part of the model.

    Its forward takes what the stage before `gives`, the inputs that it `reads` by name, and what its `normalizers`
    make of the inputs that they count. It returns what it gives, the last stage the loss.
    """

    model: Callable[[], ShardedModule]
    reads: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    gives: tuple[Edge, ...] = ()


Schedule = Literal["none", "gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv"]
V_SHAPED = ("zbv",)  # the second half of the stages comes back over the ranks in reverse
SPLIT_BACKWARD = ("interleaved_zb", "zbv")  # gradients of weights are computed apart from those of inputs


@dataclass(frozen=True)
class Program:
    """A parallel training program.

    `mesh` names its axes, outermost first; the model is cut into stages along "pp", batches along "dp", parameters
    along "tp". `rows` are those of the global batch. `zero` is the ZeRO stage, over groups of `zero_group` neighbours
    on dp (of 1: nothing is sharded). `loss` is its placement over tp: I (the same on all) or P (to be summed).

    The model is whole, or a tuple of stages that run under `schedule`. A parameter that several of them hold is
    `shared`: its name, and their numbers.
    """

    model: Callable[[], ShardedModule] | tuple[Stage, ...]
    mesh: Mapping[str, int]
    rows: int
    inputs: tuple[Input, ...]
    microbatches: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    zero_group: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    loss: Placement = field(default=I)
    optimizer: str = "adamw"
    schedule: Schedule = "none"
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        faults = []
        if self.zero not in (0, 1, 2, 3):
            faults.append(f"zero is {self.zero}, not 0, 1, 2 or 3")
        if self.precision not in ("fp32", "bf16"):
            faults.append(f"precision is {self.precision!r}, not fp32 or bf16")
        if self.optimizer not in OPTIMIZERS:
            faults.append(f"optimizer is {self.optimizer!r}, not one of {', '.join(OPTIMIZERS)}")
        if self.loss not in (I, P):
            faults.append(f"the loss is placed {self.loss!r}, not I or P")
        if unknown := [name for name, size in self.mesh.items() if name not in ("pp", "dp", "tp") and size > 1]:
            faults.append(f"the mesh has {', '.join(unknown)}: the trainer knows pp, dp and tp")
        if self.schedule not in get_args(Schedule):
            faults.append(f"schedule is {self.schedule!r}, not one of {', '.join(get_args(Schedule))}")
        if len(self.stages) % self.pp or (self.schedule == "none") != (len(self.stages) == 1):
            faults.append(f"{len(self.stages)} stages do not run over pp {self.pp} under schedule {self.schedule}")
        if self.dp % self.zero_group:
            faults.append(f"zero_group {self.zero_group} does not divide the {self.dp} data-parallel ranks")
        if self.rows < self.dp * self.microbatches:
            faults.append(f"{self.rows} rows are fewer than {self.dp} ranks x {self.microbatches} microbatches")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages; a whole model is one that reads every input."""
        if isinstance(self.model, tuple):
            return self.model
        names = tuple(one.name for one in self.inputs)
        return (Stage(self.model, names, names),)

    @property
    def pp(self) -> int:
        """Pipeline-parallel ranks."""
        return self.mesh.get("pp", 1)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.mesh.get("dp", 1)

    def rank_of(self, stage: int) -> int:
        """The pipeline-parallel rank that a stage runs on."""
        turn, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.schedule in V_SHAPED and turn % 2 else place

    def own_rows(self, rank: int) -> tuple[int, int]:
        """The first row and the number of rows of a data-parallel rank, of the global batch."""
        return balanced(self.rows, self.dp, rank)

    def ordered(self, batch: Batch, rank: int | None = None, keys: Mapping[str, str] | None = None) -> list[Tensor]:
        """The tensors of a batch in the order of the inputs: of the global batch, or of a rank's own rows.

        Raises ValueError where one is missing, no tensor, or of another shape or dtype. `keys`: what the caller calls
        the inputs.
        """
        if isinstance(batch, Mapping):
            if missing := [one.name for one in self.inputs if one.name not in batch]:
                raise ValueError(f"the batch has no {', '.join(missing)}, only {', '.join(map(str, batch))}")
            tensors = [batch[one.name] for one in self.inputs]
        else:
            tensors = list(batch)
            if len(tensors) != len(self.inputs):
                names = ", ".join(one.name for one in self.inputs)
                raise ValueError(
                    f"the batch has {len(tensors)} tensors, but the program reads {len(self.inputs)}: {names}"
                )
        rows = self.rows if rank is None else self.own_rows(rank)[1]
        whose = "the global batch" if rank is None else f"rank {rank} of {self.dp} of a sharded batch"
        for one, tensor in zip(self.inputs, tensors, strict=True):
            name = (keys or {}).get(one.name, one.name)
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} of {whose} is a {type(tensor).__name__}, but the program reads a tensor")
            shape = [rows, *one.shape] if one.rows else [*one.shape]
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} of {whose} has shape {list(tensor.shape)}, but the program is for {shape}")
            if tensor.dtype != getattr(torch, one.dtype):
                got = str(tensor.dtype).removeprefix("torch.")
                raise ValueError(f"{name} of {whose} is {got}, but the program is for {one.dtype}")
        return tensors

    def random_batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """A random global batch: the same on every rank, a function of seed and step."""
        return {one.name: one.random(self.rows, derived_seed("batch", seed, step, one.name)) for one in self.inputs}


def balanced(size: int, parts: int, part: int) -> tuple[int, int]:
    """Where a part starts and its length, lengths differing by one at most (as `torch.tensor_split`)."""
    least, longer = divmod(size, parts)
    return part * least + min(part, longer), least + (part < longer)


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
}
