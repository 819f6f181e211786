"""The programme's optimum is the cheapest of all decisions, enumerated here; memory, rows and layers bind it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf, prod

import pytest

from costmodels.cluster import Cluster
from passes.blocks import Blocked, block
from passes.graph import Graph, Op, Parameter, Ref, Value
from passes.placements import I, P, R, S, can_reshard
from passes.price import Axis, reshard_seconds
from passes.rules.base import Strategy
from passes.sharding import ROOT, Key, Programme, Sharding, Terms, shard, wanted_cuts

MOST = 5_000  # decisions that are enumerated


def axis(ranks: int = 2) -> Axis:
    return Axis.of(Cluster.preset("8xh100"), "tp", ranks, 1)


def value(name: str, *shape: int, grad: bool = True, dtype: str = "float32") -> Value:
    return Value(name, shape, dtype, grad)


def op(target: str, result: Value, *operands: str, args: tuple = (), module: str = "") -> Op:
    return Op(f"aten.{target}", (*map(Ref, operands), *args), (), (result,), module)


def program(
    inputs: list[Value], parameters: list[Value], *ops: Op, classes: Mapping[str, str] | None = None
) -> Blocked:
    held = tuple(Parameter(v, (v.name,)) for v in parameters)
    return block(Graph(tuple(inputs), held, ops, ops[-1].results[0].name), classes or {})


def mlp(rows: int = 64, hidden: int = 1024) -> Blocked:
    """loss = sum(relu(x up) down)"""
    x = value("x", rows, hidden, grad=False)
    return program(
        [x],
        [value("up", 4 * hidden, hidden), value("down", hidden, 4 * hidden)],
        op("linear.default", value("h", rows, 4 * hidden), "x", "up"),
        op("relu.default", value("a", rows, 4 * hidden), "h"),
        op("linear.default", value("y", rows, hidden), "a", "down"),
        op("sum.default", value("loss"), "y"),
    )


def residual() -> Blocked:
    """loss = sum(x + norm(x) w), x and its sum read twice"""
    x = value("x", 32, 256, grad=True)
    return program(
        [x],
        [value("w", 256, 256)],
        op("softmax.int", value("n", 32, 256), "x", args=(-1,)),
        op("linear.default", value("y", 32, 256), "n", "w"),
        op("add.Tensor", value("z", 32, 256), "y", "x"),
        op("sum.default", value("loss"), "z"),
    )


def embedding() -> Blocked:
    """loss = cross_entropy(table[ids] tableᵀ, ids): a tied table, read in two ways"""
    ids = value("ids", 16, grad=False, dtype="int64")
    loss = op("cross_entropy_loss.default", value("loss"), "y", "ids", args=(None, 2))
    return program(
        [ids],
        [value("table", 512, 64)],
        op("embedding.default", value("x", 16, 64), "table", "ids"),
        op("linear.default", value("y", 16, 512), "x", "table"),
        loss,
    )


# -- all decisions ----------------------------------------------------------------------------------------------------


def seconds(programme: Programme, chosen: Mapping[Key, Strategy], terms: Terms) -> float:
    """What a decision costs: its nodes, and one resharding per tensor and wanted placement."""
    total = sum(
        n.weight * programme.node_seconds(n, n.options.index(chosen[n.key]), terms) for n in programme.nodes.values()
    )
    for tensor in programme.tensors:
        source = chosen[tensor.producer.key].results[tensor.result]
        for target in {chosen[c.key].operands[i] for c, i in tensor.consumers}:
            if not can_reshard(source, target, tensor.value.grad):
                return inf
            total += tensor.weight * reshard_seconds(tensor.value, source, target, programme.axis).total
    return total


def decisions(programme: Programme) -> Iterator[dict[Key, Strategy]]:
    nodes = list(programme.nodes.values())
    assert prod(len(n.options) for n in nodes) <= MOST, [len(n.options) for n in nodes]
    for options in itertools.product(*(n.options for n in nodes)):
        yield {n.key: option for n, option in zip(nodes, options, strict=True)}


def fewer(programme: Programme) -> Programme:
    """The programme without some options of its largest nodes, so that all decisions can be enumerated."""
    while prod(len(n.options) for n in programme.nodes.values()) > MOST:
        key, node = max(programme.nodes.items(), key=lambda item: len(item[1].options))
        programme.nodes[key] = replace(node, options=node.options[:-1])
    return programme


def cheapest(programme: Programme, terms: Terms) -> float:
    return min(
        seconds(programme, chosen, terms)
        for chosen in decisions(programme)
        if terms.budget_bytes is None or programme.held_bytes(chosen, terms) <= terms.budget_bytes
    )


@pytest.mark.parametrize("build", [mlp, residual, embedding])
@pytest.mark.parametrize("terms", [Terms(), Terms(microbatches=8)], ids=["one microbatch", "eight microbatches"])
def test_the_optimum_is_the_cheapest_of_all_decisions(build, terms):
    programme = fewer(Programme(build(), axis(), {}))
    found = programme.solve(terms)
    assert found is not None and found.proved
    assert found.objective_s == pytest.approx(cheapest(programme, terms), rel=2e-4)
    assert seconds(programme, found.chosen, terms) == pytest.approx(found.objective_s, rel=2e-4)


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6])
def test_under_a_budget_it_is_the_cheapest_decision_that_fits(share):
    programme = fewer(Programme(mlp(rows=8), axis(), {}))
    free = programme.solve(Terms())
    assert free is not None
    budget = share * programme.held_bytes({k: n.options[0] for k, n in programme.nodes.items()}, Terms())
    terms = Terms(budget_bytes=budget)
    found = programme.solve(terms)
    assert found is not None and programme.held_bytes(found.chosen, terms) <= budget * (1 + 1e-6)
    assert found.objective_s == pytest.approx(cheapest(programme, terms), rel=2e-4)


def test_what_was_solved_before_leaves_no_trace():
    programme = Programme(residual(), axis(), {})
    free = programme.solve(Terms())
    assert free is not None
    tight = Terms(budget_bytes=0.95 * programme.held_bytes(free.chosen, Terms()))
    every = [tight, Terms(budget_bytes=1000.0), Terms(microbatches=8), tight, Terms()]
    alone = [Programme(residual(), axis(), {}).solve(terms) for terms in every]
    assert alone[0] is not None and alone[0].objective_s > free.objective_s
    assert [programme.solve(terms) for terms in every] == alone


def test_layers_that_come_to_wait_for_the_host_leave_no_trace_either():
    slow = replace(axis(), cluster=replace(axis().cluster, device=replace(axis().cluster.device, launch_s=1e-3)))
    programme = Programme(layers(4), slow, {})
    programme.hosted = set()  # so that it is found out
    every = [Terms(), Terms(microbatches=8), Terms()]
    found = [programme.solve(terms) for terms in every]
    assert programme.hosted == {0}
    fresh = [Programme(layers(4), slow, {}).solve(terms) for terms in every]
    assert found == fresh and found[0] is not None and found[0].proved
    variables = len(programme.frame.x) + len(programme.frame.z)
    assert len(list(programme.frame.model.variables())) == variables


def test_a_budget_that_nothing_meets_gives_none():
    assert shard(mlp(), axis(), Terms(budget_bytes=1000.0)) is None


def test_a_budget_cuts_what_was_whole():
    programme = Programme(residual(), axis(), {})
    free = programme.solve(Terms())
    assert free is not None
    held = programme.held_bytes(free.chosen, Terms())
    cut = programme.solve(Terms(budget_bytes=0.99 * held))
    assert cut is not None and programme.held_bytes(cut.chosen, Terms()) <= 0.99 * held
    assert cut.objective_s > free.objective_s


# -- what it finds ----------------------------------------------------------------------------------------------------


def placed(found: Sharding, *names: str) -> list[str]:
    return [str(found.placement("parameter", ROOT, name)) for name in names]


def test_it_finds_column_then_row():
    found = shard(mlp(rows=4096), axis(8), Terms(), {"x": S(0), "h": S(0), "a": S(0), "y": S(0)})
    assert found is not None
    assert placed(found, "up", "down") == ["S(0)", "S(1)"]
    assert found.of("op", ROOT, "a").name == "dim 1"


def test_rows_are_never_cut():
    rows = {name: S(0) for name in ("x", "h", "a", "y")}
    programme = Programme(mlp(), axis(), rows)
    for node in programme.nodes.values():
        for strategy in node.options:
            values = (
                *zip(node.site.operands, strategy.operands, strict=True),
                *zip(node.site.results, strategy.results, strict=True),
            )
            assert not [v.name for v, placement in values if rows.get(v.name) == placement]


def test_products_that_can_be_split_are_never_repeated():
    programme = Programme(mlp(), axis(), {})
    assert all(s.split for name in ("h", "y") for s in programme.nodes["op", ROOT, name].options)


def test_products_that_cannot_be_split_are_repeated():
    odd = program(
        [value("x", 1, 1, grad=False)], [value("w", 1, 1)], op("linear.default", value("loss", 1, 1), "x", "w")
    )
    assert {s.split for s in Programme(odd, axis(), {}).nodes["op", ROOT, "loss"].options} == {False}


def test_cuts_are_wanted_by_consumers_only():
    wanted = wanted_cuts(mlp(), 2)
    assert wanted["up"] == {S(0), S(1)} and wanted["down"] == {S(0), S(1)}
    assert wanted["a"] >= {S(0), S(1)}


def test_a_parameter_read_whole_has_partial_sums_once_per_step():
    """With many microbatches a sum over tp once per step costs less than one per microbatch."""
    few, many = (Programme(mlp(), axis(), {}).solve(Terms(microbatches=m)) for m in (1, 64))
    assert few is not None and many is not None
    assert many.objective_s <= few.objective_s


def test_the_same_programme_gives_the_same_answer():
    one, other = (shard(residual(), axis(4), Terms()) for _ in range(2))
    assert one is not None and other is not None
    assert one.chosen == other.chosen and one.objective_s == other.objective_s


def test_one_rank_has_nothing_to_decide():
    found = shard(mlp(), axis(1), Terms())
    assert found is not None and found.proved
    assert {s.results for s in found.chosen.values()} == {(I,)}


# -- layers -----------------------------------------------------------------------------------------------------------


def layers(count: int) -> Blocked:
    """count layers y = relu(x w) w', then a sum."""
    rows, hidden = 64, 512
    parameters, ops, before = [value("first", hidden, hidden)], [], "x0"
    ops.append(op("linear.default", value("x0", rows, hidden), "x", "first"))
    for i in range(count):
        path = f"layers.{i}"
        parameters += [value(f"{path}.up", 2 * hidden, hidden), value(f"{path}.down", hidden, 2 * hidden)]
        ops += [
            op("linear.default", value(f"h{i}", rows, 2 * hidden), before, f"{path}.up", module=path),
            op("relu.default", value(f"a{i}", rows, 2 * hidden), f"h{i}", module=path),
            op("linear.default", value(f"y{i}", rows, hidden), f"a{i}", f"{path}.down", module=path),
        ]
        before = f"y{i}"
    ops.append(op("sum.default", value("loss"), before))
    classes = {f"layers.{i}": "Layer" for i in range(count)}
    return program([value("x", rows, hidden, grad=False)], parameters, *ops, classes=classes)


def test_a_layer_leaves_its_output_as_the_next_takes_it():
    found = shard(layers(4), axis(), Terms())
    assert found is not None
    assert found.placement("exit", 0, "y0") == found.placement("entry", 0, "x0")


def test_more_layers_cost_as_much_more_and_decide_alike():
    two, four, six = (shard(layers(n), axis(), Terms()) for n in (2, 4, 6))
    assert two is not None and four is not None and six is not None
    assert six.objective_s - four.objective_s == pytest.approx(four.objective_s - two.objective_s, rel=1e-2)
    assert placed_in_block(four) == placed_in_block(six)


def placed_in_block(found: Sharding) -> dict[str, str]:
    return {key[2]: str(s.results[0]) for key, s in found.chosen.items() if key[:2] == ("parameter", 0)}


def test_a_layer_may_be_handed_partial_sums_but_inputs_may_not():
    programme = Programme(layers(2), axis(), {})
    assert {s.results[0] for s in programme.nodes["entry", 0, "x0"].options} >= {I, R, P}
    assert {s.results[0] for s in programme.nodes["input", ROOT, "x"].options} == {I}
