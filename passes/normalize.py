"""NORMALIZE: the same step in fewer and plainer operators.

Each rewrite preserves the meaning and is tested by running both graphs. Unknown patterns stay as they are.

    no-ops                x.to(same dtype), x + 0, dropout(p=0), alias, cat([x])  ->  x
    writes into slices    slice_scatter(x, y, 1, 1, end)                          ->  cat((x[:, :1], y), 1)
    constant masks        sdpa(q, k, v, mask that is the lower triangle)          ->  sdpa(q, k, v, is_causal=True)
    grouped queries       sdpa(q, repeat_kv(k), repeat_kv(v))                     ->  sdpa(q, k, v, enable_gqa=True)
    row counts            x.sum() / x.shape[0]                                    ->  x.sum() / rows of the global batch
    mean losses           cross_entropy(x, y, "mean")                             ->  cross_entropy(x, y, "sum") / count
    loss precision        cross_entropy(bf16)                                     ->  cross_entropy(fp32)
    gradients             p, read behind x.detach() only                          ->  p, frozen

Sums over the rows of a batch can be split over ranks and microbatches; means cannot (their parts weigh differently).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod

import torch

from passes.graph import CONSTANT, FLOATS, Arg, Atom, Graph, Op, Ref, Rows, Size, Value, map_op, mutates
from passes.interpret import call, may_alias, schema
from passes.rules.randomness import draws

LARGEST_MASK = 2**28  # elements of a constant mask that is looked at (1 byte each)


def normalize(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The rewritten graph, and notes for the user."""
    notes: list[str] = []
    graph = without_noops(graph)
    graph = with_joined_slices(graph)
    graph = with_known_masks(graph, notes)
    graph = with_grouped_queries(graph)
    graph = with_row_counts(graph)
    graph = with_summed_losses(graph)
    return with_settled_gradients(without_dead_code(graph)), tuple(notes)


# -- helpers: rewriting keeps value names, so that nothing else has to change ---------------------------------------


@dataclass(frozen=True)
class Same:
    """`result` need not be computed: it equals another value."""

    result: str
    equals: str


def substitute(graph: Graph, into: Callable[[Op], Iterable[Op | Same]]) -> Graph:
    """The graph with each operator replaced by operators, or by values that equal its results."""
    same: dict[str, str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = map_op(op, lambda a: Ref(same.get(a.name, a.name)) if isinstance(a, Ref) else a)
        for new in into(op):
            if isinstance(new, Op):
                ops.append(new)
            else:
                same[new.result] = new.equals
    return replace(graph, ops=tuple(ops), loss=same.get(graph.loss, graph.loss))


def without_dead_code(graph: Graph) -> Graph:
    """Only what the loss needs, and what changes a buffer in place."""
    needed = {graph.loss}
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if any(v.name in needed for v in op.results) or mutates(op):
            needed.update(op.operands)
            kept.append(op)
    return replace(graph, ops=tuple(reversed(kept)))


def with_settled_gradients(graph: Graph) -> Graph:
    """Marks what a gradient flows into: a parameter that reaches the loss behind a detach only counts as frozen."""
    reached = {graph.loss}
    for op in reversed(graph.ops):
        if any(v.grad and v.name in reached for v in op.results):
            reached.update(op.operands)
    parameters = tuple(
        replace(p, value=replace(p.value, grad=p.value.grad and p.value.name in reached)) for p in graph.parameters
    )
    trained = {p.value.name for p in parameters if p.value.grad}
    ops: list[Op] = []
    for op in graph.ops:
        flows = any(name in trained for name in op.operands)
        ops.append(replace(op, results=tuple(replace(v, grad=v.grad and flows) for v in op.results)))
        trained.update(v.name for v in ops[-1].results if v.grad)
    return replace(graph, parameters=parameters, ops=tuple(ops))


# -- rewrites -----------------------------------------------------------------------------------------------------

_SAME = frozenset(
    ("aten.alias.default", "aten.contiguous.default", "aten.lift_fresh_copy.default", "aten.clone.default")
)
_CASTS = frozenset(
    ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default", "aten.type_as.default")
)
_FRESH = {
    "aten.new_empty.default": "aten.empty.memory_format",
    "aten.new_zeros.default": "aten.zeros.default",
    "aten.new_ones.default": "aten.ones.default",
    "aten.new_full.default": "aten.full.default",
    "aten.empty_like.default": "aten.empty.memory_format",
    "aten.zeros_like.default": "aten.zeros.default",
    "aten.ones_like.default": "aten.ones.default",
}
_NEUTRAL = {"aten.add.Tensor": 0, "aten.sub.Tensor": 0, "aten.mul.Tensor": 1, "aten.div.Tensor": 1}


def without_noops(graph: Graph) -> Graph:
    """Drops what changes nothing: casts to the same dtype, aliases, dropout(p=0), x + 0, views to the same shape."""
    values = graph.values
    moving = written_buffers(graph)

    def into(op: Op) -> Iterable[Op | Same]:
        op = replace(
            op, kwargs=tuple((k, a) for k, a in op.kwargs if k not in ("pin_memory", "layout") and a is not None)
        )
        first = values[op.operands[0]] if op.operands else None
        if first is None:
            return (op,)
        same_type = first.dtype == op.results[0].dtype and first.shape == op.results[0].shape
        if op.target == "aten.broadcast_tensors.default":
            return tuple(
                Same(result.name, name)
                if values[name].shape == result.shape
                else op.instead("aten.expand.default", (Ref(name), result.shape), result)
                for name, result in zip(op.operands, op.results, strict=True)
            )
        if op.target == "aten.cat.default" and isinstance(op.args[0], tuple):  # a cache starts with an empty tensor
            full = tuple(a for a in op.args[0] if isinstance(a, Ref) and 0 not in values[a.name].shape)
            if len(full) == 1:
                return (Same(op.name, full[0].name),)
            return (replace(op, args=(full or op.args[0], *op.args[1:])),)
        if op.target == "aten.copy.default":
            return _copied(op, values)
        made = _FRESH.get(op.target)
        if made is not None:  # x gives only its dtype and device
            fill = (op.arg(2),) if made == "aten.full.default" else ()
            kwargs: tuple[tuple[str, Arg], ...] = (
                ("dtype", Atom(f"torch.{op.results[0].dtype}")),
                ("device", Atom("device")),
            )
            return (replace(op, target=made, args=(op.results[0].shape, *fill), kwargs=kwargs),)
        neutral = _NEUTRAL.get(op.target)
        if op.target == "aten.clone.default" and first.name in moving:
            return (op,)
        if op.target in _SAME or (op.target in _CASTS and same_type):
            return (Same(op.name, first.name),)
        if op.target in _CASTS:
            return (op.instead("aten.to.dtype", (Ref(first.name), Atom(f"torch.{op.results[0].dtype}")), *op.results),)
        if op.target == "aten.native_dropout.default" and op.arg(1) == 0.0:
            return (Same(op.name, first.name),)
        if op.target in ("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default") and (
            op.arg(1) == 0.0 or op.arg(2) is False
        ):
            return (Same(op.name, first.name),)
        second = op.arg(1)
        if neutral is not None and not isinstance(second, (Ref, bool)) and second == neutral and same_type:
            return (Same(op.name, first.name),)
        if op.target == "aten.native_dropout.default":
            op = replace(op, target="aten.dropout.default", results=op.results[:1])
        if op.target in ("aten.view.default", "aten._unsafe_view.default"):
            op = replace(op, target="aten.reshape.default")
        reshaping = ("aten.reshape.default", "aten.expand.default", "aten.slice.Tensor")
        if op.target in reshaping and same_type and (op.target != "aten.slice.Tensor" or op.arg(4, "step", 1) == 1):
            return (Same(op.name, first.name),)
        return (op,)

    return substitute(graph, into)


def _copied(op: Op, values: dict[str, Value]) -> tuple[Op | Same, ...]:
    """x.copy_(y) is y in the dtype and shape of x."""
    source, result = values[op.operands[1]], op.results[0]
    ops: list[Op] = []
    if source.dtype != result.dtype:
        cast = replace(source, name=f"{result.name}_cast", dtype=result.dtype)
        ops.append(op.instead("aten.to.dtype", (Ref(source.name), Atom(f"torch.{result.dtype}")), cast))
        source = cast
    if source.shape == result.shape:
        return (*ops, Same(result.name, source.name))
    return (*ops, op.instead("aten.expand.default", (Ref(source.name), result.shape), result))


_SCATTERS = ("aten.slice_scatter.default", "aten.select_scatter.default")


def with_joined_slices(graph: Graph) -> Graph:
    """What functionalization makes of x[:, 1:] = y, as a join of what stays and what is new."""
    values = graph.values

    def into(op: Op) -> Iterable[Op | Same]:
        if op.target not in _SCATTERS:
            return (op,)
        (old, new), result = op.operands, op.results[0]
        one = op.target == "aten.select_scatter.default"
        dim = int(op.arg(2, "dim", 0)) % len(result.shape)  # type: ignore[arg-type]
        start, end = op.arg(3, "index" if one else "start"), None if one else op.arg(4, "end")
        size, step = result.shape[dim], 1 if one else op.arg(5, "step", 1)
        if not one and start in (None, 0) and values[new].shape == result.shape:
            return (Same(op.name, new),)
        if not isinstance(size, int) or isinstance(start, Size) or isinstance(end, Size) or step != 1:
            return (op,)
        first = range(size)[start] if one else slice(start, end).indices(size)[0]  # type: ignore[index]
        last = first + 1 if one else max(first, slice(start, end).indices(size)[1])
        ops, parts = [], []

        def part(source: str, target: str, args: tuple[Arg, ...], length: int, suffix: str) -> None:
            shape = (*result.shape[:dim], length, *result.shape[dim + 1 :])
            made = replace(values[source], name=f"{result.name}_{suffix}", shape=shape)
            ops.append(op.instead(target, (Ref(source), dim, *args), made))
            parts.append(Ref(made.name))

        if first > 0:
            part(old, "aten.slice.Tensor", (0, first), first, "before")
        if one:
            part(new, "aten.unsqueeze.default", (), 1, "new")
        elif last > first:
            parts.append(Ref(new))
        if last < size:
            part(old, "aten.slice.Tensor", (last, size), size - last, "after")
        joined = op.instead("aten.cat.default", (tuple(parts), dim), *op.results)
        return (*ops, joined)

    return substitute(graph, into)


def written_buffers(graph: Graph) -> frozenset[str]:
    """Buffers that some operator writes in place, and what shares their memory: a copy of them is not a no-op."""
    found = {op.operands[0] for op in graph.ops if mutates(op)}
    for op in graph.ops:
        if op.operands and op.operands[0] in found and may_alias(op, graph.values[op.operands[0]].dtype):
            found |= {v.name for v in op.results}
    return frozenset(found)


def constants(graph: Graph) -> frozenset[str]:
    """Values that depend on no input and no parameter or buffer."""
    variable = {v.name for v in graph.inputs} | {p.value.name for p in graph.parameters}
    found: set[str] = set()
    for op in graph.ops:
        if all(name in found for name in op.operands) and not mutates(op) and not draws(op):
            found |= {v.name for v in op.results} - variable
    return frozenset(found)


def evaluate(graph: Graph, name: str) -> torch.Tensor:
    """A constant value, computed for a batch of one."""
    small = graph.at(1)
    needed = {name}
    ops: list[Op] = []
    for op in reversed(small.ops):
        if any(v.name in needed for v in op.results):
            needed.update(op.operands)
            ops.append(op)
    last_reader = {operand: op for op in reversed(ops) for operand in op.operands}
    tensors: dict[str, torch.Tensor] = {}
    for op in reversed(ops):
        tensors |= zip((v.name for v in op.results), call(op, tensors), strict=True)
        for operand in set(op.operands):
            if last_reader[operand] is op:
                tensors.pop(operand, None)  # masks are large: hold no more of them than needed
    return tensors[name]


SDPA = "aten.scaled_dot_product_attention.default"
SDPA_ARGS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def attention(op: Op, **changes: Arg) -> Op:
    """The attention operator with some of its arguments (by name) changed; defaults are left out."""
    given: dict[str, Arg] = dict(zip(SDPA_ARGS, op.args, strict=False)) | dict(op.kwargs) | changes
    defaults: dict[str, Arg] = {
        "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
    }  # fmt: skip
    kept = {k: v for k, v in given.items() if k in SDPA_ARGS[:3] or v != defaults[k]}
    return replace(op, args=tuple(kept.pop(k) for k in SDPA_ARGS[:3]), kwargs=tuple(kept.items()))


def with_known_masks(graph: Graph, notes: list[str]) -> Graph:
    """Constant attention masks are looked at: the lower triangle becomes is_causal, an empty mask goes."""
    values, constant = graph.values, constants(graph)
    seen: dict[str, str] = {}

    def meaning(mask: str) -> str:
        shape = graph.at(1).values[mask].sizes
        if prod(shape) > LARGEST_MASK:
            notes.append(f"an attention mask of shape {list(values[mask].shape)} is too large to look at, and is kept")
            return "other"
        tensor = evaluate(graph, mask)
        allowed = tensor if tensor.dtype == torch.bool else tensor == 0
        if allowed.all():
            return "empty"
        square = shape[-1] == shape[-2]
        hidden = tensor.dtype == torch.bool or bool((tensor[~allowed] <= torch.finfo(tensor.dtype).min).all())
        triangle = torch.ones(shape[-2:], dtype=torch.bool).tril_()
        return "causal" if square and hidden and bool((allowed == triangle).all()) else "other"

    def into(op: Op) -> Iterable[Op]:
        mask = op.arg(3, "attn_mask")
        if op.target != SDPA or not isinstance(mask, Ref) or mask.name not in constant:
            return (op,)
        known = seen.setdefault(mask.name, "") or meaning(mask.name)
        seen[mask.name] = known
        if known == "other":
            return (op,)
        return (attention(op, attn_mask=None, is_causal=known == "causal" or bool(op.arg(5, "is_causal", False))),)

    return substitute(graph, into)


def with_grouped_queries(graph: Graph) -> Graph:
    """reshape(expand(unsqueeze(k, 2), [b, kv, n, s, d]), [b, kv*n, s, d]) read by attention   ->   enable_gqa."""
    made = {v.name: op for op in graph.ops for v in op.results}
    values = graph.values

    def before_repeat(name: str) -> str | None:
        """The k or v that `name` repeats head by head."""
        reshape = made.get(name)
        expand = made.get(reshape.operands[0]) if reshape and reshape.target == "aten.reshape.default" else None
        unsqueeze = made.get(expand.operands[0]) if expand and expand.target == "aten.expand.default" else None
        if unsqueeze is None or expand is None or unsqueeze.target != "aten.unsqueeze.default":
            return None
        source = unsqueeze.operands[0]
        before, wide, after = values[source].shape, values[expand.name].shape, values[name].shape
        if unsqueeze.arg(1) != 2 or len(before) != 4 or len(wide) != 5 or len(after) != 4:
            return None
        repeats, heads = wide[2], before[1]
        if not isinstance(repeats, int) or not isinstance(heads, int):
            return None
        fits = wide == (*before[:2], repeats, *before[2:]) and after == (before[0], heads * repeats, *before[2:])
        return source if fits else None

    def into(op: Op) -> Iterable[Op]:
        if op.target != SDPA or op.arg(7, "enable_gqa", False):
            return (op,)
        key, value = before_repeat(op.operands[1]), before_repeat(op.operands[2])
        if key is None or value is None:
            return (op,)
        return (attention(op, key=Ref(key), value=Ref(value), enable_gqa=True),)

    return substitute(graph, into)


def counted_rows(op: Op) -> Iterable[Size]:
    """Sizes that an operator computes with: numbers, not shapes."""
    if op.target == CONSTANT or op.target.startswith("aten.arange"):
        return
    declared = schema(op).arguments
    named = {a.name: arg for a, arg in zip(declared, op.args, strict=False)} | dict(op.kwargs)
    for a in declared:
        arg = named.get(a.name)
        if isinstance(arg, Size) and str(a.type) in ("Tensor", "number", "float", "Optional[number]"):
            yield arg


def with_row_counts(graph: Graph) -> Graph:
    """A number of rows that is computed with means those of the global batch, whatever part of it one call sees."""

    def into(op: Op) -> Iterable[Op]:
        counts = {size for size in counted_rows(op) if size.fixed == 0}
        return (map_op(op, lambda a: Rows(a.per_batch) if isinstance(a, Size) and a in counts else a),)

    return substitute(graph, into)


MEAN, SUM = 1, 2  # torch's reduction argument
ELEMENTWISE_LOSSES = {  # position of `reduction`
    "aten.mse_loss.default": 2,
    "aten.l1_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
    "aten.soft_margin_loss.default": 2,
    "aten.kl_div.default": 2,
}
CLASS_LOSSES = {"aten.cross_entropy_loss.default": 3, "aten.nll_loss.default": 3, "aten.nll_loss_nd.default": 3}


def with_summed_losses(graph: Graph) -> Graph:
    """Means over the rows of the batch become sums divided by a count; losses of low precision are taken in fp32."""
    values = dict(graph.values)
    widened: set[str] = set()  # losses that are fp32 now

    def rows_of(size: int | Size) -> int | None:
        """The elements per row, where a size is a multiple of the batch."""
        return size.per_batch if isinstance(size, Size) and size.fixed == 0 else None

    def divisor(shape: tuple[int | Size, ...]) -> int | None:
        """The elements per row of a tensor, where exactly one dim counts rows."""
        growing = [rows_of(n) for n in shape if isinstance(n, Size)]
        if len(growing) != 1 or growing[0] is None:
            return None
        return growing[0] * prod(n for n in shape if isinstance(n, int))

    def set_argument(op: Op, position: int, keyword: str, value: Arg) -> Op:
        if position < len(op.args):
            return replace(op, args=(*op.args[:position], value, *op.args[position + 1 :]))
        return replace(op, kwargs=(*((k, a) for k, a in op.kwargs if k != keyword), (keyword, value)))

    def into(op: Op) -> Iterable[Op]:
        result = op.results[0]
        at = ELEMENTWISE_LOSSES.get(op.target, CLASS_LOSSES.get(op.target))
        if at is not None:
            ops, op = _in_fp32(op, values)
            if op.results[0].dtype != result.dtype:
                widened.add(result.name)
            result = op.results[0]
            if op.arg(at, "reduction", MEAN) != MEAN:
                return (*ops, op)
            total = replace(result, name=f"{result.name}_sum")
            summed = replace(set_argument(op, at, "reduction", SUM), results=(total,))
            if op.target in CLASS_LOSSES and values[op.operands[1]].dtype not in FLOATS:
                return (*ops, summed, *_counted(op, total, result, values))
            shape = values[op.operands[0]].shape
            per_row = divisor(shape if op.target in ELEMENTWISE_LOSSES else (shape[0], *shape[2:]))
            if per_row is None:
                return (*ops, op)
            divide = op.instead("aten.div.Scalar", (Ref(total.name), Rows(per_row)), result)
            return (*ops, summed, divide)
        if op.target in ("aten.mean.default", "aten.mean.dim"):
            shape = values[op.operands[0]].shape
            named = op.arg(1, "dim") if op.target == "aten.mean.dim" else None
            gone = [d % len(shape) for d in named if isinstance(d, int)] if isinstance(named, tuple) else []
            per_row = divisor(tuple(shape[d] for d in gone) if gone else shape)
            if per_row is not None:
                total = replace(result, name=f"{result.name}_sum")
                target = "aten.sum.dim_IntList" if op.target == "aten.mean.dim" else "aten.sum.default"
                summed = replace(op, target=target, results=(total,))
                return (summed, op.instead("aten.div.Scalar", (Ref(total.name), Rows(per_row)), result))
        return (op,)

    return _with_dtypes(substitute(graph, into), widened)


def _with_dtypes(graph: Graph, changed: set[str]) -> Graph:
    """What is computed of the values in `changed`, which have another dtype than before, gets the dtype it now has."""
    if not changed:
        return graph
    small = graph.at(2)
    known = dict(small.values)
    ops: list[Op] = []
    for op, sized in zip(graph.ops, small.ops, strict=True):
        if any(name in changed for name in op.operands):
            tensors = {
                name: torch.empty(known[name].sizes, dtype=getattr(torch, known[name].dtype), device="meta")
                for name in op.operands
            }
            dtypes = [str(t.dtype).removeprefix("torch.") for t in call(sized, tensors, device="meta")]
            changed |= {v.name for v, dtype in zip(op.results, dtypes, strict=True) if v.dtype != dtype}
            op = replace(op, results=tuple(replace(v, dtype=d) for v, d in zip(op.results, dtypes, strict=True)))
            known |= {v.name: replace(v, dtype=d) for v, d in zip(sized.results, dtypes, strict=True)}
        else:
            known |= {v.name: v for v in sized.results}
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _in_fp32(op: Op, values: dict[str, Value]) -> tuple[tuple[Op, ...], Op]:
    """Casts of the low-precision operands of a loss, and the loss on them. A cast joins `values`, and is made once."""
    wide: dict[str, str] = {}
    casts: list[Op] = []
    for name in dict.fromkeys(op.operands):
        if values[name].dtype in ("bfloat16", "float16"):
            wide[name] = f"{name}_fp32"
            if wide[name] not in values:
                cast = replace(values[name], name=wide[name], dtype="float32")
                casts.append(op.instead("aten.to.dtype", (Ref(name), Atom("torch.float32")), cast))
                values[cast.name] = cast
    op = map_op(op, lambda a: Ref(wide.get(a.name, a.name)) if isinstance(a, Ref) else a)
    if wide:
        op = replace(op, results=tuple(replace(v, dtype="float32") for v in op.results))
    return tuple(casts), op


def _counted(op: Op, total: Value, result: Value, values: dict[str, Value]) -> tuple[Op, ...]:
    """total / (the valid targets, weighted by class where classes have weights)."""
    target = values[op.operands[1]]
    ignored = op.arg(4, "ignore_index", -100)
    name = result.name

    def step(kind: str, args: tuple[Arg, ...], suffix: str, shape: tuple[int | Size, ...], dtype: str) -> Op:
        value = Value(f"{name}_{suffix}", shape, dtype, grad=False)
        return op.instead(kind, args, value)

    valid = step("aten.ne.Scalar", (Ref(target.name), ignored), "valid", target.shape, "bool")
    if len(op.operands) == 2:
        counted = [valid]
    else:
        weight = values[op.operands[2]]
        index = step("aten.mul.Tensor", (Ref(target.name), Ref(valid.name)), "index", target.shape, target.dtype)
        weights = step(
            "aten.embedding.default", (Ref(f"{name}_column"), Ref(index.name)), "rows", (*target.shape, 1), weight.dtype
        )
        column = step("aten.unsqueeze.default", (Ref(weight.name), -1), "column", (*weight.shape, 1), weight.dtype)
        flat = step("aten.squeeze.dim", (Ref(weights.name), -1), "weights", target.shape, weight.dtype)
        masked = step("aten.mul.Tensor", (Ref(flat.name), Ref(valid.name)), "valid_weights", target.shape, weight.dtype)
        counted = [valid, index, column, weights, flat, masked]
    last = counted[-1].results[0]
    count = step("aten.sum.default", (Ref(last.name),), "count", (), "int64" if last.dtype == "bool" else last.dtype)
    divide = op.instead("aten.div.Tensor", (Ref(total.name), Ref(count.name)), result)
    return (*counted, count, divide)


def repeated_names(graph: Graph) -> list[str]:
    """Value names that are written twice (a graph never has one)."""
    counts = Counter(v.name for op in graph.ops for v in op.results)
    return sorted(name for name, n in counts.items() if n > 1)
