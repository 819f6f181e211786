"""The runner applies passes in order and keeps every promise; a broken one names its pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from costmodels.cluster import Cluster
from passes.graph import Graph, Op, Ref, Value
from passes.pipeline import PIPELINE, every_value_is_written_before_it_is_read, every_value_is_written_once
from passes.state import Pass, State, Task, made, run

TASK = Task(nn.Linear(2, 2), None, None, Cluster.preset("cpu:1"), 4, "fp32", "adamw", {})
START = State(TASK, lambda text: None, lambda: False)


def note(text: str) -> Pass:
    def noting(state: State) -> State:
        return replace(state, notes=(*state.notes, text))

    return Pass(noting)


def notes_are_short(state: State) -> None:
    assert len(state.notes) < 2, f"{len(state.notes)} notes"


def test_passes_run_in_order_and_the_caller_watches():
    seen: list[tuple[str, int]] = []
    end = run((note("a"), note("b")), START, lambda name, state: seen.append((name, len(state.notes))))
    assert (end.notes, seen) == (("a", "b"), [("NOTING", 1), ("NOTING", 2)])
    assert START.notes == ()


def test_a_broken_promise_names_the_pass_that_broke_it():
    def first(state: State) -> State:
        return replace(state, notes=("one",))

    def second(state: State) -> State:
        return replace(state, notes=("one", "two"))

    with pytest.raises(AssertionError) as error:
        run((Pass(first, (notes_are_short,)), Pass(second)), START)
    assert str(error.value).startswith("after SECOND: notes_are_short: 2 notes")


def test_what_is_missing_is_said():
    assert made(3, "the number") == 3
    with pytest.raises(AssertionError, match="the graph is not there yet"):
        made(None, "the graph")


def test_the_passes_are_named_as_in_the_design():
    assert [one.name.rstrip("_") for one in PIPELINE] == ["CAPTURE", "NORMALIZE", "BATCH", "BLOCKS", "SEARCH", "EMIT"]


X, Y = Value("x", (2,), "float32", False), Value("y", (2,), "float32", True)
RELU = Op("aten.relu.default", (Ref("x"),), (), (Y,))


@pytest.mark.parametrize(
    ("promise", "graph", "broken"),
    [
        (every_value_is_written_once, Graph((X,), (), (RELU, RELU), "y"), "written twice: \\['y'\\]"),
        (every_value_is_written_before_it_is_read, Graph((), (), (RELU,), "y"), "reads \\['x'\\] before"),
        (every_value_is_written_before_it_is_read, Graph((X,), (), (RELU,), "z"), "the loss z is never written"),
    ],
)
def test_promises_of_the_graph_can_fail(promise, graph, broken):
    promise(replace(START, graph=Graph((X,), (), (RELU,), "y")))
    with pytest.raises(AssertionError, match=broken):
        promise(replace(START, graph=graph))
