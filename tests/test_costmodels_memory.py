import pytest

from costmodels.devices import GIB, device_named
from costmodels.memory import StaticBytes, outside_allocator_bytes, static_bytes, usable_bytes


def adamw(zero_stage: int, shard_group: int = 10, compute_bytes: int = 2, **changes) -> StaticBytes:
    """1,000 parameters, the largest group 100 of them."""
    return static_bytes(
        1000,
        zero_stage=zero_stage,
        shard_group=shard_group,
        compute_bytes=compute_bytes,
        **{"largest_group": 100, "optimizer_state_factor": 2, **changes},
    )


def test_fp32_without_zero_is_16_bytes_per_parameter() -> None:
    assert adamw(0, compute_bytes=4) == StaticBytes(parameters=4000, gradients=4000, optimizer=8000, buffers=0)
    assert adamw(0, compute_bytes=4).total == 16_000


def test_bf16_without_zero_adds_a_copy() -> None:
    # the copy: 2 * 1000; fresh bf16 gradients of one group: 2 * 100
    assert adamw(0) == StaticBytes(parameters=6000, gradients=4000, optimizer=8000, buffers=200)


def test_zero_1_shards_the_states_and_keeps_the_gradients() -> None:
    # 4 * 100 at rest and 2 * 1000 gathered; fresh gradients 200, scatter input 400, output 40
    assert adamw(1) == StaticBytes(parameters=2400, gradients=4000, optimizer=800, buffers=640)


def test_zero_2_shards_the_gradients_too() -> None:
    assert adamw(2) == StaticBytes(parameters=2400, gradients=400, optimizer=800, buffers=640)


def test_zero_1_without_accumulation_is_zero_2() -> None:
    assert adamw(1, accumulates=False) == adamw(2)


def test_zero_3_gathers_only_the_current_and_the_prefetched_group() -> None:
    assert adamw(3) == StaticBytes(parameters=400, gradients=400, optimizer=800, buffers=640 + 200 + 200)
    assert adamw(3, prefetched_group=50).buffers == 640 + 200 + 100


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_sharded_over_one_rank(stage: int) -> None:
    assert adamw(stage, shard_group=1) == adamw(0)


def test_the_first_rank_holds_what_does_not_divide() -> None:
    assert adamw(3, shard_group=3).optimizer == 8 * 334


@pytest.mark.parametrize(("factor", "expected"), [(0, 0), (1, 4000), (2, 8000)])
def test_optimizer_states_by_their_count(factor: int, expected: int) -> None:
    assert adamw(0, optimizer_state_factor=factor).optimizer == expected


def test_frozen_parameters_have_no_gradients_and_no_states() -> None:
    assert adamw(0, trainable=10) == StaticBytes(parameters=6000, gradients=40, optimizer=80, buffers=20)


def test_sharding_saves_what_torchtitan_measured() -> None:
    # Llama-3.1-8B, FSDP on 8 and on 128 H100: 77.0 and 62.0 GiB (pytorch/torchtitan benchmarks/llama3_h100_202412)
    few, many = (
        static_bytes(
            8_030_000_000,
            zero_stage=3,
            shard_group=ranks,
            largest_group=525_000_000,  # the output layer
            prefetched_group=218_000_000,
            optimizer_state_factor=2,
            compute_bytes=2,
        ).total
        for ranks in (8, 128)
    )
    assert (few - many) / GIB == pytest.approx(77.0 - 62.0, rel=0.07)


def test_process_groups_and_context_lie_outside_the_allocator() -> None:
    h100 = device_named("h100")
    assert outside_allocator_bytes(h100, 0) / GIB == pytest.approx(0.6)
    assert outside_allocator_bytes(h100, 3) / GIB == pytest.approx(0.6 + 1.5 + 2 * 0.6)


def test_usable_memory_of_an_80_gb_card() -> None:
    assert usable_bytes(device_named("h100"), 4) / GIB == pytest.approx(72.36, abs=0.01)
