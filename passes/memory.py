"""The memory of one optimizer step under a plan's choices, from the rehearsal of its program."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from costmodels.memory import StaticBytes, static_bytes
from passes.rehearse import Rehearsal
from passes.step import OPTIMIZERS, Problem, Variant


@dataclass(frozen=True)
class StepBytes:
    """What the fullest rank holds at the fullest moment of a step."""

    static: StaticBytes
    activations: int
    logits: int
    transient: int
    optimizer_temporaries: int
    inputs: int

    @property
    def peak(self) -> int:
        forward_backward = self.activations + max(self.logits, self.transient) + self.inputs
        return self.static.total + max(forward_backward, self.optimizer_temporaries)


def step_bytes(problem: Problem, variant: Variant, rehearsal: Rehearsal) -> StepBytes:
    """Memory of a variant, from the rehearsal of its program."""
    settled = variant.settled
    pair = settled.pair
    m = pair.microbatches(problem.global_batch)
    states, _ = OPTIMIZERS[problem.optimizer]
    sizes = sorted((u.elements for u in settled.units for _ in range(min(u.count, 2))), reverse=True)
    static = static_bytes(
        settled.elements,
        zero_stage=variant.zero,
        shard_group=variant.group if variant.zero else 1,
        largest_group=sizes[0],
        prefetched_group=sizes[1] if len(sizes) > 1 else 0,
        optimizer_state_factor=states,
        compute_bytes=problem.compute_bytes,
        trainable=settled.trained,
        accumulates=m > 1,
    )
    saved = transient = 0
    for unit_, kept, again, k in zip(
        settled.units, rehearsal.blocks, rehearsal.recomputed, variant.recompute, strict=False
    ):
        saved += (unit_.count - k) * kept.saved_bytes + k * again.saved_bytes
        transient = max(transient, again.backward_peak_bytes if k else kept.backward_peak_bytes)
    root = rehearsal.root
    head = max(root.forward_peak_bytes, root.saved_bytes + root.backward_peak_bytes) - rehearsal.before_calls_bytes
    shards = variant.group if variant.zero else 1
    trained = ceil(settled.trained / shards)
    # AdamW over lists of tensors (CUDA) takes one more fp32 copy of what it updates; tensor by tensor (CPU) two of one
    temporaries = 4 * trained if problem.cluster.device.kind == "cuda" else 8 * ceil(settled.largest_parameter / shards)
    inputs = sum(v.bytes for v in settled.lowered.program.inputs) * m
    return StepBytes(
        static=static,
        activations=saved + rehearsal.before_calls_bytes,
        logits=max(0, head),
        transient=transient,
        optimizer_temporaries=temporaries if states else 0,
        inputs=inputs,
    )
