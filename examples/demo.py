"""GPT-2 on four processes of this machine: planned, generated, trained, and compared with one process.

    make demo                                        the plan that the solver proves fastest
    python examples/demo.py --fix dp=2,tp=2          one of your own

The model is transformers' GPT-2 with fewer and narrower layers. It learns the help texts that ship with Python, byte
by byte. The program lands in out/demo; read it.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.cli import parse_fix
from autopar.report import render

STEPS, ROWS, SEQUENCE = 20, 8, 64
END_OF_TEXT = 256  # behind the 256 bytes
FOLDER = Path("out/demo")


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=128, n_head=4, n_positions=SEQUENCE, vocab_size=END_OF_TEXT + 1,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
        bos_token_id=END_OF_TEXT, eos_token_id=END_OF_TEXT,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batches() -> list[dict[str, Tensor]]:
    """Rows of text, each beginning somewhere at random. input_ids, labels [rows, sequence]"""
    text = torch.tensor([i for topic in sorted(topics) for i in (*topics[topic].encode(), END_OF_TEXT)])
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - SEQUENCE, (ROWS,), generator=generator)
        ids = torch.stack([text[i : i + SEQUENCE] for i in starts])
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


def on_one_process(model: GPT2LMHeadModel, data: list[dict[str, Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_several(ranks: int) -> Iterator[float]:
    """The losses that the generated program prints, as it prints them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = [str(FOLDER / "program.py"), "--steps", str(STEPS), "--device", "cpu"]
    files = ["--weights", str(FOLDER.with_name("demo-weights.pt")), "--data", str(FOLDER.with_name("demo-data.pt"))]
    print(f"$ torchrun --nproc-per-node {ranks} {' '.join(program)}\n", flush=True)
    one_thread_each = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command + program + files, stdout=subprocess.PIPE, text=True, env=one_thread_each) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if step := re.match(r"step +\d+ +loss +(\S+)", line):
                yield float(step[1])
    if running.returncode:
        sys.exit(f"the program ended with exit code {running.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fix", metavar="K=V,...", help="pin choices of the plan, such as dp=2,tp=2")
    fix = parse_fix(parser.parse_args().fix)

    print("planning GPT-2 for four processes\n", flush=True)
    model, data = gpt2(), batches()
    cluster = autopar.Cluster.preset("cpu:4")
    job = autopar.parallelize(model, cluster, batch=data[0], precision="fp32", fix=fix)
    print(render(job.plan))
    job.save(FOLDER)
    torch.save(model.state_dict(), FOLDER.with_name("demo-weights.pt"))
    torch.save(data, FOLDER.with_name("demo-data.pt"))

    expected = on_one_process(model, data)
    difference = 0.0
    for step, loss in enumerate(on_several(job.plan.mesh.devices)):
        if step == 0:
            print("step   program    one process")
        print(f"{step:4}   {loss:.6f}   {expected[step]:.6f}", flush=True)
        difference = max(difference, abs(loss - expected[step]) / expected[step])
    print(f"\nlargest relative difference of a loss: {difference:.1e}")
    sys.exit(difference > 1e-4)


if __name__ == "__main__":
    main()
