"""BATCH: where the rows of the batch lie in every tensor, and whether they can be told apart.

Splitting the rows over ranks (data parallel) and over time (microbatches) is one analysis with the same operator
rules: rows are a cut S(d, k) that every operator must carry through. A sum over rows is partial; the loss may be,
since partial losses add up. Where a whole value is needed of a partial sum (a loss's count of valid targets), it must
depend on the inputs alone: such a value is a `normalizer`, taken over the global batch before the first microbatch.
Any other operator that mixes rows couples them: data parallel and microbatches are then refused, with its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from passes.graph import Graph, Op, Ref, Size, Value, leaves, mutates
from passes.normalize import counted_rows
from passes.placements import S
from passes.rules import rule_of
from passes.rules.base import Factor, Site, block_counts
from passes.rules.creation import SIZED
from passes.rules.randomness import draws

TRIAL_ROWS = 101  # a prime that no other size has as a factor tells the rows from everything else; shapes only


@dataclass(frozen=True)
class Partial:
    """A sum over the rows."""


@dataclass(frozen=True)
class RowNumber:
    """Row numbers counted from 0 along `dim` (arange over the batch): right only to look up rows of another value.

    Each part of the batch counts from 0 again. So nothing may be computed with them, and what they look up must have
    exactly these rows.
    """

    dim: int


_MOVED = """
reshape.default view.default _unsafe_view.default flatten.using_ints unflatten.int unsqueeze.default squeeze.default
squeeze.dim squeeze.dims expand.default permute.default transpose.int t.default swapaxes.default swapdims.default
movedim.int movedim.intlist alias.default detach.default contiguous.default clone.default lift_fresh.default
lift_fresh_copy.default to.dtype to.dtype_layout to.device _to_copy.default
"""
KEEP_NUMBERS = frozenset(f"aten.{name}" for name in _MOVED.split())  # operators after which a row number is still one
COUNTING = frozenset(("int64", "int32"))  # dtypes that hold every row number

# operators that make rows which do not know their place
ALIKE = frozenset((*SIZED, "aten.expand.default", "aten.repeat.default"))

Spread: TypeAlias = "S | Partial | RowNumber | None"  # None: the same for all rows


@dataclass(frozen=True)
class BatchInfo:
    """What the analysis found. `coupled` says why rows cannot be separated ("" where they can)."""

    spread: Mapping[str, Spread]
    normalizers: tuple[str, ...]  # values that are summed over the global batch before they are used
    coupled: str


def batch_info(graph: Graph, row_inputs: frozenset[str]) -> BatchInfo:
    """Follow the rows of `row_inputs` (first dim) through the graph."""
    trial = graph.at(TRIAL_ROWS)
    spread: dict[str, Spread] = {v.name: S(0) if v.name in row_inputs else None for v in trial.inputs}
    spread |= {p.value.name: None for p in trial.parameters}
    trained = {p.value.name for p in trial.parameters if p.value.grad}
    frozen = {p.value.name for p in trial.parameters if not p.buffer} - trained
    counters = {p.value.name for p in trial.parameters if p.name.rpartition(".")[2] == "num_batches_tracked"}
    normalizers: list[str] = []
    for op in graph.ops:
        if any(counted_rows(op)):
            return BatchInfo(
                spread, (), f"{_where(op)} computes with a number of rows that is no multiple of the batch"
            )
        if mutates(op) and op.operands[0] in counters:
            return BatchInfo(spread, (), _batch_norm(op))
        if mutates(op):
            return BatchInfo(spread, (), f"{_where(op)} changes a buffer, once per step and not once per microbatch")
    for op, symbolic in zip(trial.ops, graph.ops, strict=True):
        for tainted in (trained, frozen):
            if any(name in tainted for name in op.operands):
                tainted.update(v.name for v in op.results)
        lying = [spread[name] for name in op.operands]
        found, wanted_whole, why = _through(op, symbolic, trial, lying)
        if found is None:
            norm = op.target == "aten.batch_norm.default" and op.arg(5)
            return BatchInfo(spread, (), _batch_norm(op) if norm else why)
        if any(sum(isinstance(size, Size) for size in v.shape) > 1 for v in symbolic.results):
            return BatchInfo(spread, (), f"{_where(op)} makes a value for every pair of rows")
        for name in wanted_whole:
            if name in trained:
                why = f"the loss is not a sum or mean over rows because of {_where(op)}"
                return BatchInfo(spread, (), f"{why}, which needs the sum over all rows of {name} first")
            if name in frozen:  # ranks may hold parts of a parameter, and all of a buffer
                why = f"{_where(op)} needs the sum over all rows of {name} first, which reads a frozen parameter"
                return BatchInfo(spread, (), f"{why}; make it a buffer")
            if name not in normalizers:
                normalizers.append(name)
        spread |= zip((v.name for v in op.results), found, strict=True)
    if isinstance(spread[graph.loss], S):
        return BatchInfo(spread, (), "the loss has one value per row")
    if not isinstance(spread[graph.loss], Partial):
        return BatchInfo(spread, (), "the loss is the same for every row")
    info = BatchInfo(spread, tuple(normalizers), "")
    drawn = next((op for op in split_prologue(graph, info)[1] if draws(op)), None)
    if drawn is not None:  # it would draw twice: before the first microbatch, and in it
        return BatchInfo(spread, (), f"the loss is divided by what {_where(drawn)} draws at random")
    return info


def _where(op: Op) -> str:
    place = op.module or ("loss_fn" if op.in_loss else "the model's own forward")
    return f"{op.target.removeprefix('aten.').partition('.')[0]} in {place} ({op.source})"


def _batch_norm(op: Op) -> str:
    name = f"BatchNorm `{op.module}`" if op.module else "BatchNorm"
    return f"{name} counts statistics over the whole batch; use GroupNorm or LayerNorm, or .eval() to freeze it"


def _grown(op: Op) -> tuple[Spread, ...] | None:
    """How results lie that are made out of what is the same for all rows; None where a row knows its place.

    `op` has the symbol. Only an operator that is given the number of rows makes something for each of them.
    """
    if not any(isinstance(leaf, Size) for arg in (*op.args, *(a for _, a in op.kwargs)) for leaf in leaves(arg)):
        return tuple(None for _ in op.results)
    grows = {d: size for d, size in enumerate(op.results[0].shape) if isinstance(size, Size)}
    if len(op.results) != 1 or len(grows) != 1 or any(size.fixed for size in grows.values()):
        return None
    (dim,) = grows
    if op.target in ALIKE:
        return (S(dim),)
    counts = {"aten.arange.default": True, "aten.arange.start": op.arg(0) == 0}
    counts["aten.arange.start_step"] = op.arg(0) == 0 and op.arg(2, "step", 1) == 1
    return (RowNumber(dim),) if counts.get(op.target) else None


def _kept_numbers(op: Op, graph: Graph, lying: list[Spread]) -> RowNumber | None:
    """Row numbers that an operator only moves; None where it computes with them."""
    if op.target not in KEEP_NUMBERS or op.results[0].dtype not in COUNTING:
        return None
    before = lying[0]
    out, _, _ = _through(op, op, graph, [S(before.dim)]) if isinstance(before, RowNumber) else (None, [], "")
    after = out[0] if out is not None else None
    if not isinstance(before, RowNumber) or not isinstance(after, S):
        return None
    same = graph.values[op.operands[0]].sizes[before.dim] == op.results[0].sizes[after.dim]
    return RowNumber(after.dim) if same and after.blocks == 1 else None


def _looked_up(op: Op, graph: Graph, lying: list[Spread]) -> Spread:
    """x[rows, other, indices] where `rows` are row numbers: the rows of x, wherever indexing puts them."""
    indices = op.arg(1)
    assert isinstance(indices, tuple)
    used = [d for d, index in enumerate(indices) if isinstance(index, Ref)]
    spreads = dict(zip(used, lying[1:], strict=True))
    source = lying[0]
    if not isinstance(source, S) or source.blocks != 1 or used != list(range(used[0], used[-1] + 1)):
        return None
    rows = spreads.get(source.dim)
    if not isinstance(rows, RowNumber):
        return None
    numbers = indices[source.dim]
    assert isinstance(numbers, Ref)
    if graph.values[op.operands[0]].sizes[source.dim] != graph.values[numbers.name].sizes[rows.dim]:
        return None  # the first rows of more: each part of the batch would look up its own first ones
    ranks = {d: len(graph.values[index.name].shape) for d, index in enumerate(indices) if isinstance(index, Ref)}
    place = max(ranks.values()) - ranks[source.dim] + rows.dim  # of the rows among the dims that indices make
    for d, lies in spreads.items():
        along = isinstance(lies, S) and lies.blocks == 1 and max(ranks.values()) - ranks[d] + lies.dim == place
        if d != source.dim and lies is not None and not along:
            return None
    return S(used[0] + place)


def _through(
    op: Op, symbolic: Op, graph: Graph, lying: list[Spread]
) -> tuple[tuple[Spread, ...] | None, list[str], str]:
    """How the results lie, and which partial operands must be made whole first; or None and why not."""
    numbers = f"{_where(op)} computes with the number of a row in the batch"
    partial = {i for i, s in enumerate(lying) if isinstance(s, Partial)}
    if all(s is None for s in lying):
        grown = _grown(symbolic)
        return grown, [], "" if grown is not None else numbers
    if any(isinstance(s, RowNumber) for s in lying):
        found = _looked_up(op, graph, lying) if op.target == "aten.index.Tensor" else _kept_numbers(op, graph, lying)
        return ((found,), [], "") if found is not None else (None, [], numbers)
    rule = rule_of(op.target)
    if rule is None:
        return None, [], f"{_where(op)} mixes the rows of a batch, or has no rule that says it does not"
    site = Site.of(op, graph.values)
    for group in sorted(rule.linear(site), key=len, reverse=True):
        if group <= partial and all(lying[i] is None for i in range(len(lying)) if i not in partial):
            return tuple(Partial() for _ in op.results), [op.operands[i] for i in sorted(partial - group)], ""
    whole = [op.operands[i] for i in sorted(partial)]
    lying = [None if isinstance(s, Partial) else s for s in lying]
    if all(s is None for s in lying):
        return tuple(None for _ in op.results), whole, ""
    wanted = {v.name: frozenset[S]() for v in op.results}
    for factor in rule.factors(site):
        if factor.form:
            continue
        for blocks in {*block_counts(factor, site, wanted), *_implied(factor, lying)}:
            cuts = [None if d is None else d.cut(blocks) for d in factor.operands]
            if cuts == lying:
                out = tuple(Partial() if d is None else d.cut(blocks) for d in factor.results)
                if all(holds_rows(o, v) for o, v in zip(out, site.results, strict=True)):
                    return out, whole, ""
    return None, [], f"{_where(op)} mixes the rows of a batch"


def holds_rows(spread: Spread, value: Value) -> bool:
    """Whether every block of a cut counts rows: in [10, rows] flattened, S(0, 10) does, and S(0) does not."""
    if not isinstance(spread, S):
        return spread is not None
    size = value.sizes[spread.dim]
    return size % spread.blocks == 0 and size // spread.blocks % TRIAL_ROWS == 0


def _implied(factor: Factor, lying: list[Spread]) -> set[Fraction]:
    """The factor's block count that the operands' cuts imply."""
    return {
        s.blocks / d.scale for s, d in zip(lying, factor.operands, strict=True) if isinstance(s, S) and d is not None
    }


def split_prologue(graph: Graph, info: BatchInfo) -> tuple[Graph, tuple[Op, ...]]:
    """The graph with the normalizers as inputs, and the operators that compute them."""
    needed = set(info.normalizers)
    prologue: list[Op] = []
    for op in reversed(graph.ops):
        if any(v.name in needed for v in op.results):
            needed.update(op.operands)
            prologue.append(op)
    kept, wanted = [], {graph.loss}
    for op in reversed(graph.ops):
        given = all(v.name in info.normalizers for v in op.results)
        if not given and (any(v.name in wanted for v in op.results) or mutates(op)):
            wanted.update(op.operands)
            kept.append(op)
    inputs = (*graph.inputs, *(graph.values[name] for name in info.normalizers))
    return replace(graph, inputs=inputs, ops=tuple(reversed(kept))), tuple(reversed(prologue))
