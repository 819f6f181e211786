"""The command line: plan, show, generate, dryrun, verify, calibrate.

Exit 0 = done, 1 = no plan fits or a check failed, 2 = bad input; errors are one sentence on stderr. Whatever takes
long to import (torch, the solver) is imported inside the commands.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from costmodels.errors import AutoparError, BadInput, CaptureError, PlanMismatch
from passes.plan import FIX_KEYS, VERSION, Plan

if TYPE_CHECKING:
    from autopar.report import MeasuredRun
    from autopar.target import Target
    from costmodels.profile import Profile
    from passes.pipeline import Compiled

DONE, FAILED, BAD, INTERRUPTED = 0, 1, 2, 130
LOGGED_S = 15.0  # between two lines of progress where nobody watches
DEBUG = "--debug"  # taken out of the arguments before they are parsed: it may stand anywhere

WORDS = {
    "schedule": ("none", "gpipe", "1f1b", "interleaved", "zbv", "interleaved_zb"),
    "recompute": ("none", "selective", "full"),
}
USAGE_ERROR = typer.BadParameter.__mro__[1]  # of click, which some versions of typer carry inside

app = typer.Typer(
    help="Plan how to split a PyTorch model over a cluster, and write the parallel program.",
    epilog=f"{DEBUG}, anywhere, shows the traceback of an error.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="file.py:function, or hf:PATH/config.json (a config on disk)")
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="FILE|PRESET", help="cluster.yaml, or such as 2x8xh100, cpu:4")
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch", metavar="N", min=1, help="rows per step; default: the batch of TARGET, hf: 1 a device"
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", metavar="N", min=1, help="tokens per row of an hf: target; default: its longest"),
]
Precision = Annotated[Literal["bf16", "fp32"], typer.Option("--precision", help="of compute")]
Optimizer = Annotated[Literal["adamw", "sgd"], typer.Option("--optimizer")]
FixOption = Annotated[str | None, typer.Option("--fix", metavar="K=V,...", help=f"pin choices: {', '.join(FIX_KEYS)}")]
MemoryLimit = Annotated[
    float | None, typer.Option("--memory-limit", metavar="GiB", help="what a plan may fill of each device")
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit", metavar="SECONDS", help="then the best plan so far, with its gap; Ctrl-C does the same"
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="also write the plan as JSON; - is stdout, and only that")
]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="also write plan.yaml and program.py")]
BlocksOption = Annotated[bool, typer.Option("--blocks", help="every block, the costliest collectives, the ranks")]


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if version:
        print(f"autopar {VERSION}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        raise BadInput("no command given: plan, show, generate, dryrun, verify or calibrate; see autopar --help")


@app.command()
def plan(
    target: TargetArgument,
    cluster: ClusterOption = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    fix: FixOption = None,
    memory_limit: MemoryLimit = None,
    time_limit: TimeLimit = None,
    json: JsonOption = None,
    out: OutOption = None,
) -> int:
    """Find the fastest plan for TARGET on a cluster, and show it."""
    from autopar.report import check_output_folder, write_text

    if out is not None:
        check_output_folder(out)
    asked = (target, cluster, global_batch, seq_len, precision, optimizer, fix, memory_limit)
    loaded, made = _compiled(*asked, time_limit)
    if out is not None:
        _write(out, made.plan, loaded, made)
    if str(json) == "-":
        print(made.plan.to_json())
        return DONE
    if json is not None:
        write_text(json, made.plan.to_json() + "\n")
    print(_rendered(made.plan), end="")
    if out is not None:
        print(f"\n{out}: written; to train: {_launch(made.plan, out / 'program.py')}")
    return DONE


@app.command()
def show(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.yaml, its folder, or what --json wrote")],
    blocks: BlocksOption = False,
    json: JsonOption = None,
) -> int:
    """Show a saved plan and, of a folder whose program was run, what that measured."""
    from autopar.report import read_plan, read_run, write_text

    saved, measured = read_plan(plan, any_version=True), read_run(plan)
    if str(json) == "-":
        print(saved.to_json())
        return DONE
    if json is not None:
        write_text(json, saved.to_json() + "\n")
    print(_rendered(saved, blocks, measured), end="")
    return DONE


@app.command()
def generate(
    plan: Annotated[str, typer.Argument(metavar="PLAN|TARGET", help="a saved plan, or a target to plan now")],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="for plan.yaml and program.py")] = None,
    cluster: ClusterOption = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    precision: Annotated[Literal["bf16", "fp32"] | None, typer.Option("--precision", help="default: bf16")] = None,
    optimizer: Annotated[Literal["adamw", "sgd"] | None, typer.Option("--optimizer", help="default: adamw")] = None,
    fix: FixOption = None,
    memory_limit: MemoryLimit = None,
    time_limit: TimeLimit = None,
) -> int:
    """Write the program of a saved plan, or of TARGET planned now, to a folder."""
    from autopar.report import check_output_folder, read_plan

    if out is None:
        raise BadInput("generate needs --out DIR, the folder to write")
    check_output_folder(out)
    options = {
        "--cluster": cluster, "--global-batch": global_batch, "--seq-len": seq_len, "--precision": precision,
        "--optimizer": optimizer, "--fix": fix, "--memory-limit": memory_limit, "--time-limit": time_limit,
    }  # fmt: skip
    if _is_target(plan):
        asked = (plan, cluster, global_batch, seq_len, precision or "bf16", optimizer or "adamw", fix, memory_limit)
        loaded, made = _compiled(*asked, time_limit)
        _write(out, made.plan, loaded, made)
    else:
        if given := [name for name, value in options.items() if value is not None]:
            raise BadInput(f"{', '.join(given)}: a saved plan has its own; give a TARGET to plan anew")
        from autopar.target import compile_again, located

        saved = located(read_plan(Path(plan)), Path(plan))
        with _progress() as progress:
            loaded, made = compile_again(saved, progress=progress)
        same = ("mesh", "rank_order", "zero", "schedule", "stages", "idle_devices")
        if changed := [name for name in same if getattr(made.plan, name) != getattr(saved, name)]:
            raise PlanMismatch(f"{plan} cannot be made again: {', '.join(changed)} would differ; plan anew")
        _write(out, saved, loaded, made)
    print(f"{out}: written; to train: {_launch(made.plan, out / 'program.py')}")
    return DONE


@app.command()
def dryrun(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="what --out wrote")],
    rank: Annotated[int, typer.Option("--rank", metavar="R", min=0, help="of the plan's world")] = 0,
) -> int:
    """Run the program of one rank on fake tensors, whatever the world size: memory and collectives against the plan."""
    from autopar.dryrun import dryrun as run

    with _progress() as progress:
        found = run(folder, rank, progress)
    print(found.text, end="")
    return DONE if found.as_planned else FAILED


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="what --out wrote")],
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="optimizer steps")] = 5,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="then all processes are ended")
    ] = 600.0,
) -> int:
    """Train a program on local gloo processes and the model on one process; compare losses, gradients, weights."""
    if not timeout > 0:
        raise BadInput(f"--timeout {timeout:g}: expected a positive number of seconds")
    from autopar.verify import verify as run

    with _progress() as progress:
        found = run(folder, steps=steps, timeout_s=timeout, progress=progress)
    print(found.text, end="")
    return DONE if found.passed else FAILED


@app.command()
def calibrate(
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="the profile to write")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="FILE|PRESET", help="what this machine is; default: detected")
    ] = None,
    from_step: Annotated[
        Path | None, typer.Option("--from-step", metavar="PLAN", help="correct --out by a measured step of this plan")
    ] = None,
    measured: Annotated[
        float | None, typer.Option("--measured", metavar="SECONDS", help="of that step; default: its run.yaml")
    ] = None,
) -> int:
    """Measure this machine, under torchrun every device of it, and write a profile for cluster files."""
    if out is None:
        raise BadInput("calibrate needs --out FILE, the profile to write")
    if out.is_dir() or not out.absolute().parent.is_dir():  # said before minutes are spent
        raise BadInput(f"--out {out}: {'is a folder' if out.is_dir() else f'there is no folder {out.parent}'}")
    doubts: tuple[str, ...] = ()
    if from_step is not None:
        if cluster is not None:
            raise BadInput("--cluster: a profile that is corrected has its own; leave it out beside --from-step")
        if os.environ.get("RANK", "0") != "0":
            return DONE
        profile = _corrected(out, from_step, measured)
    elif measured is not None:
        raise BadInput("--measured belongs to --from-step PLAN")
    else:
        from autopar.calibrate import calibrate as run
        from costmodels.cluster import Cluster

        machines = Cluster.detect() if cluster is None else Cluster.load(cluster, calibrated=False)
        with _progress() as progress:
            profile = run(machines, progress)
        doubts = profile.doubts(machines.device, machines.devices, machines.devices_per_node)
    if os.environ.get("RANK", "0") == "0":
        from autopar.report import write_text

        write_text(out, profile.to_yaml(VERSION))
        print(f"{out}: written; to use it: `profile: {out.name}` in a cluster file beside it")
        for doubt in doubts:
            print(f"autopar: warning: {doubt}", file=sys.stderr)
    return DONE


def _corrected(out: Path, plan: Path, measured: float | None) -> Profile:
    """The profile in `out`, or the catalogue's priors where there is none, after a measured step of a plan."""
    from autopar.calibrate import corrected, without_measurements
    from autopar.report import read_plan, read_run
    from costmodels.profile import Profile

    saved, run = read_plan(plan), read_run(plan)
    if measured is None and run is None:
        raise BadInput("--from-step needs --measured SECONDS, or the folder of a program that was run")
    seconds = measured if measured is not None else run.step_time_s if run is not None else 0.0
    if not 0 < seconds < float("inf"):
        raise BadInput(f"--measured {seconds:g}: expected a positive number of seconds")
    profile = Profile.from_yaml(out) if out.exists() else None
    if saved.cluster.profile != str(profile or ""):
        uses = saved.cluster.profile or "the catalogue's priors"
        raise BadInput(f"{plan} was made by {uses}, not by {profile or f'{out}, which is not there'}: plan again first")
    return corrected(profile or without_measurements(saved), saved, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG]
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
            result = typer.main.get_command(app).main(words, prog_name="autopar", standalone_mode=False)
            sys.stdout.flush()
    except BrokenPipeError:  # `autopar show plan.yaml | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        print(f"autopar: {_sentence(error)}", file=sys.stderr)
        return _exit_code(error)
    return result if isinstance(result, int) else DONE


def _exit_code(error: Exception) -> int:
    bad = isinstance(error, BadInput | CaptureError | PlanMismatch) or not isinstance(error, AutoparError)
    return BAD if bad else FAILED


def _sentence(error: Exception) -> str:
    if isinstance(error, AutoparError):
        return str(error)
    if isinstance(error, USAGE_ERROR):
        said = " ".join(getattr(error, "format_message", error.__str__)().split()).rstrip(".")
        return f"{said[:1].lower()}{said[1:]}; see autopar --help"
    said = str(error).strip().partition("\n")[0]
    return f"a fault of autopar, not yours: {type(error).__name__}: {said}; {DEBUG} shows where"


def _compiled(
    target: str,
    cluster: str | None,
    global_batch: int | None,
    seq_len: int | None,
    precision: str,
    optimizer: str,
    fix: str | None,
    memory_limit: float | None,
    time_limit: float | None = None,
) -> tuple[Target, Compiled]:
    """Load a target and plan it. All that is wrong with the options is said before anything slow begins."""
    if cluster is None:
        raise BadInput("no --cluster given: a cluster file, or a preset such as 8xh100, 2x8xh100 or cpu:4")
    if memory_limit is not None and not 0 < memory_limit < float("inf"):
        raise BadInput(f"--memory-limit {memory_limit:g}: expected a positive number of GiB")
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise BadInput(f"--time-limit {time_limit:g}: expected a positive number of seconds")
    pinned = parse_fix(fix)
    from costmodels.cluster import Cluster

    machines = Cluster.load(cluster)
    with _progress() as progress, _stoppable() as stop:
        progress("loading the model")
        from autopar.target import load_target
        from passes.pipeline import compile_model

        # What the user's code and the libraries print is not the answer: stdout may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            loaded = load_target(target, seq_len=seq_len)
            if global_batch is None and target.startswith("hf:"):
                global_batch = machines.devices
            made = compile_model(
                loaded.model,
                machines,
                loaded.batch,
                loaded.loss_fn,
                global_batch=global_batch,
                precision=precision,
                optimizer=optimizer,
                fix=pinned,
                target=target,
                seq_len=seq_len,
                memory_limit_gib=memory_limit,
                time_limit_s=time_limit,
                stop=stop,
                progress=progress,
            )
    # The compiler knows a cluster by its name; what makes it again is the word that was given here.
    return loaded, replace(made, plan=replace(made.plan, request=replace(made.plan.request, cluster=cluster)))


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: once ends the search with the best plan so far, once more ends everything."""
    pressed = False

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        print("stopping with the best plan so far; once more to give up", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _write(out: Path, plan: Plan, target: Target, made: Compiled) -> None:
    from autopar.weights import full_buffers
    from autopar.write import write_output

    write_output(out, plan, made.program, full_buffers(target.model) | dict(made.buffers))


def parse_fix(text: str | None) -> dict[str, int | str]:
    """`tp=2,zero=1` as a mapping; what the values mean together is the compiler's to judge."""
    fixed: dict[str, int | str] = {}
    for part in (text or "").split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not part.strip():
            continue
        if not equals or not value:
            raise BadInput(f"--fix {part.strip()}: expected key=value, such as tp=2,zero=1")
        if key not in FIX_KEYS:
            raise BadInput(f"--fix {key}: not known; the keys are {', '.join(FIX_KEYS)}")
        if key in fixed:
            raise BadInput(f"--fix {key} is given twice")
        fixed[key] = _fixed_value(key, value)
    return fixed


def _fixed_value(key: str, value: str) -> int | str:
    if key in WORDS:
        if value not in WORDS[key]:
            raise BadInput(f"--fix {key}={value}: expected one of {', '.join(WORDS[key])}")
        return value
    least = 0 if key == "zero" else 1
    if not value.isdecimal() or int(value) < least or (key == "zero" and int(value) > 3):
        raise BadInput(
            f"--fix {key}={value}: expected {'0, 1, 2 or 3' if key == 'zero' else 'a positive whole number'}"
        )
    return int(value)


def _is_target(text: str) -> bool:
    return text.startswith("hf:") or ".py:" in text or text.endswith(".py")


def _launch(plan: Plan, program: Path) -> str:
    """How to start a program: on one machine, or the same words on each node."""
    ranks, per_node = plan.mesh.devices, plan.cluster.devices // plan.cluster.nodes
    if ranks <= per_node:
        return f"torchrun --nproc-per-node {ranks} {program}"
    if ranks % per_node:
        return f"torchrun, {ranks} processes, up to {per_node} on a node, {program}"
    return f"torchrun --nnodes {ranks // per_node} --nproc-per-node {per_node} --rdzv-endpoint HOST:PORT {program}"


def _rendered(plan: Plan, blocks: bool = False, measured: MeasuredRun | None = None) -> str:
    from autopar.report import render

    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return render(plan, blocks=blocks, colour=colour, measured=measured)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is going on, on stderr of the first process: a line that changes, or in a log one now and then."""
    if os.environ.get("RANK", "0") != "0":
        yield lambda text: None
        return
    if not sys.stderr.isatty():
        said_at = time.monotonic()

        def say(text: str) -> None:
            nonlocal said_at
            if time.monotonic() - said_at >= LOGGED_S:
                said_at = time.monotonic()
                print(f"autopar: {text}", file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(text)
