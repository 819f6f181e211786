"""Megatron's plan for Llama is found, not coded: columns then rows, heads, and the vocabulary of the loss."""

from dataclasses import replace

import pytest
import torch

from costmodels.cluster import Cluster
from models import llama
from passes.pipeline import PIPELINE, SEARCH, problem_of
from passes.placements import R, S
from passes.price import Axis
from passes.sharding import ROOT, Terms, shard
from passes.state import State, Task, run

ADAMW_BYTES = 16  # of a trained element: fp32 weight, gradient, two moments
RANKS = 8
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROWS = ("o_proj", "down_proj")


def problem(seq):
    """Llama-3-8B, but two layers, on the NVLinks of one node."""
    with torch.device("meta"):
        model = llama(
            hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
            max_position_embeddings=8192,
        )  # fmt: skip
    ids = torch.zeros(8, seq, dtype=torch.int64)
    task = Task(
        model, {"input_ids": ids, "labels": ids.clone()}, None, Cluster.preset("8xh100"), 8, "bf16", "adamw", {}
    )
    return problem_of(run(PIPELINE[: PIPELINE.index(SEARCH)], State(task, lambda text: None, lambda: False)))


def strategies(program, sharding):
    """The strategy of every matrix product, of attention and of the loss, by the last part of the module's name."""
    found = {}
    regions = [(ROOT, program.body), *((i, block.ops) for i, block in enumerate(program.blocks))]
    for region, ops in regions:
        for op in ops:
            if getattr(op, "target", "").split(".")[1:2] in (
                ["linear"], ["scaled_dot_product_attention"], ["cross_entropy_loss"],
            ):  # fmt: skip
                name = "attention" if "attention" in op.target else "loss" if "loss" in op.target else op.module
                found[name.rpartition(".")[2]] = sharding.of("op", region, op.name)
    return found


@pytest.mark.parametrize("seq", (2048, 4096))
def test_llama_with_parameters_too_large_to_replicate_is_split_as_megatron_does(seq):
    asked = problem(seq)
    program = asked.program.at(1)
    elements = sum(parameter.value.elements for _, parameter in program.all_parameters())
    entries = sum(value.bytes * len(block.paths) for block in program.blocks for value in block.inputs if value.grad)
    smallest = 4096 * 1024  # k_proj
    budget = ADAMW_BYTES * (elements + smallest) / RANKS + entries / RANKS  # to keep one more whole takes 7 times that
    axis = Axis.of(asked.cluster, "tp", RANKS, 1)
    terms = Terms(state_bytes=ADAMW_BYTES, budget_bytes=budget, keeps_activations=False)
    sharding = shard(program, axis, terms, asked.rows)
    assert sharding is not None and sharding.proved
    chosen = strategies(program, sharding)
    assert {name: chosen[name].name for name in COLUMNS} == dict.fromkeys(COLUMNS, "out")
    assert {name: chosen[name].name for name in ROWS} == dict.fromkeys(ROWS, "in")
    assert chosen["attention"].name == "heads"
    assert chosen["loss"].name == chosen["loss"].form == "vocabulary"

    stored = {key[2]: strategy.results[0] for key, strategy in sharding.chosen.items() if key[0] == "parameter"}
    by_name = {parameter.name: stored[parameter.value.name] for b in program.blocks for parameter in b.parameters}
    assert {by_name[f"self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")} == {S(0)}
    assert by_name["mlp.gate_proj.weight"] == by_name["mlp.up_proj.weight"] == S(0)
    assert by_name["self_attn.o_proj.weight"] == by_name["mlp.down_proj.weight"] == S(1)


def test_llama_at_short_sequences_needs_no_budget_for_it():
    asked = problem(2048)
    program = asked.program.at(1)
    sharding = shard(program, Axis.of(asked.cluster, "tp", RANKS, 1), Terms(), asked.rows)
    assert sharding is not None and sharding.proved
    chosen = strategies(program, sharding)
    assert all(chosen[name].name == "out" for name in COLUMNS) and all(chosen[name].name == "in" for name in ROWS)
    assert chosen["attention"].name == "heads" and chosen["loss"].form == "vocabulary"


def test_norms_between_them_lie_along_the_sequence():
    """Sequence parallelism: the rest of a layer is split too, with gathers and reduce-scatters around the products.

    Where the host keeps pace, that is: else fewer collectives are better.
    """
    asked = problem(2048)
    program = asked.program.at(1)
    cluster = replace(asked.cluster, device=replace(asked.cluster.device, launch_s=0.0))
    sharding = shard(program, Axis.of(cluster, "tp", RANKS, 1), Terms(), asked.rows)
    assert sharding is not None
    (block,) = program.blocks
    norms = [op for op in block.ops if op.module.endswith("layernorm") and op.target == "aten.rsqrt.default"]
    assert len(norms) == 2
    assert {sharding.of("op", 0, op.name).results[0] for op in norms} == {S(1)}
    weights = [p for p in block.parameters if p.name.endswith("layernorm.weight")]
    assert {sharding.placement("parameter", 0, p.value.name) for p in weights} == {R}
