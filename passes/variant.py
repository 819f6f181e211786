"""A plan's choices, and what is known of what they are made from.

Problem    what is to be trained, and where
Pair       the degrees of the mesh and a microbatch: by these, what one rank runs is settled
Settled    a pair with its sharding, lowered and priced
Variant    every choice: also ZeRO, recompute, and how a pipeline is cut and scheduled
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import ceil, prod

import torch

from costmodels.cluster import Cluster
from costmodels.memory import FP32_BYTES
from costmodels.schedules import Queue
from passes.blocks import Block, Blocked
from passes.emit import Emission
from passes.graph import Parameter, mutates
from passes.lower import LocalRegion, Lowered
from passes.placements import R, S, local_shape
from passes.plan import Fix
from passes.price import Seconds
from passes.schedules import SCHEDULES, rank_of
from passes.stages import LocalStage, stages


@dataclass(frozen=True)
class OptimizerCost:
    """Of each parameter element: fp32 states, and bytes that a fused step touches."""

    states: int
    touched_bytes: int


OPTIMIZER_COSTS = {"adamw": OptimizerCost(2, 28), "sgd": OptimizerCost(1, 20)}


@dataclass(frozen=True)
class Problem:
    """What is searched: a symbolic program, and where and how it is to be trained."""

    program: Blocked
    rows: Mapping[str, S]
    cluster: Cluster
    global_batch: int
    precision: str
    optimizer: str
    fused: bool  # whether the optimizer updates in place, without temporaries
    separable: str  # why rows cannot be told apart, "" where they can
    emission: Emission  # with the choices still open
    fix: Fix
    frozen: frozenset[str]
    queue: Queue  # where the transfers of a pipeline wait for each other
    copies: bool = True  # whether what is sharded is copied into and out of flat buffers
    accumulates: bool = True  # whether gradients are added up by operators of their own
    gradient_bytes: int = FP32_BYTES  # of an element, where whole gradients are kept until they are reduced
    beside_bytes: int = 0  # of an element, what came of its gradient, beside the whole one until its pass is over
    reduced_bytes: int = FP32_BYTES  # of an element, as the data-parallel axis sums it
    sends_parts: bool = False  # ranks of tp that hold the same send a part each from stage to stage

    @cached_property
    def at(self) -> Callable[[int], Blocked]:
        """The program for a microbatch of so many rows."""
        return cache(self.program.at)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def compute_bytes(self) -> int:
        return 2 if self.precision == "bf16" else 4

    @cached_property
    def whole_units(self) -> tuple[Unit, ...]:
        """The parameters of each kind of layer and of the root, uncut."""
        program = self.program

        def held(path: str, count: int, parameters: Iterable[Parameter]) -> Unit:
            return _unit(self, path, count, ((p, p.value.sizes) for p in parameters))

        layers = [held(b.paths[0], len(b.paths), b.parameters) for b in program.blocks]
        return (*with_idle(layers, program, ()), held("", 1, program.parameters))

    @property
    def elements(self) -> int:
        return sum(u.elements * u.count for u in self.whole_units)

    @property
    def trained(self) -> int:
        return sum(u.trained * u.count for u in self.whole_units)


@dataclass(frozen=True)
class Pair:
    """The degrees of the mesh and a microbatch size: by tp and the microbatch, what one rank runs is settled.

    Ranks of tp are neighbours; around them lies dp, and pp outermost, or the other way round (`pp_inside`).
    """

    tp: int
    dp: int
    microbatch: int
    pp: int = 1
    pp_inside: bool = False

    def microbatches(self, global_batch: int) -> int:
        return global_batch // (self.dp * self.microbatch)

    @property
    def order(self) -> tuple[str, str, str]:
        """The axes of the mesh, outermost first."""
        return ("dp", "pp", "tp") if self.pp_inside else ("pp", "dp", "tp")

    @property
    def dp_stride(self) -> int:
        """How far apart neighbours on dp are, in ranks."""
        return self.tp * (self.pp if self.pp_inside else 1)

    @property
    def pp_stride(self) -> int:
        """How far apart neighbours on pp are, in ranks."""
        return self.tp * (1 if self.pp_inside else self.dp)


@dataclass(frozen=True)
class Unit:
    """What one FSDP unit holds on a rank: elements after tensor parallelism."""

    elements: int
    trained: int
    count: int
    parameters: tuple[tuple[int, int, bool], ...] = ()  # of each: its first dim, elements beside it, if it is trained
    idle: int = 0  # of `count`, those that no gradient comes through
    in_vain: int = 0  # of these, those that fully_shard gathers beside the backward of the one behind them all the same

    def padded(self, shards: int) -> tuple[int, int]:
        """Elements, and those that are trained, with every first dim filled up so that `shards` divides it."""
        more = [(-first % shards * rest, trained) for first, rest, trained in self.parameters]
        return self.elements + sum(n for n, _ in more), self.trained + sum(n for n, trained in more if trained)


@dataclass(frozen=True)
class RegionSeconds:
    """One region, once: compute, tensor-parallel communication, and of the backward what gradients of weights take.

    Compute includes what the device waits for the host, which starts one kernel after the other.
    """

    compute: Seconds
    comm: Seconds
    weight: float = 0.0

    def times(self, factor: float) -> RegionSeconds:
        return RegionSeconds(self.compute.times(factor), self.comm.times(factor), self.weight * factor)

    def __add__(self, other: RegionSeconds) -> RegionSeconds:
        return RegionSeconds(self.compute + other.compute, self.comm + other.comm, self.weight + other.weight)


@dataclass(frozen=True)
class StageLoad:
    """One stage on a rank: seconds of a microbatch, its parameters, what it hands on and what it sums."""

    seconds: RegionSeconds
    again: float  # of running recomputed layers a second time
    units: tuple[Unit, ...]  # per block, then the rest
    partial_bytes: int  # gradients that are summed over tp once per step, of a rank's shard
    sent_bytes: int  # of what the next stage receives; gradients come back for as many
    moved_bytes: int  # of it, what a rank sends
    shared_bytes: int  # gradients of parameters that other ranks hold too, of a rank's shard

    @property
    def trained(self) -> int:
        return sum(u.trained * u.count for u in self.units)


@dataclass(frozen=True)
class Settled:
    """A pair with its sharding: the local program and its price."""

    pair: Pair
    lowered: Lowered
    root: RegionSeconds
    blocks: tuple[RegionSeconds, ...]
    again: tuple[float, ...]  # per block, seconds of running it a second time for its backward
    units: tuple[Unit, ...]  # per block, then the root
    statements: Mapping[int, RegionSeconds]  # of the root, by identity
    # those known, of this problem, by cuts, ranks and shards: all that they depend on
    loads: dict[object, tuple[StageLoad, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def recomputable(self) -> tuple[int, ...]:
        """Layers of each block that may run twice: those that change no buffer."""
        blocks = zip(self.lowered.program.blocks, self.units, strict=False)
        return tuple(0 if any(map(mutates, block.ops)) else unit.count for block, unit in blocks)

    @property
    def elements(self) -> int:
        return sum(u.elements * u.count for u in self.units)

    @property
    def trained(self) -> int:
        return sum(u.trained * u.count for u in self.units)

    def partial_bytes(self, shards: int) -> int:
        """Gradients of the whole program that are summed over tp once per step, of a rank's shard."""
        return sum(partial_bytes(region, shards) * count for region, count in self.lowered.regions())


@dataclass(frozen=True)
class Staging:
    """How a pipeline runs: its schedule, where its stages begin, and what each of them recomputes."""

    schedule: str
    virtual_stages: int  # stages per rank
    cuts: tuple[int, ...]  # positions in the statements of the root
    recompute: tuple[tuple[int, ...], ...]  # per stage and block, layers recomputed


@dataclass(frozen=True)
class Variant:
    """Every choice of a plan."""

    settled: Settled
    zero: int
    group: int
    recompute: tuple[int, ...]  # per block, layers recomputed
    staging: Staging | None = None

    @property
    def shards(self) -> int:
        """Ranks over which states are sharded."""
        return self.group if self.zero else 1

    @property
    def schedule(self) -> str:
        return self.staging.schedule if self.staging else "none"

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.staging is not None and SCHEDULES[self.schedule].split

    @property
    def recompute_by_stage(self) -> tuple[tuple[int, ...], ...]:
        return self.staging.recompute if self.staging else (self.recompute,)

    @cached_property
    def stages(self) -> tuple[LocalStage, ...]:
        """What each stage runs."""
        return stages(self.settled.lowered, self.staging.cuts if self.staging else ())

    def rank_of(self, stage: int) -> int:
        """The pp rank of a stage."""
        return self.ranks[stage]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The pp rank of every stage."""
        if self.staging is None:
            return (0,)
        return rank_of(self.schedule, self.settled.pair.pp, self.staging.virtual_stages)

    @property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each pp rank."""
        found: list[list[int]] = [[] for _ in range(self.settled.pair.pp)]
        for stage in range(len(self.stages)):
            found[self.rank_of(stage)].append(stage)
        return tuple(tuple(one) for one in found)


def layers_of(variant: Variant, stage: int) -> list[int]:
    """Layers of each block that a stage may recompute.

    None where the backward is split: torch runs a layer again for the gradients of its inputs, keeps what it made for
    those of its weights, and runs it once more for these.
    """
    found = [0] * len(variant.settled.blocks)
    if variant.splits_backward:
        return found
    for call in variant.stages[stage].calls:
        found[call.block] += variant.settled.recomputable[call.block] > 0
    return found


def with_recompute(variant: Variant, layers: list[list[int]]) -> Variant:
    """The variant with so many layers recomputed, per stage and block."""
    again = tuple(tuple(one) for one in layers)
    staging = replace(variant.staging, recompute=again) if variant.staging else None
    return replace(variant, recompute=tuple(map(sum, zip(*again, strict=True))), staging=staging)


def full_recompute(variant: Variant) -> Variant:
    return with_recompute(variant, [layers_of(variant, k) for k in range(len(variant.stages))])


def is_passed(block: Block) -> bool:
    """Whether gradients come through a layer."""
    return any(block.values[name].grad for name in block.outputs)


def with_idle(units: Sequence[Unit], program: Blocked, called: Sequence[int]) -> list[Unit]:
    """Units of each block with those that no gradient comes through, from the blocks of a stage as they are called."""
    passed = [is_passed(block) for block in program.blocks]
    behind = [*(passed[b] for b in called[1:]), True]  # and the root comes last
    chased = Counter(b for b, after in zip(called, behind, strict=False) if after and not passed[b])
    return [one if passed[b] else replace(one, idle=one.count, in_vain=chased[b]) for b, one in enumerate(units)]


def unit(problem: Problem, region: LocalRegion, tp: int, path: str, count: int) -> Unit:
    """The parameters of one region on one rank."""
    return _unit(problem, path, count, ((p, local_shape(at, p.value.sizes, tp)) for p, at in region.parameters))


def _unit(problem: Problem, path: str, count: int, held: Iterable[tuple[Parameter, tuple[int, ...]]]) -> Unit:
    """Of parameters with the shape that a rank holds of each."""
    found = []
    for parameter, shape in held:
        if not parameter.buffer:
            full = f"{path}.{parameter.name}" if path else parameter.name
            found.append((shape[0] if shape else 1, prod(shape[1:]), full not in problem.frozen))
    elements = sum(first * rest for first, rest, _ in found)
    return Unit(elements, sum(first * rest for first, rest, trained in found if trained), count, tuple(found))


def partial_bytes(region: LocalRegion, shards: int = 1, without: Collection[str] = ()) -> int:
    """Gradients of a region that come in parts on the ranks of tp, in fp32: a rank's share of the ZeRO group's.

    `without`: names of parameters that another stage of the rank holds too.
    """
    held = (p for p, placement in region.parameters if placement is R and p.name not in without)
    return sum(shard_bytes(p.value.sizes, shards) for p in held)


def shard_bytes(shape: Sequence[int], shards: int) -> int:
    """A rank's share of a gradient in fp32."""
    first, *rest = shape or (1,)
    return 4 * ceil(first / shards) * prod(rest)
