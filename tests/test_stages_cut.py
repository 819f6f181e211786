"""What a stage receives, makes again, holds and refuses, on programs written by hand."""

from __future__ import annotations

from passes.blocks import Blocked, block
from passes.graph import Graph, Op, Parameter, Value
from passes.lower import Lowered
from passes.placements import S
from passes.stages import LocalStage, read_twice, refusal, results_of, shared, stages
from test_lower import chosen, written
from test_sharding import layers, op, program, value

ROWS, HIDDEN = 4, 8


def made(part: LocalStage) -> list[str]:
    return [name for statement in part.region.statements for name in results_of(statement)]


def buffered(inputs: list[Value], parameters: list[Value], buffers: list[Value], *ops: Op) -> Blocked:
    """A program with buffers, which the model holds and nobody trains."""
    held = [*(Parameter(v, (v.name,)) for v in parameters), *(Parameter(v, (v.name,), buffer=True) for v in buffers)]
    return block(Graph(tuple(inputs), tuple(held), ops, ops[-1].results[0].name), {})


def linear(name: str, *operands: str) -> Op:
    return op("linear.default", value(name, ROWS, HIDDEN), *operands)


def chain() -> Lowered:
    """Statements 0 to 4: h0, h1, h2, then y = h2 + h0, then the loss."""
    return chosen(
        program(
            [value("x", ROWS, HIDDEN, grad=False)],
            [value(f"w{i}", HIDDEN, HIDDEN) for i in range(3)],
            linear("h0", "x", "w0"),
            linear("h1", "h0", "w1"),
            linear("h2", "h1", "w2"),
            op("add.Tensor", value("y", ROWS, HIDDEN), "h2", "h0"),
            op("sum.default", value("loss"), "y"),
        ),
        ranks=1,
    )


# -- what travels -----------------------------------------------------------------------------------------------------


def test_without_cuts_the_root_is_the_only_stage() -> None:
    lowered = chain()
    (only,) = stages(lowered, ())
    assert only.region.statements == lowered.root.statements
    assert (only.region.inputs, only.region.outputs) == (lowered.root.inputs, lowered.root.outputs)


def test_stages_divide_the_statements() -> None:
    lowered = chain()
    assert [made(part) for part in stages(lowered, (1, 3))] == [["h0"], ["h1", "h2"], ["y", "loss"]]


def test_what_is_needed_several_stages_later_is_relayed_by_each_stage_in_between() -> None:
    first, second, third, fourth = stages(chain(), (1, 2, 3))
    assert first.received == ()
    assert first.region.outputs == second.received == ("h0",)
    assert second.region.outputs == third.received == ("h0", "h1")
    assert third.region.outputs == fourth.received == ("h0", "h2")
    assert fourth.region.outputs == ("loss",)


def test_what_is_needed_no_more_is_not_relayed() -> None:
    *_, last = stages(chain(), (1, 4))
    assert last.received == ("y",)


def test_each_stage_holds_the_parameters_that_it_reads() -> None:
    parts = stages(chain(), (1, 3))
    assert [[p.name for p, _ in part.region.parameters] for part in parts] == [["w0"], ["w1", "w2"], []]


# -- what is made again -----------------------------------------------------------------------------------------------


def masked(buffers: bool = False) -> Lowered:
    """A mask made of an input (or a buffer) in the first stage, which two later stages read."""
    inputs = [value("x", ROWS, HIDDEN, grad=False)]
    bits = value("bits", ROWS, HIDDEN, grad=False)
    return chosen(
        buffered(
            inputs if buffers else [*inputs, bits],
            [value("w0", HIDDEN, HIDDEN), value("w1", HIDDEN, HIDDEN)],
            [bits] if buffers else [],
            op("neg.default", value("turned", ROWS, HIDDEN, grad=False), "bits"),
            op("relu.default", value("mask", ROWS, HIDDEN, grad=False), "turned"),
            linear("h0", "x", "w0"),
            op("mul.Tensor", value("a", ROWS, HIDDEN), "h0", "mask"),
            linear("h1", "a", "w1"),
            op("mul.Tensor", value("b", ROWS, HIDDEN), "h1", "mask"),
            op("sum.default", value("loss"), "b"),
        ),
        ranks=1,
    )


def test_masks_made_of_inputs_are_made_again_where_they_are_read_and_nothing_of_them_crosses() -> None:
    first, second, third = stages(masked(), (3, 5))
    assert [part.received for part in (first, second, third)] == [(), ("h0",), ("h1",)]
    assert made(second) == ["turned", "mask", "a", "h1"]
    assert made(third) == ["turned", "mask", "b", "loss"]
    assert [part.reads for part in (first, second, third)] == [("x", "bits"), ("bits",), ("bits",)]


def test_what_a_stage_receives_stands_before_the_inputs_that_it_reads() -> None:
    _, second, _ = stages(masked(), (3, 5))
    assert second.region.inputs == ("h0", "bits")


def test_masks_made_of_buffers_are_made_again_and_the_buffer_is_held_by_each() -> None:
    parts = stages(masked(buffers=True), (3, 5))
    assert [part.received for part in parts] == [(), ("h0",), ("h1",)]
    assert [[p.name for p, _ in part.region.parameters if p.buffer] for part in parts] == [["bits"]] * 3
    assert shared(parts) == {} and refusal(parts) == ""


def test_a_stage_that_reads_no_mask_makes_none() -> None:
    first, second, third = stages(masked(), (2, 3))
    assert made(first) == ["turned", "mask"] and made(second) == ["h0"] and made(third)[:2] == ["turned", "mask"]
    assert second.reads == ("x",)


def test_random_values_are_drawn_once_and_travel() -> None:
    lowered = chosen(
        program(
            [value("x", ROWS, HIDDEN, grad=False)],
            [value("w", HIDDEN, HIDDEN)],
            op("rand_like.default", value("noise", ROWS, HIDDEN, grad=False), "x"),
            linear("h", "x", "w"),
            op("mul.Tensor", value("a", ROWS, HIDDEN), "h", "noise"),
            op("sum.default", value("loss"), "a"),
        ),
        ranks=1,
    )
    first, second = stages(lowered, (2,))
    assert first.region.outputs == second.received == ("noise", "h")
    assert (first.draws, second.draws) == (0, 1)


def test_whole_numbers_travel_without_gradients() -> None:
    """Which rows win is known from activations alone, so that it cannot be made again; no gradient comes back."""
    lowered = chosen(
        program(
            [value("x", ROWS, HIDDEN, grad=False)],
            [value("w0", HIDDEN, HIDDEN)],
            linear("h", "x", "w0"),
            op("argmax.default", value("which", ROWS, grad=False, dtype="int64"), "h", args=(1,)),
            op("sum.dim_IntList", value("s", ROWS), "h", args=((1,),)),
            op("mul.Tensor", value("y", ROWS), "s", "which"),
            op("sum.default", value("loss"), "y"),
        ),
        ranks=1,
    )
    first, second = stages(lowered, (3,))
    assert first.region.outputs == second.received == ("which", "s")
    lies = second.region.locals
    assert [(lies[name].value.dtype, lies[name].value.grad) for name in second.received] == [
        ("int64", False),
        ("float32", True),
    ]


# -- weights in several stages ----------------------------------------------------------------------------------------


def tied() -> Lowered:
    return chosen(
        program(
            [value("x", ROWS, HIDDEN, grad=False)],
            [value("table", HIDDEN, HIDDEN), value("w", HIDDEN, HIDDEN)],
            linear("h0", "x", "table"),
            linear("h1", "h0", "w"),
            linear("h2", "h1", "table"),
            op("sum.default", value("loss"), "h2"),
        ),
        ranks=1,
    )


def test_a_tied_weight_is_shared_by_the_stages_that_read_it() -> None:
    parts = stages(tied(), (1, 2))
    assert shared(parts) == {"table": (0, 2)}
    assert parts[1].received == ("h0",) and parts[2].received == ("h1",)  # no weight travels


def test_a_tied_weight_that_one_stage_reads_is_not_shared() -> None:
    assert shared(stages(tied(), ())) == {}
    assert shared(stages(chain(), (1, 2))) == {}


def test_views_of_a_weight_are_made_again_by_each_stage() -> None:
    lowered = chosen(
        program(
            [value("x", ROWS, HIDDEN, grad=False)],
            [value("w", HIDDEN, HIDDEN)],
            op("t.default", value("turned", HIDDEN, HIDDEN), "w"),
            op("mm.default", value("h", ROWS, HIDDEN), "x", "turned"),
            op("mm.default", value("y", ROWS, HIDDEN), "h", "turned"),
            op("sum.default", value("loss"), "y"),
        ),
        ranks=1,
    )
    parts = stages(lowered, (2,))
    assert made(parts[1]) == ["turned", "y", "loss"] and parts[1].received == ("h",)
    assert shared(parts) == {"w": (0, 1)}


def test_a_weight_gathered_over_tp_is_gathered_again_by_each_stage() -> None:
    lowered = chosen(
        program(
            [value("x", ROWS, HIDDEN, grad=False)],
            [value("w", HIDDEN, HIDDEN)],
            linear("h", "x", "w"),
            linear("y", "h", "w"),
            op("sum.default", value("loss"), "y"),
        ),
        parameters={"w": S(0)},
    )
    assert written(lowered)[1:4] == ["w_R = w: S(0) -> R", "h = linear(x_S0, w_R)", "y = linear(h, w_R)"]
    first, second = stages(lowered, (3,))
    assert made(second)[:2] == ["w_R", "y"] and second.received == ("h",)
    assert shared((first, second)) == {"w": (0, 1)}


# -- what is refused --------------------------------------------------------------------------------------------------


def counting(times: int) -> Lowered:
    """A buffer that is counted up so many times."""
    names = [f"h{i}" for i in range(times)]
    ops = []
    for before, name in zip(["x", *names], names, strict=False):
        ops += [
            linear(name, before, "w"),
            op("add_.Tensor", value(f"count_{name}", grad=False), "seen", args=(1,)),
        ]
    last = op("sum.default", value("loss"), names[-1])
    inputs, weights = [value("x", ROWS, HIDDEN, grad=False)], [value("w", HIDDEN, HIDDEN)]
    return chosen(buffered(inputs, weights, [value("seen", grad=False)], *ops, last), ranks=1)


def test_a_buffer_that_two_stages_write_is_refused() -> None:
    assert refusal(stages(counting(2), (2,))) == "stages 0, 1 would each update a copy of seen"


def test_a_buffer_that_one_stage_writes_is_not() -> None:
    assert refusal(stages(counting(1), (2,))) == ""
    assert refusal(stages(counting(2), ())) == ""


def test_a_weight_that_one_stage_reads_twice_is_named() -> None:
    lowered = tied()
    assert read_twice(stages(lowered, ())[0], lowered) == "table"
    assert [read_twice(part, lowered) for part in stages(lowered, (2,))] == ["", ""]


def test_a_weight_read_once_in_each_of_many_layers_is_not_read_twice() -> None:
    lowered = chosen(layers(4), ranks=1)
    assert [read_twice(part, lowered) for part in stages(lowered, (3,))] == ["", ""]
