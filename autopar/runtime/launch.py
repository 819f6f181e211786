"""Runs a generated program: `torchrun --nproc-per-node N program.py [--steps N] [--device cpu|cuda]`.

What it measured goes into run.yaml, where there is a plan.yaml beside the program.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from autopar.runtime import mesh
from autopar.runtime.program import Batch, Program
from autopar.runtime.trainer import Trainer

BUFFERS = "buffers.pt"  # beside the program: what it needs besides parameters
PLAN, RUN = "plan.yaml", "run.yaml"  # beside the program: what was predicted, and what it measured
WARM_UP = 2  # steps that are not timed where others are: memory is allocated, communicators are opened


def main(program: Program, argv: Sequence[str] | None = None) -> None:
    """Train `program` as the command line says. Exit code 2, with one sentence, where it cannot start."""
    options = _parse(argv)
    folder = Path(sys.argv[0]).resolve().parent
    # `record` puts this rank's traceback where torchrun shows it; torchrun then ends all other ranks.
    record(_train)(program, options, folder)


def _train(program: Program, options: argparse.Namespace, folder: Path) -> None:
    try:
        mesh.check_world_size(program.mesh)
        trainer = Trainer(program, device=options.device, seed=options.seed)
        _load(trainer, options, folder / BUFFERS)
        batches = _batches(program, options)
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    seconds: list[float] = []
    for step in range(options.steps):
        began = time.perf_counter()
        loss = trainer.step(batches(step))
        seconds.append(time.perf_counter() - began)
        if dist.get_rank() == 0:
            print(f"step {step:4d}   loss {loss:.6f}   {seconds[-1]:.3f} s   {_peak()}", flush=True)
    if seconds and (folder / PLAN).exists():
        _record_run(folder / RUN, program, seconds)
    dist.destroy_process_group()


def _record_run(file: Path, program: Program, seconds: Sequence[float]) -> None:
    """Write what was measured, for `autopar show` to compare with the plan: of every pp rank the fullest process."""
    cuda = mesh.current().device.type == "cuda"
    held = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    where = mesh.axis("pp").rank if program.pp > 1 else 0
    found: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
    dist.all_gather_object(found, (where, *held))
    if dist.get_rank() != 0:
        return
    timed = seconds[WARM_UP:] or seconds[-1:]
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "steps": len(timed),
        "step_time_s": statistics.median(timed),
        "fastest_step_s": min(timed),
        "slowest_step_s": max(timed),
    }
    if cuda:  # of a CPU process only all of its memory is known, which no plan counts
        facts["memory"] = [
            {
                "stage": stage,
                "allocated_bytes": max(allocated for at, allocated, _ in found if at == stage),
                "reserved_bytes": max(reserved for at, _, reserved in found if at == stage),
            }
            for stage in range(program.pp)
        ]
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in facts.items())  # JSON values are YAML
    try:
        fresh = file.with_name(f".{file.name}-{os.getpid()}")
        fresh.write_text(text)
        os.replace(fresh, file)
    except OSError as error:
        print(f"{file} cannot be written: {error.strerror}; the run itself is complete", file=sys.stderr)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train this program; without --data on random batches.")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default 10)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="a whole state dict, as torch.save writes it")
    parser.add_argument("--data", type=Path, metavar="FILE", help="a list of global batches, as torch.save writes it")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and random batches (default 0)")
    return parser.parse_args(argv)


def _load(trainer: Trainer, options: argparse.Namespace, buffers: Path) -> None:
    if buffers.exists():
        trainer.load_buffers(_read(buffers))
    if options.weights is not None:
        trainer.load_state_dict(_read(options.weights))
    if trainer.missing_buffers:
        raise ValueError(f"{buffers} is to hold the buffers {', '.join(trainer.missing_buffers)}")


def _batches(program: Program, options: argparse.Namespace) -> Callable[[int], Batch]:
    """The batch of each step."""
    if options.data is None:
        return lambda step: program.random_batch(options.seed, step)
    batches: list[Batch] = _read(options.data)
    if not batches:
        raise ValueError(f"{options.data} holds no batch")
    for batch in batches:
        program.ordered(batch)
    return lambda step: batches[step % len(batches)]


def _read(file: Path) -> Any:
    """What torch.save wrote, its tensors left on disk until they are read."""
    try:
        return torch.load(file, mmap=True, weights_only=True)
    except (RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{file} does not hold tensors as torch.save writes them: {error}") from error


def _peak() -> str:
    """The most memory this process has had: of tensors on the GPU, or on a CPU, where nobody counts them, of all."""
    if mesh.current().device.type == "cuda":
        return f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
    unit = 1 if sys.platform == "darwin" else 2**10
    return f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB of the process"
