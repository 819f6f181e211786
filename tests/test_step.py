"""What a step takes beside its operators: what data parallelism cannot hide, and gradients that are added up."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.job import load_program
from autopar.runtime import Trainer
from costmodels.cluster import Cluster
from costmodels.groups import Collective
from costmodels.memory import Kind
from costmodels.operators import exposed_seconds
from costmodels.profile import Profile
from costmodels.schedules import Lending
from gloo import Pool
from models import CASES, buffers, planned
from passes.capture import batch_leaves
from passes.dataparallel import DDP_BUCKET_BYTES, accumulated_bytes, dp_seconds, kind_of
from passes.pipeline import problem_of
from passes.price import Axis, Seconds
from passes.step import lending, loads
from passes.variant import Pair, Problem, Unit, Variant
from test_search import asked

# -- data parallelism -------------------------------------------------------------------------------------------------

FOREVER = Seconds(math.inf, math.inf)
LAYER, ROOT = 6_000_000, 9_000_000
UNITS = (Unit(LAYER, LAYER, 2, ((LAYER, 1, True),)), Unit(ROOT, ROOT, 1, ((ROOT, 1, True),)))


def on_gpus_that_compute_undisturbed() -> Problem:
    made = asked("4xh100")
    return replace(made, cluster=replace(made.cluster, device=replace(made.cluster.device, overlap_slowdown=1.0)))


def seconds(made: Problem, kind: Collective, elements: int) -> float:
    return Axis.of(made.cluster, "dp", 4, 1).seconds(kind, 4 * elements)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("microbatch", [1, 3])
def test_first_gathers_and_the_last_reduction_hide_behind_nothing(stage: int, microbatch: int) -> None:
    made = on_gpus_that_compute_undisturbed()
    first, last = (
        sum(seconds(made, kind, elements) for elements in (LAYER, ROOT))
        for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    pair = Pair(1, 4, microbatch)
    forwards = pair.microbatches(made.global_batch) if stage == 3 else 1  # those that gather
    found = dp_seconds(made, pair, stage, 4, UNITS, Kind.SHARDS, FOREVER)
    assert found == pytest.approx(forwards * first + last)
    assert forwards == (1 if stage < 3 or microbatch == 3 else 3)


def test_the_last_bucket_hides_behind_nothing() -> None:
    """It has what is read first: the largest parameter outside of layers, or whatever fills it."""
    made = on_gpus_that_compute_undisturbed()
    for root in (ROOT, 1_000):
        units = (UNITS[0], Unit(root, root, 1, ((root, 1, True),)))
        last = seconds(made, Collective.ALL_REDUCE, max(root, DDP_BUCKET_BYTES // 4))
        assert dp_seconds(made, Pair(1, 4, 3), 0, 1, units, Kind.BUCKETS, FOREVER) == pytest.approx(last)
    few = (Unit(100, 100, 2), Unit(50, 50, 1))  # fill no bucket
    last = seconds(made, Collective.ALL_REDUCE, 250)
    assert dp_seconds(made, Pair(1, 4, 3), 0, 1, few, Kind.BUCKETS, FOREVER) == pytest.approx(last)


@pytest.mark.parametrize("compute", [0.0, 1e-4, 1e-3, 1.0])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_less_is_hidden_than_if_the_ends_could_be(stage: int, compute: float) -> None:
    made, kind = asked("4xh100"), Kind.SHARDS if stage else Kind.BUCKETS
    held = (made, Pair(1, 4, 1), stage, 4, UNITS, kind, Seconds(compute, compute))
    assert dp_seconds(*held, ends=False) <= dp_seconds(*held)


def streams_s(layers: int, compute_s: float, gather_s: float, slowdown: float) -> float:
    """Two streams, event by event: a layer computes once it is gathered, and from then on the next one is gathered."""
    started = gather_s
    for _ in range(layers - 1):
        beside = min(gather_s, slowdown * compute_s)
        computed = started + beside + (compute_s - beside / slowdown)
        started = max(computed, started + gather_s)
    return started + compute_s


@pytest.mark.parametrize("slowdown", [1.0, 1.19, 2.0, math.inf])
@pytest.mark.parametrize("gather_s", [0.01, 0.5, 0.99, 1.1, 1.3, 5.0])
@pytest.mark.parametrize("layers", [2, 5, 80])
def test_of_equal_layers_what_is_not_hidden_is_as_two_streams_would_have_it(
    layers: int, gather_s: float, slowdown: float
) -> None:
    """Up to the compute of one layer, the last, beside which nothing is gathered."""
    device = replace(asked("4xh100").cluster.device, overlap_slowdown=slowdown)
    formula = layers + gather_s + exposed_seconds(layers, (layers - 1) * gather_s, device)
    assert formula <= streams_s(layers, 1.0, gather_s, slowdown) * (1 + 1e-9)
    assert streams_s(layers, 1.0, gather_s, slowdown) <= (formula + 1) * (1 + 1e-9)


def test_what_is_frozen_at_the_start_is_gathered_but_not_reduced() -> None:
    """The first layer has no gradients: the last that are reduced are those of the root and of the second kind."""
    state = planned(CASES["sequential"], "dp=2,zero=3,microbatches=3")
    made, variant = problem_of(state), state.found.best.variant
    made = replace(made, cluster=on_gpus_that_compute_undisturbed().cluster)
    units = loads(made, variant)[0].units
    frozen, first, _, root = units
    assert [(u.count, u.idle, u.in_vain) for u in units] == [(1, 1, 1), (1, 0, 0), (2, 0, 0), (1, 0, 0)]
    axis = Axis.of(made.cluster, "dp", 2, 1)
    gathers = (axis.seconds(Collective.ALL_GATHER, 4 * one.elements) for one in (frozen, root))
    reductions = (axis.seconds(Collective.REDUCE_SCATTER, 4 * one.trained) for one in (first, root))
    found = dp_seconds(made, variant.settled.pair, 3, 2, units, Kind.SHARDS, FOREVER)
    assert found == pytest.approx(3 * sum(gathers) + sum(reductions))


# -- processors that are shared ---------------------------------------------------------------------------------------


def test_ranks_lend_their_processors_to_those_of_their_node() -> None:
    profile = Profile("cpu", "x", "2026-12-01", "x", "gloo", 8, 0.5, concurrent=2)
    cluster = Cluster.of(Cluster.preset("cpu:1").device, nodes=2, devices_per_node=4).with_profile(profile)
    made = replace(asked("cpu:4"), cluster=cluster)

    def lent(pp: int, dp: int, to: Cluster = cluster) -> Lending | None:
        variant = SimpleNamespace(settled=SimpleNamespace(pair=Pair(1, dp, 1, pp=pp)))
        return lending(replace(made, cluster=to), cast(Variant, variant))

    assert lent(pp=8, dp=1) == Lending(2.0, 4)
    assert lent(pp=4, dp=2) == Lending(2.0, 2)
    assert lent(pp=2, dp=4) is None  # each on a node of its own
    assert lent(pp=8, dp=1, to=cluster.with_profile(replace(profile, concurrent=4))) is None
    assert lent(pp=8, dp=1, to=Cluster.preset("8xh100")) is None


# -- gradients that are added up --------------------------------------------------------------------------------------


class Gradients(TorchDispatchMode):
    """Bytes that are read and written where gradients are added, cast to fp32 and copied into buckets."""

    OPERATORS = ("aten.add_.Tensor", "aten._to_copy.default", "aten.mul.out")

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes, self.bytes = sizes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # its own operators, on local tensors, come here in turn
        out = func(*args, **(kwargs or {}))
        if str(func) in self.OPERATORS and out.numel() in self.sizes and out.dtype == torch.float32:
            self.bytes += out.nbytes + sum(one.nbytes for one in args if isinstance(one, Tensor) and one.dim())
        return out


def bytes_of_a_step(
    program: str, held: dict[str, Tensor], shares: list[list[Tensor]], parameters: dict[str, int], shards: int
) -> int:
    """On one rank."""
    trainer = Trainer(load_program(program), device="cpu")
    trainer.init_parameters(0)
    trainer.load_buffers(held)
    batch = shares[trainer.dp_rank]
    trainer.step(batch, sharded=True)
    with Gradients({size // n for size in parameters.values() for n in (1, shards)}) as gradients:
        trainer.step(batch, sharded=True)
    return gradients.bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,zero=0", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"])
def test_a_program_adds_gradients_as_priced(gloo: Pool, mesh: str, microbatches: int, precision: str) -> None:
    case = CASES["mlp"]
    state = planned(case, f"{mesh},microbatches={microbatches}", precision=precision)
    program, leaves = load_program(state.program), batch_leaves(case.batch(0))
    shares = []
    for rank in range(state.plan.mesh.dp):
        first, rows = program.own_rows(rank)
        shares.append([leaves[one.key][first : first + rows] for one in state.captured.inputs])
    problem, variant = problem_of(state), state.found.best.variant
    parameters = {name: p.value.elements for name, p in state.blocked.all_parameters()}
    found = gloo.run(
        state.plan.mesh.devices, bytes_of_a_step, state.program, buffers(state), shares, parameters, variant.shards
    )
    units, kind = loads(problem, variant)[0].units, kind_of(problem, variant)
    pair = variant.settled.pair
    assert set(found) == {accumulated_bytes(problem, pair, variant.zero, variant.group, units, kind)}
    assert (found[0] > 0) is (microbatches > 1 or kind is Kind.BUCKETS)
