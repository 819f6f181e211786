"""One run of `autopar plan` in a process of its own, and the models whose plans are benchmarked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
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


def gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """A GPT as Megatron-LM trains it: 2,048 learned positions, a vocabulary of 51,200."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 2048,
        "vocab_size": 51200,
    }


@dataclass(frozen=True)
class Case:
    """A model on a cluster, and what is fixed of its plan."""

    name: str
    config: Mapping[str, Any]
    cluster: str
    sequence: int
    global_batch: int
    target_s: float = TIMEOUT_S  # in which its plan should be there
    fix: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """What planning took, and the plan or why there is none."""

    wall_s: float
    cpu_s: float
    peak_gib: float
    plan: Mapping[str, Any] | None
    why_not: str = ""

    def __str__(self) -> str:
        return in_one_line(self.plan) if self.plan is not None else self.why_not


def plan(case: Case) -> Planned:
    """Run the planner on a case."""
    with tempfile.TemporaryDirectory() as folder:
        config, answer = Path(folder, "config.json"), Path(folder, "plan.json")
        config.write_text(json.dumps(dict(case.config)))
        command = [sys.executable, "-m", "autopar", "plan", f"hf:{config}", "--cluster", case.cluster]
        if case.fix:
            command += ["--fix", ",".join(f"{key}={value}" for key, value in case.fix.items())]
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
        made, why_not = None, ""
        if child.returncode == 0:
            made = json.loads(answer.read_text())
        elif wall > TIMEOUT_S:
            why_not = f"no answer in {TIMEOUT_S:.0f} s"
        else:
            why_not = f"exit {child.returncode}: {next((line for line in reversed(lines) if line.strip()), '')}"
    to_gib = 2**30 if sys.platform == "darwin" else 2**20  # ru_maxrss counts bytes there, kilobytes elsewhere
    return Planned(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / to_gib, made, why_not)


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
