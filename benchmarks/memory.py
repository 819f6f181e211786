"""Predicted against measured memory: the plan's peak and what really was live in one training step, on gloo.

    python benchmarks/memory.py                            every model under every plan
    python benchmarks/memory.py gpt2 llama --plans dp=2    some

Steps are measured on every rank, from the second one on, since the optimizer has its states then: bytes of live
tensors of any kind, each storage once and at its present size (fully_shard empties storages without releasing them).
The lower median of some steps counts: gloo's own thread lets go of what it reduced now and then an operator or two
late. Predicted is the fullest rank. `saved` is what autograd keeps for the backward pass, parameters and the batch
excluded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# ruff: noqa: E402

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.job import load_program
from autopar.runtime import Trainer
from costmodels.cluster import Cluster
from examples.mlp import MLP, squared_error
from examples.nanogpt import GPT
from gloo import Pool
from passes.capture import batch_leaves
from passes.memory import StepBytes
from passes.pipeline import PIPELINE
from passes.plan import StageMemory
from passes.state import State, Task, made, run

ROWS, SEQ, WIDTH, LAYERS, HEADS = 12, 64, 128, 3, 8
STEPS = 6  # measured ones: about one in six has a peak that gloo's thread made higher


# -- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank during a step."""

    peak: int
    saved: int


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operator touches. Looks at all of them after each: some change their size."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # its own operators, on local tensors, come here in turn
        out = func(*args, **(kwargs or {}))
        for tensor in leaves((out, args)):
            self.watch(tensor)
        self.peak = max(self.peak, self.live())
        return out

    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage._cdata, weakref.ref(storage, lambda _, key=storage._cdata: self.gone(key)))

    def gone(self, key: int) -> None:
        self.storages.pop(key, None)

    def live(self) -> int:
        return sum(storage.nbytes() for ref in list(self.storages.values()) if (storage := ref()) is not None)


def leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from leaves(one)


class SavedBytes:
    """Follows the storages that autograd packs, but for those in `beside`."""

    def __init__(self, beside: Callable[[], set[int]]) -> None:
        self.beside = beside
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes and key not in self.beside():
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.release, key)
        return tensor

    def release(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


def measure(program: str, buffers: Mapping[str, Tensor], shares: list[list[Tensor]]) -> Measured:
    """One rank: steps of a program after its first, on this data-parallel rank's rows."""
    own = [[one.clone() for one in share] for share in shares]  # that hold no more than their rows
    with LiveBytes() as tracker:
        trainer = Trainer(load_program(program), device="cpu")
        batch = own[trainer.dp_rank]
        trainer.init_parameters(0)
        trainer.load_buffers(buffers)
        trainer.step(batch, sharded=True)

        def beside() -> set[int]:
            found = [*trainer.model.parameters(), *batch]
            for module in trainer.model.modules():
                if isinstance(module, FSDPModule):
                    for group in module._get_fsdp_state()._fsdp_param_groups:
                        found += [t for p in group.fsdp_params for t in p.all_gather_outputs]
            return {t.untyped_storage()._cdata for t in found}

        saved, peaks = SavedBytes(beside), []
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            for _ in range(STEPS):
                tracker.peak = 0
                trainer.step(batch, sharded=True)
                peaks.append(tracker.peak)
    return Measured(statistics.median_low(peaks), saved.peak)


# -- what is predicted ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model with a global batch."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], Tensor] | None = None


@dataclass(frozen=True)
class Compared:
    """A plan's memory, and the fullest rank's."""

    plan: StageMemory
    predicted: StepBytes
    measured: Measured

    @property
    def peak_error(self) -> float:
        return self.plan.peak_bytes / self.measured.peak - 1

    @property
    def saved_error(self) -> float:
        return self.predicted.saved / self.measured.saved - 1


def planned(
    case: Case, fix: Mapping[str, int | str], ranks: int, precision: str = "fp32", limit_bytes: int | None = None
) -> State:
    """What the compiler makes of a case for some local processes."""
    cluster = Cluster.preset(f"cpu:{ranks}")
    if limit_bytes is not None:
        cluster = cluster.with_memory_limit(limit_bytes)
    task = Task(case.model, case.batch, case.loss_fn, cluster, ROWS, precision, "adamw", fix, "", None, None)
    return run(PIPELINE, State(task, lambda text: None, lambda: False))


def measured(pool: Pool, case: Case, state: State) -> Measured:
    """The fullest rank of the program, run on gloo."""
    mesh, captured = made(state.plan, "the plan").mesh, made(state.captured, "the capture")
    program = load_program(made(state.program, "the program"))
    leaves = batch_leaves(case.batch)
    tensors = {one.name: leaves[one.key] for one in captured.inputs}
    shares = []
    for rank in range(mesh.dp):
        first, rows = program.own_rows(rank)
        shares.append([tensors[i.name][first : first + rows] if i.rows else tensors[i.name] for i in program.inputs])
    buffers = {name: buffer.detach() for name, buffer in case.model.named_buffers()} | dict(captured.constants)
    found = pool.run(mesh.devices, measure, state.program, buffers, shares)
    return Measured(max(one.peak for one in found), max(one.saved for one in found))


def compare(pool: Pool, case: Case, fix: Mapping[str, int | str], ranks: int, precision: str = "fp32") -> Compared:
    """Plan a case, and measure its program. Without pins there is no room for plain data parallelism."""
    limit_bytes = None
    if not fix:
        plain = planned(case, {"dp": ranks, "tp": 1, "zero": 0}, ranks, precision)
        limit_bytes = made(plain.plan, "the plan").memory[0].peak_bytes - 1
    state = planned(case, fix, ranks, precision, limit_bytes)
    plan, predicted = made(state.plan, "the plan"), made(state.found, "the plan").best.bytes
    fullest = max(plan.memory, key=lambda rank: rank.peak_bytes)
    return Compared(fullest, made(predicted, "its memory"), measured(pool, case, state))


# -- the table --------------------------------------------------------------------------------------------------------


def tokens(vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(1, vocabulary, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> Case:
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=SEQ, vocab_size=257, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Case(transformers.GPT2LMHeadModel(config), tokens(257))


def llama() -> Case:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, vocab_size=256, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    return Case(transformers.LlamaForCausalLM(config), tokens(256))


def nanogpt() -> Case:
    batch = tokens(257)
    return Case(GPT(257, SEQ, WIDTH, HEADS, LAYERS), {"ids": batch["input_ids"], "targets": batch["labels"]})


def mlp() -> Case:
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(ROWS, 96, generator=generator), "y": torch.randn(ROWS, 32, generator=generator)}
    return Case(MLP(96, 4 * WIDTH, 32), batch, squared_error)


MODELS: dict[str, Callable[[], Case]] = {"gpt2": gpt2, "llama": llama, "nanogpt": nanogpt, "mlp": mlp}
PIPED: dict[str, int | str] = {"dp": 1, "tp": 1, "microbatches": 4, "schedule": "1f1b"}
PLANS: dict[str, tuple[dict[str, int | str], int]] = {
    "dp=2": ({"dp": 2, "zero": 0}, 2),
    "tp=2": ({"tp": 2}, 2),
    "tp=4": ({"tp": 4}, 4),
    "dp=2,tp=2": ({"dp": 2, "tp": 2, "zero": 0}, 4),
    "dp=3": ({"dp": 3, "zero": 0}, 3),
    "zero=1": ({"dp": 2, "zero": 1}, 2),
    "zero=2": ({"dp": 2, "zero": 2}, 2),
    "zero=3": ({"dp": 2, "zero": 3}, 2),
    "zero=3,tp=2": ({"dp": 2, "tp": 2, "zero": 3}, 4),
    "zero=3,dp=3": ({"dp": 3, "zero": 3}, 3),
    "recompute": ({"dp": 2, "zero": 0, "recompute": "full"}, 2),
    "4 microbatches": ({"dp": 1, "tp": 1, "microbatches": 4}, 1),
    "4 microbatches,dp=3": ({"dp": 3, "zero": 0, "microbatches": 4}, 3),
    "4 microbatches,zero=1": ({"dp": 3, "zero": 1, "microbatches": 4}, 3),
    "4 microbatches,zero=2": ({"dp": 3, "zero": 2, "microbatches": 4}, 3),
    "4 microbatches,zero=3": ({"dp": 3, "zero": 3, "microbatches": 4}, 3),
    "zero=3,recompute": ({"dp": 2, "zero": 3, "recompute": "full"}, 2),
    "pp=2": (PIPED | {"pp": 2}, 2),
    "pp=2,gpipe": (PIPED | {"pp": 2, "schedule": "gpipe"}, 2),
    "pp=3,recompute": (PIPED | {"pp": 3, "recompute": "full"}, 3),
    "pp=2,tp=2": (PIPED | {"pp": 2, "tp": 2}, 4),
    "pp=2,dp=2": (PIPED | {"pp": 2, "dp": 2, "microbatches": 3}, 4),
    "pp=2,zero=1": (PIPED | {"pp": 2, "dp": 2, "zero": 1, "microbatches": 3}, 4),
    "pp=2,zero=2": (PIPED | {"pp": 2, "dp": 2, "zero": 2, "microbatches": 3}, 4),
    "pp=2,zero=3": (PIPED | {"pp": 2, "dp": 2, "zero": 3, "microbatches": 3}, 4),
    "pp=2,interleaved": (PIPED | {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, 2),
    "pp=2,zbv": (PIPED | {"pp": 2, "schedule": "zbv", "microbatches": 4}, 2),
    "pp=2,interleaved_zb": (PIPED | {"pp": 2, "schedule": "interleaved_zb", "virtual_stages": 2}, 2),
    "solver": ({}, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--plans", nargs="*", default=list(PLANS), metavar="PLAN", help="; ".join(PLANS))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    pool = Pool()
    parts = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    print(
        "kB                             peak                        saved activations      the peak's parts, predicted"
    )
    print(f"{'':30}predicted measured  error  predicted measured  error  {' '.join(p[:8].rjust(8) for p in parts)}")
    worst = [0.0, 0.0]
    for name in options.models or MODELS:
        case = MODELS[name]()
        for plan in options.plans:
            fix, ranks = PLANS[plan]
            one = compare(pool, case, fix, ranks)
            # of a pipeline, what microbatches save is in the peak: how many there are, the schedule says
            errors = (one.peak_error, 0.0 if "pp" in fix else one.saved_error)
            worst = [max(w, abs(e)) for w, e in zip(worst, errors, strict=True)]
            numbers = [one.plan.peak_bytes, one.measured.peak, one.predicted.saved, one.measured.saved]
            a, b, c, d = (f"{n / 1e3:9.1f}" for n in numbers)
            c = f"{'-':>9}" if "pp" in fix else c
            held = " ".join(f"{getattr(one.plan, part) / 1e3:8.1f}" for part in parts)
            print(f"{name:8} {plan:21}{a}{b} {errors[0]:+6.1%}  {c}{d} {errors[1]:+6.1%}  {held}", flush=True)
    print(f"largest error: peak {worst[0]:.1%}, saved activations {worst[1]:.1%}")
    pool.kill()


if __name__ == "__main__":
    main()
