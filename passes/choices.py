"""What the search may choose from, within the pins, and one clear sentence for pins that cannot be."""

from __future__ import annotations

from collections.abc import Iterator

from costmodels.errors import BadInput
from costmodels.memory import Kind
from passes.dataparallel import kind_of
from passes.plan import FIX_KEYS, Fix
from passes.schedules import SCHEDULES, refusal
from passes.stages import read_twice, shared, unreached
from passes.stages import refusal as stages_refusal
from passes.variant import Pair, Problem, Variant

VIRTUAL_STAGES = (1, 2, 4)  # per rank
MOST_STAGES_WITHOUT_LAYERS = 16


def pairs(problem: Problem) -> list[Pair]:
    """Every (tp, pp, dp, microbatch) that the pins allow; raises BadInput where they contradict each other."""
    fix, devices, batch = problem.fix, problem.cluster.devices, problem.global_batch
    check_fix(problem)
    tp_fixed, dp_fixed, pp_fixed = fixed_int(fix, "tp"), fixed_int(fix, "dp"), fixed_int(fix, "pp")
    found = []
    for tp in [tp_fixed] if tp_fixed else degrees(devices, problem.cluster.devices_per_node):
        beside = problem.cluster.devices_per_node % tp == 0  # a pipeline's stages lie in nodes alike
        for pp in [pp_fixed] if pp_fixed else pipelines(problem, devices // tp if beside else 1):
            most = devices // (tp * pp)
            if not most:
                continue
            choices = [dp_fixed] if dp_fixed else [max(d for d in range(1, most + 1) if batch % d == 0)]
            if problem.separable and not dp_fixed:
                choices = [1]
            for dp in choices:
                if tp * pp * dp > devices:
                    continue
                rows = batch // dp
                for microbatch in divisors(rows):
                    count = rows // microbatch
                    if fixed_int(fix, "microbatch") not in (None, microbatch):
                        continue
                    if fixed_int(fix, "microbatches") not in (None, count):
                        continue
                    if problem.separable and count > 1:
                        continue
                    found.append(Pair(tp, dp, microbatch, pp))
                    if pp > 1 and dp > 1 and tp * pp <= problem.cluster.devices_per_node < devices:
                        found.append(Pair(tp, dp, microbatch, pp, pp_inside=True))
    if not found:
        raise BadInput(
            f"no microbatch of a global batch of {batch} rows meets "
            + ", ".join(f"{k}={fix[k]}" for k in FIX_KEYS if k in fix)
        )
    return found


def pipelines(problem: Problem, devices: int) -> list[int]:
    """Pipeline-parallel degrees worth trying on so many groups of tp: those that leave none idle."""
    fix = problem.fix
    if fix.get("schedule") == "none":
        return [1]
    most = min(devices, sum(len(b.paths) for b in problem.program.blocks) or MOST_STAGES_WITHOUT_LAYERS)
    found = [pp for pp in range(1, most + 1) if devices % pp == 0 or pp == most == devices]
    return [pp for pp in found if pp > 1] if "schedule" in fix or fixed_int(fix, "virtual_stages") else found


def stagings(problem: Problem, pair: Pair, zero: int) -> list[tuple[str, int]]:
    """Schedules with their stages per rank that can run on a pipeline."""
    fix, m = problem.fix, pair.microbatches(problem.global_batch)
    virtual_fixed = fixed_int(fix, "virtual_stages")
    found = []
    for name, schedule in SCHEDULES.items():
        if fix.get("schedule", name) != name:
            continue
        if name == "gpipe" and "schedule" not in fix and m >= pair.pp:
            continue  # 1f1b takes as long and holds less
        if schedule.split and (zero > 1 or fix.get("recompute") == "full"):
            continue
        for virtual in [virtual_fixed] if virtual_fixed else VIRTUAL_STAGES:
            if (virtual > 1) == schedule.single or pair.pp * virtual > len(problem.program.body):
                continue
            if not refusal(name, pair.pp, virtual, m):
                found.append((name, virtual))
    return found


def check_fix(problem: Problem) -> None:
    """One clear sentence for pins that cannot be."""
    fix, devices, batch = problem.fix, problem.cluster.devices, problem.global_batch
    unknown = sorted(set(fix) - set(FIX_KEYS))
    if unknown:
        raise BadInput(f"--fix does not know {', '.join(unknown)}; it knows {', '.join(FIX_KEYS)}")
    for key in FIX_KEYS:
        number = fixed_int(fix, key)
        if number is not None and number < (0 if key == "zero" else 1):
            raise BadInput(f"--fix {key}={fix[key]} must be a positive number")
    for key in ("cp", "ep"):
        if fixed_int(fix, key) not in (None, 1):
            raise BadInput(f"--fix {key}={fix[key]}: this version plans pp, dp and tp only; {key} must be 1")
    if fix.get("recompute", "none") not in ("none", "full"):
        raise BadInput(f"--fix recompute={fix['recompute']}: this version recomputes whole layers; use none or full")
    tp, dp, zero = fixed_int(fix, "tp"), fixed_int(fix, "dp"), fixed_int(fix, "zero")
    group = fixed_int(fix, "zero_group")
    pp = fixed_int(fix, "pp")
    if (tp or 1) * (dp or 1) * (pp or 1) > devices:
        asked = f"pp={pp}," if pp else ""
        needed = (tp or 1) * (dp or 1) * (pp or 1)
        raise BadInput(
            f"--fix {asked}dp={dp or 1},tp={tp or 1} needs {needed} devices; there are {devices}: pp * dp * tp may be "
            f"{devices} at most"
        )
    if dp and batch % dp:
        near = [d for d in divisors(batch) if d <= devices // ((tp or 1) * (pp or 1))]
        raise BadInput(f"a global batch of {batch} rows cannot be split over dp={dp}; use one of {near}")
    if dp and dp > 1 and problem.separable:
        raise BadInput(f"--fix dp={dp} is not possible: {problem.separable}")
    if (fixed_int(fix, "microbatches") or 1) > 1 and problem.separable:
        raise BadInput(f"--fix microbatches={fix['microbatches']} is not possible: {problem.separable}")
    if zero is not None and zero not in (0, 1, 2, 3):
        raise BadInput(f"--fix zero={zero}: the ZeRO stages are 0, 1, 2 and 3")
    if dp and group and dp % group:
        raise BadInput(f"--fix zero_group={group} does not divide dp={dp}")
    m, mb = fixed_int(fix, "microbatches"), fixed_int(fix, "microbatch")
    for name, size in (("microbatch", mb), ("microbatches", m), ("microbatch * microbatches", (m or 1) * (mb or 1))):
        if size and (batch // (dp or 1)) % size:
            rows = batch // (dp or 1)
            raise BadInput(
                f"{name} = {size} does not divide the {rows} rows of a data-parallel rank; use one of {divisors(rows)}"
            )
    check_pipeline(problem)


def check_pipeline(problem: Problem) -> None:
    """One clear sentence for a pipeline that cannot be."""
    fix = problem.fix
    name, pp, virtual = str(fix.get("schedule", "")), fixed_int(fix, "pp"), fixed_int(fix, "virtual_stages")
    if name not in ("", "none", *SCHEDULES):
        raise BadInput(f"--fix schedule={name} is not known; use one of none, {', '.join(SCHEDULES)}")
    asked = ",".join(f"{k}={fix[k]}" for k in ("schedule", "virtual_stages") if k in fix)
    if name == "none" and (pp or 1) * (virtual or 1) > 1:
        what = f"pp={pp}" if (pp or 1) > 1 else f"virtual_stages={virtual}"
        raise BadInput(
            f"--fix schedule=none is for pp=1 and does not go with {what}; use one of {', '.join(SCHEDULES)}"
        )
    if name not in SCHEDULES and (virtual or 1) == 1 and (pp or 1) == 1:
        return
    beside = (fixed_int(fix, "dp") or 1) * (fixed_int(fix, "tp") or 1)
    if (pp or problem.cluster.devices // beside) == 1:
        why = (
            "pp=1 has no stages" if pp else f"{problem.cluster.devices} devices leave none for pp beside what is fixed"
        )
        instead = "fix pp=2 or more" if pp else "fix a smaller dp or tp"
        raise BadInput(f"--fix {asked} is not possible: {why}; {instead}, or leave {asked.replace(',', ' and ')} out")
    per_node, tp = problem.cluster.devices_per_node, fixed_int(fix, "tp")
    if not pp and tp and per_node % tp:
        raise BadInput(
            f"--fix {asked},tp={tp}: beside pipelines only a tp that divides the {per_node} devices of a node is "
            f"tried; use one of {divisors(per_node)}, or fix pp too"
        )
    if name in SCHEDULES:
        check_schedule(problem, name, pp, virtual)
    stages = (pp or 2) * (virtual or stages_per_rank(name))
    most = len(problem.program.body)
    if stages > most:
        raise BadInput(too_many_stages(fix, stages, most))


def too_many_stages(fix: Fix, stages: int, most: int) -> str:
    asked = ",".join(f"{k}={fix[k]}" for k in ("pp", "schedule", "virtual_stages") if k in fix)
    smaller = "pp * virtual_stages" if "virtual_stages" in fix or stages != fixed_int(fix, "pp") else "pp"
    why = f"the model can be cut into {most} at most" if stages > most else "no way of cutting the model was found"
    return f"--fix {asked} needs {stages} stages, but {why}: use a smaller {smaller}"


def check_schedule(problem: Problem, name: str, pp: int | None, virtual: int | None) -> None:
    """One clear sentence for a schedule that cannot run with what is fixed beside it."""
    fix, schedule = problem.fix, SCHEDULES[name]
    if schedule.split and (fixed_int(fix, "zero") or 0) > 1:
        raise BadInput(
            f"--fix zero={fix['zero']}: schedule {name} computes the gradients of weights at the end, so that they "
            "stay whole until then; use zero=0 or 1, or schedule=interleaved"
        )
    if schedule.split and fix.get("recompute") == "full":
        raise BadInput(
            f"--fix recompute=full: under schedule {name} torch keeps what a layer makes again until the gradients of "
            "its weights are computed, and makes it once more for these; use recompute=none, or schedule=interleaved"
        )
    usual = stages_per_rank(name)
    if virtual and ((virtual == 1) != schedule.single or (name == "zbv" and virtual != usual)):
        least = "" if schedule.single or name == "zbv" else " or more"
        other = "interleaved" if schedule.single or virtual > 1 else "1f1b"
        raise BadInput(
            f"--fix schedule={name},virtual_stages={virtual}: {name} runs {usual} "
            f"stage{'s' if usual > 1 else ''} per rank{least}; use virtual_stages={usual}, or schedule={other}"
        )
    count = fixed_int(fix, "microbatches")
    if pp and count and (why := refusal(name, pp, virtual or usual, count)):
        raise BadInput(f"--fix pp={pp},schedule={name},microbatches={count} is not possible: {why}{remedy(name)}")


def stages_per_rank(name: str) -> int:
    """How many stages a rank has at least under a schedule."""
    return 2 if name in SCHEDULES and not SCHEDULES[name].single else 1


def remedy(name: str) -> str:
    """What else to do where a schedule cannot run so many microbatches."""
    if SCHEDULES[name].rounds:
        return ", in a global batch that has as many, or schedule=1f1b"
    return "; use a smaller pp, or schedule=gpipe"


def fixed_int(fix: Fix, key: str) -> int | None:
    value = fix.get(key)
    if value is None or key in ("schedule", "recompute"):
        return None
    try:
        return int(value)
    except ValueError:
        raise BadInput(f"--fix {key}={value} must be a whole number") from None


def degrees(devices: int, per_node: int) -> list[int]:
    """Tensor-parallel degrees worth trying: any inside a node, divisors of the cluster beyond it."""
    inside = range(1, min(devices, per_node) + 1)
    best: dict[int, int] = {}
    for tp in inside:  # of two degrees with the same number of groups, one leaves more devices idle
        best[devices // tp] = max(best.get(devices // tp, 0), tp)
    beyond = [d for d in divisors(devices) if per_node < d <= 8 * per_node and d % per_node == 0]
    return sorted({*best.values(), *beyond})


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def groups(problem: Problem, pair: Pair) -> Iterator[tuple[int, int]]:
    """ZeRO stages with the groups over which they shard."""
    stage_fixed, group_fixed = fixed_int(problem.fix, "zero"), fixed_int(problem.fix, "zero_group")
    for stage in [stage_fixed] if stage_fixed is not None else [0, 1, 2, 3]:
        if stage and pair.dp == 1 and stage_fixed is None:
            continue
        if stage == 0:
            yield 0, 1
            continue
        node = problem.cluster.devices_per_node // pair.tp
        sizes = {pair.dp} | ({node} if 1 < node < pair.dp and pair.dp % node == 0 else set())
        for size in [group_fixed] if group_fixed else sorted(sizes, reverse=True):
            if pair.dp % size == 0:
                yield stage, size


def pipeline_refusal(problem: Problem, variant: Variant) -> str:
    """Why a pipeline would not train what the model trains, or could not run; "" where it does."""
    parts, name = variant.stages, variant.schedule
    if why := stages_refusal(parts):
        return f"{why}; use pp=1"
    split = SCHEDULES[name].split
    for parameter, numbers in shared(parts).items():
        ranks = [variant.rank_of(n) for n in numbers]
        if len(set(ranks)) < len(ranks) and kind_of(problem, variant) is Kind.SHARDS:
            return (
                f"schedule {name} has stages that share {parameter} on one rank, where FSDP gives it to only one; "
                f"use {'another schedule, or dp=1 in fp32' if split else 'schedule=1f1b, or zero=0 in fp32'}"
            )
    if not split:
        return ""
    if value := unreached(parts):
        return (
            f"schedule {name} would lose the gradients of what makes {value}: no value that its stage receives goes "
            "into it, and the backward of weights is split off; use schedule=1f1b or interleaved"
        )
    for number, part in enumerate(parts[1:], 1):  # of the first, the whole backward is one
        if twice := read_twice(part, variant.settled.lowered):
            return (
                f"schedule {name} would count the gradient of {twice} twice: stage {number} reads it more than once, "
                "and the backward of weights is split off; use schedule=1f1b or interleaved"
            )
    return ""
