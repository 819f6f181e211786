"""The plan that is chosen against every other one, run for real on this machine.

    python benchmarks/regret.py                    two models on 2 and on 4 gloo processes
    python benchmarks/regret.py --ranks 2          on 2 alone
    python benchmarks/regret.py --slow-link 200    2 nodes: network namespaces joined by 200 Mb/s (needs root)
    python benchmarks/regret.py --quick            fewer plans: ZeRO 0 and 3, one number of microbatches
    python benchmarks/regret.py --json FILE        also every plan with its seconds

The processes are calibrated first (`autopar calibrate`), plans are made by that profile. Then every plan of a mesh,
ZeRO stage, schedule and number of microbatches that fits, and the planner's own choice, trains the same model in the
same processes: each plan takes a step, then each takes its next, so that what else the machine does meets all of them.

spearman   rank correlation of predicted and measured seconds (medians over the rounds); also of plans of one stage
regret     how much slower the planner's choice is than the plan that was fastest: median of the rounds' ratios

Where there are more processes than cores, one that waits gives its core to another: the profile says how many run at
once, and pipelines are priced so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# ruff: noqa: E402

import torch
import torch.distributed as dist
from published import spearman
from runtime import MODELS, ROWS, batch, fresh
from torch import Tensor

from autopar.calibrate import calibrate
from autopar.job import load_program
from autopar.runtime import Trainer
from costmodels.cluster import Cluster
from costmodels.errors import AutoparError
from passes.pipeline import compile_model

ROUNDS = 7
WARM_UP_STEPS = 2
MICROBATCHES = (1, 2, 4)
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("interleaved_zb", 2))
TARGET_SPEARMAN, TARGET_REGRET = 0.8, 0.05
TIMEOUT_S = 1200.0
HOSTS = ("10.77.0.1", "10.77.0.2")
DEVICE = "autopar0"  # of each namespace


def cores() -> int:
    return len(os.sched_getaffinity(0))


# -- where ranks run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Nodes, how many processes on each, and what a command is put behind to run on a node."""

    cluster: Cluster
    inside: tuple[tuple[str, ...], ...]  # by node
    host: str
    interface: str

    @classmethod
    def local(cls, ranks: int) -> Machine:
        return cls(Cluster.preset(f"cpu:{ranks}"), ((),), "127.0.0.1", "lo")

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(*args)` returns on rank 0, run on every rank; its processes are gone afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            job, answer = Path(folder, "job"), Path(folder, "answer")
            job.write_bytes(pickle.dumps((function.__name__, args)))
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            processes = [self._start(rank, port, job, answer) for rank in range(self.cluster.devices)]
            try:
                for process in processes:
                    if process.wait(TIMEOUT_S):
                        raise SystemExit(f"{function.__name__} failed on {self.cluster.name}")
            finally:
                for process in processes:
                    process.kill()
            return pickle.loads(answer.read_bytes())

    def _start(self, rank: int, port: int, job: Path, answer: Path) -> subprocess.Popen[bytes]:
        node, local = divmod(rank, self.cluster.devices_per_node)
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(self.cluster.devices),
            "LOCAL_WORLD_SIZE": str(self.cluster.devices_per_node), "MASTER_ADDR": self.host, "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        words = [*self.inside[node], sys.executable, __file__, "--worker", str(job), str(answer)]
        return subprocess.Popen(words, env=environment)


@contextlib.contextmanager
def two_nodes(megabits_per_s: int) -> Iterator[Machine]:
    """Two network namespaces joined by a slow link, with half of the cores each; both are removed afterwards."""
    names = [f"autopar-{os.getpid()}-{node}" for node in (0, 1)]

    def do(command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True)

    try:
        for name in names:
            do(f"ip netns add {name}")
        do(f"ip link add {DEVICE} netns {names[0]} type veth peer name {DEVICE} netns {names[1]}")
        for name, host in zip(names, HOSTS, strict=True):
            do(f"ip -n {name} addr add {host}/24 dev {DEVICE}")
            do(f"ip -n {name} link set lo up")
            do(f"ip -n {name} link set {DEVICE} up")
            do(f"tc -n {name} qdisc add dev {DEVICE} root tbf rate {megabits_per_s}mbit burst 64kb latency 100ms")
        each = max(1, cores() // 2)
        name = f"2 nodes of {each}, {megabits_per_s} Mb/s between"
        cluster = Cluster.of(Cluster.preset("cpu:1").device, nodes=2, devices_per_node=each, name=name)
        yield Machine(cluster, tuple(("ip", "netns", "exec", name) for name in names), HOSTS[0], DEVICE)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


# -- what ranks do ----------------------------------------------------------------------------------------------------


def race(model: str, programs: Mapping[str, tuple[str, Mapping[str, Tensor]]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of every program, round by round; the slowest rank's."""
    dist.init_process_group("gloo")
    whole, original = batch(), fresh(model)
    trainers: dict[str, Trainer] = {}
    for name, (program, buffers) in programs.items():
        trainers[name] = trainer = Trainer(load_program(program), partial(torch.optim.AdamW, fused=True), "cpu")
        trainer.load_state_dict(original.state_dict())
        trainer.load_buffers(dict(original.named_buffers()) | dict(buffers))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(WARM_UP_STEPS + rounds):
        for name, trainer in trainers.items():
            dist.barrier()
            began = time.perf_counter()
            trainer.step(whole)
            taken = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= WARM_UP_STEPS:
                seconds[name].append(taken.item())
    return seconds


WORK = {function.__name__: function for function in (calibrate, race)}


def work(job: Path, answer: Path) -> None:
    """One rank of Machine.run."""
    name, args = pickle.loads(job.read_bytes())
    value = WORK[name](*args)
    if os.environ["RANK"] == "0":
        answer.write_bytes(pickle.dumps(value))
    dist.barrier()


# -- one row of the table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """A plan: as it is pinned, what was predicted, and what each round measured, in seconds."""

    fix: str
    chosen: bool
    predicted_s: float
    measured_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.measured_s)


def pins(devices: int, quick: bool) -> Iterator[dict[str, int | str]]:
    """Every mesh over all devices with every ZeRO stage, schedule and number of microbatches, or some of them."""
    degrees = [n for n in range(1, devices + 1) if devices % n == 0]
    for pp, tp, m in product(degrees, degrees, MICROBATCHES):
        dp, left = divmod(devices, pp * tp)
        if left or not dp or ROWS % (dp * m) or (quick and m != (2 if pp > 1 else 1)):
            continue
        schedules = SCHEDULES if pp > 1 else (("none", 1),)
        stages = ((0, 3) if quick else (0, 1, 2, 3)) if dp > 1 else (0,)
        for zero, (schedule, virtual) in product(stages, schedules):
            fix: dict[str, int | str] = {"pp": pp, "dp": dp, "tp": tp, "microbatches": m, "zero": zero}
            yield fix | ({"schedule": schedule, "virtual_stages": virtual} if pp > 1 else {}) | {"recompute": "none"}


def plans(
    machine: Machine, model: str, quick: bool
) -> tuple[dict[str, float], dict[str, tuple[str, Mapping[str, Tensor]]], str]:
    """Seconds and program of every plan that fits, and which of them the planner chooses."""
    predicted: dict[str, float] = {}
    programs: dict[str, tuple[str, Mapping[str, Tensor]]] = {}

    def add(fix: Mapping[str, int | str]) -> str:
        made = compile_model(fresh(model), machine.cluster, batch(), precision="fp32", optimizer="adamw", fix=fix)
        for name, (program, _) in programs.items():
            if program == made.program:
                return name
        name = " ".join(f"{key}={value}" for key, value in made.plan.fixed().items() if value not in (1, "none"))
        predicted[name], programs[name] = made.plan.step_time_s, (made.program, made.buffers)
        return name

    for fix in pins(machine.cluster.devices, quick):
        with contextlib.suppress(AutoparError):  # what is refused is no plan
            add(fix)
    return predicted, programs, add({})


def row(machine: Machine, model: str, rounds: int, quick: bool) -> tuple[list[Timed], float, float]:
    """Every plan of a model, Spearman's correlation, and the regret of the choice."""
    predicted, programs, chosen = plans(machine, model, quick)
    measured = machine.run(race, model, programs, rounds)
    timed = [Timed(name, name == chosen, predicted[name], tuple(measured[name])) for name in programs]
    best = min(timed, key=lambda one: one.median_s)
    own = next(one for one in timed if one.chosen)
    regret = statistics.median(a / b for a, b in zip(own.measured_s, best.measured_s, strict=True)) - 1
    return timed, ranking(timed), regret


def ranking(timed: Sequence[Timed]) -> float:
    return spearman([one.predicted_s for one in timed], [one.median_s for one in timed])


def compare(machine: Machine, models: Sequence[str], rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Calibrate, and print a table for every model."""
    profile = machine.run(calibrate, machine.cluster)
    machine = replace(machine, cluster=machine.cluster.with_profile(profile))
    said = []
    for model in models:
        timed, correlation, regret = row(machine, model, rounds, quick)
        whole = ranking([one for one in timed if "pp=" not in one.fix])
        timed.sort(key=lambda one: one.median_s)
        met = correlation >= TARGET_SPEARMAN and regret <= TARGET_REGRET
        print(
            f"\n{model} on {machine.cluster.name}: {len(timed)} plans, Spearman {correlation:.2f} "
            f"({TARGET_SPEARMAN}; of one stage {whole:.2f}), regret {100 * regret:.1f} % ({100 * TARGET_REGRET:.0f})"
            f"{'' if met else '   MISS'}"
        )
        if machine.cluster.devices > cores():
            print(f"{machine.cluster.devices} processes share {cores()} cores")
        print(f"{'measured ms':>12}{'predicted':>11}  plan")
        for one in timed:
            ms = f"{1e3 * one.median_s:12.1f}{1e3 * one.predicted_s:11.1f}"
            print(f"{ms}  {one.fix}{'   <- chosen' if one.chosen else ''}", flush=True)
        said.append(
            {"model": model, "cluster": machine.cluster.name, "spearman": correlation, "regret": regret}
            | {"plans": [asdict(one) for one in timed]}
        )
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="processes; default 2 4")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS), help="default: both")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"steps of each plan; default {ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="fewer plans")
    parser.add_argument("--slow-link", type=int, metavar="MBIT", help="two namespaces joined by a link of so many Mb/s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every plan")
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("ended"))  # processes and namespaces go first
    if options.worker:
        work(*options.worker)
        return
    said: list[dict[str, Any]] = []
    if options.slow_link is None:
        for ranks in options.ranks:
            said += compare(Machine.local(ranks), options.models, options.rounds, options.quick)
    elif not shutil.which("ip") or not shutil.which("tc"):
        print("skipped: network namespaces need `ip` and `tc`")
    else:
        try:
            with two_nodes(options.slow_link) as machine:
                said += compare(machine, options.models, options.rounds, options.quick)
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode().strip()
            print(f"skipped: network namespaces are not permitted here: {' '.join(error.cmd)}: {reason}")
    if options.json is not None:
        options.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
