"""Seconds are added up from the cost models: on the fullest rank, forward and backward."""

from __future__ import annotations

import pytest

from costmodels.cluster import Cluster
from costmodels.groups import Collective
from costmodels.operators import OperatorClass, operator_seconds
from passes.flop import flop
from passes.graph import Op, Ref, Value
from passes.placements import I, P, R, S
from passes.price import Axis, Seconds, least_op_seconds, local_bytes, op_launches, op_seconds, reshard_seconds
from passes.rules import rule_of
from passes.rules.base import Site, Strategy, strategies

AXIS = Axis.of(Cluster.preset("8xh100"), "tp", 4, 1)
DEVICE = AXIS.cluster.device
X = Value("x", (2048, 1024), "bfloat16", True)
W = Value("w", (4096, 1024), "bfloat16", True)
Y = Value("y", (2048, 4096), "bfloat16", True)
LINEAR = Site(Op("aten.linear.default", (Ref("x"), Ref("w")), (), (Y,)), (X, W))
FLOP = 2 * 2048 * 1024 * 4096
MIB = 2**20


def strategy(site: Site, name: str) -> Strategy:
    found = strategies(site, rule_of(site.op.target), AXIS.ranks, {})
    return next(s for s in found if s.name == name)


def test_seconds_add_and_repeat():
    total = Seconds(1.0, 2.0) + Seconds(0.5, 0.0)
    assert (total, total.total, total.times(2)) == (Seconds(1.5, 2.0), 3.5, Seconds(3.0, 4.0))


@pytest.mark.parametrize(
    ("placement", "ranks", "expected"),
    [(I, 4, 4 * MIB), (R, 4, 4 * MIB), (P, 4, 4 * MIB), (S(0), 4, MIB), (S(1), 3, 342 * 2048 * 2)],
)
def test_bytes_of_the_fullest_rank(placement, ranks, expected):
    assert local_bytes(X, placement, ranks) == expected


def test_a_product_in_columns_does_its_share_of_the_work():
    found = op_seconds(LINEAR, rule_of("aten.linear.default"), strategy(LINEAR, "out"), AXIS)
    forward = operator_seconds(OperatorClass.MATMUL, FLOP / 4, (4 + 2 + 4) * MIB, "bf16", DEVICE)
    backward = operator_seconds(OperatorClass.MATMUL, 2 * FLOP / 4, (4 + 2 * (4 + 2)) * MIB, "bf16", DEVICE)
    assert found == Seconds(pytest.approx(forward), pytest.approx(backward))


def test_what_is_repeated_costs_as_on_one_device():
    relu = Site(Op("aten.relu.default", (Ref("x"),), (), (X,)), (X,))
    whole = op_seconds(relu, rule_of("aten.relu.default"), strategy(relu, "repeat"), AXIS)
    cut = op_seconds(relu, rule_of("aten.relu.default"), strategy(relu, "dim 0"), AXIS)
    assert whole.forward > cut.forward and whole.backward > cut.backward


def test_without_gradients_there_is_no_backward():
    x = Value("x", (2048, 1024), "bfloat16", False)
    site = Site(Op("aten.relu.default", (Ref("x"),), (), (x,)), (x,))
    assert op_seconds(site, rule_of("aten.relu.default"), strategy(site, "dim 0"), AXIS).backward == 0.0


def test_an_operator_without_rule_is_priced_by_its_bytes():
    site = Site(Op("aten.renorm.default", (Ref("x"), 2.0, 0, 1.0), (), (X,)), (X,))
    assert rule_of(site.op.target) is None
    found = op_seconds(site, None, strategies(site, None, 4, {})[0], AXIS)
    assert found.forward == pytest.approx(operator_seconds(OperatorClass.OTHER, 0.0, 8 * MIB, "bf16", DEVICE))


def lstm(grad: bool) -> Site:
    """Batch 8, 6 steps, 16 -> 32, two layers."""
    shapes = {"x": (8, 6, 16), "h": (2, 8, 32), "c": (2, 8, 32)}
    weights = {"wi0": (128, 16), "wh0": (128, 32), "wi1": (128, 32), "wh1": (128, 32)}
    values = {name: Value(name, shape, "float32", grad) for name, shape in (shapes | weights).items()}
    results = (Value("y", (8, 6, 32), "float32", grad), *(Value(n, (2, 8, 32), "float32", grad) for n in ("hn", "cn")))
    args = (Ref("x"), (Ref("h"), Ref("c")), tuple(map(Ref, weights)), False, 2, 0.0, True, False, True)
    return Site(Op("aten.lstm.input", args, (), results), tuple(values.values()))


def test_flop_of_an_operator_without_rule_are_counted_by_pytorch():
    forward = 2 * 8 * 6 * 128 * (16 + 32 + 32 + 32)
    assert flop(lstm(grad=True), None) == (forward, 2 * forward)
    assert flop(lstm(grad=False), None) == (forward, 0)
    site = lstm(grad=True)
    found = op_seconds(site, None, strategies(site, None, 4, {})[0], AXIS)
    assert found.forward > operator_seconds(OperatorClass.MATMUL, forward, 0.0, "fp32", DEVICE)


def test_what_does_not_run_on_shapes_alone_has_no_flop():
    result = Value("y", (9, 2), "int64", False)
    assert flop(Site(Op("aten.nonzero.default", (Ref("x"),), (), (result,)), (X,)), None) == (0, 0)


def test_collectives_inside_an_operator_are_part_of_its_forward():
    rule = rule_of("aten.cross_entropy_loss.default")
    logits = Value("y", (512, 4096), "float32", True)
    ids = Value("ids", (512,), "int64", False)
    loss = Op(
        "aten.cross_entropy_loss.default", (Ref("y"), Ref("ids"), None, 2), (), (Value("l", (), "float32", True),)
    )
    site = Site(loss, (logits, ids))
    cut = next(s for s in strategies(site, rule, 4, {}) if s.inside)
    assert {kind for kind, _ in cut.inside} == {Collective.ALL_REDUCE}
    inside = sum(AXIS.seconds(kind, size) for kind, size in cut.inside)
    assert op_seconds(site, rule, cut, AXIS).forward > inside


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        (S(0), S(1), Collective.ALL_TO_ALL, Collective.ALL_TO_ALL),
        (S(0), R, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
        (P, S(0), Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
        (P, R, Collective.ALL_REDUCE, Collective.ALL_REDUCE),
    ],
)
def test_a_resharding_costs_its_collectives_of_the_full_tensor(source, target, forward, backward):
    found = reshard_seconds(X, source, target, AXIS)
    assert found == Seconds(AXIS.seconds(forward, X.bytes), AXIS.seconds(backward, X.bytes))


def test_what_is_free_is_free():
    assert reshard_seconds(X, S(0), S(0), AXIS) == Seconds()
    assert reshard_seconds(X, S(0), R, Axis.of(AXIS.cluster, "tp", 1, 1)) == Seconds()


def test_a_value_without_gradient_is_resharded_once():
    ids = Value("ids", (2048, 8), "int64", False)
    assert reshard_seconds(ids, S(0), I, AXIS).backward == 0.0


def test_slices_cost_less_than_collectives():
    local = reshard_seconds(X, R, S(0), AXIS).total
    assert 0 < local < reshard_seconds(X, S(0), R, AXIS).total


def test_a_product_is_unaligned_where_a_rank_holds_rows_that_are():
    """Rows of 4,112 columns begin at multiples of 16 bytes, those of the 1,028 that a rank has do not."""
    w, y = Value("w", (4112, 1024), "bfloat16", True), Value("y", (2048, 4112), "bfloat16", True)
    site = Site(Op("aten.linear.default", (Ref("x"), Ref("w")), (), (y,)), (X, w))
    rule = rule_of("aten.linear.default")
    columns, rows = (op_seconds(site, rule, strategy(site, name), AXIS) for name in ("out", "in"))
    assert columns.forward > 1.4 * rows.forward
    least = least_op_seconds(site, rule, AXIS)
    assert all(least.forward <= one.forward and least.backward <= one.backward for one in (columns, rows))


def test_the_host_starts_two_products_for_the_gradients_of_one():
    assert op_launches(LINEAR, rule_of("aten.linear.default")) == Seconds(1.0, 2.0)
    view = Site(Op("aten.t.default", (Ref("w"),), (), (Value("t", (1024, 4096), "bfloat16", True),)), (W,))
    assert op_launches(view, rule_of("aten.t.default")) == Seconds()


def test_the_device_waits_for_what_the_host_needs_longer():
    assert Seconds(2.0, 5.0).waiting(Seconds(3.0, 4.0)) == Seconds(1.0, 0.0)
