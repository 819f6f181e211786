"""EMIT: the lowered program as a Python file that a PyTorch user would be happy to have written.

One `nn.Module` class per distinct block, layers in loops, the user's parameter names, every collective a call,
local shapes as comments. The same plan gives the same bytes.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from textwrap import indent

from passes.blocks import Block, Blocked
from passes.graph import Op, Parameter, Value, mutates, op_at
from passes.lower import LocalCall, LocalOp, LocalRegion, Lowered, Reshard
from passes.placements import I, P, Placement, S, is_even, kind, local_shape
from passes.rules.loss import VOCABULARY
from passes.rules.matmul import BIAS_ONCE
from passes.rules.randomness import draws
from passes.spelling import Speller, Text
from passes.stages import LocalStage, reads_of, results_of, shared, stages

WIDTH = 118
INDENT = 8  # of a statement in a method
RUNTIME = [
    "Edge",
    "I",
    "Input",
    "P",
    "Program",
    "R",
    "S",
    "ShardedModule",
    "Stage",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "bias_on_one_rank",
    "main",
    "recompute",
    "reduce_scatter",
    "replicate",
    "shard",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
]


@dataclass(frozen=True)
class InputSpec:
    """One tensor of the batch, as the program declares it. `low` and `high` bound what random data may hold."""

    name: str
    shape: tuple[int, ...]  # without the rows
    dtype: str
    rows: bool
    low: float
    high: float


@dataclass(frozen=True)
class Emission:
    """All that the file says beside the lowered program."""

    title: str  # what the docstring says of the plan
    mesh: Mapping[str, int]
    zero: int
    zero_group: int
    microbatch: int  # rows
    microbatches: int
    rows: int
    precision: str
    optimizer: str
    inputs: tuple[InputSpec, ...]
    prologue: tuple[Op, ...]  # for any batch
    normalizers: tuple[str, ...]
    recompute: tuple[tuple[int, ...], ...]  # per stage and block: how many layers are recomputed, from the first on
    frozen: frozenset[str] = frozenset()  # full names of parameters that get no gradient
    unread: tuple[Parameter, ...] = ()
    cuts: tuple[int, ...] = ()  # where stages begin, in the statements of the root
    schedule: str = "none"


def emit(lowered: Lowered, emission: Emission) -> str:
    """The text of program.py."""
    classes = [
        _block_class(block, region, lowered, emission)
        for block, region in zip(lowered.program.blocks, lowered.blocks, strict=True)
    ]
    parts = stages(lowered, emission.cuts)
    classes += [_stage_class(number, parts, lowered, emission) for number in range(len(parts))]
    body = "\n\n\n".join(classes)
    tail = _program(lowered, emission, parts)
    used = [name for name in RUNTIME if re.search(rf"\b{name}\b", body + tail)]
    imports = "from autopar.runtime import (\n" + indent(",\n".join(used), "    ") + ",\n)"
    libraries = {r"\btorch\.": "import torch", r"\bF\.": "import torch.nn.functional as F"}
    torch = "\n".join(line for mark, line in libraries.items() if re.search(mark, body + tail))
    head = "\n\n".join((f'"""{emission.title}\n"""', *([torch] if torch else []), imports, ""))
    head += f"ROWS = {emission.rows}  # of the global batch\n"
    return f"{head}\n\n{body}\n\n\n{tail}"


# -- names ----------------------------------------------------------------------------------------------------------


@dataclass
class _Names:
    """Short names for values, reused once a value is dead (which also frees its memory)."""

    taken: set[str]
    live: dict[str, str] = field(default_factory=dict)

    def give(self, value: str, like: str = "") -> str:
        base = re.sub(r"_\d+$", "", like or value)
        base = f"{base}_" if keyword.iskeyword(base) or base in dir(builtins) else base
        name, count = base, 1
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        self.live[value] = name
        return name

    def drop(self, value: str) -> None:
        self.taken.discard(self.live[value])


MOST_STAGES = 4096
RESERVED = frozenset(
    (
        *("self", "torch", "F", "ROWS", "PROGRAM", "Model", "block", "number", *RUNTIME),
        *(f"Stage{number}" for number in range(MOST_STAGES)),
    )
)


def attribute(path: str) -> str:
    """The module at `layer.0.attn` as an expression: self.layer[0].attn."""
    text = "self"
    for part in path.split(".") if path else ():
        text = f"{text}[{part}]" if part.isdigit() else _member(text, part)
    return text


def tensor(path: str) -> str:
    """The parameter or buffer at `layer.0.weight` as an expression: self.layer[0].weight."""
    owner, _, leaf = path.rpartition(".")
    return _member(attribute(owner), leaf)


def _member(owner: str, name: str) -> str:
    plain = name.isidentifier() and not keyword.iskeyword(name)
    return f"{owner}.{name}" if plain else f'getattr({owner}, "{name}")'


@dataclass
class _Body:
    """Writes the statements of one region."""

    region: LocalRegion
    lowered: Lowered
    emission: Emission
    lines: list[str] = field(default_factory=list)
    texts: dict[str, Text] = field(default_factory=dict)
    inlined: dict[str, set[str]] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)  # values whose name is settled

    def __post_init__(self) -> None:
        self.names = _Names(set(RESERVED))
        self.ranks = self.lowered.sharding.axis.ranks
        self.axis = self.lowered.sharding.axis.name
        self.uses: Counter[str] = Counter(self.region.outputs)
        for statement in self.region.statements:
            self.uses.update(reads_of(statement))
        self.last: dict[str, int] = {}
        for i, statement in enumerate(self.region.statements):
            for name in reads_of(statement):
                self.last[name] = i
        # the last operator of a module that has no modules inside is known by the module's name
        modules = {st.op.module for st in self.region.statements if isinstance(st, LocalOp)}
        leaves = {m for m in modules if not any(other.startswith(f"{m}.") for other in modules)}
        self.ends = {
            st.op.module: st.op.name
            for st in self.region.statements
            if isinstance(st, LocalOp) and st.op.module in leaves
        }
        self.sites = 0
        self.device = "self.device"

    def value(self, name: str) -> Text:
        return self.texts[name]

    def bind_parameters(self, paths: Mapping[str, str]) -> None:
        for name, path in paths.items():
            self.texts[name] = Text(tensor(path))

    def bind_input(self, value: str, like: str = "") -> str:
        name = self.names.give(value, like)
        self.texts[value] = Text(name)
        return name

    def bind_arguments(self, names: Mapping[str, str]) -> None:
        self.names.taken.update(names.values())
        self.names.live.update(names)
        self.texts |= {value: Text(name) for value, name in names.items()}

    def write(self) -> None:
        for i, statement in enumerate(self.region.statements):
            following = self.region.statements[i + 1] if i + 1 < len(self.region.statements) else None
            if isinstance(statement, LocalCall):
                raise AssertionError("calls are written by the model class")
            self.statement(i, statement, following)

    def statement(self, i: int, statement: LocalOp | Reshard, following: object) -> None:
        results, text = self.expression(statement)
        single = len(results) == 1 and self.uses[results[0]] == 1 and results[0] not in self.region.outputs
        if single and self.may_inline(statement, following, results[0], text):
            self.texts[results[0]] = text
            self.free(i, statement, keep=True)
            return
        self.free(i, statement)
        if isinstance(statement, LocalOp) and mutates(statement.op):
            self.lines.append(self.guard(statement, text.source))
            return
        names = [self.names.give(r, self.like(statement, r)) for r in results]
        for result, name in zip(results, names, strict=True):
            self.texts[result] = Text(name)
        line = f"{', '.join(names)} = {text.source}"
        self.lines.append(self.guard(statement, commented(line, self.comment(results[0]))))
        for result in results:
            if not self.uses[result]:
                self.names.drop(result)

    def like(self, statement: LocalOp | Reshard, result: str) -> str:
        if result in self.called:
            return self.called[result]
        if isinstance(statement, Reshard):
            return self.names.live.get(statement.value.name, statement.value.name)
        op = statement.op
        _, name, _ = op.target.split(".")
        leaf = op.module.rpartition(".")[2]
        if statement.rule is not None and statement.rule.flop(statement.site)[0] and leaf.isidentifier():
            return leaf if name != "scaled_dot_product_attention" else "attention"
        if self.ends.get(op.module) == op.name and leaf.isidentifier():
            return leaf
        return {"slice": "part", "to": "x", "arange": "positions"}.get(name, name.strip("_"))

    def may_inline(self, statement: LocalOp | Reshard, following: object, result: str, text: Text) -> bool:
        """Whether the only reader comes next and the line stays short."""
        if isinstance(statement, LocalOp) and (draws(statement.op) or mutates(statement.op)):
            return False
        if not isinstance(following, (LocalOp, Reshard)) or result not in reads_of(following):
            return False
        if isinstance(following, LocalOp) and draws(following.op):
            return False
        return len(text.source) < 64

    def free(self, i: int, statement: LocalOp | Reshard, keep: bool = False) -> None:
        """Names of values that nobody reads after this statement may be used again."""
        if keep:  # the text of an inlined value still mentions them
            for name in reads_of(statement):
                if self.last[name] == i:
                    self.inlined.setdefault(results_of(statement)[0], set()).update(self.roots(name))
            return
        for name in set(reads_of(statement)):
            if self.last[name] == i:
                for root in self.roots(name):
                    if root in self.names.live and root not in self.region.outputs:
                        self.names.drop(root)

    def roots(self, name: str) -> set[str]:
        """The named values that the text of `name` mentions for the last time."""
        return self.inlined.get(name, {name})

    def comment(self, result: str) -> str:
        """The local shape of a value, and how it lies."""
        local = self.region.locals[result]
        note = str(list(local_shape(local.placement, local.value.sizes, self.ranks)))
        if isinstance(local.placement, S):
            return f"{note}, {local.placement} over {self.axis}"
        return f"{note}, partial over {self.axis}" if local.placement is P else note

    def guard(self, statement: LocalOp | Reshard, line: str) -> str:
        """Random operators run under a seed of their own."""
        if not isinstance(statement, LocalOp) or not draws(statement.op):
            return line
        self.sites += 1
        axes = f', axes=("{self.axis}",)' if statement.strategy.split and self.ranks > 1 else ""
        return f"with self.rng({self.sites}{axes}):\n" + indent(line, "    ")

    def expression(self, statement: LocalOp | Reshard) -> tuple[list[str], Text]:
        if isinstance(statement, Reshard):
            return [statement.result], self.reshard(statement)
        results = [v.name for v in statement.op.results]
        return results, self.operator(statement)

    def operator(self, statement: LocalOp) -> Text:
        speller = Speller(self.value, self.device)
        op, form = statement.op, statement.strategy.form
        arg = [speller.arg(a) for a in op.args]
        if form == "":
            return speller.write(op)
        if form == VOCABULARY and "embedding" in op.target:
            size = statement.site.operands[0].sizes[0]
            padding = op.arg(2, "padding_idx", -1)
            extra = "" if padding == -1 else f", padding_idx={padding}"
            return Text(f'vocabulary_embedding({arg[1]}, {arg[0]}, axis="{self.axis}", size={size}{extra})')
        if form == VOCABULARY:
            size = statement.site.operands[0].sizes[1]
            reduction = ("none", "mean", "sum")[int(op.arg(3, "reduction", 1))]  # type: ignore[arg-type]
            ignored = op.arg(4, "ignore_index", -100)
            extra = "" if ignored == -100 else f", ignore_index={ignored}"
            return Text(
                f"vocabulary_cross_entropy({arg[0]}, {arg[1]}, "
                f'axis="{self.axis}", size={size}, reduction="{reduction}"{extra})'
            )
        if form == BIAS_ONCE:
            bias = 0 if "addmm" in op.target else 2
            once = Text(f'bias_on_one_rank({arg[bias]}, axis="{self.axis}")')
            name = statement.op.operands[bias]
            inner = Speller(lambda n: once if n == name else self.value(n), self.device)
            return inner.write(op)
        raise AssertionError(f"no way to write the local form {form!r} of {op.target}")

    def reshard(self, statement: Reshard) -> Text:
        x = self.value(statement.value.name).source
        if statement.value.dtype.startswith("complex"):  # which not every backend communicates
            return Text(f"torch.view_as_complex({self.resharded(statement, f'torch.view_as_real({x})').source})")
        return self.resharded(statement, x)

    def resharded(self, statement: Reshard, x: str) -> Text:
        source, target = statement.source, statement.target
        pair = kind(source) + kind(target)
        axis = f'axis="{self.axis}"'
        grad = statement.value.grad
        if pair == "SS":
            assert isinstance(source, S) and isinstance(target, S)
            cuts = self.cut(source, statement.value, "gather_") + self.cut(target, statement.value, "scatter_")
            return Text(f"all_to_all({x}, {cuts}{axis})")
        if pair in ("SR", "SI"):
            assert isinstance(source, S)
            backward = "reduce_scatter" if pair == "SR" else "slice"
            shown = f', backward="{backward}"' if grad and backward != "reduce_scatter" else ""
            return Text(f"all_gather({x}, {self.cut(source, statement.value)}{axis}{shown})")
        if pair in ("RS", "IS"):
            assert isinstance(target, S)
            backward = "pad" if pair == "RS" else "all_gather"
            return Text(f'shard({x}, {self.cut(target, statement.value)}{axis}, backward="{backward}")')
        if pair == "PS":
            assert isinstance(target, S)
            return Text(f"reduce_scatter({x}, {self.cut(target, statement.value)}{axis})")
        if pair in ("PR", "PI"):
            backward = "all_reduce" if pair == "PR" else "identity"
            return Text(f'all_reduce({x}, {axis}, backward="{backward}")')
        assert pair in ("IR", "RI"), f"no resharding from {source} to {target}"
        backward = "all_reduce" if pair == "IR" else "first_rank"
        return Text(f'replicate({x}, {axis}, backward="{backward}")')

    def cut(self, cut: S, value: Value, prefix: str = "") -> str:
        text = f"{prefix}dim={cut.dim}, "
        if cut.blocks != 1:
            text += f"{prefix}blocks={cut.blocks}, "
        if not is_even(cut, value.sizes, self.ranks):
            text += f"{prefix}size={value.sizes[cut.dim]}, "
        return text


def commented(line: str, note: str) -> str:
    """A statement with its shape beside it, or above it where the line is full; long calls are broken."""
    beside = f"{line}  # {note}"
    if len(beside) + INDENT <= WIDTH:
        return beside
    if len(line) + INDENT > WIDTH:
        line = broken(line)
    return f"# {note}\n{line}"


def broken(line: str) -> str:
    """A long `name = call(a, b)` with the arguments of its last call on lines of their own."""
    if not line.endswith(")"):
        return line
    depth, start = 0, 0
    for i in range(len(line) - 1, -1, -1):
        depth += (line[i] in ")]}") - (line[i] in "([{")
        if depth == 0:
            start = i
            break
    inner, parts, last = line[start + 1 : -1], [], 0
    depth = 0
    for i, c in enumerate(inner):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(inner[last:i].strip())
            last = i + 1
    parts.append(inner[last:].strip())
    grouped = len(parts) == 1 and not re.match(r"[\w)\]]", line[start - 1])  # a comma would make a tuple of it
    arguments = "".join(f"    {part}{'' if grouped else ','}\n" for part in parts if part)
    return f"{line[: start + 1]}\n{arguments})"


# -- classes --------------------------------------------------------------------------------------------------------


def _declared(parameter: Parameter, placement: Placement, ranks: int, axis: str, frozen: bool) -> str:
    """One line of __init__."""
    value = parameter.value
    sizes = ", ".join(map(str, value.sizes))
    parts = [f'"{parameter.name}"'] + ([sizes] if sizes else [])
    if parameter.buffer:
        # a buffer has the dtype that the user's model gave it; parameters are kept in fp32 and cast by the engine
        parts.append(f"dtype=torch.{value.dtype}")
        if not parameter.persistent:
            parts.append("persistent=False")
    elif value.dtype not in ("float32", "bfloat16"):
        parts.append(f"dtype=torch.{value.dtype}")
    if placement is not I:
        parts.append(f"{axis}={placement}")
    if frozen:
        parts.append("requires_grad=False")
    line = f"self.{'buffer' if parameter.buffer else 'parameter'}({', '.join(parts)})"
    if isinstance(placement, S):
        line += f"  # {list(local_shape(placement, value.sizes, ranks))} here"
    return line


def _declarations(
    parameters: Iterable[tuple[Parameter, Placement]], lowered: Lowered, emission: Emission, prefix: str = ""
) -> list[tuple[str, str]]:
    """Parameters by name, each with its line of __init__."""
    axis = lowered.sharding.axis
    return [
        (
            p.name,
            _declared(p, placement, axis.ranks, axis.name, not p.buffer and f"{prefix}{p.name}" in emission.frozen),
        )
        for p, placement in dict.fromkeys(parameters)
        if p not in emission.unread
    ]


def _method(name: str, arguments: list[str], lines: list[str]) -> str:
    head = f"def {name}({', '.join(['self', *arguments])}):"
    return f"{head}\n{indent(chr(10).join(lines), '    ')}"


def _block_class(block: Block, region: LocalRegion, lowered: Lowered, emission: Emission) -> str:
    body = _Body(region, lowered, emission)
    body.bind_parameters({p.value.name: p.name for p, _ in region.parameters})
    first_float = next((v.name for v in block.inputs if v.grad), None)
    arguments = [body.bind_input(v.name, "x" if v.name == first_float else v.name) for v in block.inputs]
    body.device = f"{arguments[0]}.device" if arguments else "self.device"
    shapes = [_shape_note(region, v.name, n, lowered) for v, n in zip(block.inputs, arguments, strict=True)]
    body.write()
    returned = ", ".join(body.value(name).source for name in region.outputs)
    where = block.paths[0] if len(block.paths) == 1 else f"{block.paths[0]} to {block.paths[-1].rpartition('.')[2]}"
    declared = _declarations(region.parameters, lowered, emission, f"{block.paths[0]}.")
    init = ["super().__init__()", *(line for _, line in declared)]
    members = [
        _method("__init__", [], init),
        _method("forward", arguments, [*shapes, *body.lines, f"return {returned}"]),
    ]
    doc = f'"""{where}"""'
    return f"class {block.name}(ShardedModule):\n" + indent(doc + "\n\n" + "\n\n".join(members), "    ")


def _shape_note(region: LocalRegion, name: str, argument: str, lowered: Lowered) -> str:
    local = region.locals[name]
    shape = list(local_shape(local.placement, local.value.sizes, lowered.sharding.axis.ranks))
    lies = f", {local.placement} over {lowered.sharding.axis.name}" if local.placement is not I else ""
    return f"# {argument} {shape}{lies}"


def _stage_class(number: int, parts: tuple[LocalStage, ...], lowered: Lowered, emission: Emission) -> str:
    program, part = lowered.program, parts[number]
    axis = lowered.sharding.axis
    numbers = _numbers(program.blocks, part)
    beside = tuple(f"{container}." if container else "" for container in numbers)
    counted = {name for op in emission.prologue for name in op.operands} if _counts(part, emission) else set()
    beside_it = [one for one in lowered.root.parameters if one[0].value.name in counted]
    own = _declarations((*part.region.parameters, *beside_it), lowered, emission)
    # what two layers share, or the loss never reads, may be found in a layer or beside it, so it comes after them
    outside = [line for name, line in own if not name.startswith(beside)]
    inside = [line for name, line in own if name.startswith(beside)]
    init = ["super().__init__()", *outside, *_containers(numbers), *inside]
    if number == 0:
        init += [_declared(p, I, axis.ranks, axis.name, not p.buffer) for p in emission.unread]
    unread = emission.unread if number == 0 else ()
    for parameter in (*(p for p, _ in part.region.parameters), *unread):
        init += [f'self.alias("{other}", "{parameter.name}")' for other in parameter.names[1:]]
    for block, instances in _instances(part).items():
        for path in (program.blocks[block].paths[i] for i in instances):
            for parameter in program.blocks[block].parameters:
                init += [f'self.alias("{path}.{other}", "{path}.{parameter.name}")' for other in parameter.names[1:]]
    methods = [_method("__init__", [], init)]
    arguments = _arguments(part, emission)
    if _counts(part, emission):
        methods.append(_normalizers(part, lowered, emission, len(parts) == 1))
    methods.append(_forward(number, part, lowered, emission, arguments))
    if number + 1 < len(parts):
        says = "Gives what the next stage takes."
    else:
        loss = lowered.loss_placement
        says = "Gives this microbatch's share of the loss" + (
            f", a partial sum over {axis.name}." if loss is P else "."
        )
    if len(parts) > 1:
        says = f"Stage {number} of {len(parts)}. {says}"
    name = "Model" if len(parts) == 1 else f"Stage{number}"
    return f"class {name}(ShardedModule):\n" + indent(f'"""{says}"""\n\n' + "\n\n".join(methods), "    ")


def _instances(part: LocalStage) -> dict[int, list[int]]:
    """The layers that a stage calls, by block."""
    found: dict[int, list[int]] = {}
    for call in part.calls:
        found.setdefault(call.block, []).append(call.instance)
    return found


def _numbers(blocks: tuple[Block, ...], part: LocalStage) -> dict[str, dict[int, str]]:
    """The class of every layer of a stage, by container and number."""
    found: dict[str, dict[int, str]] = {}
    for block, instances in _instances(part).items():
        for path in (blocks[block].paths[i] for i in instances):
            container, _, number = path.rpartition(".")
            found.setdefault(container, {})[int(number)] = blocks[block].name
    return {container: dict(sorted(layers.items())) for container, layers in sorted(found.items())}


def _containers(numbers: Mapping[str, Mapping[int, str]]) -> list[str]:
    """The numbered containers, filled in the user's order."""
    lines = []
    for container, layers in numbers.items():
        kinds = list(layers.values())
        if list(layers) != list(range(len(kinds))):  # others stand between, or in other stages
            first, last = min(layers), max(layers)
            if len(set(kinds)) == 1 and 2 < len(kinds) == last + 1 - first:
                made = f"{{number: {kinds[0]}() for number in range({first}, {last + 1})}}"
            else:
                made = f"{{{', '.join(f'{number}: {kind}()' for number, kind in layers.items())}}}"
        elif len(set(kinds)) == 1:
            made = f"[{kinds[0]}() for _ in range({len(kinds)})]"
        else:
            made = f"[{', '.join(f'{kind}()' for kind in kinds)}]"
        lines.append(f'self.blocks("{container}", {made})')
    return lines


def _arguments(part: LocalStage, emission: Emission) -> dict[str, str]:
    """How the methods of a stage call what it is given: received values, inputs and, after them, normalizers."""
    names = _Names(set(RESERVED))
    first = next((v for v in part.received if part.region.locals[v].value.grad), None)
    given = {value: names.give(value, "x" if value == first else value) for value in part.received}
    return given | {value: names.give(value) for value in part.reads}


def _counts(part: LocalStage, emission: Emission) -> bool:
    """Whether a stage divides by sums over all rows."""
    return not set(part.reads).isdisjoint(emission.normalizers)


def counted(part: LocalStage, emission: Emission, whole: bool) -> tuple[str, ...]:
    """The inputs that the normalizers of a stage are made of; of the whole model, all."""
    if not _counts(part, emission):
        return ()
    read = {name for op in emission.prologue for name in op.operands}
    return tuple(spec.name for spec in emission.inputs if whole or spec.name in read)


def _normalizers(part: LocalStage, lowered: Lowered, emission: Emission, whole: bool) -> str:
    given_names = _Names(set(RESERVED))
    given = {name: given_names.give(name) for name in counted(part, emission, whole)}
    names = list(given.values())
    texts = {value: Text(name) for value, name in given.items()}
    texts |= {p.value.name: Text(tensor(p.name)) for p in lowered.program.parameters}
    speller = Speller(lambda name: texts[name], f"{names[0]}.device")
    taken = _Names(set(RESERVED) | set(names))
    lines = ["# sums over rows that the loss is divided by: taken over the global batch before the first microbatch"]
    for op in (op_at(op, emission.microbatch) for op in emission.prologue):
        written = speller.write(op).source
        bound = [taken.give(v.name) for v in op.results]
        texts |= {v.name: Text(n) for v, n in zip(op.results, bound, strict=True)}
        lines.append(f"{', '.join(bound)} = {written}  # {list(op.results[0].sizes)}")
    lines.append(f"return ({', '.join(texts[n].source for n in emission.normalizers if n in part.reads)},)")
    return _method("normalizers", names, lines)


def _forward(number: int, part: LocalStage, lowered: Lowered, emission: Emission, given: Mapping[str, str]) -> str:
    program, region = lowered.program, part.region
    body = _Body(region, lowered, emission)
    body.sites = part.draws
    body.bind_parameters({p.value.name: p.name for p, _ in region.parameters})
    arguments = list(given.values())
    body.bind_arguments(given)
    body.device = f"{arguments[0]}.device"
    shapes = [_shape_note(region, value, given[value], lowered) for value in part.received]
    statements = region.statements
    calls = [s for s in statements if isinstance(s, LocalCall)]
    for call in calls:  # what a layer takes first is called x, as inside the layer
        arg = next((a for a in call.args if region.locals[a].value.grad), None)
        if arg is not None and body.uses[arg] == 1:
            body.called[arg] = "x"
    i = 0
    while i < len(statements):
        statement = statements[i]
        if isinstance(statement, LocalCall):
            i = _calls(body, program, part, emission.recompute[number], i)
            continue
        following = statements[i + 1] if i + 1 < len(statements) else None
        body.statement(i, statement, following)
        i += 1
    lines = [*shapes, *body.lines, f"return {', '.join(body.value(name).source for name in region.outputs)}"]
    return _method("forward", arguments, lines)


def _calls(body: _Body, program: Blocked, part: LocalStage, recompute: tuple[int, ...], start: int) -> int:
    """Writes the run of layers that starts here, as a loop where each layer takes what the one before gave."""
    statements, blocks = body.region.statements, program.blocks
    first = statements[start]
    assert isinstance(first, LocalCall)
    block = blocks[first.block]
    container = block.paths[first.instance].rpartition(".")[0]
    end = start + 1
    while end < len(statements) and _continues(body, statements[end - 1], statements[end], blocks):
        end += 1
    count = end - start
    numbers = [int(block.paths[first.instance + k].rpartition(".")[2]) for k in range(count)]
    arguments = [body.value(a).source for a in first.args]
    last = statements[end - 1]
    assert isinstance(last, LocalCall)
    outputs = [v.name for v in last.results]
    carried = _carried_position(first, statements[start + 1]) if count > 1 else 0
    ended = {a for s in statements[start:end] for a in reads_of(s) if body.last[a] < end and a in body.names.live}
    ended -= {*body.region.outputs}
    again = {a for i, a in enumerate(first.args) if i != carried} if count > 1 else set()  # read in every turn
    for value in ended - again:
        body.names.drop(value)
    bound = [body.names.give(o, "x" if k == 0 else o) for k, o in enumerate(outputs)]
    for value in ended & again:
        body.names.drop(value)
    for output, name in zip(outputs, bound, strict=True):
        body.texts[output] = Text(name)
    target = ", ".join(bound)
    layers = attribute(container)
    saved = max(0, min(count, recompute[first.block] - _instances(part)[first.block].index(first.instance)))
    if count == 1:
        layer = f"{layers}[{numbers[0]}]"
        body.lines.append(f"{target} = {_called(layer, arguments, saved > 0)}")
        return end
    if target != arguments[carried]:
        body.lines.append(f"{target} = {arguments[carried]}")
        arguments[carried] = target
    # where not every child is a layer, or the container is the model itself, it is no list
    here = _numbers(blocks, part)[container]
    alone = container and list(here) == list(range(_children(program, container)))
    for some, recomputes in ((numbers[:saved], True), (numbers[saved:], False)):
        if not some:
            continue
        span = range(some[0], some[-1] + 1)
        if not alone:
            layer = f"{layers}[number]"
            body.lines.append(f"for number in {span}:")
        else:
            layer = "block"
            cut = "" if len(span) == len(here) else f"[{span.start}:{span.stop}]"
            body.lines.append(f"for block in {layers}{cut}:")
        body.lines.append(f"    {target} = {_called(layer, arguments, recomputes)}")
    return end


def _called(layer: str, arguments: list[str], again: bool) -> str:
    return f"recompute({', '.join([layer, *arguments])})" if again else f"{layer}({', '.join(arguments)})"


def _children(program: Blocked, container: str) -> int:
    """How many numbered children of a container hold anything."""
    prefix = f"{container}." if container else ""
    names = [name for name, _ in program.all_parameters()]
    return len({name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)})


def _carried_position(first: LocalCall, second: object) -> int:
    """Which argument of a layer in a loop is what the layer before gave."""
    assert isinstance(second, LocalCall)
    return second.args.index(first.results[0].name)


def _continues(body: _Body, before: object, statement: object, blocks: tuple[Block, ...]) -> bool:
    """Whether `statement` is the next turn of the loop that `before` is in."""
    if not isinstance(before, LocalCall) or not isinstance(statement, LocalCall) or statement.block != before.block:
        return False
    if len(before.results) != 1 or statement.instance != before.instance + 1:
        return False
    result = before.results[0].name
    numbers = [int(blocks[c.block].paths[c.instance].rpartition(".")[2]) for c in (before, statement)]
    fresh = [a for a, b in zip(statement.args, before.args, strict=True) if a != b]
    return fresh == [result] and numbers[1] == numbers[0] + 1 and body.uses[result] == 1


def _program(lowered: Lowered, emission: Emission, parts: tuple[LocalStage, ...]) -> str:
    """What is to be run, and running it."""
    mesh = ", ".join(f'"{axis}": {size}' for axis, size in emission.mesh.items())
    lines = ["PROGRAM = Program("]
    if len(parts) == 1:
        lines.append("    model=Model,")
    else:
        lines.append("    model=(")
        for number, part in enumerate(parts):
            read = tuple(name for name in part.reads if name not in emission.normalizers)
            stage = f"Stage{number}"
            for what, names in (("reads", read), ("counts", counted(part, emission, whole=False))):
                listed = ", ".join(f'"{name}"' for name in names)
                stage += f", {what}=({listed}{',' if len(names) == 1 else ''})" if names else ""
            if number + 1 == len(parts):
                lines.append(f"        Stage({stage}),")
                continue
            edges = [_edge(part.region, name, lowered) for name in part.region.outputs]
            lines.append(f"        Stage({stage}, gives=(")
            lines += [f"            {edge}," for edge in edges]
            lines.append("        )),")
        lines.append("    ),")
    lines.append(f"    mesh={{{mesh}}},")
    if emission.schedule != "none":
        lines.append(f'    schedule="{emission.schedule}",')
    if both := shared(parts):
        lines.append("    shared={")
        lines += [f'        "{name}": {numbers},' for name, numbers in both.items()]
        lines.append("    },")
    lines.append(f"    zero={emission.zero},")
    lines.append(f"    zero_group={emission.zero_group},")
    lines.append(f"    microbatches={emission.microbatches},")
    lines.append("    rows=ROWS,")
    lines.append(f'    precision="{emission.precision}",')
    lines.append("    inputs=(")
    for spec in emission.inputs:
        shape = f"({', '.join(map(str, spec.shape))}{',' if len(spec.shape) == 1 else ''})"
        rows = "" if spec.rows else ", rows=False"
        bounds = f", low={spec.low:.0f}, high={spec.high:.0f}"
        lines.append(f'        Input("{spec.name}", {shape}, "{spec.dtype}"{rows}{bounds}),')
    lines.append("    ),")
    lines.append(f"    loss={lowered.loss_placement},")
    lines.append(f'    optimizer="{emission.optimizer}",')
    lines.append(")")
    lines += ["", 'if __name__ == "__main__":', "    main(PROGRAM)", ""]
    return "\n".join(lines)


def _edge(region: LocalRegion, name: str, lowered: Lowered) -> str:
    """How a tensor travels between two stages."""
    value, lies = region.locals[name].value, region.locals[name].placement
    parts = [*map(str, value.sizes)]
    if value.dtype != "float32":
        parts.append(f"dtype=torch.{value.dtype}")
    if lies is not I:
        parts.append(f"{lowered.sharding.axis.name}={lies}")
    if not value.grad:
        parts.append("grad=False")
    return f"Edge({', '.join(parts)})"
