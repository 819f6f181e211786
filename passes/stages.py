"""STAGES: the local program of one rank is cut, anywhere between the statements of its root, into stages.

    root      | a   b | layer layer layer | layer layer  c |      positions of cuts: 2, 5
    received          x                    x
    computed again            mask               mask

What a later stage needs is relayed by every stage in between, its gradient on the same way back. But what is made of
inputs and buffers alone, without a gradient (masks, positions), every stage that reads it makes for itself, from the
loader's batch; so no input ever travels.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from costmodels.operators import OperatorClass
from passes.graph import mutates
from passes.lower import LocalCall, LocalOp, LocalRegion, Lowered, Reshard, Statement
from passes.rules.randomness import draws


@dataclass(frozen=True)
class LocalStage:
    """What one rank runs of one stage.

    The region's inputs are what is `received`, then the inputs of the batch that it `reads`; its outputs are what the
    next stage receives, or the loss.
    """

    region: LocalRegion
    received: tuple[str, ...]
    reads: tuple[str, ...]
    draws: int  # random operators of the root in earlier stages

    @property
    def calls(self) -> tuple[LocalCall, ...]:
        return tuple(s for s in self.region.statements if isinstance(s, LocalCall))


@lru_cache(maxsize=256)  # plans that differ in other things are often cut alike
def stages(lowered: Lowered, cuts: tuple[int, ...]) -> tuple[LocalStage, ...]:
    """The stages of the root between `cuts`, ascending positions in its statements; without cuts, the root itself."""
    root, program = lowered.root, lowered.program
    inputs = [v.name for v in program.inputs]
    parts = [root.statements[a:b] for a, b in zip((0, *cuts), (*cuts, len(root.statements)), strict=True)]
    maker = {name: i for i, s in enumerate(root.statements) for name in results_of(s)}
    stage_of = {name: k for k, part in enumerate(parts) for s in part for name in results_of(s)}
    again = made_again(lowered)
    mine: list[dict[int, Statement]] = []
    wanted: list[dict[str, None]] = []  # in order
    for k, part in enumerate(parts):
        start = (0, *cuts)[k]
        statements = dict(enumerate(part, start))
        needs = dict.fromkeys(name for s in part for name in reads_of(s))
        if k == len(parts) - 1:
            needs |= dict.fromkeys(root.outputs)
        pending = list(needs)
        while pending:
            name = pending.pop()
            if name in again and stage_of[name] < k and maker[name] not in statements:
                statements[maker[name]] = root.statements[maker[name]]
                fresh = [n for n in reads_of(root.statements[maker[name]]) if n not in needs]
                needs |= dict.fromkeys(fresh)
                pending += fresh
        mine.append(dict(sorted(statements.items())))
        made = {name for s in statements.values() for name in results_of(s)}
        wanted.append({name: None for name in needs if name in maker and name not in made})
    # what a stage wants from before, every stage in between receives too
    received: list[tuple[str, ...]] = []
    carried: dict[str, None] = {}
    for k in reversed(range(len(parts))):
        carried = {n: None for n in (*carried, *wanted[k]) if stage_of[n] < k}
        received.append(tuple(sorted(carried, key=lambda n: maker[n])))
    received.reverse()
    found = []
    drawn = 0
    for k, statements in enumerate(mine):
        body = tuple(statements.values())
        read = {name for s in body for name in reads_of(s)}
        reads = tuple(name for name in inputs if name in read)
        gives = received[k + 1] if k + 1 < len(parts) else root.outputs
        held = tuple((p, lies) for p, lies in root.parameters if p.value.name in read)
        if len(parts) == 1:
            reads, held = tuple(inputs), root.parameters
        names = {*received[k], *reads, *gives, *(p.value.name for p, _ in held)}
        names |= {name for s in body for name in (*results_of(s), *reads_of(s))}
        lies = {name: local for name, local in root.locals.items() if name in names}
        region = LocalRegion((*received[k], *reads), body, gives, lies, held)
        found.append(LocalStage(region, received[k], reads, drawn))
        drawn += sum(isinstance(s, LocalOp) and draws(s.op) for s in parts[k])
    return tuple(found)


def shared(parts: Sequence[LocalStage]) -> Mapping[str, tuple[int, ...]]:
    """Names of the parameters that several stages hold, with the stages. Buffers are copied: nobody writes them."""
    holders: dict[str, list[int]] = defaultdict(list)
    for k, part in enumerate(parts):
        for parameter, _ in part.region.parameters:
            if not parameter.buffer:
                holders[parameter.name].append(k)
    return {name: tuple(numbers) for name, numbers in holders.items() if len(numbers) > 1}


def refusal(parts: Sequence[LocalStage]) -> str:
    """Why these stages would not train what the model trains, "" where they do."""
    writers: dict[str, set[int]] = defaultdict(set)
    readers: dict[str, set[int]] = defaultdict(set)
    for k, part in enumerate(parts):
        buffers = {p.value.name: p.name for p, _ in part.region.parameters if p.buffer}
        for statement in part.region.statements:
            for name in reads_of(statement):
                if name in buffers:
                    readers[buffers[name]].add(k)
            if isinstance(statement, LocalOp) and mutates(statement.op) and statement.op.operands[0] in buffers:
                writers[buffers[statement.op.operands[0]]].add(k)
    for name, stages_ in writers.items():
        if len(stages_ | readers[name]) > 1:
            return f"stages {', '.join(map(str, sorted(stages_ | readers[name])))} would each update a copy of {name}"
    for name, numbers in shared(parts).items():
        for k in numbers:
            if not _trains(parts[k], name):
                return f"stage {k} reads {name} without a gradient, while stages that train it run on other ranks"
    return ""


def _trains(part: LocalStage, parameter: str) -> bool:
    """Whether a gradient of a trained parameter comes from a stage that reads it."""
    names = {p.value.name for p, _ in part.region.parameters if p.name == parameter and p.value.grad}
    frozen = not names
    for statement in part.region.statements:
        if names.intersection(reads_of(statement)):
            if isinstance(statement, Reshard):
                names.add(statement.result)
            elif any(part.region.locals[name].value.grad for name in results_of(statement)):
                return True
    return frozen


def read_twice(part: LocalStage, lowered: Lowered) -> str:
    """A trained parameter that is read more than once in a stage or one of its layers, itself or what is made of it
    alone (a position bias of several layers); "" if there is none."""
    called = {call.block for call in part.calls}
    for region in (part.region, *(lowered.blocks[b] for b in sorted(called))):
        of = {p.value.name: p.name for p, _ in region.parameters if p.value.grad}
        reads = Counter(region.outputs)
        for statement in region.statements:
            names = reads_of(statement)
            reads.update(names)
            trained = {name for name in names if region.locals[name].value.grad}
            if trained and trained <= of.keys() and not isinstance(statement, LocalCall):
                of |= {name: of[min(trained)] for name in results_of(statement)}
        if twice := next((of[name] for name in of if reads[name] > 1), ""):
            return twice
    return ""


def unreached(parts: Sequence[LocalStage]) -> str:
    """What a stage but the first gives with a gradient, though nothing it received goes into it; "" if nothing."""
    for part in parts[1:]:
        values = part.region.locals
        reached = {name for name in part.received if values[name].value.grad}
        for statement in part.region.statements:
            if reached.intersection(reads_of(statement)):
                reached.update(results_of(statement))
        for name in part.region.outputs:
            if values[name].value.grad and name not in reached:
                return name
    return ""


@lru_cache(maxsize=64)
def made_again(lowered: Lowered) -> frozenset[str]:
    """Values that any stage can make for itself: of inputs and buffers, and views and reshardings of parameters."""
    root = lowered.root
    written = {s.op.operands[0] for s in root.statements if isinstance(s, LocalOp) and mutates(s.op)}
    free = {v.name for v in lowered.program.inputs} | {p.value.name for p, _ in root.parameters if p.buffer}
    free -= written
    weights = {p.value.name for p, _ in root.parameters if not p.buffer}
    found: set[str] = set()
    for statement in root.statements:
        names = results_of(statement)
        if isinstance(statement, LocalCall) or written.intersection(names):
            continue
        if isinstance(statement, LocalOp) and (draws(statement.op) or mutates(statement.op)):
            continue
        if free.issuperset(reads_of(statement)):
            free.update(names)
            found.update(names)
        elif (free | weights).issuperset(reads_of(statement)) and _moves_only(statement, root):
            weights.update(names)
            found.update(names)
    return frozenset(found)


def _moves_only(statement: LocalOp | Reshard, root: LocalRegion) -> bool:
    """Whether it only shows a weight in another way, and its gradient comes back: else that weight has none there."""
    if any(root.locals[n].value.grad for n in reads_of(statement)) != root.locals[results_of(statement)[0]].value.grad:
        return False
    if isinstance(statement, Reshard):
        return True
    return statement.rule is not None and statement.rule.cost is OperatorClass.VIEW


def reads_of(statement: Statement) -> tuple[str, ...]:
    """Local names of the values that a statement reads."""
    if isinstance(statement, LocalOp):
        return statement.op.operands
    return (statement.value.name,) if isinstance(statement, Reshard) else statement.args


def results_of(statement: Statement) -> tuple[str, ...]:
    """Local names of the values that a statement writes."""
    if isinstance(statement, Reshard):
        return (statement.result,)
    return tuple(v.name for v in (statement.op.results if isinstance(statement, LocalOp) else statement.results))
