"""Published records: what their software does is read from their words, and plans are as they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from published import (
    LARGE,
    SPREAD,
    Row,
    Run,
    Scalars,
    calibration_rows,
    fitted_scalars,
    planned,
    price,
    telling,
)
from records import Skipped, read
from stacks import by_cost, even, filled, last_more, stack_of

from costmodels.errors import BadInput
from costmodels.groups import Collective
from passes.lower import Reshard
from passes.placements import S, collectives
from passes.step import StepSeconds

MODEL = {
    "params_b": 0.01, "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn_hidden": 1024, "vocab": 1000,
    "seq_len": 128, "gated_mlp": True, "tied_embeddings": False, "learned_pos": 0,
}  # fmt: skip
RECORD = {
    "id": "one", "source": "a table", "framework": "none that is known", "gpu": "A100-80GB-SXM", "gpus_per_node": 8,
    "num_gpus": 8, "interconnect": None, "model": MODEL, "precision": "bf16", "global_batch": 8, "micro_batch": 1,
    "dp": 1, "tp": 4, "pp": 2, "cp": 1, "vpp": 1, "zero_stage": 0, "sequence_parallel": None, "recompute": "none",
    "flash_attention": True, "torch_compile": None, "optimizer": None, "offload": "none", "notes": "",
    "measured": {"step_time_s": 1.0},
}  # fmt: skip


def record(**changes: object) -> dict[str, object]:
    return RECORD | changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": "eight"}, "tp is 'eight', not a whole number above 0"),
        ({"micro_batch": 0}, "micro_batch is 0, not a whole number above 0"),
        ({"model": MODEL | {"layers": 2.5}}, "layers is 2.5, not a whole number above 0"),
        ({"measured": {"step_time_s": -1}}, "step_time_s is -1, not a number above 0"),
        ({"zero_stage": 4}, "zero_stage is 4"),
        ({"model": {}}, "layers of the model not stated"),
    ],
)
def test_a_record_that_cannot_be_is_skipped_with_the_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(Skipped) as found:
        read(record(**changes))
    assert str(found.value) == reason


@pytest.mark.parametrize("name", [name for name in RECORD if name != "id"])
def test_what_is_left_out_is_not_stated(name: str) -> None:
    left = {key: value for key, value in RECORD.items() if key != name}
    try:
        assert read(left)
    except Skipped as reason:
        assert name == "gpu" or "not stated" in str(reason) or "unknown" in str(reason)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (4, 4, "plain")),
        ({"precision": "fp16"}, (2, 2, "plain")),
        ({"optimizer": "Adam, bf16 gradient reduction"}, (2, 2, "plain")),
        ({"notes": "PURE: params and reduction in bf16"}, (4, 2, "plain")),
        ({"notes": "BF16 optimizer accumulating gradients in fp32"}, (6, 4, "plain")),
        ({"notes": "fused cross-entropy"}, (4, 4, "fused")),
        ({"framework": "DeepSpeed 0.14"}, (2, 2, "plain")),
        ({"framework": "Megatron-DeepSpeed"}, (4, 4, "in_place")),
        ({"framework": "composer/llm-foundry"}, (4, 4, "fused")),
    ],
)
def test_words_of_a_record_say_how_gradients_and_the_loss_are_kept(changes, expected):
    stack = stack_of(record(**changes))
    assert (stack.gradient_bytes, stack.reduced_bytes, stack.loss) == expected


def test_a_record_becomes_a_run():
    found = read(record(framework="Megatron-LM"))
    assert found.shape.vocab == 1024 and found.shape.fused_gate  # 128 times the ranks of tp
    assert dict(found.fix) == {
        "pp": 2, "dp": 1, "tp": 4, "zero": 0, "recompute": "none", "microbatch": 1, "virtual_stages": 1,
        "schedule": "1f1b",
    }  # fmt: skip
    with pytest.raises(Skipped, match=r"^context parallelism$"):
        read(record(cp=2))


def test_layers_are_dealt_out_evenly_or_by_what_they_cost():
    shape = read(record()).shape  # a layer has 4 * 256 + 3 * 1024 columns, the head 1,000: a quarter of one
    assert even(shape, 2) == [2] and even(replace(shape, layers=6), 4) == [1, 3, 5]
    uneven = replace(shape, layers=78)
    assert filled(uneven, 12) == [7 * (k + 1) for k in range(11)]
    assert last_more(uneven, 12)[:7] == [6, 12, 18, 24, 30, 36, 43]
    assert by_cost(shape, 2) == [3] and by_cost(replace(shape, vocab=9000), 3) == [3, 5]
    with pytest.raises(BadInput, match="empty"):
        by_cost(replace(shape, vocab=20000), 4)


def test_a_stage_may_hold_the_head_alone():
    found = planned(read(record(framework="nanotron", model=MODEL | {"vocab": 9000})), True)  # the head is 2.2 layers
    first, last = (len(stage.calls) for stage in found.variant.stages)
    assert (first, last) == (4, 0)


def test_a_loss_in_place_holds_less():
    run_ = read(record(model=MODEL | {"vocab": 16_384, "seq_len": 8_192}, pp=1, tp=1, dp=8))
    plain, in_place = (
        max(planned(replace(run_, shape=replace(run_.shape, loss=loss)), True).by_rank)
        for loss in ("plain", "in_place")
    )
    logits = 8_192 * 16_384
    assert plain - in_place == pytest.approx(0.5 * 4 * logits, rel=0.05)


@pytest.mark.parametrize("along_sequence", (False, True))
def test_activations_lie_as_the_record_says(along_sequence):
    found = planned(read(record(sequence_parallel=along_sequence)), True)
    lowered = found.variant.settled.lowered
    moved = [s for region in (lowered.root, *lowered.blocks) for s in region.statements if isinstance(s, Reshard)]
    kinds = {kind for s in moved for kind in collectives(s.source, s.target)} - {None}
    (block,) = lowered.blocks
    entries = {block.locals[name].placement for name in block.inputs if block.locals[name].value.grad}
    if along_sequence:
        assert entries == {S(1)}
    else:
        assert kinds == {Collective.ALL_REDUCE} and not any(isinstance(p, S) for p in entries)


def test_a_plan_is_priced_again_on_a_faster_cluster():
    run_ = read(record())
    row = price(run_)
    assert isinstance(row, Row)
    plan = planned(run_, True)
    assert plan.seconds(Scalars()) == row.prior
    assert plan.seconds(Scalars(speed=2.0)).total < row.prior.total < plan.seconds(Scalars(fixed=2.0)).total


def row_of(name: str, billions: float) -> Row:
    made = read(record(id=name, model=MODEL | {"params_b": billions}))
    return Row(made, StepSeconds(1.0, 0.0, 0.0, 0.0, 0.0), 1, 0, True)


def test_the_row_that_is_fitted_is_of_median_size_among_the_large():
    rows = [row_of(str(size), size) for size in (1.0, LARGE, 2 * LARGE, 4 * LARGE)]
    assert [row.run.parameters_b for row in calibration_rows(rows).values()] == [2 * LARGE]


class Known:
    """Stands in for workers: seconds of a run are speed, network and fixed parts, by its global batch."""

    PARTS = ((8.0, 1.0, 1.0), (4.0, 4.0, 0.5), (2.0, 0.5, 4.0), (7.0, 1.0, 1.0), (7.5, 1.1, 1.0))

    def seconds(self, runs: list[Run], at: Scalars) -> list[float]:
        return [
            a / at.speed + b / at.network + c * at.fixed for a, b, c in (self.PARTS[r.global_batch // 8] for r in runs)
        ]


def runs_of(truth: Scalars) -> list[Run]:
    known = Known()
    found = []
    for number in range(len(known.PARTS)):
        made = read(record(id=str(number), global_batch=8 * number or 1))
        measured = {"step_time_s": known.seconds([made], truth)[0]}
        found.append(read(record(id=str(number), global_batch=8 * number or 1, measured=measured)))
    return found


def test_three_scalars_are_found_from_the_three_rows_that_tell_most():
    truth = Scalars(speed=0.8, network=0.4, fixed=3.0)
    runs = runs_of(truth)
    parts = torch.tensor(Known.PARTS, dtype=torch.float64)
    chosen = telling(parts / parts.sum(1, keepdim=True) * torch.tensor([-1.0, -1.0, 1.0]))
    assert chosen == (0, 1, 2)
    fitted = fitted_scalars(Known(), [runs[i] for i in chosen])
    for name in SPREAD:
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.1)
