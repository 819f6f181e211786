"""Bounds that are known before anything is solved: no plan beats them, and they are near enough to be of use."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from costmodels.cluster import Cluster
from costmodels.profile import Profile
from models import CASES, prepared
from passes.bounds import Bounds, saved_bytes
from passes.choices import groups, pairs, pipeline_refusal, stagings
from passes.cutting import Uncut
from passes.lower import LocalOp
from passes.memory import step_bytes
from passes.pipeline import problem_of
from passes.price import Seconds, op_launches
from passes.search import Search
from passes.step import step_seconds
from passes.variant import Pair, Problem, Variant, with_recompute

FAMILIES = ("gpt2", "llama", "nanogpt", "bert", "vit", "t5")


def problem(name: str, cluster: str) -> Problem:
    return replace(problem_of(prepared(CASES[name])), cluster=Cluster.preset(cluster))


def search(made: Problem) -> Search:
    return Search(made, lambda text: None, lambda: False)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_saves_no_less_than_its_bound_and_not_much_more(name):
    made = problem(name, "cpu:1")
    pair = Pair(1, 1, 4)
    settled = search(made).settled(pair, search(made).terms(pair, 0, 1))
    found = search(made).rehearsal(settled)
    for block, measured in zip(made.at(pair.microbatch).blocks, found.blocks, strict=True):
        given = sum(v.bytes for v in block.inputs)  # the rehearsal leaves out what the layer before it holds
        assert 0.6 * measured.saved_bytes <= saved_bytes(block) <= measured.saved_bytes + given


def test_no_recompute_that_fits_is_faster_than_the_bound():
    """Every number of recomputed layers of every variant, under the limit that just holds each of them."""
    made = problem("gpt2", "4xh100")
    tried = search(made)
    binding = 0
    for pair in (pair for pair in pairs(made) if pair.pp == 1):
        for zero, group in groups(made, pair):
            settled = tried.settled(pair, tried.terms(pair, zero, group))
            variants = [
                Variant(settled, zero, group, layers)
                for layers in product(*(range(count + 1) for count in settled.recomputable))
            ]
            peaks = [step_bytes(made, v, tried.rehearsed(v)).peak for v in variants]
            for limit in peaks:
                bounds = Bounds(made)
                bounds.limit_bytes = limit
                fastest = min(step_seconds(made, v).total for v, p in zip(variants, peaks, strict=True) if p <= limit)
                again = bounds.recompute_seconds(pair, zero, group)
                assert not bounds.hopeless(pair, zero, group)
                assert bounds.seconds(pair) + again <= fastest
                binding += again > 0
    assert binding


@pytest.mark.parametrize("tp", (1, 2))
def test_a_layer_takes_no_less_than_its_launches(tp):
    """Bound, programme and price agree on it: layers of a tiny model are shorter than what the host needs for them."""
    made = problem("gpt2", "4xh100")
    device = made.cluster.device
    free = replace(made, cluster=replace(made.cluster, device=replace(device, launch_s=0.0)))
    pair = Pair(tp, 4 // tp, 1)
    found = {}
    for name, one in (("hosted", made), ("free", free)):
        tried = search(one)
        settled = tried.settled(pair, tried.terms(pair, 0, 1))
        step = step_seconds(one, Variant(settled, 0, 1, tuple(0 for _ in settled.blocks)))
        bound = pair.microbatches(one.global_batch) * settled.lowered.sharding.bound_s
        assert Bounds(one).seconds(pair) <= bound * (1 + 1e-9) <= step.total * (1 + 2e-9)
        found[name] = settled, step
    (settled, hosted), (_, quick) = found["hosted"], found["free"]
    assert hosted.compute > 2 * quick.compute
    for layer, region in zip(settled.blocks, settled.lowered.blocks, strict=True):
        local = [s for s in region.statements if isinstance(s, LocalOp)]
        started = sum((op_launches(s.site, s.rule, s.strategy) for s in local), Seconds()).times(device.launch_s)
        assert layer.compute.forward + layer.comm.forward >= started.forward * (1 - 1e-9)
        assert layer.compute.backward + layer.comm.backward >= started.backward * (1 - 1e-9)


SHARED = Cluster.preset("cpu:4").with_profile(Profile("cpu", "x", "2026-12-01", "x", "gloo", 4, 0.5, 2))  # two cores


@pytest.mark.parametrize("name", ["nanogpt", "t5", "unet", "sequential"])
@pytest.mark.parametrize(
    "cluster", [Cluster.preset("cpu:4"), SHARED, Cluster.preset("2x2xh100")], ids=["cpu", "shared", "gpu"]
)
def test_no_pipeline_is_faster_than_it_is_queued(name: str, cluster: Cluster) -> None:
    """Models of one and of several kinds of layers, in much room: every mesh, ZeRO stage and schedule, as first cut."""
    made = replace(problem_of(prepared(CASES[name])), cluster=cluster)
    searching, tried = search(made), 0
    for pair in (pair for pair in pairs(made) if pair.pp > 1 and pair.tp == 1 and pair.microbatch < 3):
        settled = searching.settled(pair, searching.terms(pair, 0, 1))
        for zero, group in groups(made, pair):
            for schedule, virtual in stagings(made, pair, zero):
                item = Uncut(pair, zero, group, schedule, virtual, math.inf)
                variant = searching.roomy(item, settled)
                if variant is None or pipeline_refusal(made, variant):
                    continue
                variant = with_recompute(variant, [[0] * len(settled.blocks) for _ in variant.stages])
                known = search(made)
                floors = [known.uncut_floor(item)]
                known.first_cutters[pair.tp, pair.microbatch] = searching.cutter(settled)
                floors.append(known.uncut_floor(item))
                floors.append(step_seconds(made, variant, play=False).total)
                assert max(floors) <= step_seconds(made, variant).total * (1 + 1e-9), (item, floors)
                tried += 1
    assert tried
