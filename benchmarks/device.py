"""Predicted against measured on one device: six models, each with and without recompute.

    python benchmarks/device.py prepare DIR --cluster 1xh200    the programs, where autopar is installed
    python benchmarks/device.py run DIR                         runs them on the device, and calibrates it
    python benchmarks/device.py report DIR                      the table, where autopar is installed

`run` needs torch, pyyaml and this repository, no solver: it can be done on another machine, to which DIR is copied and
back. Peak memory is what CUDA's allocator had allocated at most; a CPU has none to ask. Time is the median step.
`calibrated` is by the profile that `run` measures, which knows none of these models. With --tiny the models are so
small that a CPU trains them in seconds: that is how this script itself is tried.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402

import torch
import yaml

RECOMPUTE = ("none", "full")
STEPS = 12
PROGRAM_TIMEOUT_S = 120
TINY = "AUTOPAR_TINY"  # set: the targets below give small models
TARGET_MEMORY, TARGET_PRIOR, TARGET_CALIBRATED = 3.0, 10.0, 5.0  # percent
CLUSTER, PROFILE, MEASURED = "cluster.yaml", "profile.yaml", "run.yaml"


# -- the models -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model of transformers with its sizes, small ones, and rows by tokens (or pixels) of a batch."""

    name: str  # of the classes in transformers: their common stem
    head: str
    sizes: Mapping[str, Any]
    tiny: Mapping[str, Any]
    rows: int
    length: int


LARGE = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
}  # fmt: skip
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
MODELS: Mapping[str, Model] = {
    "gpt2": Model(
        "GPT2", "LMHeadModel",
        {"n_embd": 1024, "n_layer": 24, "n_head": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512},
        8, 1024,
    ),
    "llama": Model(
        "Llama", "ForCausalLM",
        {
            "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
        },
        SMALL | {"num_key_value_heads": 2, "vocab_size": 512},
        4, 2048,
    ),
    "qwen2": Model(
        "Qwen2", "ForCausalLM",
        {
            "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
            "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
        },
        SMALL | {"num_key_value_heads": 2, "vocab_size": 512},
        1, 4096,
    ),
    "bert": Model(
        "Bert", "ForMaskedLM", LARGE,
        SMALL | {"vocab_size": 512},
        16, 512,
    ),
    "t5": Model(
        "T5", "ForConditionalGeneration",
        {
            "d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 12, "num_heads": 16,
            "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "decoder_start_token_id": 0,
        },
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 512},
        8, 512,
    ),
    "vit": Model(
        "ViT", "ForImageClassification", LARGE,
        SMALL | {"image_size": 32},
        32, 224,
    ),
}  # fmt: skip


def target(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model on meta, and a batch."""
    import transformers

    one, tiny = MODELS[name], TINY in os.environ
    config = getattr(transformers, f"{one.name}Config")(**(one.sizes | (one.tiny if tiny else {})))
    with torch.device("meta"):
        model = getattr(transformers, f"{one.name}{one.head}")(config)
    rows, length = (2, 32) if tiny else (one.rows, one.length)
    if one.name == "ViT":
        return model, {
            "pixel_values": torch.randn(rows, 3, length, length),
            "labels": torch.randint(config.num_labels, (rows,)),
        }
    ids = torch.randint(config.vocab_size, (rows, length))
    return model, {"input_ids": ids, "labels": ids.clone()}


# what `autopar plan device.py:NAME` calls
gpt2, llama, qwen2, bert, t5, vit = (lambda name=name: target(name) for name in MODELS)


# -- the three steps --------------------------------------------------------------------------------------------------


def command(*words: str) -> str:
    """What the command line prints. SystemExit where it fails."""
    from autopar.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(words)
    if code:
        raise SystemExit(f"autopar {' '.join(words)}: exit code {code}")
    return said.getvalue()


def plan(name: str, recompute: str, cluster: str, *more: str) -> str:
    fix = f"recompute={recompute},microbatches=1"
    return command("plan", f"{__file__}:{name}", "--cluster", cluster, "--fix", fix, *more)


def prepare(folder: Path, cluster: str, tiny: bool) -> None:
    """Every program with its plan."""
    folder.mkdir(parents=True, exist_ok=True)
    if tiny:
        os.environ[TINY] = "1"
    for name in MODELS:
        for recompute in RECOMPUTE:
            plan(name, recompute, cluster, "--out", str(folder / f"{name}-{recompute}"))
            print(f"{name}, recompute {recompute}: written", flush=True)
    (folder / "cluster.json").write_text(json.dumps({"cluster": cluster, "tiny": tiny}))


def run(folder: Path) -> None:
    """Calibrates this machine, and runs every program in a process of its own."""
    from autopar.calibrate import calibrate
    from costmodels.cluster import Cluster
    from passes.plan import VERSION

    began = time.monotonic()
    cluster = Cluster.load(json.loads((folder / "cluster.json").read_text())["cluster"])
    (folder / PROFILE).write_text(calibrate(cluster).to_yaml(VERSION))
    print(f"calibrated in {time.monotonic() - began:.0f} s", flush=True)
    for program in sorted(folder.glob("*/program.py")):
        words = [sys.executable, str(program), "--steps", str(STEPS)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(words, env=environment, capture_output=True, timeout=PROGRAM_TIMEOUT_S, check=False)
            said = (done.stdout if done.returncode == 0 else done.stderr).decode().strip().splitlines()
        except subprocess.TimeoutExpired:
            said = [f"no end after {PROGRAM_TIMEOUT_S} s"]
        print(f"{program.parent.name}: {said[-1] if said else 'nothing was printed'}", flush=True)
    print(f"all in {time.monotonic() - began:.0f} s")


def report(folder: Path) -> None:
    """The table of what was predicted, by priors and calibrated, and what was measured."""
    made = json.loads((folder / "cluster.json").read_text())
    if made["tiny"]:
        os.environ[TINY] = "1"
    calibrated = folder / CLUSTER
    device = yaml.safe_load((folder / PROFILE).read_text())["device"]
    calibrated.write_text(f"{{devices_per_node: 1, device: {device}, profile: {PROFILE}}}\n")
    heads = f"{'peak GiB':>9}{'plan':>8}{'error':>9}{'step ms':>10}{'priors':>9}{'calibrated':>12}"
    print(f"{'model':8}{'recompute':10}{heads}")
    errors: dict[str, list[float]] = {"memory": [], "priors": [], "calibrated": []}
    for name in MODELS:
        for recompute in RECOMPUTE:
            place = folder / f"{name}-{recompute}"
            if not (place / MEASURED).exists():
                print(f"{name:8}{recompute:10}not run")
                continue
            measured = yaml.safe_load((place / MEASURED).read_text())
            saved = yaml.safe_load((place / "plan.yaml").read_text())
            again = json.loads(plan(name, recompute, str(calibrated), "--json", "-"))
            step = measured["step_time_s"]
            of_time = {"priors": saved["step_time_s"] / step - 1, "calibrated": again["step_time_s"] / step - 1}
            memory = "        -       -        -"
            if "memory" in measured:
                peak, planned = measured["memory"][0]["allocated_bytes"], saved["memory"][0]["peak_bytes"]
                errors["memory"].append(planned / peak - 1)
                memory = f"{peak / 2**30:9.2f}{planned / 2**30:8.2f}{100 * errors['memory'][-1]:+8.1f}%"
            for kind, error in of_time.items():
                errors[kind].append(error)
            before, after = (100 * error for error in of_time.values())
            print(f"{name:8}{recompute:10}{memory}{1e3 * step:10.1f}{before:+8.1f}%{after:+11.1f}%")
    targets = {"memory": TARGET_MEMORY, "priors": TARGET_PRIOR, "calibrated": TARGET_CALIBRATED}
    for kind, found in errors.items():
        if found:
            mean = 100 * statistics.fmean(map(abs, found))
            met = "" if mean <= targets[kind] else "   MISS"
            print(f"{kind}: mean error {mean:.1f} % (target {targets[kind]:g}){met}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps: Mapping[str, Callable[..., None]] = {"prepare": prepare, "run": run, "report": report}
    parser.add_argument("step", choices=tuple(steps))
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--cluster", default="1xh200", metavar="PRESET", help="of prepare; default: 1xh200")
    parser.add_argument("--tiny", action="store_true", help="of prepare: models for a CPU")
    options = parser.parse_args()
    if options.step == "prepare":
        prepare(options.folder, options.cluster, options.tiny)
    elif not (options.folder / "cluster.json").is_file():
        parser.error(f"{options.folder} was not prepared: it has no cluster.json")
    else:
        steps[options.step](options.folder)


if __name__ == "__main__":
    main()
