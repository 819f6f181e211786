"""Bytes that a training step holds besides its activations.

N elements of parameters on this rank (after tensor, pipeline and expert parallelism), n ranks share them under
ZeRO, P elements in the largest group that is gathered at once, c bytes of the compute dtype, K optimizer states:

    stage  parameters        gradients            optimizer  transients
    0      4 N (+ c N)       4 N                  4 K N      c P
    1      4 N/n + c N       4 N (2: if no        4 K N/n    c P + 4 P + 4 P/n
                             accumulation)
    2      4 N/n + c N       4 N/n                4 K N/n    c P + 4 P + 4 P/n
    3      4 N/n             4 N/n                4 K N/n    the same + c P + c P'

Master parameters, reduction and states are fp32. c N in stage 0 is the copy that a lower compute dtype needs.
Transients (torch/distributed/fsdp/_fully_shard, torch 2.13): fresh gradients of one group, the flat input of its
reduce-scatter, its output; in stage 3 also the unsharded parameters of the current group and the gathered ones of
the prefetched group P'. With n = 1 nothing is sharded, whatever the stage.
"""

from dataclasses import dataclass

from costmodels.devices import Device

FP32_BYTES = 4


@dataclass(frozen=True)
class StaticBytes:
    """What one rank holds whatever the batch, at the fullest moment of a step."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int  # transients of gathering and reducing

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


def static_bytes(
    parameters: int,
    *,
    zero_stage: int,
    shard_group: int,
    largest_group: int,
    optimizer_state_factor: int,
    compute_bytes: int,
    trainable: int | None = None,
    prefetched_group: int | None = None,
    accumulates: bool = True,
) -> StaticBytes:
    """The bytes of `parameters` elements on one rank, by the table above.

    optimizer_state_factor: fp32 states per parameter: AdamW 2, SGD with momentum 1, SGD 0.
    trainable: elements that get gradients and states (default: all).
    prefetched_group: elements of the largest group beside the largest (default: as large).
    accumulates: whether gradients wait for further microbatches (matters in stage 1).
    """
    assert zero_stage in (0, 1, 2, 3), f"ZeRO stage {zero_stage}"
    assert 0 <= largest_group <= parameters, f"group of {largest_group} in {parameters} elements"
    assert shard_group >= 1, f"shard group of {shard_group}"
    trained = parameters if trainable is None else trainable
    prefetched = largest_group if prefetched_group is None else prefetched_group
    trained_group = min(largest_group, trained)
    stage = 0 if shard_group == 1 else zero_stage

    if stage == 0:
        copied = compute_bytes != FP32_BYTES
        return StaticBytes(
            parameters=(FP32_BYTES + compute_bytes * copied) * parameters,
            gradients=FP32_BYTES * trained,
            optimizer=FP32_BYTES * optimizer_state_factor * trained,
            buffers=compute_bytes * copied * trained_group,
        )

    at_rest = FP32_BYTES * _shard(parameters, shard_group)
    unsharded = compute_bytes * parameters if stage < 3 else 0
    whole_gradients = stage == 1 and accumulates
    reducing = (compute_bytes + FP32_BYTES) * trained_group + FP32_BYTES * _shard(trained_group, shard_group)
    gathering = compute_bytes * (largest_group + prefetched) if stage == 3 else 0
    return StaticBytes(
        parameters=at_rest + unsharded,
        gradients=FP32_BYTES * (trained if whole_gradients else _shard(trained, shard_group)),
        optimizer=FP32_BYTES * optimizer_state_factor * _shard(trained, shard_group),
        buffers=reducing + gathering,
    )


def _shard(elements: int, ranks: int) -> int:
    """The largest shard: rank 0 holds what does not divide."""
    return -(-elements // ranks)


def outside_allocator_bytes(device: Device, communicators: int) -> int:
    """What the context and this many process groups of more than one rank take beside the allocator."""
    first, further = device.communicator_bytes
    groups = first + (communicators - 1) * further if communicators else 0
    return device.fixed_overhead_bytes + groups


def usable_bytes(device: Device, communicators: int) -> int:
    """What live tensors may fill: the rest of the memory, less what the allocator loses to fragmentation."""
    return int((device.memory_bytes - outside_allocator_bytes(device, communicators)) / (1 + device.fragmentation))
