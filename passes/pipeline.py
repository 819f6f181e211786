"""The compiler: a tuple of passes, in order, and what it makes of a model."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from costmodels.cluster import Cluster
from costmodels.errors import BadInput, NoPlanFits
from costmodels.schedules import Queue, check
from passes.batch import batch_info, split_prologue
from passes.blocks import Blocked, Call, block
from passes.capture import COMPUTE_DTYPES, Captured, batch_leaves, capture
from passes.describe import alternatives, block_plans, collective_uses, headline, schedule_of
from passes.emit import RESERVED, Emission, InputSpec, emit
from passes.flop import flop
from passes.graph import COMPLEX, Size
from passes.lower import LocalOp
from passes.memory import StepBytes
from passes.normalize import normalize, repeated_names
from passes.placements import S
from passes.plan import (
    ClusterInfo,
    Fix,
    Mesh,
    ModelInfo,
    Plan,
    Request,
    SolverReport,
    Stage,
    StageMemory,
    TimeSplit,
    Workload,
    Zero,
)
from passes.rules import rule_of
from passes.rules.base import Site
from passes.search import Search
from passes.state import Pass, State, Task, made, run
from passes.step import timetable
from passes.variant import OPTIMIZER_COSTS, Problem

# -- the passes: each takes the state and returns a new one -----------------------------------------------------------


def capture_(state: State) -> State:
    task = state.task
    state.progress("capturing the model")
    captured = capture(task.model, task.batch, task.loss_fn, task.precision)
    return replace(state, captured=captured, graph=captured.graph, notes=state.notes + captured.notes)


def normalize_(state: State) -> State:
    state.progress("normalizing the graph")
    graph, notes = normalize(made(state.graph, "the graph"))
    for p in graph.parameters:
        if not p.buffer and p.value.dtype in COMPLEX:
            raise BadInput(f"parameter {p.name} is complex, which is not supported; keep its real and imaginary parts")
    if not any(p.value.grad for p in graph.parameters):
        raise BadInput(f"no parameter of {state_name(state)} that requires a gradient reaches the loss")
    return replace(state, graph=graph, notes=state.notes + notes)


def batch_(state: State) -> State:
    captured: Captured = made(state.captured, "the capture")
    info = batch_info(made(state.graph, "the graph"), frozenset(i.name for i in captured.inputs if i.rows))
    if captured.coupled and captured.example_rows != state.task.global_batch:
        raise BadInput(
            f"a global batch of {state.task.global_batch} rows needs an example batch of as many: {captured.coupled}"
        )
    if captured.coupled:
        info = replace(info, coupled=captured.coupled, normalizers=())
    graph, prologue = split_prologue(made(state.graph, "the graph"), info)
    return replace(state, batch=info, graph=graph, prologue=prologue)


def blocks_(state: State) -> State:
    classes = {
        name: type(m).__name__ for name, m in state.task.model.named_modules() if name.rpartition(".")[2].isdigit()
    }
    return replace(state, blocked=block(made(state.graph, "the graph"), classes, RESERVED))


def search_(state: State) -> State:
    """STRATEGIES and SEARCH: every pair of degrees is sharded by the programme, the best variant is kept."""
    problem = problem_of(state)
    search = Search(problem, state.progress, state.deadline)
    try:
        found = search.run()
    except NoPlanFits as error:
        tried = remedies(problem, search, state)
        raise NoPlanFits(f"{error}\n  Tried and would fit: {'; '.join(tried)}." if tried else str(error)) from None
    return replace(state, found=found, lowered=found.best.variant.settled.lowered)


def emit_(state: State) -> State:
    found, task = made(state.found, "the plan"), state.task
    variant = found.best.variant
    pair = variant.settled.pair
    emission = replace(
        open_emission(state),
        title=headline(state_name(state), variant, task),
        mesh={axis: getattr(pair, axis) for axis in pair.order if axis != "pp" or pair.pp > 1},
        zero=variant.zero,
        zero_group=variant.group,
        microbatch=pair.microbatch,
        microbatches=pair.microbatches(task.global_batch),
        recompute=variant.recompute_by_stage,
        cuts=variant.staging.cuts if variant.staging else (),
        schedule=variant.schedule,
    )
    return replace(state, program=emit(variant.settled.lowered, emission), plan=plan_of(state))


def remedies(problem: Problem, failed: Search, state: State) -> list[str]:
    """Changes that were tried and that fit: more devices of the same kind, more memory on each."""
    cluster, found = problem.cluster, []
    pinned = {"pp", "dp", "tp"} & set(problem.fix)
    for times in () if pinned else (2, 4, 8):
        state.progress(f"nothing fits; trying {times * cluster.devices} devices")
        if cluster.nodes > 1 or cluster.device.kind == "cuda":
            wider = replace(cluster, nodes=cluster.nodes * times)
        else:
            wider = replace(cluster, devices_per_node=cluster.devices_per_node * times)
        if Search(replace(problem, cluster=wider), state.progress, state.deadline).fits_at_all():
            found.append(f"{wider.devices} devices")
            break
    needed = failed.least_peak_bytes
    if needed and needed < cluster.device.memory_bytes:
        found.append(f"a memory limit of {math.ceil(needed / 2**30 * 1e4) / 1e4:g} GiB")
    return found


# -- what they promise ------------------------------------------------------------------------------------------------


def every_value_is_written_once(state: State) -> None:
    repeated = repeated_names(made(state.graph, "the graph"))
    assert not repeated, f"written twice: {repeated}"


def every_value_is_written_before_it_is_read(state: State) -> None:
    graph = made(state.graph, "the graph")
    known = {v.name for v in graph.inputs} | {p.value.name for p in graph.parameters}
    for op in graph.ops:
        missing = [name for name in op.operands if name not in known]
        assert not missing, f"{op} reads {missing} before they are written"
        known |= {v.name for v in op.results}
    assert graph.loss in known, f"the loss {graph.loss} is never written"


def every_operator_is_in_one_place(state: State) -> None:
    program: Blocked = made(state.blocked, "the blocks")
    count = sum(1 for s in program.body if not isinstance(s, Call))
    count += sum(len(program.blocks[call.block].ops) for call in program.calls)
    assert count == len(made(state.graph, "the graph").ops), "operators were lost or doubled"


def the_plan_fits(state: State) -> None:
    found = made(state.found, "the plan")
    limit = state.task.cluster.memory_limit_bytes
    assert found.best.bytes.peak <= limit, f"{found.best.bytes.peak} bytes exceed the limit of {limit}"


def every_operand_lies_as_wanted(state: State) -> None:
    lowered = made(state.lowered, "the local program")
    for region, _ in lowered.regions():
        for statement in region.statements:
            if isinstance(statement, LocalOp):
                for name, wanted in zip(statement.op.operands, statement.strategy.operands, strict=True):
                    lies = region.locals[name].placement
                    assert lies == wanted, f"{statement.op.name} wants {name} as {wanted}, it lies as {lies}"


def no_rank_waits_for_ever(state: State) -> None:
    variant = made(state.found, "the plan").best.variant
    if variant.staging is not None:
        check(timetable(variant, variant.settled.pair.microbatches(state.task.global_batch)))


CAPTURE = Pass(capture_, ensures=(every_value_is_written_before_it_is_read,))
NORMALIZE = Pass(normalize_, ensures=(every_value_is_written_once,))
BATCH = Pass(batch_)
BLOCKS = Pass(blocks_, ensures=(every_operator_is_in_one_place,))
SEARCH = Pass(search_, ensures=(the_plan_fits, every_operand_lies_as_wanted, no_rank_waits_for_ever))
EMIT = Pass(emit_)

PIPELINE = (CAPTURE, NORMALIZE, BATCH, BLOCKS, SEARCH, EMIT)


# -- the compiler's door ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """A plan, the text of its program, and the values of buffers that no checkpoint holds."""

    plan: Plan
    program: str
    buffers: Mapping[str, torch.Tensor]
    captured: Captured


def compile_model(
    model: nn.Module,
    cluster: Cluster,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    global_batch: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    fused: bool = True,
    fix: Fix | None = None,
    target: str = "",
    seq_len: int | None = None,
    memory_limit_gib: float | None = None,
    time_limit_s: float | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[str], None] = lambda text: None,
) -> Compiled:
    """Plan and write the training of `model` on `cluster`.

    `fused`: the optimizer holds no temporaries, as the program's own does not.
    After `time_limit_s`, or once `stop` says so, it is the best plan of those priced so far, with its gap. Raises
    BadInput for options that cannot be, CaptureError where the model cannot be traced, NoPlanFits where no plan meets
    the memory limit.
    """
    if precision not in COMPUTE_DTYPES:
        raise BadInput(f"precision {precision!r} is not known; use one of {', '.join(COMPUTE_DTYPES)}")
    if optimizer not in OPTIMIZER_COSTS:
        raise BadInput(f"optimizer {optimizer!r} is not known; use one of {', '.join(OPTIMIZER_COSTS)}")
    if memory_limit_gib is not None:
        cluster = cluster.with_memory_limit(int(memory_limit_gib * 2**30))
    rows = next((t.shape[0] for t in batch_leaves(batch).values() if isinstance(t, torch.Tensor) and t.dim()), 1)
    if not rows:
        raise BadInput("the batch has no rows")
    if global_batch is not None and global_batch < 1:
        raise BadInput(f"a global batch of {global_batch} rows is not possible; it must be positive")
    started = time.monotonic()
    task = Task(
        model, batch, loss_fn, cluster, global_batch or rows, precision, optimizer, dict(fix or {}), target, seq_len,
        memory_limit_gib, fused,
    )  # fmt: skip

    def is_over() -> bool:
        return stop() or (time_limit_s is not None and time.monotonic() - started > time_limit_s)

    state = run(PIPELINE, State(task, progress, is_over))
    plan = made(state.plan, "the plan")
    plan = replace(plan, solver=replace(plan.solver, seconds=round(time.monotonic() - started, 3)))
    captured = made(state.captured, "the capture")
    return Compiled(plan, made(state.program, "the program"), dict(captured.constants), captured)


def state_name(state: State) -> str:
    return str(made(state.captured, "the capture").name)


def problem_of(state: State) -> Problem:
    """What SEARCH needs of the state."""
    task, info = state.task, made(state.batch, "the batch analysis")
    blocked: Blocked = made(state.blocked, "the blocks")
    return Problem(
        program=blocked,
        rows={name: s for name, s in info.spread.items() if isinstance(s, S)},
        cluster=task.cluster,
        global_batch=task.global_batch,
        precision=task.precision,
        optimizer=task.optimizer,
        fused=task.fused,
        separable=info.coupled,
        emission=open_emission(state),
        fix=task.fix,
        frozen=frozen(state),
        # over NCCL torch posts all transfers of a rank to one stream; gloo has none
        queue=Queue.RANK if task.cluster.device.kind == "cuda" else Queue.FREE,
    )


def frozen(state: State) -> frozenset[str]:
    """Full names of parameters that get no gradient: frozen by the user, never read, or read behind a detach."""
    return frozenset(name for name, p in made(state.blocked, "the blocks").all_parameters() if not p.value.grad) | {
        p.name for p in unread(state)
    }


def unread(state: State) -> tuple[Any, ...]:
    """Parameters and buffers of the model that the loss does not depend on."""
    graph = made(state.graph, "the graph")
    read = {name for op in (*graph.ops, *state.prologue) for name in op.operands}
    return tuple(p for p in graph.parameters if p.value.name not in read)


def open_emission(state: State) -> Emission:
    """What the program says whatever the plan."""
    task, captured = state.task, made(state.captured, "the capture")
    leaves = batch_leaves(task.batch)
    inputs = []
    for one in captured.inputs:
        tensor = leaves[one.key]
        low, high = bounds(tensor)
        shape = tuple(tensor.shape[1:] if one.rows else tensor.shape)
        inputs.append(InputSpec(one.name, shape, str(tensor.dtype).removeprefix("torch."), one.rows, low, high))
    info = made(state.batch, "the batch analysis")
    return Emission(
        title="", mesh={}, zero=0, zero_group=1, microbatch=1, microbatches=1, rows=task.global_batch,
        precision=task.precision, optimizer=task.optimizer, inputs=tuple(inputs), prologue=state.prologue,
        normalizers=info.normalizers, recompute=(), frozen=frozen(state), unread=unread(state),
    )  # fmt: skip


def bounds(tensor: torch.Tensor) -> tuple[float, float]:
    """The range of an integer input in the example, for random data."""
    if tensor.is_floating_point() or tensor.is_meta or tensor.numel() == 0:
        return 0, 1
    low = int(tensor.min())
    return max(0, low), max(int(tensor.max()), max(0, low)) + 1


def plan_of(state: State) -> Plan:
    """The plan as everyone reads it."""
    task, found = state.task, made(state.found, "the search's answer")
    captured: Captured = made(state.captured, "the capture")
    best = found.best
    variant, seconds = best.variant, best.seconds
    pair = variant.settled.pair
    cluster = task.cluster
    program: Blocked = made(state.blocked, "the blocks")
    parameters = [(n, p) for n, p in program.all_parameters() if not p.buffer]
    total = sum(p.value.elements for _, p in parameters)
    still = frozen(state)
    trained = sum(p.value.elements for name, p in parameters if name not in still)
    used = pair.pp * pair.dp * pair.tp
    tokens = task.global_batch * (captured.seq_len or 1)
    stages = [block_plans(variant, number) for number in range(len(variant.stages))]
    warnings = [*state.notes, *unruled(state)]
    if cluster.devices != used:
        warnings.append(f"{cluster.devices - used} of {cluster.devices} devices are idle")
    coupled = made(state.batch, "the batch analysis").coupled
    if coupled:
        warnings.append(f"no data parallelism or microbatches: {coupled}")
    if captured.seq_len is None:
        warnings.append("the batch has no sequence: tokens_per_s_per_device counts samples")
    if cluster.profile is None:
        warnings.append("times are catalogue priors, not calibrated on this cluster")
    else:
        warnings += cluster.profile.doubts(cluster.device, cluster.devices, cluster.devices_per_node)
    peak_flop = cluster.device.peak_flop_per_s(task.precision)
    return Plan(
        status="optimal" if found.proved else "feasible",
        model=ModelInfo(captured.name, total, trained, fingerprint(program)),
        cluster=ClusterInfo(
            cluster.name, cluster.devices, cluster.nodes, cluster.device.name, str(cluster.profile or "")
        ),
        workload=Workload(task.global_batch, captured.seq_len, task.precision, task.optimizer),
        mesh=Mesh(pp=pair.pp, dp=pair.dp, tp=pair.tp),
        rank_order=pair.order,
        idle_devices=cluster.devices - used,
        zero=Zero(variant.zero, variant.group),
        schedule=schedule_of(variant, task.global_batch),
        stages=tuple(Stage(blocks, {b.name: b.recomputed for b in blocks if b.count}) for blocks in stages),
        step_time_s=seconds.total,
        tokens_per_s_per_device=tokens / seconds.total / used,
        mfu=model_flop(program, task.global_batch) / (seconds.total * used * peak_flop),
        time_s=TimeSplit(
            compute=seconds.compute,
            tp_comm=seconds.tp_comm,
            dp_comm=seconds.dp_comm,
            pp_comm=seconds.pp_comm,
            bubble=seconds.bubble,
            recompute=seconds.recompute,
            optimizer=seconds.optimizer,
        ),
        memory=tuple(stage_memory(rank, held, cluster.memory_limit_bytes) for rank, held in enumerate(found.by_rank)),
        solver=SolverReport(
            name="best-first over SCIP",
            status="optimal" if found.proved else "feasible",
            objective_s=seconds.total,
            bound_s=found.bound_s,
            gap=max(0.0, 1 - found.bound_s / seconds.total),
            seconds=0.0,
            enumerated=found.enumerated,
            pruned=found.enumerated - found.visited - found.unvisited,
            solved=found.solved,
            unvisited=found.unvisited,
        ),
        alternatives=alternatives(found, task.global_batch),
        warnings=tuple(warnings),
        collectives=collective_uses(problem_of(state), variant),
        request=Request(
            task.target, cluster.name, task.global_batch, task.seq_len, task.precision, task.optimizer, dict(task.fix),
            task.memory_limit_gib,
        ),
    )  # fmt: skip


def stage_memory(rank: int, held: StepBytes, limit_bytes: int) -> StageMemory:
    """The fullest moment of a pp rank by what fills it."""
    return StageMemory(
        stage=rank,
        peak_bytes=held.peak,
        limit_bytes=limit_bytes,
        parameters=held.static.parameters,
        gradients=held.static.gradients,
        optimizer=held.static.optimizer,
        activations=held.activations,
        logits=held.logits,
        buffers=held.static.buffers + held.transient + held.inputs,
        reserved_overhead=0,
    )


def unruled(state: State) -> list[str]:
    """Operators without a rule, which every tensor-parallel rank repeats."""
    program: Blocked = made(state.blocked, "the blocks")
    ops = [op for _, ops, _ in program.regions() for op in ops]
    names = sorted({op.target for op in ops if rule_of(op.target) is None and not op.target.startswith("autopar.")})
    return [f"no sharding rule, so repeated on every tp rank: {', '.join(names)}"] if names else []


def model_flop(program: Blocked, rows: int) -> float:
    """Forward and backward FLOP of one step, recompute not counted."""
    regions = program.at(1).regions()
    total = sum(n * sum(flop(Site.of(op, values), rule_of(op.target))) for values, ops, n in regions for op in ops)
    return float(total * rows)


def fingerprint(program: Blocked) -> str:
    """A digest of names, shapes and operators; the batch size does not enter."""
    text = [f"{name} {p.value.shape} {p.value.dtype}" for name, p in program.all_parameters()]
    for op in (op for _, ops, _ in program.regions() for op in ops):
        shapes = [tuple(str(n) if isinstance(n, Size) else n for n in v.shape) for v in op.results]
        text.append(f"{op.target} {shapes}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
