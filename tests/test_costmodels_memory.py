import pytest

from costmodels.devices import GIB, device_named
from costmodels.memory import Engine, Kind, StaticBytes, Unit, outside_allocator_bytes, usable_bytes

LAYER, ROOT = Unit(100, 100), Unit(200, 200)  # elements; two layers and the root
UNITS = [LAYER, LAYER, ROOT]


def engine(kind: Kind, *, stage: int = 0, ranks: int = 1, compute_bytes: int = 4, **changes: int) -> Engine:
    """AdamW."""
    return Engine(UNITS, kind, stage=stage, ranks=ranks, compute_bytes=compute_bytes, states=2, **changes)


def play(one: Engine) -> dict[str, list[StaticBytes]]:
    """A microbatch through both layers: what is held in every moment, by the part of the pass."""
    seen: dict[str, list[StaticBytes]] = {}

    def see(part: str, moments: object = ()) -> None:
        for _ in moments:  # type: ignore[attr-defined]
            seen.setdefault(part, []).append(one.now())

    def computes(part: str, moments: object) -> None:
        see(part, moments)
        see(part, [None])

    computes("root", one.forward(ROOT))
    for name in ("first", "second"):
        computes(name, one.forward(LAYER))
        one.after_forward(LAYER)
    one.turn(LAYER)
    see("loss", [None])
    for name, following in (("second", LAYER), ("first", None)):
        computes(f"{name} back", one.backward(LAYER, following))
        computes(f"{name} reduced", one.after_backward(LAYER))
    computes("root reduced", one.after_backward(ROOT))
    one.rest()
    see("end", [None])
    return seen


def field(name: str, moments: list[StaticBytes]) -> list[int]:
    return [getattr(one, name) for one in moments]


def test_fp32_alone_ends_with_16_bytes_per_parameter() -> None:
    seen = play(engine(Kind.PLAIN))
    assert seen["end"] == [StaticBytes(parameters=1600, gradients=1600, optimizer=3200, buffers=0)]


def test_gradients_of_the_only_microbatch_come_layer_by_layer() -> None:
    seen = play(engine(Kind.PLAIN))
    assert [seen[part][-1].gradients for part in ("loss", "second reduced", "first reduced", "root reduced")] == [
        0,
        400,
        800,
        1600,
    ]


def test_gradients_of_earlier_microbatches_are_there_before() -> None:
    one = engine(Kind.PLAIN, first=False)
    assert one.passing
    assert {held.gradients for moments in play(one).values() for held in moments} == {1600}


def test_buckets_hold_the_gradients_from_the_beginning() -> None:
    one = engine(Kind.BUCKETS)
    assert one.passing
    assert {held.gradients for moments in play(one).values() for held in moments} == {1600}


def test_gradients_that_waited_leave_for_the_buckets_in_the_last_microbatch() -> None:
    seen = play(engine(Kind.BUCKETS, first=False))
    assert [seen[part][-1].gradients for part in ("loss", "second reduced", "first reduced", "end")] == [
        3200,
        2800,
        2400,
        1600,
    ]
    assert play(engine(Kind.BUCKETS, last=False))["end"][0].gradients == 3200


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_at_rest_are_a_share_of_everything(stage: int) -> None:
    seen = play(engine(Kind.SHARDS, stage=stage, ranks=10))
    assert seen["end"] == [StaticBytes(parameters=160, gradients=160, optimizer=320, buffers=0)]


def test_stage_3_holds_one_layer_whole_beside_the_root_and_the_buffer_of_its_gather() -> None:
    seen = play(engine(Kind.SHARDS, stage=3, ranks=10, compute_bytes=2))
    # [while the buffer fills, beside the one before; while the layer computes]
    assert field("parameters", seen["first"]) == [160 + 400, 160 + 400 + 200]
    assert field("buffers", seen["first"]) == [400 + 200, 200]
    assert field("parameters", seen["second"]) == [160 + 400, 160 + 400 + 200]
    assert field("buffers", seen["second"]) == [200 + 200, 200]


def test_stage_3_gathers_the_next_layer_while_one_computes_backward() -> None:
    seen = play(engine(Kind.SHARDS, stage=3, ranks=10, compute_bytes=2))
    assert field("buffers", seen["loss"]) == [200]
    assert field("buffers", seen["second back"]) == [200, 200]
    assert field("buffers", seen["first back"]) == [400 + 200, 400]  # the second's flat gradients, fp32; no next one


def test_a_layer_is_reduced_through_a_flat_copy_of_its_fresh_gradients() -> None:
    seen = play(engine(Kind.SHARDS, stage=2, ranks=10, compute_bytes=2))
    assert field("buffers", seen["second reduced"]) == [400 + 200, 400, 400]
    assert field("gradients", seen["second reduced"]) == [0, 40, 40]
    copied = play(engine(Kind.SHARDS, stage=2, ranks=10, compute_bytes=2, copies=True))
    assert field("buffers", copied["second reduced"]) == [400 + 200, 400 + 400, 400]


def test_the_last_gradient_of_a_unit_is_named_until_it_is_reduced() -> None:
    one = engine(Kind.SHARDS, stage=2, ranks=10, compute_bytes=2)
    assert [one.now().buffers for _ in one.after_backward(Unit(100, 100, last=30))] == [400 + 200, 400 + 60]


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_keep_parameters_whole_until_their_backward(stage: int) -> None:
    seen = play(engine(Kind.SHARDS, stage=stage, ranks=10, compute_bytes=2))
    assert seen["loss"][0].parameters == 160 + 800
    assert [seen[part][-1].parameters for part in ("second reduced", "first reduced")] == [160 + 600, 160 + 400]


def test_between_the_first_and_the_last_microbatch_parameters_stay_whole() -> None:
    held = play(engine(Kind.SHARDS, stage=2, ranks=10, compute_bytes=2, first=False, last=False))
    assert {one.parameters for moments in held.values() for one in moments} == {160 + 800}


def test_stage_1_keeps_whole_gradients_for_the_last_microbatch() -> None:
    one = engine(Kind.SHARDS, stage=1, ranks=10, first=False)
    assert one.passing
    seen = play(one)
    assert [seen[part][-1].gradients for part in ("loss", "second reduced", "end")] == [1600, 1600 - 400 + 40, 160]


def test_stage_2_adds_to_its_share_of_the_gradients() -> None:
    seen = play(engine(Kind.SHARDS, stage=2, ranks=10, first=False))
    assert field("gradients", seen["second reduced"]) == [160, 160 + 40, 160]
    assert seen["loss"][0].buffers == 800  # the root's flat gradients of the microbatch before


def test_mixed_precision_on_one_rank_is_a_copy_in_the_compute_dtype() -> None:
    seen = play(engine(Kind.SHARDS, stage=1, ranks=1, compute_bytes=2))
    assert seen["loss"] == [StaticBytes(parameters=1600 + 800, gradients=0, optimizer=3200, buffers=0)]


@pytest.mark.parametrize("kind", list(Kind))
def test_frozen_parameters_have_no_gradients_and_no_states(kind: Kind) -> None:
    units = [Unit(100, 0), Unit(200, 10)]
    one = Engine(units, kind, stage=1, ranks=1, compute_bytes=4, states=2)
    for unit in units:
        for _ in one.after_backward(unit):
            pass
    assert (one.gradients, one.optimizer) == (40, 80)


def test_sharding_saves_what_torchtitan_measured() -> None:
    # Llama-3.1-8B, FSDP on 8 and on 128 H100: 77.0 and 62.0 GiB (pytorch/torchtitan benchmarks/llama3_h100_202412)
    units = [Unit(218_112_000, 218_112_000)] * 32 + [Unit(1_050_677_248, 1_050_677_248)]

    def at_rest(ranks: int) -> int:
        one = Engine(units, Kind.SHARDS, stage=3, ranks=ranks, compute_bytes=2, states=2, first=False)
        return one.parameters + one.gradients + one.optimizer

    assert (at_rest(8) - at_rest(128)) / GIB == pytest.approx(77.0 - 62.0, rel=0.07)


def test_process_groups_and_context_lie_outside_the_allocator() -> None:
    h100 = device_named("h100")
    assert outside_allocator_bytes(h100, 0) / GIB == pytest.approx(0.6)
    assert outside_allocator_bytes(h100, 3) / GIB == pytest.approx(0.6 + 1.5 + 2 * 0.6)


def test_usable_memory_of_an_80_gb_card() -> None:
    assert usable_bytes(device_named("h100"), 4) / GIB == pytest.approx(72.36, abs=0.01)


@pytest.mark.parametrize(("stage", "whole"), [(1, 400), (2, 100)])
def test_gradients_are_kept_in_what_the_engine_is_told(stage: int, whole: int) -> None:
    """Between microbatches stage 1 keeps them whole, stage 2 a rank's share; states are fp32 all the same."""
    wide, narrow = (
        engine(Kind.SHARDS, stage=stage, ranks=4, compute_bytes=2, first=False, gradient_bytes=size) for size in (4, 2)
    )
    assert (wide.now().gradients, narrow.now().gradients) == (4 * whole, 2 * whole)
    assert wide.now().optimizer == narrow.now().optimizer == 2 * 4 * 400 // 4
