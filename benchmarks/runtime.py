"""The generated program's speed against what one would write by hand with torch, on two local processes.

    python benchmarks/runtime.py                  every plan, 24 pairs of blocks of two steps
    python benchmarks/runtime.py --quick          8 pairs
    python benchmarks/runtime.py --only zero=3    the rows whose name contains it

Both train the same model from the same weights on the same batch, in the same processes, of one thread each. They take
turns: a block of whole optimizer steps of one, then of the other. A row is the median (and the quartiles) of torch's
time / ours of such pairs: 1 is as fast, more is faster. Ours gives the global loss after each step; torch's does not.
`cpu` is the same ratio of processor time, which says more on a machine that is busy with other work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# ruff: noqa: E402

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from autopar.job import load_program
from autopar.runtime import Trainer
from costmodels.cluster import Cluster
from examples.nanogpt import GPT
from gloo import Pool
from passes.pipeline import compile_model

RANKS = 2
ROWS, SEQ, WIDTH, LAYERS, HEADS, VOCABULARY = 8, 128, 256, 4, 8, 2048
SAME_LOSS = 1e-4  # relative, after the last step


# -- the models -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [rows, sequence, width]
        rows, sequence, _ = x.shape
        q, k, v = (f(x).view(rows, sequence, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        return self.o(x.transpose(1, 2).reshape(rows, sequence, -1))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = WIDTH * 11 // 4
        self.gate, self.up = nn.Linear(WIDTH, inner, bias=False), nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm_2, self.mlp = nn.RMSNorm(WIDTH), SwiGLU()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """Without grouped queries: RMSNorm, rotary positions, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(SEQ), 10000.0 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # both [rows, sequence]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(VOCABULARY, SEQ, WIDTH, HEADS, LAYERS),
    "llama": Llama,
}


def fresh(model: str) -> nn.Module:
    """The model, with the same weights in every process."""
    torch.manual_seed(0)
    return MODELS[model]()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return {"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


# -- torch by hand ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByHand:
    """A parallelized model, whether each rank has rows of its own, and what loss and backward run in."""

    model: nn.Module
    own_rows: bool
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    run: Callable[..., Tensor] | None = None  # of a pipeline: forward and backward; the loss where it is known, else 0


def ddp(model: nn.Module) -> ByHand:
    return ByHand(DistributedDataParallel(model, gradient_as_bucket_view=True), own_rows=True)


def fsdp(model: nn.Module) -> ByHand:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for unit in (*model.blocks, model):
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return ByHand(model, own_rows=True)


def tensor(model: nn.Module) -> ByHand:
    """Heads and ffn over the ranks; embedding and head along the vocabulary."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        parallelize_module(
            block, mesh, dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROW, RowwiseParallel())
        )
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return ByHand(parallelize_module(model, mesh, ends), own_rows=False, context=loss_parallel)


def tensor_and_sequence(model: nn.Module) -> ByHand:
    """The same with what lies between them along the sequence."""
    mesh = init_device_mesh("cpu", (RANKS,))
    split, whole = Shard(1), Replicate()
    plan = (
        dict.fromkeys(COLUMNS, ColwiseParallel())
        | dict.fromkeys(ROW, RowwiseParallel(output_layouts=split))
        | {
            "norm_1": SequenceParallel(),
            "norm_2": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(split, None, None), desired_input_layouts=(whole, None, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,)),
        }
    )
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    ends = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False),
    }
    return ByHand(parallelize_module(model, mesh, ends), own_rows=False, context=loss_parallel)


class Half(nn.Module):
    """A stage of two of the Llama: the first takes ids, the last gives logits."""

    def __init__(self, model: nn.Module, stage: int) -> None:
        super().__init__()
        half = LAYERS // 2
        self.blocks = model.blocks[stage * half : (stage + 1) * half]
        self.first = model.tokens if stage == 0 else nn.Identity()
        self.last = nn.Sequential(model.norm, model.head) if stage else nn.Identity()
        self.register_buffer("cos", model.cos)
        self.register_buffer("sin", model.sin)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.last(x)


def pipeline(model: nn.Module) -> ByHand:
    """Two stages of half the blocks each under 1F1B."""
    rank = dist.get_rank()
    half = Half(model, rank)
    stage = PipelineStage(half, rank, RANKS, torch.device("cpu"))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICROBATCHES

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss, scale_grads=False)

    def run(ids: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        schedule.step(*([ids] if rank == 0 else []), target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).sum() if losses else torch.zeros(())

    return ByHand(half, own_rows=False, run=run)


MICROBATCHES = 4
COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
ROW = ("attention.o", "mlp.down")


# -- one row of the table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A plan of ours, what it is compared with, and the ratio that it should reach."""

    name: str
    fix: Mapping[str, int | str]
    by_hand: Callable[[nn.Module], ByHand]
    against: str
    target: float
    models: tuple[str, ...] = tuple(MODELS)


CASES = (
    Case("dp=2", {"dp": 2, "zero": 0}, ddp, "DistributedDataParallel", 0.95),
    Case("zero=3", {"dp": 2, "zero": 3}, fsdp, "fully_shard per block", 0.95),
    Case("tp=2", {"tp": 2}, tensor, "DTensor, column and row", 1.0, ("llama",)),
    Case("tp=2", {"tp": 2}, tensor_and_sequence, "the same, norms by sequence", 1.0, ("llama",)),
    Case(
        "pp=2",
        {"pp": 2, "dp": 1, "tp": 1, "schedule": "1f1b", "microbatches": MICROBATCHES},
        pipeline,
        "PipelineStage, Schedule1F1B",
        0.95,
        ("llama",),
    ),
)


@dataclass(frozen=True)
class Raced:
    """Seconds a step, of each block of steps, ours and torch's; and the losses after the last."""

    wall_s: tuple[list[float], list[float]]
    cpu_s: tuple[list[float], list[float]]
    loss: tuple[float, float]


def ratios(seconds: tuple[list[float], list[float]]) -> list[float]:
    return [torch / ours for ours, torch in zip(*seconds, strict=True)]


def race(program: str, buffers: Mapping[str, Tensor], case: Case, model: str, pairs: int, steps: int) -> Raced:
    """On one rank: the steps of both, in turns."""
    whole = batch()
    original = fresh(model)
    trainer = Trainer(load_program(program), torch.optim.AdamW, "cpu")
    trainer.load_state_dict(original.state_dict())
    trainer.load_buffers(dict(original.named_buffers()) | dict(buffers))

    hand = case.by_hand(original)
    optimizer = torch.optim.AdamW(hand.model.parameters())
    rows = ROWS // RANKS
    own = {name: t[dist.get_rank() * rows :][:rows] for name, t in whole.items()} if hand.own_rows else whole

    def ours() -> float:
        return trainer.step(whole)

    def theirs() -> Tensor:
        with hand.context():
            if hand.run is not None:
                loss = hand.run(**own)
            else:
                loss = hand.model(**own)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def seconds(step: Callable[[], Any]) -> tuple[float, float, Any]:
        dist.barrier()
        started, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = step()
        dist.barrier()  # a step takes as long as on the slowest rank
        return (time.perf_counter() - started) / steps, (time.process_time() - used) / steps, loss

    seconds(ours), seconds(theirs)  # the first makes buckets, optimizer states, caches
    wall: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])
    losses: list[Any] = [0.0, 0.0]
    for pair in range(pairs):
        for i in (0, 1) if pair % 2 else (1, 0):
            taken, used, losses[i] = seconds((ours, theirs)[i])
            wall[i].append(taken)
            cpu[i].append(used)
    loss = losses[1].full_tensor() if isinstance(losses[1], DTensor) else losses[1]
    if hand.own_rows or hand.run is not None:
        dist.all_reduce(loss)
        loss /= RANKS if hand.own_rows else 1
    return Raced(wall, cpu, (losses[0], loss.item()))


def row(pool: Pool, case: Case, model: str, pairs: int, steps: int) -> bool:
    """Print one row; whether the target is met."""
    compiled = compile_model(
        fresh(model), Cluster.preset(f"cpu:{RANKS}"), batch(), precision="fp32", optimizer="adamw", fix=case.fix
    )
    found = pool.run(RANKS, race, compiled.program, compiled.buffers, case, model, pairs, steps, timeout_s=600.0)[0]
    ours, theirs = found.loss
    if abs(ours / theirs - 1) > SAME_LOSS:
        raise SystemExit(f"{case.name} {model}: the loss is {ours}, but {theirs} by hand")
    low, middle, high = statistics.quantiles(ratios(found.wall_s), n=4)
    ms = "".join(f"{statistics.median(seconds) * 1e3:9.1f}" for seconds in found.wall_s)
    met = middle >= case.target
    print(
        f"{case.name:8}{model:7}{case.against:28}{ms}{middle:9.3f}  {low:.3f} to {high:.3f}"
        f"{statistics.median(ratios(found.cpu_s)):8.3f}{case.target:8.2f}  {'' if met else 'MISS'}",
        flush=True,
    )
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 pairs")
    parser.add_argument("--only", metavar="NAME", default="", help="rows whose plan, model or rival contains it")
    parser.add_argument("--pairs", type=int, default=0, metavar="N", help="how many pairs; default 24")
    options = parser.parse_args()
    pairs = options.pairs or (8 if options.quick else 24)
    wanted = [
        (case, model)
        for case in CASES
        for model in case.models
        if options.only in f"{case.name} {model} {case.against}"
    ]
    pool = Pool()
    print(f"{'':43}{'ms a step':>18}  torch / ours")
    heads = f"{'ours':>9}{'torch':>9}{'median':>9}  {'quartiles':14}{'cpu':>8}{'target':>8}"
    print(f"{'plan':8}{'model':7}{'by hand':28}{heads}")
    met = [row(pool, case, model, pairs, steps=2) for case, model in wanted]
    pool.kill()
    print(f"{sum(met)} of {len(met)} reach their target")


if __name__ == "__main__":
    main()
