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
It is left out of the score. And where a dozen runs or more are of one model on one cluster, after three numbers were
fitted to three of them: the speed of all compute, the bandwidth between nodes, and what an operator takes however small
it is. Those three rows are the ones whose times, as priced, tell most of the three numbers; no measurement is looked at
to choose them.

What the software of a run does otherwise than ours is taken from the record's words, and from the public code of the
framework that it names (`stacks.py`).

Memory is compared by its kind: `allocated` with the plan's peak, `reserved` with what the allocator holds for it, and
`smi` with that and what lies outside the allocator.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from decoder import LOSSES, Decoder, Shape, deepened, of_rows
from records import MEMORY_KINDS, Run, Skipped, read
from stacks import SPLITS

from costmodels.cluster import EXPECTED_COMMUNICATORS, Cluster
from costmodels.devices import GIB, Coefficients
from costmodels.errors import AutoparError
from costmodels.groups import Collective
from costmodels.memory import FP32_BYTES, outside_allocator_bytes
from costmodels.operators import OperatorClass, operator_seconds
from costmodels.schedules import Queue
from passes.cutting import Cutter, Uncut
from passes.graph import Value
from passes.lower import LocalCall, LocalOp, LocalRegion, Reshard
from passes.pipeline import PIPELINE, problem_of
from passes.placements import Placement, S, collectives
from passes.price import Axis, local_bytes
from passes.rehearse import Rehearsal
from passes.search import Search
from passes.sharding import Programme, Sharding, Tensor, Terms
from passes.state import State, Task, run
from passes.step import StepSeconds, loads, settle, step_seconds
from passes.variant import Pair, Problem, Settled, Variant

WORKERS = 2
SEQUENCE_DIM = 1  # of what layers hand on
FEW = 3  # layers that are captured; the others are like them
FITTED_TO = 1e-3  # of the measured time
FIT_STEPS = 6
# Standard deviations: of the logarithms of the scalars around the priors, and of a measured time
SPREAD = {"speed": 0.2, "network": 1.0, "fixed": 2.0}
NOISE = 0.02
STEP = 1.05  # a scalar is varied by, for slopes
ROWS_OF_A_FIT = 12
LARGE = 6.0  # billions of parameters
DEARER = 3.0  # times the work of a step: parameters, where all are cut
WITHOUT_LIMIT = 2**50  # what a plan holds is compared afterwards

ATTENTION = "aten.scaled_dot_product_attention.default"
METRIC_BYTES = 14  # per logit: a cast to fp32, and log-softmax of that
T = TypeVar("T")


@dataclass
class Row:
    """A run with its predictions."""

    run: Run
    prior: StepSeconds
    peak_bytes: int
    flat_bytes: int  # beside them in what the allocator holds
    fits: bool
    calibrated_s: float | None = None
    calibration: bool = False


# -- predictions ------------------------------------------------------------------------------------------------------


@cache
def captured(shape: Shape, rows: int) -> State:
    """A few layers of the model through the passes before the search, then all of them."""
    with torch.device("meta"):
        model = Decoder(replace(shape, layers=FEW))
    ids = torch.empty(rows, shape.sequence, dtype=torch.long, device="meta")
    anywhere = Cluster.preset("8xh100")
    loss = LOSSES.get(shape.loss, of_rows)
    task = Task(model, {"ids": ids, "labels": ids}, loss, anywhere, rows, "bf16", "adamw", {})
    state = run(PIPELINE[:4], State(task, lambda text: None, lambda: False))
    assert state.blocked is not None, "BLOCKS has run"
    return replace(state, blocked=deepened(state.blocked, shape.layers))


class Dealt(Cutter):
    """Stages of as many layers each as the framework gives them."""

    split: Callable[[int], Sequence[int]]

    def cuts(self, uncut: Uncut) -> Iterator[tuple[int, ...]]:
        statements = self.settled.lowered.root.statements
        calls = [i for i, s in enumerate(statements) if isinstance(s, LocalCall)]
        head = max(i for i, s in enumerate(statements) if isinstance(s, LocalOp) and s.rule and s.rule.flop(s.site)[0])
        starts = [*calls, calls[-1] + 1, head + 1]  # of layers, of the head, and of what is behind it
        yield tuple(starts[end] for end in self.split(uncut.count))


class TensorParallel(Programme):
    """Products run on the part of a weight that a rank holds, as Megatron's do; activations move by `moves` alone."""

    moves: frozenset[Collective] = frozenset({Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER})

    def may_reshard(self, tensor: Tensor, source: Placement, target: Placement) -> bool:
        if not super().may_reshard(tensor, source, target):
            return False
        forward, backward = collectives(source, target)
        if tensor.producer.key[0] == "parameter" and forward is not None:
            return False
        return {forward, backward} <= {None, *self.moves}

    def solve(self, terms: Terms, seconds_limit: float = 60.0) -> Sharding | None:
        """Where that is impossible, as the planner would."""
        found = super().solve(terms, seconds_limit)
        return found or Programme(self.program, self.axis, self.rows).solve(terms, seconds_limit)


class Whole(TensorParallel):
    """Without sequence parallelism nothing but sums moves over tp, so that activations stay whole outside of it."""

    moves = frozenset({Collective.ALL_REDUCE})


class AlongSequence(TensorParallel):
    """With sequence parallelism layers hand on their part of the sequence."""

    def boundary(self, *values: Value) -> tuple[Placement, ...]:
        every = super().boundary(*values)
        return tuple(p for p in every if isinstance(p, S) and p.dim == SEQUENCE_DIM) or every


class Recorded(Search):
    """The search within a recorded plan.

    What published runs cut over tp, they cut: a parameter element that a rank holds is priced so high that all of them
    together cost more than all work, so that none stays whole for speed.
    """

    cutter_of = Dealt
    programme_of: type[Programme] = TensorParallel
    regathers = copies_heads = False
    split: Callable[[int], Sequence[int]]

    def cutter(self, settled: Settled) -> Cutter:
        found = super().cutter(settled)
        assert isinstance(found, Dealt), "as cutter_of says"
        found.split = self.split
        return found

    def rehearsed(self, variant: Variant) -> tuple[Rehearsal, ...]:
        found, ranks = super().rehearsed(variant), variant.settled.pair.tp
        more = [
            self.copies_heads * heads_bytes(region, ranks, variant.settled.pair.microbatch)
            - self.regathers * gathered_bytes(region, ranks)
            for region in variant.settled.lowered.blocks
        ]
        return tuple(
            replace(
                one,
                blocks=tuple(replace(b, saved_bytes=b.saved_bytes + m) for b, m in zip(one.blocks, more, strict=True)),
            )
            for one in found
        )

    def terms(self, pair: Pair, zero: int, group: int) -> Terms:
        dear = DEARER * self.bounds.seconds(pair) / max(1, self.problem.trained // pair.tp)
        return replace(super().terms(pair, zero, group), element_s=dear)


def heads_bytes(region: LocalRegion, ranks: int, microbatch: int) -> int:
    """Of keys and values of a layer's attention, and of what it gives: of one row that is contiguous as it is."""
    found = 0
    for s in region.statements:
        if isinstance(s, LocalOp) and s.op.target == ATTENTION:
            copied = [*zip(s.site.operands[1:3], s.strategy.operands[1:3], strict=True)]
            copied += [(s.site.results[0], s.strategy.results[0])] if microbatch > 1 else []
            found += sum(local_bytes(value, placement, ranks) for value, placement in copied)
    return found


def gathered_bytes(region: LocalRegion, ranks: int) -> int:
    """What a layer's activations grow by where they are gathered over tp."""
    weights = {p.value.name for p, _ in region.parameters}
    moved = (s for s in region.statements if isinstance(s, Reshard) and s.value.name not in weights)
    return sum(
        local_bytes(s.value, s.target, ranks) - local_bytes(s.value, s.source, ranks)
        for s in moved
        if collectives(s.source, s.target)[0] is Collective.ALL_GATHER
    )


class RecordedWhole(Recorded):
    programme_of = Whole


class RecordedAlongSequence(Recorded):
    programme_of = AlongSequence


SEARCHES = {None: Recorded, False: RecordedWhole, True: RecordedAlongSequence}  # by what is said of the sequence


@dataclass(frozen=True)
class Planned:
    """A recorded plan, found once and priced often."""

    problem: Problem
    variant: Variant
    by_rank: tuple[int, ...]  # the peak bytes of live tensors of each pp rank
    metrics_bytes: int  # that metrics move in a step

    @property
    def flat_bytes(self) -> int:
        """Of the gradients in fp32 that the optimizer makes of those in less: one block of a rank's part of them.

        The allocator keeps what activations were in, but in pieces that are too small for it.
        """
        if self.problem.gradient_bytes >= FP32_BYTES:
            return 0
        every = loads(self.problem, self.variant)
        trained = max(sum(every[stage].trained for stage in own) for own in self.variant.by_rank)
        return FP32_BYTES * trained // self.variant.shards

    def seconds(self, scalars: Scalars) -> StepSeconds:
        """A step of the plan on a cluster that is so much faster."""
        cluster = scalars.of(self.problem.cluster)
        problem, old = replace(self.problem, cluster=cluster), self.variant.settled
        axis = Axis.of(cluster, "tp", old.pair.tp, 1)
        settled = settle(problem, old.pair, replace(old.lowered.sharding, axis=axis))
        step = step_seconds(problem, replace(self.variant, settled=settled))
        metrics_s = operator_seconds(OperatorClass.LOSS, 0.0, self.metrics_bytes, "fp32", cluster.device)
        return replace(step, compute=step.compute + metrics_s) if self.metrics_bytes else step


@dataclass(frozen=True)
class Scalars:
    """Factors that a whole cluster may be calibrated by."""

    speed: float = 1.0  # of all compute
    network: float = 1.0  # of the bandwidth between nodes
    fixed: float = 1.0  # of the time that an operator takes however small it is

    def of(self, cluster: Cluster) -> Cluster:
        def scaled(one: Coefficients) -> Coefficients:
            return Coefficients(
                one.peak_fraction * self.speed, one.bandwidth_fraction * self.speed, one.fixed_s * self.fixed
            )

        device = replace(cluster.device, efficiency=cluster.device.efficiency.changed(scaled))
        inter_node = replace(cluster.inter_node, bytes_per_s=cluster.inter_node.bytes_per_s * self.network)
        return replace(cluster, device=device, inter_node=inter_node)


@cache
def planned(run_: Run, fused: bool) -> Planned:
    """Raises AutoparError where there is no such plan. `fused`: whether attention is."""
    cluster = replace(run_.cluster, memory_limit_bytes=WITHOUT_LIMIT)
    state = captured(replace(run_.shape, fused=fused), run_.global_batch)
    state = replace(state, task=replace(state.task, cluster=cluster, fix=dict(run_.fix)))
    stack = run_.stack
    problem = replace(
        problem_of(state),
        # what was published ran on other pipelines than torch's, whose transfers hold up each other
        queue=Queue.FREE,
        gradient_bytes=stack.gradient_bytes,
        beside_bytes=stack.beside_bytes,
        reduced_bytes=stack.reduced_bytes,
        sends_parts=stack.sends_parts,
        copies=stack.copies,
        accumulates=stack.accumulates,
    )
    searched = SEARCHES[run_.sequence_parallel](problem, lambda text: None, lambda: False)
    searched.regathers, searched.copies_heads = stack.regathers, stack.copies_heads
    searched.split = partial(SPLITS[stack.stages], run_.shape)
    found = searched.run()
    variant = found.best.variant
    logits = run_.global_batch // variant.settled.pair.dp * run_.shape.sequence * run_.shape.vocab  # of a rank
    moved = stack.metrics * METRIC_BYTES * logits // variant.settled.pair.tp
    return Planned(problem, variant, tuple(held.peak for held in found.by_rank), moved)


def seconds(run_: Run, scalars: Scalars) -> float:
    """Of a step. A core of attention that is recomputed is priced as one that keeps what it makes."""
    return planned(run_, run_.shape.fused and not run_.core_again).seconds(scalars).total


def price(run_: Run) -> Row | str:
    """The row by priors, or why there is none."""
    try:
        plan = planned(run_, run_.shape.fused)
        step = planned(run_, run_.shape.fused and not run_.core_again).seconds(Scalars())
    except AutoparError as error:
        return str(error).splitlines()[0]
    except Exception as error:  # one record is not to cost the others their place in the table
        return f"FAILED: {type(error).__name__}: {error}"
    held = plan.by_rank
    fits = max(held) <= run_.cluster.memory_limit_bytes
    return Row(run_, step, held[0] if run_.first_rank else max(held), plan.flat_bytes, fits)


class Workers:
    """Processes among which the runs are shared out, each with the plans of its own."""

    def __init__(self, runs: Sequence[Run]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pools = [context.Pool(1) for _ in range(WORKERS)]
        shapes = list(dict.fromkeys(one.shape for one in runs))  # those of one shape share a capture
        self.pool_of = {one: self.pools[shapes.index(one.shape) % WORKERS] for one in runs}

    def map(self, function: Callable[..., T], jobs: Iterable[tuple[Run, *tuple[Any, ...]]]) -> list[T]:
        """Of jobs whose first argument is a run."""
        begun = [self.pool_of[job[0]].apply_async(function, job) for job in jobs]
        return [one.get() for one in begun]

    def seconds(self, runs: Iterable[Run], scalars: Scalars) -> list[float]:
        return self.map(seconds, [(one, scalars) for one in runs])


# -- calibration ------------------------------------------------------------------------------------------------------


def fitted_speed(run_: Run) -> float:
    """The speed at which a run takes as long as measured: by secants, since only compute scales with it."""
    assert run_.measured_s is not None, "only timed rows are fitted"
    speed, compute_share = 1.0, 1.0
    before: tuple[float, float] | None = None
    for _ in range(FIT_STEPS):
        found = seconds(run_, Scalars(speed))
        if abs(found / run_.measured_s - 1) < FITTED_TO:
            break
        if before is not None and before[0] != speed:
            slope = math.log(found / before[1]) / math.log(speed / before[0])
            compute_share = min(1.0, max(0.2, -slope))
        before = speed, found
        speed *= (found / run_.measured_s) ** (1 / compute_share)
    return speed


def slopes(workers: Workers, runs: Sequence[Run], at: Scalars) -> tuple[list[float], torch.Tensor]:
    """Seconds of runs, and the slopes of their logarithms along those of the scalars [runs, scalars]."""
    now = workers.seconds(runs, at)
    columns = []
    for name in SPREAD:
        more = workers.seconds(runs, replace(at, **{name: getattr(at, name) * STEP}))
        columns.append([math.log(b / a) / math.log(STEP) for a, b in zip(now, more, strict=True)])
    return now, torch.tensor(columns, dtype=torch.float64).T


def telling(jacobian: torch.Tensor) -> tuple[int, ...]:
    """The three rows that by the priors tell most of the scalars (D-optimal); no error is looked at."""
    prior = torch.diag(torch.tensor([s**-2 for s in SPREAD.values()], dtype=torch.float64))

    def told(rows: tuple[int, ...]) -> float:
        part = jacobian[list(rows)]
        return float(torch.logdet(part.T @ part / NOISE**2 + prior))

    return max(combinations(range(len(jacobian)), len(SPREAD)), key=told)


def fitted_scalars(workers: Workers, runs: Sequence[Run]) -> Scalars:
    """The likeliest scalars, given the priors' and the measurements' spread (Gauss-Newton on logarithms)."""
    precision = torch.tensor([s**-2 for s in SPREAD.values()], dtype=torch.float64)
    logs = torch.zeros(len(SPREAD), dtype=torch.float64)
    for _ in range(FIT_STEPS):
        at = Scalars(**dict(zip(SPREAD, logs.exp().tolist(), strict=True)))
        now, jacobian = slopes(workers, runs, at)
        left = [math.log((one.measured_s or t) / t) for one, t in zip(runs, now, strict=True)]
        gradient = jacobian.T @ torch.tensor(left, dtype=torch.float64) / NOISE**2 - precision * logs
        step = torch.linalg.solve(jacobian.T @ jacobian / NOISE**2 + torch.diag(precision), gradient)
        logs += step.clamp(-1.0, 1.0)
        if float(step.abs().max()) < FITTED_TO:
            break
    return Scalars(**dict(zip(SPREAD, logs.exp().tolist(), strict=True)))


@dataclass(frozen=True)
class Fit:
    """Runs of one model on one cluster, after three scalars were fitted to three of them."""

    topology: str
    scalars: Scalars
    fitted_to: tuple[Row, ...]
    others: tuple[tuple[Row, float], ...]  # and their seconds


def fit_three(workers: Workers, topology: str, rows: Sequence[Row]) -> Fit:
    runs = [row.run for row in rows]
    _, jacobian = slopes(workers, runs, Scalars())
    chosen = telling(jacobian)
    scalars = fitted_scalars(workers, [runs[i] for i in chosen])
    after = workers.seconds(runs, scalars)
    others = tuple((row, after[i]) for i, row in enumerate(rows) if i not in chosen)
    return Fit(topology, scalars, tuple(rows[i] for i in chosen), others)


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
    """Spearman's correlation, and how much slower the row that is predicted fastest is than the fastest, per sample."""
    pairs = [
        (p / row.run.global_batch, row.run.measured_s / row.run.global_batch)
        for row in rows
        if (p := of(row)) is not None and row.run.measured_s is not None
    ]
    if len(pairs) < 5 or len({p for p, _ in pairs}) < 2:
        return None
    predicted_, measured = zip(*pairs, strict=True)
    picked = measured[predicted_.index(min(predicted_))]
    return spearman(predicted_, measured), picked / min(measured) - 1


def held_gib(row: Row) -> float | None:
    """What the row's kind of memory is predicted to be."""
    device = row.run.cluster.device
    reserved = (row.peak_bytes + row.flat_bytes) * (1 + device.fragmentation)
    outside = outside_allocator_bytes(device, EXPECTED_COMMUNICATORS if row.run.cluster.devices > 1 else 0)
    found = {"allocated": row.peak_bytes, "reserved": reserved, "smi": reserved + outside}.get(row.run.memory_kind)
    return None if found is None else found / GIB


def report(rows: Sequence[Row], fits: Sequence[Fit], skipped: Mapping[str, Counter[str]]) -> None:
    prior, fitted = (lambda row: row.prior.total), (lambda row: None if row.calibration else row.calibrated_s)
    print("Time, % of the measured (cal: after one scalar per source and GPU, the calibration row left out)")
    print("unflagged: the same of rows on which the data cast no doubt")
    head = f"{'source':30}{'GPU':22}{'rows':>5}{'MAPE':>8}{'median':>8}{'bias':>8}{'MAPE cal':>10}{'bias cal':>10}"
    print(f"{head}{'unflagged':>11}{'MAPE cal':>10}")
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.run.source, row.run.gpu].append(row)
    large = [r for r in rows if r.run.parameters_b >= LARGE and r.run.stated]
    table = [*sorted(groups.items()), ((f"all >= {LARGE:g} B, fully stated", ""), large), (("all", ""), list(rows))]
    for (source, gpu), group in table:
        before, after = errors(group, prior), errors(group, fitted)
        trusted = errors([row for row in group if not row.run.flagged], fitted)
        print(
            f"{source:30}{gpu:22}{len(before):5}{percent(before, mape)}{percent(before, median_error)}"
            f"{percent(before, statistics.fmean)}{percent(after, mape):>10}{percent(after, statistics.fmean):>10}"
            f"{len(trusted):11}{percent(trusted, mape):>10}"
        )
    print(
        "\nRanking (Spearman; regret: how much slower the predicted best is than the best), 5 rows of one model or more"
    )
    topologies: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        topologies[row.run.topology].append(row)
        if not row.run.flagged:
            topologies[row.run.grid].append(row)
    for topology, group in sorted(topologies.items()):
        if topology == group[0].run.grid and len({row.run.topology for row in group}) == 1:
            continue  # on one cluster
        for name, of in (("priors", prior), ("calibrated", fitted)):
            if (found := ranking(group, of)) is not None:
                print(f"{topology:72}{name:12}{len(group):4} rows {found[0]:6.2f} {100 * found[1]:6.1f} % regret")
    report_fits(fits)
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


def report_fits(fits: Sequence[Fit]) -> None:
    print(
        f"\nThree scalars, by {ROWS_OF_A_FIT} rows or more of one model on one cluster; of those that are not fitted to"
    )
    print(f"{'':62}{'rows':>5}{'MAPE':>8}{'Spearman':>10}{'regret':>8}   speed network fixed")
    for fit in fits:
        after = {row.run.id: found for row, found in fit.others}
        left = [row for row, _ in fit.others]
        wrong = errors(left, lambda row, after=after: after[row.run.id])
        ranked = ranking(left, lambda row, after=after: after[row.run.id])
        said = f"{ranked[0]:10.2f}{100 * ranked[1]:8.1f}" if ranked else f"{'-':>10}{'-':>8}"
        scalars = fit.scalars
        print(
            f"{fit.topology:62}{len(left):5}{percent(wrong, mape)}{said}   "
            f"{scalars.speed:5.2f} {scalars.network:7.2f} {scalars.fixed:5.1f}"
        )
        for row in fit.fitted_to:
            print(f"    fitted to {row.run.id}")


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
    workers = Workers(runs)
    rows = []
    for run_, row in zip(runs, workers.map(price, [(one,) for one in runs]), strict=True):
        if isinstance(row, Row):
            rows.append(row)
        else:
            skipped[run_.source][row] += 1
    timed = [row for row in rows if row.run.measured_s is not None]
    middle = calibration_rows(timed)
    speeds = dict(zip(middle, workers.map(fitted_speed, [(row.run,) for row in middle.values()]), strict=True))
    jobs = [(row.run, Scalars(speeds[row.run.source, row.run.gpu])) for row in timed]
    for row, found in zip(timed, workers.map(seconds, jobs), strict=True):
        row.calibrated_s = found
        row.calibration = row is middle[row.run.source, row.run.gpu]
    topologies: dict[str, list[Row]] = defaultdict(list)
    for row in timed:
        topologies[row.run.topology].append(row)
    fits = [
        fit_three(workers, topology, group)
        for topology, group in sorted(topologies.items())
        if len(group) >= ROWS_OF_A_FIT
    ]
    report(rows, fits, skipped)
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
                "predicted_to_fit": row.fits,
                "predicted_memory_gib": held_gib(row),
                "measured_memory_gib": row.run.measured_gib,
                "calibration": row.calibration,
            }
            for row in rows
        ]
        options.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
