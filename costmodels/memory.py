"""Bytes that a training step holds besides its activations, moment by moment.

N elements of parameters on this rank (after tensor, pipeline and expert parallelism), in units that are gathered and
reduced together; n ranks share them under ZeRO; c bytes of the compute dtype; K optimizer states. At rest:

    stage  parameters   gradients   optimizer
    0      4 N          4 N         4 K N
    1-3    4 N/n        4 N/n       4 K N/n

Master parameters, reduction and states are fp32. What comes and goes depends on the engine:

    plain       Gradients appear unit by unit in the backward pass; with several microbatches they are there before.
    buckets     DistributedDataParallel's buckets hold the gradients from its construction on. Gradients that wait for
                the last microbatch are kept beside them until they are copied in.
    shards      fully_shard (torch 2.13), for a unit of P elements:
                  forward    the flat buffer of the gather, c P, beside the one before; then the whole parameters, c P.
                             The buffer goes when the next unit's arrives.
                  backward   in stage 3 parameters are gathered again, and the unit after that while this one computes
                  reduce     fresh gradients c P and their flat copy 4 P, then 4 P/n beside the copy and the last
                             gradient, which a loop still names. The copy goes when the next unit is reduced.
                Stages 1 and 2 keep whole parameters from the first forward to the last backward; with several
                microbatches stage 1 keeps whole gradients, 4 N. The root unit is whole from beginning to end.
                Parameters are padded so that n divides their first dim. With n = 1 nothing is gathered: c P is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from costmodels.devices import Device

FP32_BYTES = 4


@dataclass(frozen=True)
class StaticBytes:
    """What one rank holds of its parameters at one moment of a step."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int  # of gathering and reducing, temporaries of the update

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers

    def __add__(self, other: StaticBytes) -> StaticBytes:
        return StaticBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.buffers + other.buffers,
        )


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: elements on one rank, padded to what the group cuts."""

    elements: int
    trained: int
    last: int = 0  # of its last trained parameter


class Kind(Enum):
    """Which engine trains over the data-parallel axis."""

    PLAIN = "plain"
    BUCKETS = "buckets"
    SHARDS = "shards"


class Engine:
    """What is held in one microbatch of a step, moment by moment.

    The caller plays the pass: `forward` and `backward` of units, the root (the last unit) around them all. Each yields
    the moments on its way; after it the unit computes. `first` and `last` say which microbatch of the step it is;
    `gathered`, that an earlier one has gathered the parameters: in a pipeline, before gradients are there.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        kind: Kind,
        *,
        stage: int,
        ranks: int,
        compute_bytes: int,
        states: int,
        first: bool = True,
        last: bool = True,
        copies: bool = False,
        gradient_bytes: int = FP32_BYTES,
        beside_bytes: int = 0,
        gathered: bool | None = None,
    ) -> None:
        gathered = not first if gathered is None else gathered
        self.kind, self.stage, self.ranks, self.compute_bytes = kind, stage, ranks, compute_bytes
        self.first, self.last, self.gathered = first, last, gathered
        self.gradient_bytes = gradient_bytes  # of an element: where it is kept whole, and in the buffers that reduce it
        self.beside_bytes = beside_bytes  # of an element: what came of its gradient, until the backward pass is over
        self.copies = copies  # whether the library reduces a copy of what it is given (gloo)
        elements, trained = sum(u.elements for u in units), sum(u.trained for u in units)
        shard = ranks if kind is Kind.SHARDS else 1
        self.parameters = FP32_BYTES * elements // shard
        self.optimizer = FP32_BYTES * states * trained // shard
        trained *= gradient_bytes
        self.shard_bytes = trained // shard  # of gradients, once they are reduced
        self.fresh = 0  # gradients of the root that are complete; the caller's to set
        self.beside = 0  # those that were added to whole ones, and stay
        self.whole = 0  # parameters that are gathered
        self.gathering = self.prefetched = self.reducing = 0
        if kind is Kind.PLAIN:
            self.gradients = 0 if first else trained
        elif kind is Kind.BUCKETS:
            self.gradients = trained if first else 2 * trained
        else:
            self.gradients = 0 if first else trained if stage == 1 else trained // ranks
            self.whole = compute_bytes * elements if gathered and stage < 3 else 0
            reduced = units[-1] if units[-1].trained else units[0]  # last, in the microbatch before
            self.reducing = 0 if first or stage == 1 else gradient_bytes * reduced.trained

    @property
    def passing(self) -> bool:
        """Whether a gradient, once complete, is added to what is there already and freed."""
        if self.kind is Kind.SHARDS:
            return self.stage == 1 and not self.first and self.compute_bytes == FP32_BYTES
        return not self.first or (self.kind is Kind.BUCKETS and self.last)

    def now(self) -> StaticBytes:
        return StaticBytes(
            self.parameters + self.whole,
            self.gradients + self.fresh + self.beside,
            self.optimizer,
            self.gathering + self.prefetched + self.reducing,
        )

    def forward(self, unit: Unit) -> Iterator[None]:
        """The moments before a unit computes."""
        if self.kind is Kind.SHARDS and (self.stage == 3 or not self.gathered):
            before, self.gathering = self.gathering, self.gathering + self.flat(unit)
            yield
            self.gathering -= before
            self.whole += self.compute_bytes * unit.elements

    def after_forward(self, unit: Unit) -> None:
        if self.kind is Kind.SHARDS and self.stage == 3:
            self.whole -= self.compute_bytes * unit.elements

    def add_late(self, unit: Unit) -> None:
        """Gradients of a unit that came in the compute dtype are added to those in fp32."""
        self.gradients += (self.gradient_bytes * self.first - self.compute_bytes) * unit.trained

    def turn(self, following: Unit | None) -> None:
        """The loss is there; the root's backward begins. `following` is the unit whose backward comes next."""
        self.gathering = 0
        self.prefetch(following)

    def backward(self, unit: Unit, following: Unit | None) -> Iterator[None]:
        """The moments before the backward of a unit computes."""
        if self.kind is Kind.SHARDS and self.stage == 3:
            self.whole += self.compute_bytes * unit.elements
            yield
            self.prefetch(following)

    def after_backward(self, unit: Unit) -> Iterator[None]:
        """The moments in which the gradients of a unit are stored or reduced."""
        grown = self.gradient_bytes * unit.trained
        self.beside += self.beside_bytes * unit.trained
        if self.kind is Kind.BUCKETS:
            self.gradients += grown * (self.first - self.last)
        elif self.kind is Kind.PLAIN or (self.stage == 1 and not self.last):
            self.gradients += grown * self.first
        else:
            if self.stage == 3 or self.last:
                self.whole -= self.compute_bytes * unit.elements
            kept = self.stage == 1 and not self.first  # its gradients are among `gradients` already
            self.reducing = grown + (0 if kept else self.compute_bytes * unit.trained)
            yield
            self.reducing = grown * (2 if self.copies or self.ranks == 1 else 1)  # one rank divides into a copy
            self.reducing += self.compute_bytes * unit.last * (self.ranks > 1)
            self.gradients += grown // self.ranks - grown * kept
            yield
            self.reducing = grown
            if self.stage > 1 and not self.first:  # added to what was there
                self.gradients -= grown // self.ranks

    def rest(self, temporaries: int = 0) -> None:
        """The backward pass is over; what comes then takes `temporaries`."""
        self.gathering, self.prefetched, self.reducing, self.beside = 0, 0, temporaries, 0

    def finish(self) -> None:
        """The last backward pass of the step is over."""
        self.whole, self.gradients = 0, self.shard_bytes
        self.rest()

    def prefetch(self, unit: Unit | None) -> None:
        again = self.kind is Kind.SHARDS and self.stage == 3 and unit is not None
        self.prefetched = self.flat(unit) if again and unit is not None else 0

    def flat(self, unit: Unit) -> int:
        return self.compute_bytes * unit.elements if self.ranks > 1 else 0


def outside_allocator_bytes(device: Device, communicators: int) -> int:
    """What the context and this many process groups of more than one rank take beside the allocator."""
    first, further = device.communicator_bytes
    groups = first + (communicators - 1) * further if communicators else 0
    return device.fixed_overhead_bytes + groups


def usable_bytes(device: Device, communicators: int) -> int:
    """What live tensors may fill: the rest of the memory, less what the allocator loses to fragmentation."""
    return int((device.memory_bytes - outside_allocator_bytes(device, communicators)) / (1 + device.fragmentation))
