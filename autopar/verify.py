"""Verifies a program: trained on local gloo processes, it must compute what the model computes on one process.

The command starts torchrun; every rank runs this module with the path of a task. Rank 0 also trains the plain model,
from the same weights on the same random batches, and compares after every step: the loss, every gradient, every
weight. All in fp32 and without dropout, whose masks one process cannot draw as several do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.report import PROGRAM, how_many, read_plan
from costmodels.errors import AutoparError, BadInput
from passes.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from autopar.runtime import Program
    from autopar.target import Target

MOST_RANKS = 8
TOLERANCE = 1e-5  # relative
FLOOR = 0.1  # root mean square that a difference is relative to at least: 1e-6 absolute
BYTES_PER_PARAMETER = 16  # weight, gradient, two moments
PATIENCE_S = 15.0  # for torchrun to end its processes before it is killed
LEARNING_RATE = 1e-3
EPSILON = 1e-3  # Adam turns a gradient that is zero but for rounding into a full update; not above this


@dataclass(frozen=True)
class Difference:
    """The worst relative difference, and where."""

    value: float = 0.0
    name: str = ""

    def worse(self, other: Difference) -> Difference:
        return other if not other.value <= self.value else self  # not a number is worst


@dataclass(frozen=True)
class Step:
    """One optimizer step: the two losses, and what the gradients and the weights after it differ by."""

    loss: float
    reference: float
    gradients: Difference
    weights: Difference

    @property
    def loss_difference(self) -> Difference:
        return Difference(abs(self.loss - self.reference) / max(abs(self.reference), 1e-12))


@dataclass(frozen=True)
class Verification:
    """What the comparison found."""

    title: str
    steps: tuple[Step, ...]
    missing: tuple[str, ...]  # parameters that the program has no gradient or no value for

    @property
    def worst(self) -> dict[str, Difference]:
        found = {"loss": Difference(), "gradients": Difference(), "weights": Difference()}
        for step in self.steps:
            of_step = {"loss": step.loss_difference, "gradients": step.gradients, "weights": step.weights}
            found = {what: found[what].worse(one) for what, one in of_step.items()}
        return found

    @property
    def passed(self) -> bool:
        return not self.missing and all(one.value <= TOLERANCE for one in self.worst.values())

    @property
    def text(self) -> str:
        lines = [self.title, "", f"{'step':>6}   {'program':>12}   {'one process':>12}   difference"]
        for i, step in enumerate(self.steps):
            lines.append(f"{i:6}   {step.loss:12.6f}   {step.reference:12.6f}   {step.loss_difference.value:.1e}")
        worst = self.worst
        said = ", ".join(
            f"{what} {one.value:.1e}" + (f" ({one.name})" if one.name and one.value > TOLERANCE else "")
            for what, one in worst.items()
        )
        lines += ["", f"worst relative difference: {said}"]
        if self.missing:
            lines.append(f"missing in the program: {', '.join(self.missing[:5])}")
        lines.append(f"{'passed' if self.passed else 'FAILED'}: the bound is {TOLERANCE:g}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Task:
    """What every rank reads."""

    program: str  # folder
    target: str
    seq_len: int | None
    steps: int
    optimizer: str
    timeout_s: float


def verify(
    folder: Path, *, steps: int = 5, timeout_s: float = 600.0, progress: Callable[[str], None] = lambda text: None
) -> Verification:
    """Run the program of a folder against its model. Raises BadInput where that cannot be done on this machine."""
    if not (folder / PROGRAM).is_file():
        raise BadInput(f"{folder}: there is no {PROGRAM} in it; name a folder that --out wrote")
    from autopar.target import located

    plan = located(read_plan(folder), folder)
    _check_that_it_can_run(plan)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as scratch:
        where, twin = folder, ""
        if plan.workload.precision != "fp32":
            progress("generating the program in fp32")
            where, twin = _in_fp32(plan, folder, Path(scratch)), ", the same plan in fp32"
        progress(f"training on {plan.mesh.devices} processes and on one")
        task = _Task(
            program=str(where.resolve()),
            target=plan.request.target,
            seq_len=plan.request.seq_len,
            steps=steps,
            optimizer=plan.workload.optimizer,
            timeout_s=timeout_s,
        )
        (Path(scratch) / "task.json").write_text(json.dumps(asdict(task)))
        _run(Path(scratch) / "task.json", plan.mesh.devices, timeout_s)
        found = json.loads((Path(scratch) / "result.json").read_text())
    mesh = "  ".join(f"{axis} {size}" for axis, size in asdict(plan.mesh).items() if size > 1) or "one device"
    processes = how_many(plan.mesh.devices, "process", "processes")
    title = f"{folder / PROGRAM}{twin}: {mesh}, {processes} against one, dropout off"
    made = [
        Step(s["loss"], s["reference"], Difference(**s["gradients"]), Difference(**s["weights"]))
        for s in found["steps"]
    ]
    return Verification(title, tuple(made), tuple(found["missing"]))


def _check_that_it_can_run(plan: Plan) -> None:
    ranks = plan.mesh.devices
    if ranks > MOST_RANKS:
        raise BadInput(f"the plan is for {ranks} devices: verify runs up to {MOST_RANKS} processes on this machine")
    if not plan.request.target:
        raise BadInput("the plan was made in Python: verify needs a TARGET to build the model from")
    needed = BYTES_PER_PARAMETER * plan.model.parameters * (1 + plan.mesh.dp)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise BadInput(
            f"{plan.model.name} has {plan.model.parameters:,} parameters: training it here twice takes "
            f"{needed / 2**30:.0f} GiB of the {memory / 2**30:.0f} GiB of this machine; verify a smaller one"
        )


def _in_fp32(plan: Plan, folder: Path, scratch: Path) -> Path:
    """The program of the same plan in fp32: two orders of the same sum agree in bf16 to two digits only."""
    from autopar.target import compile_again
    from autopar.weights import full_buffers
    from autopar.write import write_output

    _, own = compile_again(plan)
    if own.program != (folder / PROGRAM).read_text(encoding="utf-8"):
        raise BadInput(
            f"{folder / PROGRAM} computes in {plan.workload.precision} and has been edited: verify compares fp32 "
            "programs, and would have to generate this one again; plan with --precision fp32"
        )
    target, made = compile_again(plan, precision="fp32")
    write_output(scratch / "fp32", made.plan, made.program, full_buffers(target.model) | dict(made.buffers))
    return scratch / "fp32"


def _run(task: Path, ranks: int, timeout_s: float) -> None:
    """torchrun on this machine, ended with all that it started when it takes too long. Raises what went wrong."""
    scratch = task.parent
    root = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
        "AUTOPAR_VERIFY_PARENT": str(os.getpid()),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "-m", "autopar.verify", str(task)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AutoparError(
                f"no result after {timeout_s:g} s: ended; give a longer --timeout, or verify a smaller model"
            ) from None
        finally:
            _end(process)
    for kind, file in ((BadInput, scratch / "bad-input"), (AutoparError, scratch / "error")):
        if file.exists():
            raise kind(file.read_text())
    if code or not (scratch / "result.json").exists():
        last = (scratch / "log").read_text(errors="replace").strip().splitlines()[-20:]
        raise AutoparError("\n  ".join([f"torchrun ended with exit code {code}:", *last]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun; it ends its processes, and those that it does not end themselves when it is gone."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- on the ranks ---------------------------------------------------------------------------------------------------


def _work(file: Path) -> None:
    task = _Task(**json.loads(file.read_text()))
    threading.Thread(target=_end_with_torchrun, args=(os.getppid(),), daemon=True).start()
    rank = int(os.environ["RANK"])
    try:
        with without_dropout():
            _compare(task, rank, file.parent)
    except Exception as error:
        kind = "bad-input" if isinstance(error, AutoparError) else "error"
        said = str(error) if isinstance(error, AutoparError) else _told(error, task.program, rank)
        with contextlib.suppress(FileExistsError), (file.parent / kind).open("x") as first:
            first.write(said)
        traceback.print_exc()
        sys.exit(1)


def _end_with_torchrun(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _told(error: Exception, program: str, rank: int) -> str:
    """The error of a rank in one sentence, with the line of the program where there is one."""
    file = Path(program) / PROGRAM
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file]
    where = f" ({PROGRAM}:{lines[-1]})" if lines else ""
    return (
        f"the program failed on rank {rank}{where}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    )


def _compare(task: _Task, rank: int, scratch: Path) -> None:
    import torch
    import torch.distributed as dist

    from autopar.runtime import Trainer

    patient = timedelta(seconds=task.timeout_s)  # others wait while rank 0 builds and trains the plain model
    dist.init_process_group("gloo", timeout=patient)
    plain = _Plain.of(task) if rank == 0 else None
    dist.barrier()

    program = _program(Path(task.program))
    trainer = Trainer(program, _optimizer(task.optimizer), "cpu")
    buffers = Path(task.program) / "buffers.pt"
    if buffers.exists():
        trainer.load_buffers(torch.load(buffers, mmap=True, weights_only=True))
    if plain is not None:
        torch.save(plain.model.state_dict(), scratch / "weights.pt")
    dist.barrier()
    trainer.load_state_dict(torch.load(scratch / "weights.pt", mmap=True, weights_only=True))

    steps = []
    missing: set[str] = set()
    for i in range(task.steps):
        batch = program.random_batch(seed=0, step=i)
        loss = trainer.step(batch)
        gradients, weights = trainer.full_gradients(), trainer.state_dict()
        if plain is None:
            continue
        assert gradients is not None and weights is not None, "rank 0 has the whole tensors"
        reference = plain.step(batch)
        missing |= plain.missing(gradients, weights)
        steps.append(Step(loss, reference, _worst(gradients, plain.gradients()), _worst(weights, plain.weights())))
    if plain is not None:
        result = {"steps": [asdict(step) for step in steps], "missing": sorted(missing)}
        (scratch / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _program(folder: Path) -> Program:
    spec = importlib.util.spec_from_file_location("autopar_generated_program", folder / PROGRAM)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    program: Program = module.PROGRAM
    return program


def _optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    import torch

    if name == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE)
    return lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPSILON)


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Dropout gives its input back inside, attention's own as well: in models, in programs and in torch.nn."""
    import torch
    import torch.nn.functional as F

    def same(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input

    attention = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        return attention(query, key, value, **named | {"dropout_p": 0.0})

    functional = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    patches: list[tuple[Any, str, Any]] = [(F, name, same) for name in functional]
    patches += [(torch, name, same) for name in ("dropout", "dropout_", "feature_dropout", "alpha_dropout")]
    patches += [(F, "scaled_dot_product_attention", attend)]
    with contextlib.ExitStack() as stack:
        for owner, name, patch in patches:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, patch)
        yield


@dataclass
class _Plain:
    """The model as the user wrote it, trained on this process alone."""

    target: Target
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, task: _Task) -> _Plain:
        from autopar.target import load_target
        from autopar.weights import full_buffers, full_weights

        target = load_target(task.target, seq_len=task.seq_len)
        model = target.model
        weights, buffers = full_weights(model), full_buffers(model)
        materialise(model)
        model.load_state_dict(weights)
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
        return cls(target, _optimizer(task.optimizer)(p for p in model.parameters() if p.requires_grad))

    @property
    def model(self) -> nn.Module:
        return self.target.model

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """The loss of one optimizer step on the whole batch."""
        from passes.capture import forward_arguments, loss_of

        self.optimizer.zero_grad()
        own = _in_the_users_form(self.target.batch, batch)
        positional, named = forward_arguments(self.model.forward, own, self.target.loss_fn)
        output = self.model(*positional, **named)
        loss = loss_of(output) if self.target.loss_fn is None else self.target.loss_fn(output, own)
        assert loss is not None, "the model was captured with a loss"
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def gradients(self) -> dict[str, Tensor]:
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: p.grad for name, p in named if p.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def missing(self, gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> set[str]:
        """Names without a counterpart in the program; of a tied gradient one name is enough."""
        alike: dict[int, list[str]] = {}
        for name, gradient in self.gradients().items():
            alike.setdefault(id(gradient), []).append(name)
        lost = {names[0] for names in alike.values() if not any(name in gradients for name in names)}
        return lost | (self.weights().keys() - weights.keys())


def materialise(model: nn.Module) -> None:
    """Give what is on the meta device memory (zeros), and compute in fp32; ties stay."""
    import torch

    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (parameter.is_meta or parameter.dtype in (torch.bfloat16, torch.float16)):
                if id(parameter) not in made:
                    real = torch.zeros(parameter.shape) if parameter.is_meta else parameter.detach().float()
                    made[id(parameter)] = torch.nn.Parameter(real, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def _in_the_users_form(example: Any, batch: Mapping[str, Tensor]) -> Any:
    """The program's batch as the user's model takes it: the same keys, or the same positions."""
    from passes.capture import batch_leaves, refilled

    rows = next(iter(batch.values())).shape[0]

    def own(key: str | int, value: Any) -> Any:
        name = key if isinstance(key, str) and key.isidentifier() else f"input_{key}"
        if name in batch:
            return batch[name]
        # what the program does not read stays as in the example, for as many rows
        return value[[i % value.shape[0] for i in range(rows)]] if hasattr(value, "shape") and value.dim() else value

    return refilled(example, {key: own(key, value) for key, value in batch_leaves(example).items()})


def _worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Difference:
    """Over all tensors that both have: |found - wanted| / (|wanted| + FLOOR * sqrt(n))."""
    worst = Difference()
    for name in sorted(found.keys() & wanted.keys()):
        want = wanted[name].detach().double()
        if want.numel():
            off = (found[name].double() - want).norm() / (want.norm() + FLOOR * math.sqrt(want.numel()))
            worst = worst.worse(Difference(off.item(), name))
    return worst


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
