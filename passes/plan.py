"""What a plan is: frozen, printable, and the same JSON for every reader (the keys are a contract)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import yaml

VERSION = "0.1.0"
FIX_KEYS = (
    "pp", "dp", "cp", "ep", "tp", "zero", "zero_group", "microbatch", "microbatches", "schedule", "virtual_stages",
    "recompute",
)  # fmt: skip
Fix: TypeAlias = Mapping[str, int | str]


@dataclass(frozen=True)
class ModelInfo:
    name: str
    parameters: int
    trainable_parameters: int
    fingerprint: str  # of names, shapes and operators: a plan belongs to one model


@dataclass(frozen=True)
class ClusterInfo:
    name: str
    devices: int
    nodes: int
    device: str
    profile: str = ""  # which measurements the times follow; none: the catalogue's priors


@dataclass(frozen=True)
class Workload:
    global_batch: int
    seq_len: int | None
    precision: str
    optimizer: str


@dataclass(frozen=True)
class Mesh:
    """Ranks per axis; ep lies inside dp * cp."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


@dataclass(frozen=True)
class Zero:
    stage: int
    group: int  # ranks over which states are sharded


@dataclass(frozen=True)
class Schedule:
    name: str
    microbatch: int  # rows
    microbatches: int
    virtual_stages: int = 1


@dataclass(frozen=True)
class BlockPlan:
    """One distinct block (or the operators outside of blocks): how often it runs and how it is split, in words."""

    name: str
    count: int
    recomputed: int
    sharding: str


@dataclass(frozen=True)
class Stage:
    blocks: tuple[BlockPlan, ...]
    recompute: Mapping[str, int]  # layers recomputed, by block name


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of one optimizer step, exposed time only."""

    compute: float = 0.0
    tp_comm: float = 0.0
    dp_comm: float = 0.0
    cp_comm: float = 0.0
    ep_comm: float = 0.0
    pp_comm: float = 0.0
    bubble: float = 0.0
    recompute: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of one place on pp (`stage`), whichever stages run there.

    `peak_bytes` is the sum of the parts; `limit_bytes` what may be filled.
    """

    stage: int
    peak_bytes: int
    limit_bytes: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    reserved_overhead: int


@dataclass(frozen=True)
class SolverReport:
    name: str
    status: str
    objective_s: float
    bound_s: float
    gap: float
    seconds: float
    enumerated: int
    pruned: int
    solved: int
    unvisited: int = 0  # candidates that might be faster: the search was stopped before


@dataclass(frozen=True)
class Alternative:
    mesh: Mesh
    zero: Zero
    schedule: Schedule
    recompute: str
    step_time_s: float
    peak_bytes: int
    why_not: str


@dataclass(frozen=True)
class CollectiveUse:
    """One collective of a pp rank: what it moves, how often per step, and what it costs per step."""

    name: str
    axis: str
    tensor: str
    full_bytes: int
    count: int
    seconds: float
    stage: int = 0  # the pp rank


@dataclass(frozen=True)
class Request:
    """What was asked for, so that a plan can be made again: plain values only."""

    target: str  # "" where the model was given in Python
    cluster: str
    global_batch: int
    seq_len: int | None
    precision: str
    optimizer: str
    fix: Fix
    memory_limit_gib: float | None


@dataclass(frozen=True)
class Plan:
    """A chosen plan with its price, its memory, what nearly won, and how the search ended."""

    status: str  # "optimal" | "feasible" | "infeasible"
    model: ModelInfo
    cluster: ClusterInfo
    workload: Workload
    mesh: Mesh
    rank_order: tuple[str, ...]  # the axes that the program builds, outermost first: ranks run along the last
    idle_devices: int
    zero: Zero
    schedule: Schedule
    stages: tuple[Stage, ...]
    step_time_s: float
    tokens_per_s_per_device: float
    mfu: float
    time_s: TimeSplit
    memory: tuple[StageMemory, ...]
    solver: SolverReport
    alternatives: tuple[Alternative, ...]
    warnings: tuple[str, ...]
    collectives: tuple[CollectiveUse, ...]
    request: Request

    def as_dict(self) -> dict[str, Any]:
        return {"autopar": VERSION, **_plain(asdict(self))}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def to_yaml(self) -> str:
        """The same as JSON has, without the solver's wall time: equal inputs give equal bytes."""
        settled = replace(self, solver=replace(self.solver, seconds=0.0))
        return yaml.safe_dump(settled.as_dict(), sort_keys=False, width=120)

    def fixed(self) -> dict[str, int | str]:
        """The plan as `fix` pins it."""
        recompute = {r for stage in self.stages for b in stage.blocks for r in ([b.recomputed] if b.count else [])}
        return {
            "pp": self.mesh.pp, "dp": self.mesh.dp, "cp": self.mesh.cp, "ep": self.mesh.ep, "tp": self.mesh.tp,
            "zero": self.zero.stage, "zero_group": self.zero.group,
            "microbatch": self.schedule.microbatch, "microbatches": self.schedule.microbatches,
            "schedule": self.schedule.name, "virtual_stages": self.schedule.virtual_stages,
            "recompute": "none" if recompute <= {0} else "full",
        }  # fmt: skip

    def __str__(self) -> str:
        """A table that a person can check with a pencil; `autopar show` prints more."""
        m, z, s = self.mesh, self.zero, self.schedule
        used = max(self.memory, key=lambda one: one.peak_bytes)
        spent = {k: v for k, v in asdict(self.time_s).items() if v}
        held = {k: v for k, v in asdict(used).items() if v and k not in ("stage", "peak_bytes", "limit_bytes")}
        lines = [
            f"model      {self.model.name}, {self.model.parameters:,} parameters",
            f"cluster    {self.cluster.name}: {self.cluster.devices} x {self.cluster.device}, {self.idle_devices} idle",
            f"mesh       pp {m.pp}  dp {m.dp}  cp {m.cp}  ep {m.ep}  tp {m.tp}",
            f"ZeRO       stage {z.stage} over {z.group}",
            f"batch      {self.workload.global_batch} = dp {m.dp} x {s.microbatches} microbatches x {s.microbatch}",
            f"step       {self.step_time_s:.6g} s = " + " + ".join(f"{k} {v:.4g}" for k, v in spent.items()),
            f"memory     {used.peak_bytes:,} of {used.limit_bytes:,} bytes",
            *(f"           {k:<12} {v:>16,}" for k, v in held.items()),
        ]
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Mappings, lists and scalars only."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value
