"""How long planning takes and what it holds: full-size models on full-size clusters, each in a process of its own.

    python benchmarks/planner.py                        every case
    python benchmarks/planner.py --only llama3-8b       those whose name contains it

`wall` and `cpu` are those of the whole command `autopar plan`, imports and capture included; on a machine that does
other work too, cpu is the one to compare. `peak` is the largest resident memory of that process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEAK_GIB = 6.0  # no planner may hold more
TIMEOUT_S = 900.0

LLAMA3 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
LLAMA3_8B = LLAMA3 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA3_70B = LLAMA3 | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA3_405B = LLAMA3 | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
GPT3_175B = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 12288,
    "n_layer": 96,
    "n_head": 96,
    "n_positions": 2048,
    "vocab_size": 51200,
}


@dataclass(frozen=True)
class Case:
    """A model on a cluster, and the seconds in which its plan should be there."""

    name: str
    config: Mapping[str, Any]
    cluster: str
    sequence: int
    global_batch: int
    target_s: float


CASES = (
    Case("llama3-8b/8xh100", LLAMA3_8B, "8xh100", 8192, 64, 20),
    Case("llama3-8b/64xh100", LLAMA3_8B, "8x8xh100", 8192, 512, 20),
    Case("llama3-70b/256xh100", LLAMA3_70B, "32x8xh100", 8192, 512, 45),
    Case("llama3-70b/512xh100", LLAMA3_70B, "64x8xh100", 8192, 1024, 45),
    Case("gpt3-175b/1024xa100", GPT3_175B, "128x8xa100-80", 2048, 1536, 60),
    Case("llama3-405b/16384xh100", LLAMA3_405B, "2048x8xh100", 8192, 2048, 120),
)


@dataclass(frozen=True)
class Planned:
    """What planning took, and the plan in one line (or why there is none)."""

    wall_s: float
    cpu_s: float
    peak_gib: float
    plan: str
    found: bool


def plan(case: Case) -> Planned:
    """Run the planner on a case."""
    with tempfile.TemporaryDirectory() as folder:
        config, answer = Path(folder, "config.json"), Path(folder, "plan.json")
        config.write_text(json.dumps(dict(case.config)))
        command = [sys.executable, "-m", "autopar", "plan", f"hf:{config}", "--cluster", case.cluster]
        command += ["--seq-len", str(case.sequence), "--global-batch", str(case.global_batch), "--json", str(answer)]
        with open(Path(folder, "said"), "w+") as said:
            started = time.perf_counter()
            deadline = started + TIMEOUT_S
            child = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=said,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            # wait4 and not child.wait(): it tells what this one process has used
            while not (ended := os.wait4(child.pid, os.WNOHANG))[0]:
                if time.perf_counter() > deadline:
                    child.kill()
                time.sleep(0.02)
            wall = time.perf_counter() - started
            _, status, used = ended
            child.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            lines = said.read().split("\n")
        if child.returncode == 0:
            text = in_one_line(json.loads(answer.read_text()))
        elif wall > TIMEOUT_S:
            text = f"no answer in {TIMEOUT_S:.0f} s"
        else:
            text = f"exit {child.returncode}: {next((line for line in reversed(lines) if line.strip()), '')}"
    to_gib = 2**30 if sys.platform == "darwin" else 2**20  # ru_maxrss counts bytes there, kilobytes elsewhere
    return Planned(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / to_gib, text, child.returncode == 0)


def in_one_line(plan: Mapping[str, Any]) -> str:
    """The mesh, the microbatches, what is recomputed, and what the plan promises."""
    mesh, zero, schedule = plan["mesh"], plan["zero"], plan["schedule"]
    axes = [f"{name} {size}" for name, size in mesh.items() if size > 1] or ["one device"]
    parts = [" ".join(axes)]
    if zero["stage"]:
        parts.append(f"ZeRO-{zero['stage']} over {zero['group']}")
    parts.append(f"{schedule['microbatches']} x {schedule['microbatch']}")
    if schedule["name"] != "none":
        parts.append(f"{schedule['name']} of {schedule['virtual_stages']} x {mesh['pp']} stages")
    blocks = [block for stage in plan["stages"] for block in stage["blocks"]]
    if again := sum(block["recomputed"] for block in blocks):
        parts.append(f"{again} of {sum(block['count'] for block in blocks)} recomputed")
    peak = max(stage["peak_bytes"] for stage in plan["memory"]) / 2**30
    parts += [f"{plan['step_time_s']:.2f} s", f"MFU {plan['mfu']:.2f}", f"{peak:.1f} GiB"]
    if plan["idle_devices"]:
        parts.append(f"{plan['idle_devices']} idle")
    if plan["status"] != "optimal":
        parts.append(plan["status"])
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", default="", help="cases whose name contains it")
    chosen = [case for case in CASES if parser.parse_args().only in case.name]
    if not chosen:
        parser.error(f"no such case; there are {'; '.join(case.name for case in CASES)}")
    print(f"{'':22}{'wall s':>8}{'cpu s':>8}{'target s':>10}{'peak GiB':>10}        plan")
    missed = 0
    for case in chosen:
        one = plan(case)
        met = one.found and one.wall_s <= case.target_s and one.peak_gib <= PEAK_GIB
        missed += not met
        times = f"{one.wall_s:8.1f}{one.cpu_s:8.1f}{case.target_s:10.0f}{one.peak_gib:10.2f}"
        print(f"{case.name:22}{times}  {'pass' if met else 'MISS'}  {one.plan}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} within their seconds and {PEAK_GIB:g} GiB")


if __name__ == "__main__":
    main()
