"""Rehearsals of programs whose bytes can be counted by hand, and of the collectives beside the real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory import Case, LiveBytes, planned
from costmodels.cluster import Cluster
from gloo import Pool
from passes.pipeline import PIPELINE
from passes.rehearse import Rehearsal, Tracker, rehearse
from passes.stand_ins import collectives as stand_ins_of
from passes.state import State, Task, made, run

ROWS, WIDTH, INNER, LAYERS = 12, 16, 64, 3
X, H = 4 * ROWS * WIDTH, 4 * ROWS * INNER  # bytes of [ROWS, WIDTH] and of [ROWS, INNER] in fp32
WEIGHT = 4 * WIDTH * INNER


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Layers(nn.Module):
    """Its first operator keeps its result, so that the gradient of the first layer's input is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


@pytest.fixture(scope="module")
def rehearsal() -> Rehearsal:
    case = Case(Layers(), {"x": torch.randn(ROWS, WIDTH)})
    state = planned(case, {"dp": 1, "tp": 1, "microbatches": 1}, 1)
    (found,) = rehearse(made(state.program, "the program"), made(state.lowered, "the local program"), torch.float32)
    return found


def test_a_layer_saves_what_its_backward_reads(rehearsal: Rehearsal) -> None:
    (layer,) = rehearsal.blocks
    assert layer.saved_bytes == H + H  # gelu's input and its result; x is the caller's


def test_the_forward_holds_the_sum_beside_its_terms(rehearsal: Rehearsal) -> None:
    (layer,) = rehearsal.blocks
    assert layer.forward_peak_bytes == H + H + X + X  # down's result and the output


def test_the_backward_holds_gradients_beside_what_was_saved(rehearsal: Rehearsal) -> None:
    (layer,) = rehearsal.blocks
    # In gelu's backward: its input, the gradients of the output, of gelu's result and of its input; and of down's
    # weight and bias where they stay
    passing = H + X + H + H
    assert layer.passing_peak_bytes >= passing
    assert layer.backward_peak_bytes >= passing + WEIGHT + 4 * WIDTH
    # never more than everything that the backward makes
    assert layer.backward_peak_bytes <= 4 * H + 3 * X + 2 * WEIGHT + 4 * (WIDTH + INNER)
    assert layer.left_bytes == X  # the gradient of the input


def test_a_recomputed_layer_keeps_only_its_input(rehearsal: Rehearsal) -> None:
    (layer,), (again,) = rehearsal.blocks, rehearsal.recomputed
    assert again.saved_bytes == 0
    assert again.backward_peak_bytes >= layer.backward_peak_bytes


def test_the_root_keeps_the_inputs_of_its_layers(rehearsal: Rehearsal) -> None:
    root = rehearsal.root
    assert root.calls == (0,) * LAYERS
    assert root.backward_calls == tuple(reversed(range(LAYERS)))
    # when layer k is called: its input, and those of the layers before
    assert [stretch.live_bytes for stretch in root.forward[:-1]] == [X * (k + 1) for k in range(LAYERS)]
    # when its backward is reached: the same, the loss and its gradient; that of its output is the layer's to count
    held = [stretch.live_bytes for stretch in root.backward[:-1]]
    assert held == [X * (k + 1) + 8 for k in reversed(range(LAYERS))]


def test_a_layer_that_keeps_nothing_holds_less_on_its_way(rehearsal: Rehearsal) -> None:
    ((kept, again),) = zip(rehearsal.blocks, rehearsal.recomputed, strict=True)
    assert again.forward_peak_bytes < kept.forward_peak_bytes


def test_parameters_come_in_the_order_of_the_model(rehearsal: Rehearsal) -> None:
    layer = [(INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,)]
    assert [held.shape for held in rehearsal.parameters] == [(WIDTH,), *layer * LAYERS]
    assert [held.shape for held in rehearsal.root.parameters] == [(WIDTH,)]


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout, self.scale = dropout, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        heads = (x * self.scale).view(ROWS, 16, 2, 32).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout, is_causal=True).sum()


@pytest.mark.parametrize(("cluster", "written_down"), [("1xh100", False), ("cpu:1", True)])
def test_the_probabilities_of_attention_with_dropout_are_held_where_it_is_not_fused(
    cluster: str, written_down: bool
) -> None:
    def saved(dropout: float) -> int:
        batch = {"x": torch.randn(ROWS, 16 * 64)}
        task = Task(Attending(dropout), batch, None, Cluster.preset(cluster), ROWS, "fp32", "adamw", {})
        state = run(PIPELINE, State(task, lambda text: None, lambda: False))
        text, lowered = made(state.program, "the program"), made(state.lowered, "the local program")
        return rehearse(text, lowered, torch.float32)[0].root.forward[-1].live_bytes

    probabilities = 4 * ROWS * 2 * 16 * 16
    assert (saved(0.1) - saved(0.0) >= probabilities) == written_down


def test_the_tracker_counts_views_once() -> None:
    with Tracker() as tracker:
        x = torch.empty(10)
        y = x.view(2, 5)[1:]
        assert tracker.live == 40
        z = y + 1
        assert (tracker.live, tracker.peak) == (40 + 20, 60)
        del x, z
        assert tracker.live == 40  # y still names a part of it
        del y
        assert (tracker.live, tracker.peak) == (0, 60)


def test_the_tracker_tells_gradients_that_stay_from_those_that_pass() -> None:
    weight = nn.Parameter(torch.ones(10))
    with Tracker() as tracker:
        tracker.ignore(weight)
        weight.register_post_accumulate_grad_hook(tracker.complete)
        (weight * 2.0).sum().backward()
        assert tracker.gradients == 40
        found = tracker.stretch()
    assert found.gradient_bytes == 40
    assert found.live_bytes == 0
    assert found.peak_bytes >= 40


# -- stand-ins --------------------------------------------------------------------------------------------------------

MOVES: list[tuple[str, dict[str, Any]]] = [
    ("all_gather", {"dim": 0}),
    ("all_gather", {"dim": 1}),
    ("all_gather", {"dim": 1, "backward": "slice"}),
    ("reduce_scatter", {"dim": 0}),
    ("reduce_scatter", {"dim": 1}),
    ("shard", {"dim": 1}),
    ("shard", {"dim": 1, "backward": "all_gather"}),
    ("all_reduce", {}),
    ("all_reduce", {"backward": "identity"}),
    ("replicate", {}),
    ("all_to_all", {"gather_dim": 0, "scatter_dim": 1}),
]
UNEVEN: list[tuple[str, dict[str, Any]]] = [
    ("all_gather", {"dim": 1, "size": 11}),
    ("reduce_scatter", {"dim": 2}),
    ("all_to_all", {"gather_dim": 1, "scatter_dim": 0, "gather_size": 11}),
]


def moved(function: Callable[..., Tensor], how: dict[str, Any]) -> tuple[int, int]:
    """The peak of live bytes in the forward and in the backward of a collective.

    Gloo's worker thread may let go of a tensor after `wait` has returned, so that a peak is now and then too high
    and never too low: the smallest of several is taken.
    """
    found = [moved_once(function, how) for _ in range(5)]
    return min(forward for forward, _ in found), min(backward for _, backward in found)


def moved_once(function: Callable[..., Tensor], how: dict[str, Any]) -> tuple[int, int]:
    short = (how.get("size") or how.get("gather_size")) and dist.is_initialized() and dist.get_rank() == 1
    x = torch.randn(8, 5 if short else 6, 257, requires_grad=True)
    with LiveBytes() as tracker:
        y = function(x, axis="tp", **how)
        forward, tracker.peak = tracker.peak, 0
        y.backward(torch.ones_like(y))
    return forward, tracker.peak


def moved_for_real() -> list[tuple[int, int]]:
    from autopar.runtime import collectives, mesh

    mesh.init({"dp": 1, "tp": 2}, "cpu")
    return [moved(getattr(collectives, name), how) for name, how in MOVES + UNEVEN]


def test_stand_ins_allocate_what_the_collectives_do(gloo: Pool) -> None:
    found = gloo.run(2, moved_for_real)
    stand_ins = stand_ins_of(2, copies=True)
    for (name, how), *real in zip(MOVES + UNEVEN, *found, strict=True):
        here, there = moved(stand_ins[name], how), (max(r[0] for r in real), max(r[1] for r in real))
        slack = 1.1 if (name, how) in UNEVEN else 1.0  # a short rank fills up its part
        for mine, its in zip(here, there, strict=True):
            assert its <= mine <= its * slack, f"{name} {how}: {here}, really {there}"
