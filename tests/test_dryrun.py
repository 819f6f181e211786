"""One rank of a program on fake tensors: it holds what the plan says, and runs the collectives that were priced."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autopar.cli import main
from autopar.dryrun import TOLERANCE, dryrun
from autopar.write import write_output
from costmodels.cluster import Cluster
from costmodels.errors import BadInput
from models import CASES, pins, prepared
from passes.pipeline import PIPELINE, SEARCH
from passes.state import run

PLANS = [
    ("gpt2", "dp=2,tp=2,zero=3"),
    ("gpt2", "dp=3,tp=1,zero=0"),
    ("gpt2", "pp=2,dp=1,tp=2,microbatches=4,schedule=1f1b"),
    ("llama", "dp=4,tp=1,zero=3,zero_group=2"),
    ("llama", "dp=2,tp=2,zero=1,microbatches=2"),
    ("llama", "dp=1,tp=4,recompute=full"),
    ("llama", "pp=2,dp=2,tp=1,zero=2,microbatches=3,schedule=1f1b"),
    ("t5", "dp=2,tp=2,zero=2"),
    ("bert", "pp=2,dp=1,tp=2,microbatches=4,schedule=1f1b,recompute=full"),
    ("gpt2", "pp=2,dp=1,tp=2,microbatches=4,schedule=interleaved_zb"),
    ("llama", "pp=2,dp=2,tp=1,zero=1,microbatches=3,schedule=zbv"),
    ("llama", "pp=2,dp=1,tp=2,microbatches=4,schedule=interleaved"),
    ("normed", "dp=2,tp=2,zero=3"),
    ("dropout", "dp=2,tp=2,zero=1,microbatches=2"),
]


@cache
def state_of(model: str, fix: str, precision: str) -> Any:
    state = prepared(CASES[model], precision)
    task = replace(state.task, cluster=Cluster.preset("4xh100"), fix=pins(fix))
    return run(PIPELINE[PIPELINE.index(SEARCH) :], replace(state, task=task))


def written(folder: Path, model: str, fix: str, precision: str = "bf16") -> Path:
    state = state_of(model, fix, precision)
    write_output(folder, state.plan, state.program, {})
    return folder


def in_a_child(done: Callable[..., Any], *args: Any) -> Any:
    """A dry run is once in a process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(done, args)


def command(*words: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(words)
    return code, said.getvalue()


IN_FP32 = [pytest.param(model, fix, "fp32", marks=() if "zero=0" in fix else pytest.mark.slow) for model, fix in PLANS]


@pytest.mark.parametrize(("model", "fix", "precision"), [*((*one, "bf16") for one in PLANS), *IN_FP32])
def test_a_rank_holds_and_sends_what_the_plan_says(model: str, fix: str, precision: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "out", model, fix, precision)
    world = state_of(model, fix, precision).plan.mesh.devices
    for rank in (0, world - 1):
        found = in_a_child(dryrun, folder, rank)
        assert found.as_planned, found.text
        if rank == 0:  # it has the largest shards
            sent, planned = (
                [(one.name, one.axis, one.full_bytes) for one in traffic]
                for traffic in (found.traffic, found.predicted_traffic)
            )
            assert sent == planned, found.text
        assert abs(found.predicted_bytes / found.peak_bytes - 1) <= TOLERANCE, found.text
        assert sum(size for _, size in found.held) == found.peak_bytes
    assert not dist.is_initialized()


def test_what_was_not_planned_is_said_and_fails(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", "llama", "dp=2,tp=2,zero=1,microbatches=2")
    code, said = in_a_child(command, "dryrun", str(folder), "--rank", "1")
    assert code == 0, said
    assert said.startswith("rank       1   dp 0  tp 1\n") and "as planned" in said
    plan = state_of("llama", "dp=2,tp=2,zero=1,microbatches=2", "bf16").plan
    forgotten = [one for one in plan.collectives if one.axis != "tp"]
    memory = tuple(replace(one, peak_bytes=one.peak_bytes // 2) for one in plan.memory)
    lie = replace(plan, collectives=tuple(forgotten), memory=memory)
    (folder / "plan.yaml").write_text(lie.to_yaml())
    code, said = in_a_child(command, "dryrun", str(folder))
    assert code == 1 and "not in the plan" in said and "(-5" in said


def test_a_rank_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", "llama", "dp=2,tp=2,zero=1,microbatches=2")
    with pytest.raises(BadInput, match="--rank 4: the program is for 4 ranks, 0 to 3"):
        dryrun(folder, 4)
    (folder / "program.py").unlink()
    with pytest.raises(BadInput, match=r"there is no program\.py in it"):
        dryrun(folder)
