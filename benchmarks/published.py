"""Predicted against measured: published training runs, each priced under its own recorded plan.

    python benchmarks/published.py published_runs.yaml                    every source
    python benchmarks/published.py published_runs.yaml --only torchtitan  records whose id or source contains it
    python benchmarks/published.py published_runs.yaml --json rows.json   also every row

A record's model is built from its dimensions, its plan is fixed, and the search fills in what no record says (how
tensors lie over tp, where stages begin). A record that says something this version does not plan (experts, cp, offload,
fp8), or does not say what it takes to plan, is skipped with the reason, never guessed.

Times are given twice. By priors alone; and after one number was fitted for each (source, GPU): a factor on the speed
of all compute, so that one row is predicted exactly. That row is, of those with a time, models of 6 B and more if there
are any, at the most frequent sequence length, the one of median size (the first of equals, in the order of the file).
It is left out of the score.

Memory is compared by its kind: `allocated` with the plan's peak, `reserved` with what the allocator holds for it, and
`smi` with that and what lies outside the allocator.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import yaml
from decoder import Decoder, Shape, deepened, next_token

from costmodels.cluster import EXPECTED_COMMUNICATORS, Cluster
from costmodels.devices import GIB, Coefficients, Device, Efficiencies, device_named
from costmodels.errors import AutoparError
from costmodels.memory import outside_allocator_bytes
from costmodels.schedules import Queue
from passes.cutting import Cutter, Uncut
from passes.lower import LocalCall
from passes.pipeline import PIPELINE, problem_of
from passes.search import Search
from passes.sharding import Terms
from passes.state import State, Task, run
from passes.step import Pair, StepSeconds

WORKERS = 2
FEW = 3  # layers that are captured; the others are like them
FITTED_TO = 1e-3  # of the measured time
FIT_STEPS = 6
LARGE = 6.0  # billions of parameters
TARGET_PERCENT = {"time": 8.0, "bias": 3.0, "source": 12.0}
DEARER = 3.0  # times the work of a step: parameters, where all are cut
WITHOUT_LIMIT = 2**50  # what a plan holds is compared afterwards

# catalogue names; NVLink of an A800 or H800 is cut to 400 GB/s both ways (NVIDIA A800 data sheet)
DEVICES: Mapping[str, tuple[str, float | None]] = {
    "A100-80GB-SXM": ("a100-80", None),
    "A100-40GB-SXM": ("a100-40", None),
    "A800-80GB-SXM": ("a100-80", 200e9),
    "H100-80GB-SXM": ("h100", None),
    "H800-80GB": ("h100", 200e9),
    "H200-141GB-SXM": ("h200", None),
    "B200": ("b200", None),
    "GB200": ("gb200", None),
}
# torchtitan's: 96 GB of HBM2e, 500 W (pytorch/torchtitan benchmarks/llama3_h100_202412)
HBM2E_96 = "H100-96GB-HBM2e-500W"
HBM2E_BYTES_PER_S = 2.4e12
MEMORY_KINDS = ("allocated", "reserved", "smi")


@dataclass(frozen=True)
class Run:
    """A record that can be priced."""

    id: str
    source: str
    gpu: str
    parameters_b: float
    shape: Shape
    cluster: Cluster
    global_batch: int
    precision: str
    fix: tuple[tuple[str, int | str], ...]
    measured_s: float | None
    measured_gib: float | None
    memory_kind: str
    out_of_memory: bool
    stated: bool  # nothing of it is unknown or flagged
    topology: str  # runs of one model on one cluster are ranked among themselves


@dataclass
class Row:
    """A run with its predictions."""

    run: Run
    prior: StepSeconds
    peak_bytes: int
    fits: bool
    calibrated_s: float | None = None
    calibration: bool = False


class Skipped(Exception):
    """Why a record is not priced."""


# -- records ----------------------------------------------------------------------------------------------------------


def read(record: Mapping[str, Any]) -> Run:
    """Raises Skipped with the reason."""
    model, measured = record["model"], record["measured"]
    if model.get("experts"):
        raise Skipped("mixture of experts")
    if model.get("mla"):
        raise Skipped("latent attention")
    if record["precision"] not in ("bf16", "fp16"):
        raise Skipped(f"precision {record['precision'] or 'not stated'}")
    if (record.get("cp") or 1) > 1:
        raise Skipped("context parallelism")
    if record.get("offload") not in (None, "none"):
        raise Skipped("offload")
    for name in ("global_batch", "micro_batch", "dp", "tp", "pp", "num_gpus", "zero_stage", "recompute"):
        if record.get(name) is None:
            raise Skipped(f"{name} not stated")
    for name in ("layers", "hidden", "heads", "ffn_hidden", "vocab", "seq_len"):
        if model.get(name) is None:
            raise Skipped(f"{name} of the model not stated")
    dp, tp, pp = record["dp"], record["tp"], record["pp"]
    if dp * tp * pp != record["num_gpus"]:
        raise Skipped("dp * tp * pp is not the number of GPUs")
    if record["global_batch"] % (dp * record["micro_batch"]):
        raise Skipped("the microbatch does not divide the batch")
    recompute, fused = str(record["recompute"]), record.get("flash_attention")
    if recompute.startswith("selective (attention core)"):
        recompute, fused = "none", True  # what is recomputed is what fused attention never keeps
    if recompute not in ("none", "full"):
        raise Skipped(f"recompute {recompute}")
    fix: dict[str, int | str] = {"pp": pp, "dp": dp, "tp": tp, "zero": record["zero_stage"], "recompute": recompute}
    fix["microbatch"] = record["micro_batch"]
    if fix["zero"] and dp == 1:
        fix["zero"] = 0
    elif record.get("zero_group") and fix["zero"]:
        fix["zero_group"] = record["zero_group"]
    if pp > 1:
        if record.get("vpp") is None:
            raise Skipped("virtual stages not stated")
        fix["virtual_stages"] = record["vpp"]
        fix["schedule"] = "1f1b" if record["vpp"] == 1 else "interleaved"
    kv_heads, heads = model.get("kv_heads") or model["heads"], model["heads"]
    shape = Shape(
        layers=model["layers"],
        hidden=model["hidden"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=model.get("head_dim") or model["hidden"] // heads,
        ffn=model["ffn_hidden"],
        vocab=model["vocab"],
        sequence=model["seq_len"],
        gated=bool(model.get("gated_mlp")),
        tied=bool(model.get("tied_embeddings")),
        learned_positions=model.get("learned_pos") or 0,
        fused=fused is not False,
    )
    if shape.hidden % heads and not model.get("head_dim"):
        raise Skipped("heads do not divide the hidden size")
    kind = str(measured.get("memory_kind") or "")
    return Run(
        id=record["id"],
        source=record["source"],
        gpu=record["gpu"],
        parameters_b=model.get("params_b") or 0.0,
        shape=shape,
        cluster=cluster_of(record),
        global_batch=record["global_batch"],
        precision="bf16",  # fp16 moves and holds as much
        fix=tuple(fix.items()),
        measured_s=seconds_of(record),
        measured_gib=measured.get("peak_memory_gib"),
        memory_kind=next((k for k in MEMORY_KINDS if k in kind.replace("nvidia-smi", "smi")), ""),
        out_of_memory=bool(measured.get("oom")),
        stated=fused is not None and not record.get("known_issues"),
        topology=f"{record['source']} {model['layers']}x{model['hidden']} on {record['num_gpus']}",
    )


def seconds_of(record: Mapping[str, Any]) -> float | None:
    """Of a step, as published or from the published throughput."""
    measured, model = record["measured"], record["model"]
    if measured.get("step_time_s"):
        return float(measured["step_time_s"])
    tokens = record["global_batch"] * model["seq_len"]
    if measured.get("tokens_per_s_per_gpu"):
        return float(tokens / measured["tokens_per_s_per_gpu"] / record["num_gpus"])
    if measured.get("tokens_per_s_total"):
        return float(tokens / measured["tokens_per_s_total"])
    return None


def cluster_of(record: Mapping[str, Any]) -> Cluster:
    gpu, local = record["gpu"], min(record["gpus_per_node"] or 8, record["num_gpus"])
    if gpu == HBM2E_96:
        device, within = device_named("h100"), None
        device = replace(
            device, name="h100-hbm2e-96", memory_bytes=round(95 * GIB), memory_bytes_per_s=HBM2E_BYTES_PER_S
        )
    elif gpu in DEVICES:
        name, within = DEVICES[gpu]
        device = device_named(name)
    else:
        raise Skipped(f"{gpu} is not in the catalogue")
    nodes, left = divmod(record["num_gpus"], local)
    if left:
        raise Skipped("the GPUs do not fill their nodes")
    intra = replace(device.intra_node, bytes_per_s=within) if within else None
    between = inter_node_bytes_per_s(str(record["interconnect"] or ""), local)
    inter = replace(device.inter_node, bytes_per_s=between) if between else None
    return Cluster.of(device, nodes=nodes, devices_per_node=local, intra_node=intra, inter_node=inter)


def inter_node_bytes_per_s(text: str, local: int) -> float | None:
    """What a GPU has of its node's network, from words such as `4x100 Gb/s RoCE per node`; None where it says nothing.

    Omni-Path is 100 Gb/s a link (Intel), HDR InfiniBand 200.
    """
    if found := re.search(r"(?:(\d+)x)?(\d+) Gb/s.*per (node|GPU)", text):
        links, gigabits, per = int(found[1] or 1), int(found[2]), found[3]
        return links * gigabits * 1e9 / 8 / (local if per == "node" else 1)
    if found := re.search(r"Omni-Path, (\d+) links per node", text):
        return int(found[1]) * 100e9 / 8 / local
    if found := re.search(r"(\d+)x HDR", text):
        return int(found[1]) * 200e9 / 8 / local
    return None


# -- predictions ------------------------------------------------------------------------------------------------------


@cache
def captured(shape: Shape, rows: int) -> State:
    """A few layers of the model through the passes before the search, then all of them."""
    with torch.device("meta"):
        model = Decoder(replace(shape, layers=FEW))
    ids = torch.empty(rows, shape.sequence, dtype=torch.long, device="meta")
    anywhere = Cluster.preset("8xh100")
    task = Task(model, {"ids": ids, "labels": ids}, next_token, anywhere, rows, "bf16", "adamw", {})
    state = run(PIPELINE[:4], State(task, lambda text: None, lambda: False))
    assert state.blocked is not None, "BLOCKS has run"
    return replace(state, blocked=deepened(state.blocked, shape.layers))


class Even(Cutter):
    """Stages of as many layers each as frameworks give them; where these do not divide, the ends have fewer."""

    def cuts(self, uncut: Uncut) -> Iterator[tuple[int, ...]]:
        calls = [i for i, s in enumerate(self.settled.lowered.root.statements) if isinstance(s, LocalCall)]
        least, more = divmod(len(calls), uncut.count)
        fewer = sorted(range(uncut.count), key=lambda k: -min(k + 1, uncut.count - k))
        layers = [least + (k in fewer[:more]) for k in range(uncut.count)]
        yield tuple(calls[end] for end in accumulate(layers[:-1]))


class Recorded(Search):
    """The search within a recorded plan.

    What published runs cut over tp, they cut: a parameter element that a rank holds is priced so high that all of them
    together cost more than all work, so that none stays whole for speed.
    """

    cutter_of = Even

    def terms(self, pair: Pair, zero: int, group: int) -> Terms:
        dear = DEARER * self.bounds.seconds(pair) / max(1, self.problem.trained // pair.tp)
        return replace(super().terms(pair, zero, group), element_s=dear)


def predicted(run_: Run, speed: float = 1.0) -> tuple[StepSeconds, int]:
    """A step and its peak bytes of live tensors; `speed` is a factor on that of all compute."""
    cluster = replace(run_.cluster, device=faster(run_.cluster.device, speed), memory_limit_bytes=WITHOUT_LIMIT)
    state = captured(run_.shape, run_.global_batch)
    state = replace(state, task=replace(state.task, cluster=cluster, fix=dict(run_.fix)))
    # what was published ran on other pipelines than torch's, whose transfers hold up each other
    problem = replace(problem_of(state), queue=Queue.FREE)
    found = Recorded(problem, lambda text: None, lambda: False).run()
    return found.best.seconds, max(held.peak for held in found.by_rank)


def faster(device: Device, speed: float) -> Device:
    """The device with every operator so many times as fast."""

    def scaled(one: Coefficients) -> Coefficients:
        return Coefficients(one.peak_fraction * speed, one.bandwidth_fraction * speed, one.fixed_s / speed)

    given = {f.name: getattr(device.efficiency, f.name) for f in fields(Efficiencies)}
    changed = {name: scaled(one) for name, one in given.items() if isinstance(one, Coefficients)}
    return replace(device, efficiency=replace(device.efficiency, **changed))


def price(run_: Run) -> Row | str:
    """The row by priors, or why there is none."""
    try:
        seconds, peak = predicted(run_)
    except AutoparError as error:
        return str(error).splitlines()[0]
    return Row(run_, seconds, peak, peak <= run_.cluster.memory_limit_bytes)


def fitted_speed(run_: Run) -> float:
    """The speed at which a run takes as long as measured: by secants, since only compute scales with it."""
    assert run_.measured_s is not None, "only timed rows are fitted"
    speed, compute_share = 1.0, 1.0
    before: tuple[float, float] | None = None
    for _ in range(FIT_STEPS):
        seconds = predicted(run_, speed)[0].total
        if abs(seconds / run_.measured_s - 1) < FITTED_TO:
            break
        if before is not None and before[0] != speed:
            slope = math.log(seconds / before[1]) / math.log(speed / before[0])
            compute_share = min(1.0, max(0.2, -slope))
        before = speed, seconds
        speed *= (seconds / run_.measured_s) ** (1 / compute_share)
    return speed


def calibrated(job: tuple[Run, float]) -> float | None:
    run_, speed = job
    try:
        return predicted(run_, speed)[0].total
    except AutoparError:
        return None


# -- scores -----------------------------------------------------------------------------------------------------------


def calibration_rows(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """The row that each (source, GPU) is fitted to, as the head of this file says."""
    timed: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.run.measured_s is not None:
            timed[row.run.source, row.run.gpu].append(row)
    middle = {}
    for key, group in timed.items():
        large = [row for row in group if row.run.parameters_b >= LARGE] or group
        ((usual, _),) = Counter(row.run.shape.sequence for row in large).most_common(1)
        usual_ones = [row for row in large if row.run.shape.sequence == usual]
        sizes = sorted(row.run.parameters_b for row in usual_ones)
        middle[key] = next(r for r in usual_ones if r.run.parameters_b == sizes[(len(sizes) - 1) // 2])
    return middle


def errors(rows: Iterable[Row], of: Callable[[Row], float | None]) -> list[float]:
    """Relative errors of the predicted times of rows with both."""
    found = []
    for row in rows:
        seconds = of(row)
        if seconds is not None and row.run.measured_s is not None:
            found.append(seconds / row.run.measured_s - 1)
    return found


def percent(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> str:
    return f"{100 * of(values):8.1f}" if values else f"{'-':>8}"


def mape(values: Sequence[float]) -> float:
    return statistics.fmean(map(abs, values))


def median_error(values: Sequence[float]) -> float:
    return statistics.median(map(abs, values))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(v) + (order.count(v) - 1) / 2 for v in values]

    return statistics.correlation(ranks(a), ranks(b))


def ranking(rows: Sequence[Row], of: Callable[[Row], float | None]) -> tuple[float, float] | None:
    """Spearman's correlation, and how much slower the row that is predicted fastest is than the fastest."""
    pairs = [(p, row.run.measured_s) for row in rows if (p := of(row)) is not None and row.run.measured_s is not None]
    if len(pairs) < 5 or len({p for p, _ in pairs}) < 2:
        return None
    predicted_, measured = zip(*pairs, strict=True)
    picked = measured[predicted_.index(min(predicted_))]
    return spearman(predicted_, measured), picked / min(measured) - 1


def held_gib(row: Row) -> float | None:
    """What the row's kind of memory is predicted to be."""
    device = row.run.cluster.device
    reserved = row.peak_bytes * (1 + device.fragmentation)
    outside = outside_allocator_bytes(device, EXPECTED_COMMUNICATORS if row.run.cluster.devices > 1 else 0)
    found = {"allocated": row.peak_bytes, "reserved": reserved, "smi": reserved + outside}.get(row.run.memory_kind)
    return None if found is None else found / GIB


def report(rows: Sequence[Row], skipped: Mapping[str, Counter[str]]) -> None:
    prior, fitted = (lambda row: row.prior.total), (lambda row: None if row.calibration else row.calibrated_s)
    print("Time, % of the measured (cal: after one scalar per source and GPU, the calibration row left out)")
    print(f"{'source':30}{'GPU':22}{'rows':>5}{'MAPE':>8}{'median':>8}{'bias':>8}{'MAPE cal':>10}{'bias cal':>10}")
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.run.source, row.run.gpu].append(row)
    large = [r for r in rows if r.run.parameters_b >= LARGE and r.run.stated]
    table = [*sorted(groups.items()), ((f"all >= {LARGE:g} B, fully stated", ""), large), (("all", ""), list(rows))]
    for (source, gpu), group in table:
        before, after = errors(group, prior), errors(group, fitted)
        print(
            f"{source:30}{gpu:22}{len(before):5}{percent(before, mape)}{percent(before, median_error)}"
            f"{percent(before, statistics.fmean)}{percent(after, mape):>10}{percent(after, statistics.fmean):>10}"
        )
    print(
        "\nRanking (Spearman; regret: how much slower the predicted best is than the best), 5 rows of one model or more"
    )
    topologies: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        topologies[row.run.topology].append(row)
    for topology, group in sorted(topologies.items()):
        for name, of in (("priors", prior), ("calibrated", fitted)):
            if (found := ranking(group, of)) is not None:
                print(f"{topology:52}{name:12}{len(group):4} rows {found[0]:6.2f} {100 * found[1]:6.1f} % regret")
    print("\nMemory, % of the measured")
    for kind in MEMORY_KINDS:
        for source in sorted({r.run.source for r in rows}):
            wrong = [
                held / r.run.measured_gib - 1
                for r in rows
                if r.run.source == source and r.run.memory_kind == kind and r.run.measured_gib
                for held in [held_gib(r)]
                if held is not None
            ]
            if wrong:
                print(
                    f"{kind:10}{source:30}{len(wrong):4} rows  MAPE{percent(wrong, mape)}  bias"
                    f"{percent(wrong, statistics.fmean)}  from{percent(wrong, min)} to{percent(wrong, max)}"
                )
    died = [r for r in rows if r.run.out_of_memory]
    ran = [r for r in rows if not r.run.out_of_memory]
    print(f"\nOut of memory: {sum(not r.fits for r in died)} of {len(died)} labels predicted not to fit;", end=" ")
    print(f"{sum(not r.fits for r in ran)} of {len(ran)} that ran predicted not to fit")
    print("\nSkipped")
    for source, reasons in sorted(skipped.items()):
        for reason, count in reasons.most_common():
            print(f"{source:30}{count:5}  {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=Path("published_runs.yaml"), metavar="FILE")
    parser.add_argument("--only", metavar="NAME", default="", help="records whose id or source contains it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every row")
    options = parser.parse_args()
    if not options.file.is_file():
        parser.error(f"there is no file {options.file}")
    started = time.monotonic()
    runs: list[Run] = []
    skipped: dict[str, Counter[str]] = defaultdict(Counter)
    for record in yaml.load(options.file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if options.only not in record["id"] and options.only not in record["source"]:
            continue
        try:
            runs.append(read(record))
        except Skipped as reason:
            skipped[record["source"]][str(reason)] += 1
    order = {one.id: i for i, one in enumerate(runs)}
    runs.sort(key=lambda one: str(asdict(one.shape)))  # neighbours share a capture
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        rows = []
        for run_, row in zip(runs, pool.imap(price, runs, chunksize=4), strict=True):
            if isinstance(row, Row):
                rows.append(row)
            else:
                skipped[run_.source][row] += 1
        rows.sort(key=lambda row: order[row.run.id])
        middle = calibration_rows(rows)
        speeds = dict(
            zip(middle, pool.map(fitted_speed, [row.run for row in middle.values()], chunksize=1), strict=True)
        )
        timed = [row for row in rows if row.run.measured_s is not None]
        jobs = [(row.run, speeds[row.run.source, row.run.gpu]) for row in timed]
        for row, seconds in zip(timed, pool.imap(calibrated, jobs, chunksize=4), strict=True):
            row.calibrated_s = seconds
            row.calibration = row is middle[row.run.source, row.run.gpu]
    report(rows, skipped)
    print("\nFitted speed of all compute, of the catalogue's, and the row it was fitted to")
    for (source, gpu), row in sorted(middle.items()):
        print(f"{source:30}{gpu:22}{speeds[source, gpu]:6.3f}  {row.run.id}")
    print(f"{len(rows)} rows in {time.monotonic() - started:.0f} s")
    if options.json is not None:
        said = [
            {
                "id": row.run.id,
                "predicted_step_time_s": row.calibrated_s if row.calibrated_s is not None else row.prior.total,
                "prior_step_time_s": row.prior.total,
                "prior_time_s": asdict(row.prior),
                "measured_step_time_s": row.run.measured_s,
                "predicted_peak_bytes": row.peak_bytes,
                "calibration": row.calibration,
            }
            for row in rows
        ]
        options.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
