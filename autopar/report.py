"""A plan for people: as text on one screen, and read back from the file that holds it."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path

from costmodels.errors import BadInput, PlanMismatch
from costmodels.files import Unlike, read_mapping, typed
from passes.plan import VERSION, Alternative, BlockPlan, CollectiveUse, Plan, Schedule, Stage, StageMemory, Zero

WIDTH = 100
LABEL = 11  # columns
BAR = 22
SHOWN_BLOCKS = 8
SHOWN_ALTERNATIVES = 4
SHOWN_WARNINGS = 4
SHOWN_COLLECTIVES = 10
LISTED = 16  # numbers in a row
NAMED = 48  # columns for what an alternative is
GRID = 8  # rows and columns of ranks before some are left out
SAID_ABOVE = ("not calibrated", "devices are idle")  # by the line of the cluster

TIMES = {
    "compute": "compute", "tp_comm": "tp", "dp_comm": "dp", "cp_comm": "cp", "ep_comm": "ep", "pp_comm": "pp",
    "bubble": "bubble", "recompute": "recompute", "optimizer": "optimizer",
}  # fmt: skip
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "reserved_overhead")
TITLES = {"adamw": "AdamW", "sgd": "SGD"}


@dataclass(frozen=True)
class HeldBytes:
    """The fullest process of a pp rank, by CUDA's allocator."""

    stage: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class MeasuredRun:
    """What a program wrote about its own run (run.yaml, see autopar/runtime/launch.py)."""

    date: str
    device: str
    torch: str
    ranks: int
    steps: int
    step_time_s: float  # the median
    fastest_step_s: float
    slowest_step_s: float
    memory: tuple[HeldBytes, ...] = ()  # nothing on CPUs


# -- text -----------------------------------------------------------------------------------------------------------


def render(plan: Plan, *, blocks: bool = False, colour: bool = False, measured: MeasuredRun | None = None) -> str:
    """The plan on one screen; with `blocks` also every block, the costliest collectives and where each rank is.

    `measured`: a run of its program, beside what the plan predicts.
    """
    paragraphs = [
        [*entry("model", _model(plan)), *entry("cluster", _cluster(plan))],
        [*entry("plan", _choice(plan)), *entry("step", _step(plan))],
        entry("memory", _memory(plan)),
        entry("measured", _measured(plan, measured) if measured is not None else ()),
        entry("blocks", [*_blocks(plan.stages, SHOWN_BLOCKS if not blocks else None), *_spread(plan.stages)]),
        [_solver(plan), *entry("next best", _alternatives(plan))],
        entry("warnings", _warnings(plan.warnings, SHOWN_WARNINGS if not blocks else None)),
    ]
    if blocks:
        paragraphs += [entry("traffic", _collectives(plan)), entry("ranks", _ranks(plan))]
    text = "\n\n".join("\n".join(lines) for lines in paragraphs if lines) + "\n"
    return _coloured(text) if colour else text


def entry(label: str, lines: Iterable[str]) -> list[str]:
    """Lines with the label before the first, and as much space before the others."""
    return [f"{label if i == 0 else '':{LABEL}}{line}".rstrip() for i, line in enumerate(lines)]


def _model(plan: Plan) -> list[str]:
    work, model = plan.workload, plan.model
    size = f"{_count(model.parameters)} parameters"
    if model.trainable_parameters != model.parameters:
        size += f" ({_count(model.trainable_parameters)} trainable)"
    sequence = [] if work.seq_len is None else [f"sequence {work.seq_len:,}"]
    optimizer = TITLES.get(work.optimizer, work.optimizer)
    facts = ", ".join([size, *sequence, f"global batch {work.global_batch:,}", work.precision, optimizer])
    return _wrapped(f"{model.name}   {facts}", indent="  ")


def _cluster(plan: Plan) -> list[str]:
    cluster = plan.cluster
    machines = f"{how_many(cluster.nodes, 'node')} of {cluster.devices // cluster.nodes:,} {cluster.device}"
    idle = f"{plan.idle_devices:,} of {cluster.devices:,} idle" if plan.idle_devices else "none idle"
    if not cluster.profile:
        return [f"{machines}, {idle}; catalogue priors, not calibrated"]
    return [f"{machines}, {idle}", f"times by {cluster.profile}"]


def _choice(plan: Plan) -> list[str]:
    mesh, schedule = asdict(plan.mesh), plan.schedule
    shown = [f"{axis} {size}" for axis, size in mesh.items() if size > 1 or axis in ("pp", "dp", "tp")]
    zero = _zero(plan.zero) or "no ZeRO"
    batches = f"{how_many(schedule.microbatches, 'microbatch', 'microbatches')} of {schedule.microbatch}"
    line = "   ".join(shown) + f"    {zero}    {batches}"
    return [line + (f"    {_schedule(schedule)}" if plan.mesh.pp > 1 else "")]


def _schedule(schedule: Schedule) -> str:
    virtual = f", {schedule.virtual_stages} virtual stages" if schedule.virtual_stages > 1 else ""
    return schedule.name + virtual


def _zero(zero: Zero) -> str:
    return f"ZeRO-{zero.stage} over {zero.group}" if zero.stage else ""


def _step(plan: Plan) -> list[str]:
    unit = "tokens/s" if plan.workload.seq_len is not None else "samples/s"
    speed = f"{_significant(plan.tokens_per_s_per_device)} {unit} per device"
    first = f"{_seconds(plan.step_time_s)}   {speed}   MFU {f'{plan.mfu:.2f}' if plan.mfu >= 0.005 else '<0.01'}"
    total = plan.time_s.total
    if total <= 0:
        return [first]
    shares = {TIMES[name]: seconds / total for name, seconds in asdict(plan.time_s).items()}
    large = sorted((item for item in shares.items() if item[1] >= 0.005), key=lambda item: -item[1])
    parts = [f"{name} {100 * share:.0f} %" for name, share in large]
    rest = 1 - sum(share for _, share in large)
    if rest >= 0.005:
        parts.append(f"other {100 * rest:.0f} %")
    return [first, "  ".join(parts)]


def _memory(plan: Plan) -> list[str]:
    """The fullest place on pp against its limit, and what fills it."""
    if not plan.memory:
        return []
    fullest = max(plan.memory, key=lambda one: (one.peak_bytes / one.limit_bytes, -one.stage))
    unit, divisor = _byte_unit(fullest.limit_bytes)
    small, small_divisor = _byte_unit(fullest.peak_bytes)
    if small != unit:  # megabytes in gigabytes: two numbers with their own units
        used = f"{_in(fullest.peak_bytes, small_divisor)} {small} of {_in(fullest.limit_bytes, divisor)} {unit}"
    else:
        used = f"{_in(fullest.peak_bytes, divisor)} of {_in(fullest.limit_bytes, divisor)} {unit}"
    where = f"   pp {fullest.stage}, the fullest of {len(plan.memory)}" if len(plan.memory) > 1 else ""
    return [f"{_bar(fullest)}  {used} per device{where}", *_wrapped(_parts(fullest, small_divisor), indent="")]


def _measured(plan: Plan, run: MeasuredRun) -> list[str]:
    """Time and memory of a run against the plan's."""
    steps = f"median of {how_many(run.steps, 'step')}, {_seconds(run.fastest_step_s)} to {_seconds(run.slowest_step_s)}"
    where = f"{run.date[:10]}, {how_many(run.ranks, 'rank')} on {run.device}, torch {run.torch}"
    lines = [f"step {_seconds(run.step_time_s)} {_off(plan.step_time_s, run.step_time_s)}   {steps}"]
    predicted = {one.stage: one.peak_bytes for one in plan.memory}
    pairs = [(one, predicted[one.stage]) for one in run.memory if one.stage in predicted]
    if pairs:
        one, peak = max(pairs, key=lambda pair: pair[0].allocated_bytes)
        stage = f" on pp {one.stage}" if len(pairs) > 1 else ""
        held = f"peak {bytes_for_people(one.allocated_bytes)}{stage} {_off(peak, one.allocated_bytes)}"
        lines.append(f"{held}   {bytes_for_people(one.reserved_bytes)} reserved")
    return [*lines, where]


def _off(predicted: float, measured: float) -> str:
    """How far a prediction is from what was measured."""
    return f"(predicted {100 * (predicted / measured - 1):+.1f} %)" if measured else ""


def _bar(memory: StageMemory) -> str:
    full = memory.peak_bytes / memory.limit_bytes
    blocks = min(BAR, math.ceil(BAR * full)) if full > 0 else 0
    return "█" * blocks + "░" * (BAR - blocks)


def _parts(memory: StageMemory, divisor: int) -> str:
    names = {part: part.replace("reserved_overhead", "overhead") for part in PARTS}
    return "  ".join(
        f"{names[part]} {_in(size, divisor)}"
        for part in PARTS
        if (size := getattr(memory, part)) or part == "parameters"
    )


def _blocks(stages: Sequence[Stage], most: int | None) -> list[str]:
    """One line per distinct block; a block that several stages run stands once."""
    merged: dict[tuple[str, str], BlockPlan] = {}
    for block in (block for stage in stages for block in stage.blocks):
        before = merged.get((block.name, block.sharding), BlockPlan(block.name, 0, 0, block.sharding))
        merged[block.name, block.sharding] = BlockPlan(
            block.name, before.count + block.count, before.recomputed + block.recomputed, block.sharding
        )
    named = [(f"{b.count} x {b.name}" if b.count > 1 else b.name, b) for b in merged.values()]
    column = min(30, max((len(name) for name, _ in named), default=0)) + 3
    lines = []
    for name, block in named[:most]:
        again = f"{block.recomputed} of {block.count} " if block.recomputed < block.count else ""
        recomputed = f", {again}recomputed" if block.recomputed else ""
        text = f"{name:{column - 3}}   {block.sharding}{recomputed}"
        lines += _wrapped(text, indent=" " * column, most=None if most is None else 2 if len(named) <= 4 else 1)
    if most is not None and len(named) > most:
        lines.append(f"and {len(named) - most} more: show with --blocks")
    return lines


def _spread(stages: Sequence[Stage]) -> list[str]:
    """How many layers each stage of a pipeline has, and recomputes where it is not all or none of them."""
    counts = [sum(block.count for block in stage.blocks) for stage in stages]
    again = [sum(block.recomputed for block in stage.blocks) for stage in stages]
    if len(stages) == 1 or not any(counts):
        return []
    text = f"stages {_listed(counts)} layers"
    if any(again) and again != counts:
        text += f", of them {_listed(again)} recomputed"
    return [_cut(text)]


def _listed(counts: Sequence[int]) -> str:
    """Numbers in a row; of many, equal neighbours together."""
    if len(counts) <= LISTED:
        return ", ".join(map(str, counts))
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    if len(runs) <= LISTED // 2:
        return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in runs)
    return f"{min(counts)} to {max(counts)}"


def _solver(plan: Plan) -> str:
    solver = plan.solver
    if plan.status == "optimal":
        found = "proved optimal"
    elif math.isfinite(solver.gap):
        found = f"best found, optimality gap {100 * solver.gap:.1f} %"
    else:
        found = "best found, without a bound"
    took = f", {_seconds(solver.seconds)}" if solver.seconds else ""
    skipped = f", {solver.unvisited:,} skipped" if solver.unvisited else ""
    priced = solver.enumerated - solver.pruned - solver.unvisited
    counts = f"{how_many(solver.enumerated, 'candidate')}, {solver.pruned:,} pruned{skipped}, {priced:,} priced"
    return f"{found}: {counts}{took}"


def _alternatives(plan: Plan) -> list[str]:
    limit = max((one.limit_bytes for one in plan.memory), default=0)
    rows = []
    others: dict[str, Alternative] = {}
    for other in plan.alternatives:
        others.setdefault(_difference(plan, other), other)  # pipelines that differ only in where they are cut: the best
    for name, other in list(others.items())[:SHOWN_ALTERNATIVES]:
        fits = not limit or other.peak_bytes <= limit
        slower = f"{100 * (other.step_time_s / plan.step_time_s - 1):+.1f} %" if fits and plan.step_time_s else "-"
        rows.append((name, slower, other.why_not))
    first = max((len(name) for name, _, _ in rows if len(name) <= NAMED), default=NAMED)
    second = max((len(slower) for _, slower, _ in rows), default=0)
    lines = []
    for name, slower, why in rows:
        if len(name) > first:  # a line of its own
            lines.append(_cut(name))
            name = ""
        lines.append(_cut(f"{name:{first}}   {slower:>{second}}   {why}"))
    return lines


def _difference(plan: Plan, other: Alternative) -> str:
    """What an alternative is: its axes, and of the rest what differs from the plan."""
    parts = [f"{axis} {size}" for axis, size in asdict(other.mesh).items() if size > 1] or ["one device"]
    if other.zero != plan.zero:
        parts.append(f"ZeRO-{other.zero.stage}" if other.zero.stage else "no ZeRO")
        if other.zero.stage and other.zero.group != other.mesh.dp:
            parts[-1] += f" over {other.zero.group}"
    parts += _schedule_difference(plan, other)
    layers = sum(block.recomputed for stage in plan.stages for block in stage.blocks)
    if other.recompute not in (plan.fixed()["recompute"], f"{layers} layers"):
        again = "1 layer" if other.recompute == "1 layers" else other.recompute
        parts.append("no recompute" if again == "none" else f"{again} recomputed")
    elif (other.mesh, other.zero, other.schedule) == (plan.mesh, plan.zero, plan.schedule):
        parts.append("other stages")
    return "  ".join(parts)


def _schedule_difference(plan: Plan, other: Alternative) -> list[str]:
    parts = []
    ways = [(one.name, one.virtual_stages) for one in (plan.schedule, other.schedule)]
    if other.mesh.pp > 1 and (plan.mesh.pp == 1 or ways[0] != ways[1]):
        parts.append(_schedule(other.schedule))
    if other.schedule.microbatch != plan.schedule.microbatch:
        parts.append(f"microbatch {other.schedule.microbatch}")
    return parts


def _warnings(warnings: Sequence[str], most: int | None) -> list[str]:
    warnings = [one for one in warnings if not any(said in one for said in SAID_ABOVE)]
    lines = [line for text in warnings[:most] for line in _wrapped(text, indent="  ", most=2 if most else None)]
    if most is not None and len(warnings) > most:
        lines.append(f"and {len(warnings) - most} more: show with --blocks")
    return lines


def _collectives(plan: Plan) -> list[str]:
    """The costliest collectives of a step."""
    merged: dict[tuple[str, str, str, int], CollectiveUse] = {}  # what stages have in common
    for one in plan.collectives:
        key = one.name, one.axis, one.tensor, one.full_bytes
        before = merged.get(key, replace(one, count=0, seconds=0.0))
        merged[key] = replace(before, count=before.count + one.count, seconds=before.seconds + one.seconds)
    used = sorted(merged.values(), key=lambda one: (-one.seconds, one.name, one.axis, one.tensor))
    rows = [
        (one.name, one.axis, one.tensor, bytes_for_people(one.full_bytes), f"{one.count:,} x", _seconds(one.seconds))
        for one in used[:SHOWN_COLLECTIVES]
    ]
    widths = [min(40, max((len(row[i]) for row in rows), default=0)) for i in range(6)]
    lines = [
        "   ".join(
            f"{cell if len(cell) <= width else cell[: width - 1] + '…':{'<' if i < 3 else '>'}{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    if len(used) > SHOWN_COLLECTIVES:
        rest = used[SHOWN_COLLECTIVES:]
        lines.append(f"and {len(rest)} more, {_seconds(sum(one.seconds for one in rest))} together")
    if lines and plan.mesh.pp > 1:
        lines.append(f"of the {len(plan.stages)} stages together, which work at the same time")
    return lines


def _ranks(plan: Plan) -> list[str]:
    """Which rank has which place: rows are the outer axes, columns the innermost; of a pipeline also its stages."""
    *outer, inner = ((axis, getattr(plan.mesh, axis)) for axis in plan.rank_order)
    axes = [(axis, size) for axis, size in outer if size > 1 or axis == "dp"]
    held = _stages_by_rank(plan)
    width = max(len(f"{inner[0]} {inner[1] - 1}"), len(str(plan.mesh.devices - 1)))
    columns = _elided(inner[1])
    rows = [("", [f"{'...' if j is None else f'{inner[0]} {j}':>{width}}" for j in columns])]
    for place in _places(axes):
        named = [f"{f'{axis} {i}':{len(f'{axis} {size - 1}')}}" for (axis, size), i in zip(axes, place, strict=False)]
        if place and place[-1] is None:
            rows.append(("  ".join([*named[:-1], "..."]), [f"{'...':>{width}}" for _ in columns]))
            continue
        first = 0
        for (axis, size), i in zip(axes, place, strict=True):
            first = first * size + (i or 0)
            if axis == "pp":
                stages = held[i or 0]
                named.append(f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}")
        ranks = ["..." if j is None else str(first * inner[1] + j) for j in columns]
        rows.append(("  ".join(named), [f"{rank:>{width}}" for rank in ranks]))
    names = max(len(name) for name, _ in rows)
    return ["  ".join([f"{name:{names}}", *cells]) for name, cells in rows]


def _places(axes: Sequence[tuple[str, int]]) -> list[tuple[int | None, ...]]:
    """Places on the axes, in the order of ranks; None, which stands for several, is the last of its place."""
    if math.prod(size for _, size in axes) <= GRID or len(axes) == 1:
        shown = [_elided(size) for _, size in axes]
    else:  # all stages, and of the rest the ends
        shown = [_elided(size) if axis == "pp" else _elided(size, 2) for axis, size in axes]
    every = product(*shown)
    return list(dict.fromkeys(place[: place.index(None) + 1] if None in place else place for place in every))


def _stages_by_rank(plan: Plan) -> list[list[int]]:
    """The stages of each pp rank, as torch lays them: 0 1 0 1, or for zbv 0 1 1 0."""
    pp = plan.mesh.pp
    found: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(pp * plan.schedule.virtual_stages):
        turn, place = divmod(stage, pp)
        found[pp - 1 - place if plan.schedule.name == "zbv" and turn % 2 else place].append(stage)
    return found


def _elided(count: int, most: int = GRID) -> list[int | None]:
    """All numbers below `count`, or the first ones, None, and the last."""
    if count <= most:
        return list(range(count))
    return [*range(max(1, most - 2)), None, count - 1]


def _wrapped(text: str, *, indent: str, most: int | None = None) -> list[str]:
    width = WIDTH - LABEL
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, replace_whitespace=False, break_on_hyphens=False, max_lines=most,
        placeholder=" …",
    )  # fmt: skip
    return lines or [""]


def _cut(text: str) -> str:
    width = WIDTH - LABEL
    return text if len(text) <= width else text[: width - 2].rstrip() + " …"


def _coloured(text: str) -> str:
    """Labels in bold, as a terminal shows them."""
    lines = []
    for line in text.splitlines():
        label = line[:LABEL].strip()
        if (
            label
            and line[LABEL - 1 : LABEL] == " "
            and line[:1] != " "
            and not line.startswith(("proved", "best found"))
        ):
            line = f"\x1b[1m{line[:LABEL]}\x1b[0m{line[LABEL:]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


# -- numbers --------------------------------------------------------------------------------------------------------


def _significant(value: float) -> str:
    """Three significant digits, with separators from a thousand on."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    return f"{rounded:,.{max(0, digits)}f}"


def _count(value: int) -> str:
    """A number of parameters: 8.03 B."""
    for size, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{_significant(value / size)} {name}"
    return str(value)


def how_many(count: int, one: str, many: str = "") -> str:
    """A count with its noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _seconds(value: float) -> str:
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size or name == "µs":
            return f"{_significant(value / size)} {name}"
    raise AssertionError("the last unit takes what is left")


def _byte_unit(value: int) -> tuple[str, int]:
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size / 10 or name == "KiB":
            return name, size
    raise AssertionError("the last unit takes what is left")


def _in(value: int, divisor: int) -> str:
    scaled = value / divisor
    return f"{scaled:,.1f}" if scaled >= 0.05 or value == 0 else "<0.1"


def bytes_for_people(value: int) -> str:
    unit, divisor = _byte_unit(value)
    return f"{_in(value, divisor)} {unit}"


# -- files ----------------------------------------------------------------------------------------------------------

PLAN, PROGRAM, RUN = "plan.yaml", "program.py", "run.yaml"


def check_output_folder(folder: Path) -> None:
    """Raise BadInput where a folder cannot be written, or holds what autopar has not written: before the long work."""
    if not folder.exists():
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise BadInput(f"{folder}: cannot be written: {above} is not a folder that you may write to")
        return
    if not folder.is_dir():
        raise BadInput(f"{folder} is a file: --out names a folder")
    found = {one.name for one in folder.iterdir()}
    if not found:
        return
    from autopar.write import OURS

    foreign = sorted(found - OURS)
    if foreign or not {PLAN, PROGRAM} <= found:
        what = f"holds {', '.join(foreign[:3])}" if foreign else f"has no {PLAN} and {PROGRAM}"
        raise BadInput(f"{folder} is not empty and not an output of autopar alone (it {what}): name another folder")


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    scratch = file.with_name(f".{file.name}-{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise BadInput(f"{file}: cannot be written: {error.strerror}") from None


def read_plan(path: Path, *, any_version: bool = False) -> Plan:
    """The plan that a file (plan.yaml, or what --json wrote) or the folder with a plan.yaml holds.

    Raises BadInput where it is no plan, and PlanMismatch where another version of autopar wrote it.
    """
    file = path / PLAN if path.is_dir() else path
    values = read_mapping(file, "a plan")
    version = values.pop("autopar", None)
    if version is None:
        raise BadInput(f"{file}: not a plan: it has no key 'autopar'")
    if version != VERSION and not any_version:
        raise PlanMismatch(f"{file} was made by autopar {version}, this is {VERSION}: make the plan again")
    try:
        return typed(Plan, values, "")
    except Unlike as fault:
        other = f" (made by autopar {version}, this is {VERSION})" if version != VERSION else ""
        raise BadInput(f"{file}: not a plan: {fault}{other}") from None


def read_run(path: Path) -> MeasuredRun | None:
    """What the program in a folder measured when it last ran, if it did. Raises BadInput where run.yaml is another."""
    file = path / RUN
    if not (path.is_dir() and file.exists()):
        return None
    try:
        return typed(MeasuredRun, read_mapping(file, "a run"), "")
    except Unlike as fault:
        raise BadInput(f"{file}: not what a program writes about its run: {fault}") from None
