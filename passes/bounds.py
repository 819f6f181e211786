"""What no plan of a mesh and microbatch can beat, known before anything is solved: seconds and bytes from below.

All work and all tensors are cut over all ranks of tp, and ranks say nothing to each other. Activations that cannot be
held are recomputed, those first that are cheapest to make again, in parts of layers if need be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from costmodels.operators import OperatorClass
from passes.blocks import Block
from passes.graph import Op, Value
from passes.price import Axis, Seconds, least_op_seconds, op_launches
from passes.rules import rule_of
from passes.rules.base import Site
from passes.saved import saved
from passes.step import loads
from passes.variant import OPTIMIZER_COSTS, Pair, Problem, Variant


@dataclass(frozen=True)
class _Kind:
    """A kind of layer, uncut: how many there are, what one saves and gives back if recomputed, and what that takes."""

    layers: int
    saved_bytes: int
    freed_bytes: int
    again_s: float


class Bounds:
    """The bounds of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.limit_bytes = problem.cluster.memory_limit_bytes

    def axis(self, pair: Pair) -> Axis:
        return Axis.of(self.problem.cluster, "tp", pair.tp, 1)

    def hopeless(self, pair: Pair, zero: int, group: int) -> bool:
        """Whether no sharding can make the variant fit."""
        return self.bytes(pair, zero, group) > self.limit_bytes

    def bytes(self, pair: Pair, zero: int, group: int) -> float:
        """A rank's share of the states, the inputs of every layer, and what the largest operator reads and writes."""
        return self.states(pair, zero, group) + self.recomputed_bytes(pair.microbatch) / (pair.tp * pair.pp)

    def cut_bytes(self, variant: Variant, in_flight: Sequence[float]) -> float:
        """What the fullest rank of a pipeline that is cut holds at least, with so many microbatches in flight on each.

        Its states, and of each microbatch the inputs of its layers, however they are sharded.
        """
        pair = variant.settled.pair
        inputs, whole = self.layer_inputs(pair.microbatch), self.problem.whole_units
        every = loads(self.problem, variant)
        found = []
        for own, flying in zip(variant.by_rank, in_flight, strict=True):
            elements = trained = kept = 0
            for stage in own:
                *layers, root = every[stage].units
                elements += root.elements + sum(u.count * one.elements for u, one in zip(layers, whole, strict=False))
                trained += root.trained + sum(u.count * one.trained for u, one in zip(layers, whole, strict=False))
                kept += sum(u.count * size for u, size in zip(layers, inputs, strict=True))
            states = self.states_of(elements // pair.tp, trained // pair.tp, pair, variant.zero, variant.group)
            found.append(states + flying * kept / pair.tp)
        return max(found)

    def layer_inputs(self, microbatch: int) -> tuple[int, ...]:
        """What a layer of each block keeps when recomputed."""
        return tuple(map(input_bytes, self.problem.at(microbatch).blocks))

    def states(self, pair: Pair, zero: int, group: int) -> int:
        ranks = pair.tp * pair.pp
        return self.states_of(self.problem.elements // ranks, self.problem.trained // ranks, pair, zero, group)

    def states_of(self, elements: int, trained: int, pair: Pair, zero: int, group: int) -> int:
        """Of so many elements on a rank, at whichever moment these alone are most."""
        problem = self.problem
        kept = OPTIMIZER_COSTS[problem.optimizer].states
        states = 4 * (elements + kept * trained) // (group if zero else 1)
        if zero in (1, 2):
            states += problem.compute_bytes * elements
        elif zero == 0 and (pair.dp > 1 or pair.microbatches(problem.global_batch) > 1):
            states += problem.gradient_bytes * trained  # else gradients come as activations go
        return states

    @cache  # noqa: B019  (bounds live as long as their search)
    def recomputed_bytes(self, microbatch: int) -> int:
        program = self.problem.at(microbatch)
        kept = sum(size * len(b.paths) for size, b in zip(self.layer_inputs(microbatch), program.blocks, strict=True))
        largest = max(
            sum(values[n].bytes for n in set(op.operands)) + sum(v.bytes for v in op.results)
            for values, ops, _ in program.regions()
            for op in ops
        )
        return kept + largest

    @cache  # noqa: B019
    def seconds(self, pair: Pair) -> float:
        """Of a step, without recompute."""
        axis = self.axis(pair)
        program, launch_s = self.problem.at(pair.microbatch), self.problem.cluster.device.launch_s
        once = 0.0
        for values, ops, count in program.regions():
            busy = sum((least(op, values, axis) for op in ops), Seconds())
            once += count * busy.total
            if values is not program.values:  # a layer takes no less than its launches
                started = sum((least_launches(op, values) for op in ops), Seconds())
                once += count * busy.waiting(started.times(launch_s)).total
        return pair.microbatches(self.problem.global_batch) * once

    @cache  # noqa: B019
    def recompute_seconds(self, pair: Pair, zero: int, group: int) -> float:
        """Of a step, for what must be recomputed because it cannot be held at the end of the forward pass."""
        if "recompute" in self.problem.fix:
            return 0.0
        kinds = self.kinds(pair)
        room = (self.limit_bytes - self.states(pair, zero, group)) * pair.tp * pair.pp
        excess = float(sum(kind.layers * kind.saved_bytes for kind in kinds) - room)
        once = 0.0
        for kind in sorted(kinds, key=lambda kind: kind.again_s / max(1, kind.freed_bytes)):
            if excess <= 0 or kind.freed_bytes <= 0:
                break
            part = min(kind.layers, excess / kind.freed_bytes)
            once += part * kind.again_s
            excess -= part * kind.freed_bytes
        return pair.microbatches(self.problem.global_batch) * once

    @cache  # noqa: B019
    def kinds(self, pair: Pair) -> tuple[_Kind, ...]:
        axis = self.axis(pair)
        found = []
        for block in self.problem.at(pair.microbatch).blocks:
            last = max((i for i, op in enumerate(block.ops) if is_saving(op, block.values)), default=-1)
            again = sum(least(op, block.values, axis).forward for op in block.ops[: last + 1])
            held = saved_bytes(block)
            found.append(_Kind(len(block.paths), held, held - input_bytes(block), again))
        return tuple(found)


def least(op: Op, values: Mapping[str, Value], axis: Axis) -> Seconds:
    return least_op_seconds(Site.of(op, values), rule_of(op.target), axis)


def least_launches(op: Op, values: Mapping[str, Value]) -> Seconds:
    return op_launches(Site.of(op, values), rule_of(op.target))


def input_bytes(block: Block) -> int:
    """What a recomputed layer keeps."""
    return sum(v.bytes for v in block.inputs if v.grad)


def is_saving(op: Op, values: Mapping[str, Value]) -> bool:
    found = saved(Site.of(op, values))
    return bool(found.operands or found.results)


def saved_bytes(block: Block) -> int:
    """What one layer saves at least: views and what they show count once, outputs with the layer that reads them."""
    shown: dict[str, str] = {}
    kept: set[str] = set()
    for op in block.ops:
        rule = rule_of(op.target)
        if rule is not None and rule.cost is OperatorClass.VIEW and op.operands:
            shown |= {v.name: shown.get(op.operands[0], op.operands[0]) for v in op.results}
        found = saved(Site.of(op, block.values))
        kept |= {op.operands[i] for i in found.operands} | {op.results[i].name for i in found.results}
    storages = {shown.get(name, name) for name in kept}
    storages -= {p.value.name for p in block.parameters} | {shown.get(name, name) for name in block.outputs}
    return sum(block.values[name].bytes for name in storages)
