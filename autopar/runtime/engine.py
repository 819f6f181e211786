"""Which of PyTorch's engines trains the model over the data-parallel axis.

    Alone        one data-parallel rank, fp32
    Replicated   ZeRO 0 in fp32: DistributedDataParallel
    Sharded      ZeRO 1, 2, 3, and whatever is mixed precision: fully_shard, with parameters kept in fp32

Gradients are summed, not averaged: the loss is already divided by what the whole batch counts.

    stage   parameters whole                gradients reduced
    1       from the first forward of a     after the last microbatch
            step to its last backward
    2       the same                        scattered after every microbatch
    3       a block at a time               scattered after every microbatch
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from autopar.runtime import mesh
from autopar.runtime.module import sharded_blocks
from autopar.runtime.program import SPLIT_BACKWARD, Program


def engine(module: nn.Module, program: Program) -> Alone:
    """The engine that a program asks for, around its model or a stage of it."""
    if is_replicated(program):
        trained = any(p.requires_grad for p in module.parameters())
        return Replicated(module) if trained else Alone(module)
    shards = program.zero_group if program.zero else 1
    if program.dp == 1 and program.precision == "fp32":
        return Alone(module)
    return Sharded(module, program, shards)


def is_replicated(program: Program) -> bool:
    """Whether DistributedDataParallel trains it, which divides gradients by the number of its ranks."""
    whole = not program.zero or program.zero_group == 1
    return program.dp > 1 and whole and program.precision == "fp32" and program.schedule not in SPLIT_BACKWARD


class Alone:
    """The module itself: forward and backward of the microbatches of a step.

    A pipeline calls `module` itself, and says before each backward pass whether it is the last.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def loss(self, inputs: Sequence[Tensor], last: bool) -> Tensor:
        """The forward pass of a microbatch; `last` of its step."""
        self.before_backward(last)
        loss: Tensor = self.module(*inputs)
        return loss

    def before_backward(self, last: bool) -> None:
        """What the next backward pass is to know: whether it is the last of its step."""

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a microbatch."""
        loss.backward()

    def finish(self) -> None:
        """After the last backward pass: gradients are summed over dp."""

    def rest(self) -> None:
        """After forward passes that no backward pass follows."""


# torch 2.13 renamed it, and warns at the old name
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


class Replicated(Alone):
    """DistributedDataParallel, which reduces once a step."""

    def __init__(self, module: nn.Module) -> None:
        on = mesh.axis("dp")
        options: dict[str, Any] = {_SYNC_BUFFERS: False}
        self.parallel = DistributedDataParallel(
            module,
            process_group=on.group,
            init_sync=False,  # every rank is given the same weights and buffers
            gradient_as_bucket_view=True,
            **options,
        )
        super().__init__(self.parallel)
        self.ranks = on.size

    def loss(self, inputs: Sequence[Tensor], last: bool) -> Tensor:
        with nullcontext() if last else self.parallel.no_sync():
            return super().loss(inputs, last)

    def backward(self, loss: Tensor) -> None:
        loss.backward(torch.full_like(loss, self.ranks))  # the reducer divides by as much


class _Behind(nn.Module):
    """A module that `torch.distributed.pipelining` does not take for FSDP's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Sharded(Alone):
    """FSDP2, a unit per block and one for the rest.

    A pipeline knows FSDP's modules and reduces their gradients once, at the end of a step: that is right where the
    backward pass is split, which FSDP's own hooks do not see. Elsewhere FSDP is hidden from it, and does what the
    stage of ZeRO says.
    """

    def __init__(self, module: nn.Module, program: Program, group: int) -> None:
        self.stage = program.zero if group > 1 else 1
        self.own = program.schedule not in SPLIT_BACKWARD
        bf16 = program.precision == "bf16"
        dp_mesh = mesh.shard_mesh(group)
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None,
            reduce_dtype=torch.float32 if bf16 else None,
            cast_forward_inputs=False,
        )
        # A number has no dim to shard: it is reduced here.
        self.numbers = [one for one in module.parameters() if one.ndim == 0]
        ignored = set(self.numbers)

        def shard(module: nn.Module, reshard_after_forward: bool) -> FSDPModule:
            one = fully_shard(
                module,
                mesh=dp_mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=precision,
                ignored_params=ignored,
            )
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)  # gloo knows no other
            return one

        self.units = [shard(block, self.stage == 3) for block in sharded_blocks(module)]
        # What is not in a block is read at both ends of the model: to gather it twice would free nothing.
        self.root = shard(module, False)
        self.units.append(self.root)
        super().__init__(_Behind(module) if program.schedule != "none" and self.own else module)

    def before_backward(self, last: bool) -> None:
        if not self.own:
            return
        self.root.set_is_last_backward(last)
        if self.stage == 1:
            self.root.set_requires_gradient_sync(last)
        else:
            self.root.set_requires_all_reduce(last)  # over the groups of hybrid sharding
        if self.stage < 3:
            self.root.set_reshard_after_backward(last)

    def finish(self) -> None:
        for number in self.numbers:
            if number.grad is not None:
                dist.all_reduce(number.grad, group=mesh.axis("dp").group)

    def rest(self) -> None:
        for unit in self.units:  # parameters kept whole for a backward pass would be stale after the next update
            unit.reshard()
