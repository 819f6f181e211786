"""The seconds of an operator under a strategy and of a resharding, from the cost models; pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

from costmodels.cluster import Cluster
from costmodels.collectives import collective_seconds
from costmodels.groups import Collective, Group
from costmodels.operators import OperatorClass, operator_seconds
from passes.flop import flop
from passes.graph import DTYPE_BYTES, Value
from passes.placements import Placement, S, collectives, local_shape
from passes.rules.base import Rule, Site, Strategy

DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp32"}


@dataclass(frozen=True)
class Seconds:
    """Time of the forward and of the backward."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> Seconds:
        return Seconds(self.forward * factor, self.backward * factor)

    def waiting(self, host: Seconds) -> Seconds:
        """What the device waits if the host needs so long to start what it does in these seconds."""
        return Seconds(max(0.0, host.forward - self.forward), max(0.0, host.backward - self.backward))

    @property
    def launches(self) -> Seconds:
        """Kernels of a resharding: one where it takes time."""
        return Seconds(float(self.forward > 0), float(self.backward > 0))


@dataclass(frozen=True)
class Axis:
    """One mesh axis on one cluster: the group of ranks that communicate along it."""

    name: str
    ranks: int
    group: Group
    cluster: Cluster

    @classmethod
    def of(cls, cluster: Cluster, name: str, ranks: int, stride: int) -> Axis:
        return cls(name, ranks, Group.of_axis(cluster, ranks, stride), cluster)

    def seconds(self, kind: Collective | None, full_bytes: float) -> float:
        return 0.0 if kind is None else self._seconds(kind, full_bytes)

    @cached_property
    def _seconds(self) -> Callable[[Collective, float], float]:
        return cache(lambda kind, full_bytes: collective_seconds(kind, full_bytes, self.group, self.cluster))


def local_bytes(value: Value, placement: Placement, ranks: int) -> int:
    """What the fullest rank holds of a value."""
    return prod(local_shape(placement, value.sizes, ranks)) * DTYPE_BYTES[value.dtype]


def reshard_bytes(value: Value, source: Placement, target: Placement, ranks: int) -> tuple[int, int]:
    """Of the whole value, as collectives carry it there and its gradient back: uneven parts are filled up."""
    cuts = [p for p in (source, target) if isinstance(p, S)]
    sizes = [ranks * local_bytes(value, cut, ranks) for cut in cuts] or [value.bytes]
    return sizes[0], sizes[-1]


def op_seconds(site: Site, rule: Rule | None, strategy: Strategy, axis: Axis) -> Seconds:
    """One operator on the fullest rank, collectives inside its local form included."""
    ranks = axis.ranks
    moved_in = sum(local_bytes(v, p, ranks) for v, p in zip(site.operands, strategy.operands, strict=True))
    moved_out = sum(local_bytes(v, p, ranks) for v, p in zip(site.results, strategy.results, strict=True))
    inside = sum(axis.seconds(kind, size) for kind, size in strategy.inside)
    shapes = zip((*site.operands, *site.results), (*strategy.operands, *strategy.results), strict=True)
    aligned = all(is_aligned(v, local_shape(p, v.sizes, ranks)) for v, p in shapes)
    local = _local_seconds(site, rule, moved_in, moved_out, ranks if strategy.split else 1, axis, aligned)
    return Seconds(local.forward + inside, local.backward)


def op_launches(site: Site, rule: Rule | None, strategy: Strategy | None = None) -> Seconds:
    """Kernels that the host starts for an operator, forward and backward: the gradients of a product are two.

    Without a strategy, at least.
    """
    if rule is not None and rule.cost is OperatorClass.VIEW:
        return Seconds()
    trained, products = any(v.grad for v in site.operands), flop(site, rule)[0] > 0
    inside = len(strategy.inside) if strategy is not None else 0
    return Seconds(1.0 + inside, (1.0 + products) * trained)


def least_op_seconds(site: Site, rule: Rule | None, axis: Axis) -> Seconds:
    """No strategy is faster: every operand, every result and all the work are cut over all ranks, and well."""
    moved_in = sum(v.bytes for v in site.operands) / axis.ranks
    moved_out = sum(v.bytes for v in site.results) / axis.ranks
    aligned = axis.ranks > 1 or all(is_aligned(v, v.sizes) for v in (*site.operands, *site.results))
    return _local_seconds(site, rule, moved_in, moved_out, axis.ranks, axis, aligned)


def is_aligned(value: Value, shape: tuple[int, ...]) -> bool:
    """Whether all rows of a tensor begin at multiples of 16 bytes, as tensor cores want them."""
    return len(shape) < 2 or shape[-1] * DTYPE_BYTES[value.dtype] % 16 == 0


def _local_seconds(
    site: Site, rule: Rule | None, moved_in: float, moved_out: float, share: int, axis: Axis, aligned: bool
) -> Seconds:
    """One of `share` equal parts of an operator, that reads and writes so many bytes in its forward."""
    device = axis.cluster.device
    flop_forward, flop_backward = flop(site, rule)
    # what is counted without a rule are products
    kind = rule.cost if rule is not None else OperatorClass.MATMUL if flop_forward else OperatorClass.OTHER
    dtype = DTYPE_NAMES.get(site.results[0].dtype, "fp32") if site.results else "fp32"
    tiles = None
    if kind is OperatorClass.ATTENTION:
        query = site.operands[0].sizes
        tiles = max(1, prod(query[:-2]) * -(-query[-2] // 128) // share)

    batched = all(len(v.sizes) > 2 for v in site.operands)

    def one(work: float, moved: float) -> float:
        work /= share
        return operator_seconds(
            kind, work, moved, dtype, device, attention_tiles=tiles, aligned=aligned, batched=batched
        )

    trained = any(v.grad for v in site.operands)
    # the backward reads the gradient of the result and what was saved, and writes the gradients of the operands
    return Seconds(
        one(flop_forward, moved_in + moved_out), one(flop_backward, moved_out + 2 * moved_in) if trained else 0.0
    )


def reshard_seconds(value: Value, source: Placement, target: Placement, axis: Axis) -> Seconds:
    """One resharding; slicing and padding cost what they move."""
    if source == target or axis.ranks == 1:
        return Seconds()
    forward, backward = collectives(source, target)
    moved = operator_seconds(
        OperatorClass.POINTWISE, 0.0, 2 * local_bytes(value, target, axis.ranks), "fp32", axis.cluster.device
    )
    there, back = reshard_bytes(value, source, target, axis.ranks)
    # slices are views until something needs them contiguous; the collectives read and write by themselves
    return Seconds(
        axis.seconds(forward, there) if forward is not None else 0.25 * moved,
        (axis.seconds(backward, back) if backward is not None else 0.25 * moved) if value.grad else 0.0,
    )
