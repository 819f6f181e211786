"""LOWER: the global program and the sharding become what one rank runs: local operators and explicit reshardings.

This is the object that is priced, whose memory is counted, and that is emitted: nothing runs that is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from passes.blocks import Blocked, Call
from passes.graph import Op, Parameter, Ref, Value, map_op
from passes.placements import Placement, local_shape
from passes.rules import rule_of
from passes.rules.base import Rule, Site, Strategy
from passes.sharding import ROOT, Region, Sharding


@dataclass(frozen=True)
class Reshard:
    """`result` is `value` lying as `target` instead of `source`."""

    value: Value
    source: Placement
    target: Placement
    result: str


@dataclass(frozen=True)
class LocalOp:
    """An operator with this rank's arguments. `site` is the global one; `names` are the local operands."""

    op: Op
    site: Site
    rule: Rule | None
    strategy: Strategy


@dataclass(frozen=True)
class LocalCall:
    """A layer: the block's local region, called with local values."""

    block: int
    instance: int
    args: tuple[str, ...]
    results: tuple[Value, ...]


Statement: TypeAlias = "LocalOp | Reshard | LocalCall"


@dataclass(frozen=True)
class Local:
    """A value as one rank holds it."""

    value: Value  # the global value
    placement: Placement


@dataclass(frozen=True)
class LocalRegion:
    """What one rank runs of the root or of a block: statements in order, and how every value lies by local name."""

    inputs: tuple[str, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    locals: Mapping[str, Local]
    parameters: tuple[tuple[Parameter, Placement], ...]


@dataclass(frozen=True, eq=False)
class Lowered:
    """The whole program of one rank, for one microbatch."""

    program: Blocked
    sharding: Sharding
    root: LocalRegion
    blocks: tuple[LocalRegion, ...]

    @property
    def loss_placement(self) -> Placement:
        return self.sharding.placement("loss", ROOT, self.program.loss)

    def regions(self) -> tuple[tuple[LocalRegion, int], ...]:
        """Every region with the number of times that it runs per microbatch."""
        return ((self.root, 1), *((r, len(b.paths)) for r, b in zip(self.blocks, self.program.blocks, strict=True)))


def lower(program: Blocked, sharding: Sharding) -> Lowered:
    """The local program of `program` under `sharding`."""
    blocks = []
    for index, block in enumerate(program.blocks):
        lying = {v.name: sharding.placement("entry", index, v.name) for v in block.inputs}
        writer = _Writer(sharding, index, block.values, lying | stored(sharding, index, block.parameters))
        writer.run(block.ops)
        outputs = tuple(writer.lay(name, sharding.placement("exit", index, name)) for name in block.outputs)
        blocks.append(writer.region(tuple(v.name for v in block.inputs), outputs, block.parameters))
    lying = {v.name: sharding.placement("input", ROOT, v.name) for v in program.inputs}
    writer = _Writer(sharding, ROOT, program.values, lying | stored(sharding, ROOT, program.parameters))
    for statement in program.body:
        if isinstance(statement, Op):
            writer.run((statement,))
        else:
            writer.call(statement, program)
    loss = writer.lay(program.loss, sharding.placement("loss", ROOT, program.loss))
    root = writer.region(tuple(v.name for v in program.inputs), (loss,), program.parameters)
    return Lowered(program, sharding, root, tuple(blocks))


def stored(sharding: Sharding, region: Region, parameters: Iterable[Parameter]) -> dict[str, Placement]:
    return {p.value.name: sharding.placement("parameter", region, p.value.name) for p in parameters}


class _Writer:
    """Writes one region: operators in order, a resharding right before its first reader."""

    def __init__(
        self, sharding: Sharding, region: Region, values: Mapping[str, Value], lying: Mapping[str, Placement]
    ) -> None:
        self.sharding, self.index, self.values = sharding, region, values
        self.statements: list[Statement] = []
        self.locals = {name: Local(values[name], placement) for name, placement in lying.items()}
        self.resharded: dict[tuple[str, Placement], str] = {}

    def lay(self, name: str, target: Placement) -> str:
        """The local name of a value lying as `target`, resharded where it does not."""
        local = self.locals[name]
        if local.placement == target:
            return name
        key = (name, target)
        if key not in self.resharded:
            result = f"{name}_{str(target).translate(_PLAIN)}"
            self.statements.append(Reshard(local.value, local.placement, target, result))
            self.locals[result] = Local(local.value, target)
            self.resharded[key] = result
        return self.resharded[key]

    def run(self, ops: Iterable[Op]) -> None:
        for op in ops:
            strategy = self.sharding.of("op", self.index, op.name)
            site = Site.of(op, self.values)
            rule = rule_of(op.target)
            operands = [self.lay(n, p) for n, p in zip(op.operands, strategy.operands, strict=True)]
            shapes = tuple(
                local_shape(p, v.sizes, self.sharding.axis.ranks)
                for v, p in zip(op.results, strategy.results, strict=True)
            )
            local = op
            if rule is not None and rule.localize is not None and strategy.split:
                local = rule.localize(site, shapes)
            self.statements.append(LocalOp(with_operands(local, operands), site, rule, strategy))
            self.locals |= {v.name: Local(v, p) for v, p in zip(op.results, strategy.results, strict=True)}

    def call(self, call: Call, program: Blocked) -> None:
        block = program.blocks[call.block]
        entries = (self.sharding.placement("entry", call.block, v.name) for v in block.inputs)
        args = tuple(self.lay(name, placement) for name, placement in zip(call.args, entries, strict=True))
        self.statements.append(LocalCall(call.block, call.instance, args, call.results))
        for result, output in zip(call.results, block.outputs, strict=True):
            self.locals[result.name] = Local(result, self.sharding.placement("exit", call.block, output))

    def region(self, inputs: tuple[str, ...], outputs: tuple[str, ...], parameters: Iterable[Parameter]) -> LocalRegion:
        kept = tuple((p, self.locals[p.value.name].placement) for p in parameters)
        return LocalRegion(inputs, tuple(self.statements), outputs, self.locals, kept)


_PLAIN = str.maketrans({"(": "", ")": "", ",": "_", " ": ""})


def with_operands(op: Op, names: Iterable[str]) -> Op:
    """`op` reading other values, in the order in which its operands stand."""
    left = iter(names)
    return map_op(op, lambda a: Ref(next(left)) if isinstance(a, Ref) else a)
