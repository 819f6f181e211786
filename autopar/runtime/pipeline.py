"""Runs this rank's stages of a program, under the schedules of `torch.distributed.pipelining`.

`PipelineStage` keeps a buffer for what each microbatch of a step receives, from the first step on, and schedules of
several stages per rank keep whatever was sent until the end of a step. Here a buffer comes when it is received into
and goes with the microbatch's backward pass, and what was sent goes when it has arrived. That overrides private
methods, tried on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from autopar.runtime import mesh
from autopar.runtime.engine import Alone, engine, is_replicated
from autopar.runtime.module import Randomness, ShardedModule, randomness
from autopar.runtime.program import SPLIT_BACKWARD, Edge, Program

SCHEDULES: Mapping[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
SINGLE = ("gpipe", "1f1b")  # schedules of one stage per rank, which they take without a list


class Fed(nn.Module):
    """A stage's model with the inputs of a step's microbatches: it is called with what the stage before gave."""

    def __init__(self, model: ShardedModule, split: bool) -> None:
        super().__init__()
        self.model, self.split = model, split
        self.microbatches: Sequence[tuple[Tensor, ...]] = ()
        self.at = Randomness()  # of which microbatch is called next

    def forward(self, *received: Tensor) -> Any:
        with randomness(self.at):
            given = self.model(*received, *self.microbatches[self.at.microbatch])
        outputs = tuple(t.contiguous() for t in (given if isinstance(given, tuple) else (given,)))
        if self.split:
            outputs = tuple(_Own.apply(t) for t in outputs)  # type: ignore[no-untyped-call]
        return outputs if isinstance(given, tuple) else outputs[0]


class _Own(torch.autograd.Function):
    """The same values as a tensor that no operator has saved, and that is no view.

    After the gradients of its inputs, a pipeline detaches what a stage gave in place; those of weights come later.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Pipeline:
    """This rank's stages by number: `run` trains one step's microbatches, `evaluate` only computes their losses."""

    def __init__(self, program: Program, models: Mapping[int, ShardedModule]) -> None:
        split = program.schedule in SPLIT_BACKWARD
        self.fed = {number: Fed(model, split) for number, model in models.items()}
        self.engines = {number: engine(fed, program) for number, fed in self.fed.items()}
        # DistributedDataParallel divides gradients by as much
        self.scale = program.dp if is_replicated(program) else 1
        self.targets = torch.zeros(program.microbatches)  # none are needed: the last stage returns the loss
        self.stages = [_Stage(number, program, self.fed[number], one) for number, one in self.engines.items()]
        self.schedule = SCHEDULES[program.schedule](
            self.stages[0] if program.schedule in SINGLE else self.stages,
            program.microbatches,
            loss_fn=lambda loss, _: loss * self.scale,
            scale_grads=False,
        )

    def run(self, inputs: Mapping[int, Sequence[tuple[Tensor, ...]]], at: Randomness) -> list[Tensor]:
        """Forward and backward of every microbatch; their losses where this rank has the last stage.

        `inputs`: of every stage, what it reads of each microbatch.
        """
        losses = self._go(self.schedule.step, inputs, at)
        for one in self.engines.values():
            one.finish()
        return losses

    def evaluate(self, inputs: Mapping[int, Sequence[tuple[Tensor, ...]]], at: Randomness) -> list[Tensor]:
        """Forward of every microbatch."""
        losses = self._go(self.schedule.eval, inputs, at)
        for one in self.engines.values():
            one.rest()
        return losses

    def _go(
        self, run: Callable[..., Any], inputs: Mapping[int, Sequence[tuple[Tensor, ...]]], at: Randomness
    ) -> list[Tensor]:
        for number, fed in self.fed.items():
            fed.microbatches, fed.at = inputs[number], at
        losses: list[Tensor] = []
        run(target=self.targets, losses=losses, return_outputs=False)
        for stage in self.stages:
            stage.finish_sending()
        return [loss.detach() / self.scale for loss in losses]


class _Stage(PipelineStage):
    """A stage with its engine. Its buffers live as long as they are needed."""

    def __init__(self, number: int, program: Program, fed: Fed, engine: Alone) -> None:
        self.fed, self.engine = fed, engine
        self.posts_itself = program.schedule not in SINGLE
        self.posted: list[dist.Work] = []
        self.received = program.stages[number - 1].gives if number else ()
        self.given = program.stages[number].gives
        super().__init__(
            engine.module,
            number,
            len(program.stages),
            mesh.current().device,
            input_args=_examples(self.received),
            output_args=_examples(self.given) or (torch.empty((), device="meta"),),
            group=mesh.axis("pp").group,
        )

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            for info in infos:
                info.buffer = None

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for infos in self.grad_recv_info.values():
            for info in infos:
                info.buffer = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            _allocate(self.args_recv_info[fwd_chunk_id], self.received, self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            _allocate(self.grad_recv_info[bwd_chunk_id], self.given, self.device, gradients=True)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.fed.at = replace(self.fed.at, microbatch=fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = None  # held for the backward pass by what autograd keeps
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.engine.before_backward(last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:  # the schedule keeps it until the end of the step, and its graph what was received
            loss.detach_()
        for info in self.grad_recv_info.get(bwd_chunk_id, ()):
            info.buffer = None

    # torch hands gradients over between two stages of one rank also where there are none

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        if not self.has_backward:
            return ()
        gradients: tuple[Tensor | None, ...] = super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]
        return gradients

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sent(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(None if g is None else g.contiguous() for g in gradients)
        return self._sent(super().get_bwd_send_ops(bwd_chunk_id))

    def _sent(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """What is left for the schedule to send: all, or nothing where it would wait for it only at the end."""
        if not self.posts_itself or not ops:
            return ops
        self.posted = [work for work in self.posted if not work.is_completed()]
        self.posted += dist.batch_isend_irecv(ops)
        return []

    def finish_sending(self) -> None:
        """Wait for all that was sent."""
        for work in self.posted:
            work.wait()
        self.posted = []


def _examples(edges: Sequence[Edge]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(_local(edge), dtype=edge.dtype, device="meta", requires_grad=edge.grad) for edge in edges)


def _local(edge: Edge) -> tuple[int, ...]:
    tp = mesh.axis_or_none("tp")
    return edge.local_shape(tp.rank, tp.size) if tp else edge.local_shape(0, 1)


def _allocate(infos: Sequence[Any], edges: Sequence[Edge], device: torch.device, gradients: bool = False) -> None:
    for info, edge in zip(infos, edges, strict=True):
        if edge.grad or not gradients:
            info.buffer = torch.empty(_local(edge), dtype=edge.dtype, device=device)
