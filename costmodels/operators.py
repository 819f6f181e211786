"""The seconds of one operator on one device, and of compute beside communication.

    seconds = t0 + FLOP / (e * peak) + bytes / (b * bandwidth)      (t0, e, b) per operator class and device

Of six forms tried on 183 A100 and 514 B200 matmuls timed in training (SimuMax 4dcaae5), this one predicts held-out
shapes best: 3.1 % and 10.3 % mean error; a flat share of peak 5.8 % and 10.7 %, a roofline 4.0 % and 10.4 %.
"""

from enum import Enum

from costmodels.devices import Coefficients, Device


class OperatorClass(Enum):
    """Operators that share coefficients."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    NORM = "norm"
    EMBEDDING = "embedding"
    LOSS = "loss"
    CONV = "conv"
    VIEW = "view"  # moves nothing
    OPTIMIZER = "optimizer"  # a fused one, which only moves bytes
    OTHER = "other"


MATRIX_CLASSES = (OperatorClass.MATMUL, OperatorClass.ATTENTION, OperatorClass.CONV)


def coefficients(kind: OperatorClass, dtype_name: str, device: Device) -> Coefficients:
    """The (e, b, t0) of an operator class: as measured, best in this dtype, or as the catalogue has it."""
    assert kind is not OperatorClass.VIEW, "a view has no coefficients: it is free"
    measured, table = device.measured_of, device.efficiency
    if (found := measured.get((kind.value, dtype_name)) or measured.get((kind.value, ""))) is not None:
        return found
    prior: Coefficients = table.pointwise if kind is OperatorClass.OPTIMIZER else getattr(table, kind.value)
    return prior


def operator_seconds(
    kind: OperatorClass,
    flop: float,
    bytes_moved: float,
    dtype_name: str,
    device: Device,
    *,
    attention_tiles: int | None = None,
    aligned: bool = True,
    batched: bool = False,
) -> float:
    """The seconds of one operator that reads and writes `bytes_moved` in all.

    Matrix classes run at the peak of their dtype, the others on the fp32 vector units. attention_tiles =
    batch * heads * ceil(sequence / 128), as this rank runs it: few tiles leave multiprocessors idle. Attention
    counts the FLOP that are done: half when causal. A matmul that is not aligned has rows that are no multiples of
    16 bytes, alone or in batches.
    """
    if kind is OperatorClass.VIEW:
        return 0.0
    rate = coefficients(kind, dtype_name, device)
    peak = device.peak_flop_per_s(dtype_name if kind in MATRIX_CLASSES else "fp32")
    flop_s = flop / (rate.peak_fraction * peak)
    if attention_tiles is not None:
        assert kind is OperatorClass.ATTENTION, f"tiles given for {kind.name}"
        flop_s *= 1 + device.efficiency.attention_tail_waves * device.sms / attention_tiles
    if not aligned and kind is OperatorClass.MATMUL:
        flop_s /= device.efficiency.unaligned_batched if batched else device.efficiency.unaligned
    return rate.fixed_s + flop_s + bytes_moved / (rate.bandwidth_fraction * device.memory_bytes_per_s)


def optimizer_seconds(parameter_bytes_touched: float, device: Device) -> float:
    """The seconds of a fused optimizer step, which only moves bytes.

    AdamW on fp32 touches 28 bytes per parameter on this rank (reads p, g, m, v; writes p, m, v), SGD with momentum
    20, SGD 12; a bf16 copy adds 2.
    """
    rate = coefficients(OperatorClass.OPTIMIZER, "fp32", device)
    return rate.fixed_s + parameter_bytes_touched / (rate.bandwidth_fraction * device.memory_bytes_per_s)


def exposed_seconds(compute_s: float, comm_s: float, device: Device) -> float:
    """The extra time beyond compute_s when communication of comm_s runs beside it.

    While the collective runs, compute takes `overlap_slowdown` times longer (1.19 on average over A100, H100, MI210
    and MI250: arXiv 2507.03114); what outlives the compute is exposed in full. With k = overlap_slowdown:

        compute  |=== k times slower ===|= full speed =|     extra = comm * (1 - 1/k)
        comm     |----------------------|

        compute  |=== k times slower ===|                    extra = comm - compute
        comm     |---------------------------------|
    """
    return max(comm_s - compute_s, comm_s * (1 - 1 / device.overlap_slowdown))
