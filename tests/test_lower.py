"""The local program: local shapes, and reshardings that serve every reader that wants the same."""

from __future__ import annotations

from costmodels.cluster import Cluster
from passes.blocks import Blocked
from passes.graph import Value
from passes.lower import LocalCall, LocalOp, Lowered, Reshard, lower
from passes.placements import I, P, Placement, R, S, local_shape
from passes.price import Axis
from passes.rules.base import Strategy
from passes.sharding import ROOT, Programme, Sharding, Terms
from test_sharding import layers, op, program, value


def axis(ranks: int = 2) -> Axis:
    return Axis.of(Cluster.preset("8xh100"), "tp", ranks, 1)


def chosen(made: Blocked, ranks: int = 2, parameters: dict[str, Placement] | None = None, **names: str) -> Lowered:
    """The local program where operators run by the strategies named here (others are repeated)."""
    programme = Programme(made, axis(ranks), {})
    decisions: dict[tuple[str, int, str], Strategy] = {}
    for key, node in programme.nodes.items():
        kind, _, name = key
        wanted = names.get(name) if kind == "op" else str((parameters or {}).get(name, I))
        if kind == "loss":
            wanted = names.get("loss_lies", "I")
        decisions[key] = next((s for s in node.options if s.name == wanted), node.options[0])
    return lower(made, Sharding(programme.axis, decisions, 0.0, 0.0, True))


def written(lowered: Lowered) -> list[str]:
    """The root's statements, one per line."""
    lines = []
    for s in lowered.root.statements:
        if isinstance(s, Reshard):
            lines.append(f"{s.result} = {s.value.name}: {s.source} -> {s.target}")
        elif isinstance(s, LocalOp):
            lines.append(f"{s.op.name} = {s.op.target.split('.')[1]}({', '.join(s.op.operands)})")
        else:
            lines.append(f"{s.results[0].name} = layer {s.instance}({', '.join(s.args)})")
    return lines


def column_row(rows: int = 4, inner: int = 6) -> Blocked:
    return program(
        [value("x", rows, 8, grad=False)],
        [value("up", inner, 8), value("down", 8, inner)],
        op("linear.default", value("h", rows, inner), "x", "up"),
        op("relu.default", value("a", rows, inner), "h"),
        op("linear.default", value("y", rows, 8), "a", "down"),
        op("sum.default", value("loss"), "y"),
    )


def test_columns_then_rows_need_one_sum():
    lowered = chosen(column_row(), parameters={"up": S(0), "down": S(1)}, h="out", a="dim 1", y="in")
    assert written(lowered) == [
        "h = linear(x, up)",
        "a = relu(h)",
        "y = linear(a, down)",
        "y_I = y: P -> I",
        "loss = sum(y_I)",
    ]


def test_a_sum_may_stay_partial_to_the_end():
    lowered = chosen(
        column_row(), parameters={"up": S(0), "down": S(1)}, h="out", a="dim 1", y="in", loss="partial", loss_lies="P"
    )
    assert written(lowered)[-1] == "loss = sum(y)" and lowered.loss_placement is P


def test_each_rank_has_its_slice():
    lowered = chosen(column_row(inner=7), parameters={"up": S(0), "down": S(1)}, h="out", a="dim 1", y="in")
    shapes = {
        name: [local_shape(local.placement, local.value.sizes, 2, rank) for rank in (0, 1)]
        for name, local in lowered.root.locals.items()
    }
    assert shapes == {
        "x": [(4, 8), (4, 8)], "up": [(4, 8), (3, 8)], "down": [(8, 4), (8, 3)], "h": [(4, 4), (4, 3)],
        "a": [(4, 4), (4, 3)], "y": [(4, 8), (4, 8)], "y_I": [(4, 8), (4, 8)], "loss": [(), ()],
    }  # fmt: skip


def test_one_resharding_serves_every_reader_that_wants_the_same():
    made = program(
        [value("x", 4, 8, grad=False)],
        [value("w", 8, 8)],
        op("linear.default", value("h", 4, 8), "x", "w"),
        op("relu.default", value("a", 4, 8), "h"),
        op("exp.default", value("b", 4, 8), "h"),
        op("add.Tensor", value("y", 4, 8), "a", "b"),
        op("sum.default", value("loss"), "y"),
    )
    lowered = chosen(made, parameters={"w": S(1)}, h="in")
    assert written(lowered) == [
        "x_S1 = x: I -> S(1)",
        "h = linear(x_S1, w)",
        "h_I = h: P -> I",
        "a = relu(h_I)",
        "b = exp(h_I)",
        "y = add(a, b)",
        "loss = sum(y)",
    ]


def test_a_resharding_stands_right_before_its_first_reader():
    made = program(
        [value("x", 4, 8, grad=False)],
        [value("w", 8, 8)],
        op("linear.default", value("h", 4, 8), "x", "w"),
        op("exp.default", value("e", 4, 8), "x"),
        op("mul.Tensor", value("y", 4, 8), "h", "e"),
        op("sum.default", value("loss"), "y"),
    )
    lines = written(chosen(made, parameters={"w": S(0)}, h="out"))
    assert lines == ["h = linear(x, w)", "e = exp(x)", "h_I = h: S(1) -> I", "y = mul(h_I, e)", "loss = sum(y)"]


def test_views_have_local_sizes():
    made = program(
        [],
        [value("w", 12, 8)],
        op("transpose.int", value("t", 8, 12), "w", args=(0, 1)),
        op("reshape.default", value("v", 8, 4, 3), "t", args=((8, 4, 3),)),
        op("expand.default", value("e", 2, 8, 4, 3), "v", args=((2, 8, 4, 3),)),
        op("sum.default", value("loss"), "e"),
    )
    names = {n.key[2]: [s.name for s in n.options] for n in Programme(made, axis(), {}).nodes.values()}
    assert "dim 1 as dim 1" in names["v"], names
    lowered = chosen(made, parameters={"w": S(0)}, t="dim 1", v="dim 1 as dim 1", e="dim 2")
    sizes = {s.op.name: s.op.args[1] for s in lowered.root.statements if isinstance(s, LocalOp) and s.op.name in "ve"}
    assert sizes == {"v": (8, 2, 3), "e": (2, -1, -1, -1)}


def test_a_vocabulary_that_does_not_divide_is_cut_unevenly():
    made = program(
        [value("ids", 4, grad=False, dtype="int64")],
        [value("table", 11, 8)],
        op("embedding.default", value("x", 4, 8), "table", "ids"),
        op("sum.default", value("loss"), "x"),
    )
    lowered = chosen(made, ranks=4, parameters={"table": S(0)}, x="vocabulary")
    table = lowered.root.locals["table"]
    assert [local_shape(table.placement, table.value.sizes, 4, r) for r in range(4)] == [(3, 8), (3, 8), (3, 8), (2, 8)]
    assert written(lowered)[0] == "x = embedding(table, ids)" and lowered.root.locals["x"].placement is P


def test_layers_are_called_with_what_they_enter_with():
    lowered = chosen(layers(3))
    calls = [s for s in lowered.root.statements if isinstance(s, LocalCall)]
    assert [c.args for c in calls] == [("x0_I",), ("y0",), ("y1",)]  # the first product gave partial sums
    assert len(lowered.blocks) == 1
    assert [count for _, count in lowered.regions()] == [1, 3]


def test_what_the_programme_chose_is_what_runs():
    made = layers(2)
    found = Programme(made, axis(), {}).solve(Terms())
    assert found is not None
    for region, _ in lower(made, found).regions():
        for statement in region.statements:
            if isinstance(statement, LocalOp):
                for name, wanted in zip(statement.op.operands, statement.strategy.operands, strict=True):
                    assert region.locals[name].placement == wanted


def test_the_root_keeps_its_parameters_with_their_placements():
    lowered = chosen(column_row(), parameters={"up": S(0), "down": R}, h="out")
    assert [(p.name, placement) for p, placement in lowered.root.parameters] == [("up", S(0)), ("down", R)]
    assert (
        isinstance(lowered.root.parameters[0][0].value, Value) and lowered.sharding.placement("loss", ROOT, "loss") is I
    )
