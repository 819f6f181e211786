import pytest

from costmodels.devices import device_named
from costmodels.errors import BadInput
from costmodels.operators import OperatorClass, exposed_seconds, operator_seconds, optimizer_seconds

A100 = device_named("a100-80")
B200 = device_named("b200")
H100 = device_named("h100")


def test_matmul_is_the_sum_of_fixed_flop_and_bytes() -> None:
    # 8192 x 8192 x 8192 in bf16: 1.1e12 FLOP, three matrices of 134 MB
    # 18 us + 1.1e12 / (0.769 * 312e12) + 402.7e6 / (2.16 * 2e12) = 18 + 4582.6 + 93.2 us
    seconds = operator_seconds(OperatorClass.MATMUL, 2 * 8192**3, 3 * 2 * 8192**2, "bf16", A100)
    assert seconds == pytest.approx(4693.8e-6, rel=1e-4)


def test_matmul_stays_below_the_best_ever_measured() -> None:
    # best matmuls in TFLOP/s: stas00/ml-engineering, compute/accelerator/README.md
    for device, best in ((A100, 271.2e12), (H100, 794.5e12), (B200, 1745e12)):
        seconds = operator_seconds(OperatorClass.MATMUL, 2 * 8192**3, 3 * 2 * 8192**2, "bf16", device)
        assert 0.55 * best < 2 * 8192**3 / seconds < best


def test_view_is_free() -> None:
    assert operator_seconds(OperatorClass.VIEW, 0, 2**30, "bf16", H100) == 0.0


def test_pointwise_pays_a_launch_and_its_bytes() -> None:
    # 7 us + 3.35e9 / (0.7 * 3.35e12)
    assert operator_seconds(OperatorClass.POINTWISE, 0, 3.35e9, "bf16", H100) == pytest.approx(7e-6 + 1e-3 / 0.7)
    assert operator_seconds(OperatorClass.OTHER, 0, 0, "bf16", H100) == 7e-6


def test_vector_operators_take_any_dtype() -> None:
    assert operator_seconds(OperatorClass.EMBEDDING, 1e6, 1e6, "int64", H100) > 0


def test_matmul_in_a_dtype_without_units_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^v100-sxm-32 has no bf16 arithmetic; use one of fp16, fp32$"):
        operator_seconds(OperatorClass.MATMUL, 1e9, 1e6, "bf16", device_named("v100"))


# Share of peak of causal attention, 4096 tokens, head dim 128, forward and 2.5 times as many backward FLOP together,
# from the tables of SimuMax (4dcaae5): 3.5 / (1 / forward + 2.5 / backward).
@pytest.mark.parametrize(
    ("device", "heads", "share", "tolerance"),
    [
        (A100, 64, 0.523, 0.05),
        (A100, 16, 0.453, 0.05),
        (A100, 4, 0.313, 0.05),
        (B200, 128, 0.44, 0.2),
        (B200, 16, 0.343, 0.2),
        (B200, 4, 0.129, 0.2),
    ],
)
def test_attention_loses_its_efficiency_with_few_heads(device, heads: int, share: float, tolerance: float) -> None:
    flop = 3.5 * 4 * 4096**2 * heads * 128 / 2
    seconds = operator_seconds(OperatorClass.ATTENTION, flop, 0, "bf16", device, attention_tiles=heads * 32)
    assert flop / seconds / device.peak_flop_per_s("bf16") == pytest.approx(share, rel=tolerance)


def test_optimizer_moves_bytes() -> None:
    # 1e9 parameters, 28 bytes each, at 0.75 of 2 TB/s
    assert optimizer_seconds(28e9, A100) == pytest.approx(28e9 / 1.5e12, rel=1e-3)


def test_hidden_communication_slows_the_compute() -> None:
    assert exposed_seconds(1.0, 0.1, H100) == pytest.approx(0.1 * 0.19 / 1.19)


def test_communication_that_outlives_the_compute_is_exposed() -> None:
    assert exposed_seconds(1.0, 3.0, H100) == 2.0
    assert exposed_seconds(0.0, 3.0, H100) == 3.0


def test_nothing_hides_behind_the_compute_of_a_cpu() -> None:
    assert exposed_seconds(1.0, 0.1, device_named("cpu")) == pytest.approx(0.1)


def test_products_with_rows_that_are_no_multiples_of_16_bytes_are_slow() -> None:
    def flop_s(device, **changes: bool) -> float:
        whole = operator_seconds(OperatorClass.MATMUL, 1e12, 0, "bf16", device, **changes)
        return whole - operator_seconds(OperatorClass.MATMUL, 0, 0, "bf16", device)

    assert flop_s(A100) == pytest.approx(1e12 / (0.769 * 312e12))
    assert flop_s(A100, aligned=False) == pytest.approx(flop_s(A100) / 0.25)
    assert flop_s(A100, aligned=False, batched=True) == pytest.approx(flop_s(A100) / 0.05)
    # the units of an H100 that need aligned rows are idle: it is about as much faster as it has more and faster units
    assert 1.4 < flop_s(A100, aligned=False) / flop_s(H100, aligned=False) < 2.0
    cpu = device_named("cpu")
    assert operator_seconds(OperatorClass.MATMUL, 1e9, 0, "fp32", cpu, aligned=False) == pytest.approx(
        operator_seconds(OperatorClass.MATMUL, 1e9, 0, "fp32", cpu)
    )
