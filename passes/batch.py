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

from passes.graph import Graph, Op, Ref, Size, Value, mutates
from passes.normalize import counted_rows
from passes.placements import S
from passes.rules import rule_of
from passes.rules.base import Factor, Site, block_counts

TRIAL_ROWS = 101  # a prime that no other size has as a factor tells the rows from everything else; shapes only


@dataclass(frozen=True)
class Partial:
    """A sum over the rows."""


@dataclass(frozen=True)
class RowNumber:
    """Row numbers counted from 0 along `dim` (arange over the batch): right only to look up rows of another value."""

    dim: int


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
    trained = {p.value.name for p in trial.parameters}
    normalizers: list[str] = []
    for op in graph.ops:
        if any(counted_rows(op)):
            return BatchInfo(
                spread, (), f"{_where(op)} computes with a number of rows that is no multiple of the batch"
            )
        if mutates(op):
            return BatchInfo(spread, (), f"{_where(op)} changes a buffer, once per step and not once per microbatch")
    for op in trial.ops:
        if any(name in trained for name in op.operands):
            trained.update(v.name for v in op.results)
        lying = [spread[name] for name in op.operands]
        found, wanted_whole, why = _through(op, graph, trial, lying)
        if found is None:
            return BatchInfo(spread, (), why)
        for name in wanted_whole:
            if name in trained:
                return BatchInfo(spread, (), f"{_where(op)} needs the sum over all rows of {name}, which is trained")
            if name not in normalizers:
                normalizers.append(name)
        spread |= zip((v.name for v in op.results), found, strict=True)
    if isinstance(spread[graph.loss], S):
        return BatchInfo(spread, (), "the loss has one value per row")
    if not isinstance(spread[graph.loss], Partial):
        return BatchInfo(spread, (), "the loss is the same for every row")
    return BatchInfo(spread, tuple(normalizers), "")


def _where(op: Op) -> str:
    return f"{op.target.removeprefix('aten.').partition('.')[0]} in {op.module or 'the loss'} ({op.source})"


def _grown(result: Value, arange: bool) -> Spread:
    """How a value lies that is made for the whole batch out of what is the same for all rows."""
    dims = [d for d, size in enumerate(result.shape) if isinstance(size, Size)]
    if len(dims) != 1:
        return None
    return RowNumber(dims[0]) if arange else S(dims[0])


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
    ranks = {d: len(graph.values[index.name].shape) for d, index in enumerate(indices) if isinstance(index, Ref)}
    place = max(ranks.values()) - ranks[source.dim] + rows.dim  # of the rows among the dims that indices make
    for d, lies in spreads.items():
        along = isinstance(lies, S) and lies.blocks == 1 and max(ranks.values()) - ranks[d] + lies.dim == place
        if d != source.dim and lies is not None and not along:
            return None
    return S(used[0] + place)


def _through(
    op: Op, symbolic: Graph, graph: Graph, lying: list[Spread]
) -> tuple[tuple[Spread, ...] | None, list[str], str]:
    """How the results lie, and which partial operands must be made whole first; or None and why not."""
    partial = {i for i, s in enumerate(lying) if isinstance(s, Partial)}
    if all(s is None for s in lying):
        made = (symbolic.values[v.name] for v in op.results)
        return tuple(_grown(v, op.target.startswith("aten.arange")) for v in made), [], ""
    numbered = any(isinstance(s, RowNumber) for s in lying)
    if numbered and op.target == "aten.index.Tensor" and (found := _looked_up(op, graph, lying)) is not None:
        return (found,), [], ""
    if numbered and any(isinstance(s, (S, Partial)) for s in lying):
        return None, [], f"{_where(op)} computes with the number of a row in the batch"
    if numbered:
        lying = [S(s.dim) if isinstance(s, RowNumber) else s for s in lying]
        out, whole, why = _through(op, symbolic, graph, lying)
        return (out and tuple(RowNumber(s.dim) if isinstance(s, S) else s for s in out)), whole, why
    rule = rule_of(op.target)
    if rule is None:
        return None, [], f"{_where(op)} mixes the rows of a batch, or has no rule that says it does not"
    site = Site(op, tuple(graph.values[name] for name in op.operands))
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
