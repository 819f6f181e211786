"""The memory of one optimizer step under a plan's choices: its last microbatch, moment by moment.

    forward     layers add what they save          gathered parameters
    loss        all is saved                       the root computes beside it: logits
    backward    layers give back what they saved   gradients come
    optimizer   nothing is saved                   temporaries of the update

What layers and root hold comes from the rehearsal of the program, what the data-parallel engine holds from
`costmodels.memory`. The peak is the largest sum of one moment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from costmodels.memory import FP32_BYTES, Engine, Kind, StaticBytes, Unit
from passes.rehearse import BlockMemory, Held, Rehearsal, Stretch
from passes.step import OPTIMIZERS, Problem, Variant

BUCKET_BYTES = 64 * 2**20  # of partial gradients, copied together to be summed over tp


@dataclass(frozen=True)
class StepBytes:
    """What the fullest rank holds at the fullest moment of a step; `saved` is the most that it saves at any."""

    static: StaticBytes
    activations: int  # saved in layers and before them
    logits: int  # behind the last layer
    transient: int
    inputs: int  # and buffers of the model
    saved: int

    @property
    def peak(self) -> int:
        return self.static.total + self.activations + self.logits + self.transient + self.inputs


def step_bytes(problem: Problem, variant: Variant, rehearsal: Rehearsal) -> StepBytes:
    """Memory of a variant, from the rehearsal of its program."""
    m = variant.settled.pair.microbatches(problem.global_batch)
    program = variant.settled.lowered.program
    shards = variant.group if variant.zero else 1
    units = [unit(block.parameters, shards) for block in rehearsal.blocks]
    outer = unit(rehearsal.root.parameters, shards)
    engine = engine_of(problem, variant, [*(u for u, b in zip(units, program.blocks, strict=True) for _ in b.paths), outer])
    inputs = m * sum(v.bytes for v in program.inputs) + rehearsal.buffer_bytes
    peak = StepBytes(engine.now(), 0, 0, 0, inputs, 0)

    def see(activations: int, transient: int = 0, logits: int = 0) -> None:
        nonlocal peak
        static = engine.now()
        if static.total + activations + transient + logits + inputs > peak.peak:
            peak = StepBytes(static, activations, logits, transient, inputs, 0)

    # forward: what is saved inside of layers, beside what the root holds
    root, order = rehearsal.root, rehearsal.root.calls
    layers: list[BlockMemory] = []
    saved = 0
    for _ in engine.forward(outer):
        see(0)
    for stretch, b in zip(root.forward, order, strict=False):
        again = order[: len(layers)].count(b) < variant.recompute[b]
        layer = (rehearsal.recomputed if again else rehearsal.blocks)[b]
        see(saved + stretch.live_bytes, stretch.peak_bytes - stretch.live_bytes)
        for _ in engine.forward(units[b]):
            see(saved + stretch.live_bytes)
        see(saved + stretch.live_bytes, layer.forward_peak_bytes)
        engine.after_forward(units[b])
        saved += layer.saved_bytes
        layers.append(layer)

    # loss: all is saved
    held = saved + root.forward[-2 if layers else -1].live_bytes
    most = saved + root.forward[-1].live_bytes
    see(held, logits=saved + root.forward[-1].peak_bytes - held)

    # backward: gradients of parameters stay where they came, or pass
    upcoming = [units[order[call]] for call in root.backward_calls]
    engine.head(upcoming[0] if upcoming else None)
    see(held, logits=saved + peak_of(root.backward[0], engine.passing) - held)
    for i, call in enumerate(root.backward_calls):
        stretch, layer, one = root.backward[i], layers[call], upcoming[i]
        live = stretch.live_bytes
        if i:
            see(saved + live, peak_of(stretch, engine.passing) - live)
        engine.fresh = 0 if engine.passing else stretch.gradient_bytes
        for _ in engine.backward(one, upcoming[i + 1] if i + 1 < len(upcoming) else None):
            see(saved + live, layer.left_bytes)
        see(saved + live, peak_of(layer, engine.passing) - layer.saved_bytes)
        saved -= layer.saved_bytes
        for _ in engine.after_backward(one):
            see(saved + live, layer.left_bytes)
        engine.fresh = 0
    see(0, peak_of(root.backward[-1], engine.passing))
    for _ in engine.after_backward(outer):
        see(0)
    engine.rest()

    # gradients that are partial over tp are copied together to be summed; then the update
    see(0, min(variant.settled.partial_bytes // shards, BUCKET_BYTES) if variant.settled.pair.tp > 1 else 0)
    see(0, update_bytes(problem, rehearsal.parameters, shards))
    return replace(peak, saved=most)


def unit(parameters: tuple[Held, ...], shards: int) -> Unit:
    return Unit(sum(padded(p.shape, shards) for p in parameters), sum(padded(p.shape, shards) for p in parameters if p.trained))


def padded(shape: tuple[int, ...], shards: int) -> int:
    """Elements of a parameter whose first dim is filled up so that `shards` divides it."""
    first, *rest = shape or (1,)
    return -(-first // shards) * shards * prod(rest)


def engine_of(problem: Problem, variant: Variant, units: list[Unit]) -> Engine:
    """The engine that the runtime takes (autopar/runtime/engine.py), at the start of the last microbatch."""
    pair = variant.settled.pair
    shards = variant.group if variant.zero else 1
    if shards > 1 or problem.precision == "bf16":
        kind = Kind.SHARDS
    else:
        kind = Kind.PLAIN if pair.dp == 1 else Kind.BUCKETS
    states, _ = OPTIMIZERS[problem.optimizer]
    return Engine(
        units,
        kind,
        stage=variant.zero if shards > 1 else 1,
        ranks=shards,
        compute_bytes=problem.compute_bytes,
        states=states,
        several=pair.microbatches(problem.global_batch) > 1,
        copies=problem.cluster.device.kind == "cpu",
    )


def peak_of(one: BlockMemory | Stretch, passing: bool) -> int:
    if isinstance(one, Stretch):
        return one.passing_peak_bytes if passing else one.peak_bytes
    return one.passing_peak_bytes if passing else one.backward_peak_bytes


def update_bytes(problem: Problem, parameters: tuple[Held, ...], shards: int) -> int:
    """Temporaries of AdamW: the root of the second moment, and what it is divided into.

    Over lists of tensors (the default on CUDA) all roots at once, divided in place. Tensor by tensor (CPU) both, of one
    parameter, beside the quotient of the one before, which its variable still names.
    """
    if problem.optimizer != "adamw":
        return 0
    sizes = [FP32_BYTES * padded(p.shape, shards) // shards for p in parameters if p.trained]
    if problem.cluster.device.kind == "cuda":
        return sum(sizes)
    return max((before + 2 * one for before, one in pairwise([0, *sizes])), default=0)
