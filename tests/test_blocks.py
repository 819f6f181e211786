"""Layers of one kind become one block; whatever cannot be called layer by layer stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.blocks import Blocked, Call, block
from passes.capture import capture
from passes.graph import Graph, Op, Size
from passes.normalize import normalize
from test_capture import Small

BATCH = {"x": torch.ones(4, 4), "y": torch.ones(4, 4)}


class FFN(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * scale


class Gated(FFN):
    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))).sigmoid()) * scale


def in_order(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    return x


def model(*layers: nn.Module, order: Callable[[Any, Tensor], Tensor] = in_order, **members: Any) -> Small:
    """A linear layer, then `order` on the layers (so that every layer's input has a gradient)."""
    return Small(lambda self, x: order(self, self.a(x)), a=nn.Linear(4, 4), layers=nn.ModuleList(layers), **members)


def graph_of(made: nn.Module) -> Graph:
    return normalize(capture(made, BATCH, lambda o, b: F.mse_loss(o, b["y"])).graph)[0]


def blocked(made: nn.Module) -> Blocked:
    classes = {name: type(m).__name__ for name, m in made.named_modules() if name.rpartition(".")[2].isdigit()}
    return block(graph_of(made), classes)


def outline(program: Blocked) -> str:
    """The body in one line: operators by name, calls as block[instance]."""
    return " ".join(
        f"{program.blocks[s.block].name}[{s.instance}]" if isinstance(s, Call) else s.target.split(".")[1]
        for s in program.body
    )


def test_equal_layers_share_one_block():
    program = blocked(model(FFN(), FFN(), FFN()))
    assert outline(program) == "linear FFN[0] FFN[1] FFN[2] mse_loss div"
    (ffn,) = program.blocks
    assert ffn.paths == ("layers.0", "layers.1", "layers.2")
    assert [p.name for p in ffn.parameters] == [
        "norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias",
    ]  # fmt: skip
    assert [p.name for p in program.parameters] == ["a.weight", "a.bias"]
    assert [(len(c.args), [v.shape for v in c.results]) for c in program.calls] == 3 * [(1, [(Size(1), 4)])]


def test_each_layer_takes_what_the_one_before_gave():
    program = blocked(model(FFN(), FFN(), FFN()))
    first, second, third = program.calls
    assert first.args == ("linear",)
    assert second.args == (first.results[0].name,) and third.args == (second.results[0].name,)


def test_a_first_layer_of_another_width_has_a_block_of_its_own():
    program = blocked(model(FFN(6), FFN(), FFN()))
    assert outline(program) == "linear FFN[0] FFN2[0] FFN2[1] mse_loss div"


def test_a_first_layer_whose_input_has_no_gradient_has_a_block_of_its_own():
    made = Small(in_order, layers=nn.ModuleList([FFN(), FFN(), FFN()]))
    assert outline(blocked(made)) == "FFN[0] FFN2[0] FFN2[1] mse_loss div"


def test_a_frozen_layer_has_a_block_of_its_own():
    layers = [FFN(), FFN(), FFN()]
    layers[1].up.weight.requires_grad_(False)
    assert outline(blocked(model(*layers))) == "linear FFN[0] FFN2[0] FFN[1] mse_loss div"


def test_layers_of_two_classes_in_one_container():
    program = blocked(model(FFN(), Gated(), FFN(), Gated()))
    assert outline(program) == "linear FFN[0] Gated[0] FFN[1] Gated[1] mse_loss div"


def test_a_sequential_of_one_of_each_has_no_blocks():
    made = Small(lambda self, x: self.net(x), net=nn.Sequential(FFN(), Gated(), nn.Linear(4, 4)))
    assert blocked(made).blocks == ()


def test_layers_that_share_a_parameter_are_not_taken():
    layers = [FFN(), FFN(), FFN()]
    layers[2].up.weight = layers[0].up.weight
    program = blocked(model(*layers))
    assert program.blocks == ()
    assert ("layers.0.up.weight", "layers.2.up.weight") in [p.names for p in program.parameters]


def test_layers_whose_parameters_others_read_are_not_taken():
    def peeking(self: Any, x: Tensor) -> Tensor:
        return in_order(self, x) * self.layers[0].norm.weight

    assert blocked(model(FFN(), FFN(), order=peeking)).blocks == ()


def test_one_layer_called_three_times_is_no_layer():
    assert blocked(model(FFN(), FFN(), order=lambda self, x: in_order(self, in_order(self, x)))).blocks == ()


def test_layers_that_others_interrupt_are_not_taken():
    def half(self: Any, x: Tensor) -> Tensor:
        first, second = self.layers
        early, late = first.up(x), second.up(x)
        return first.down(early.relu()) + second.down(late.relu())

    assert blocked(model(FFN(), FFN(), order=half)).blocks == ()


def test_layers_in_reverse_are_called_in_reverse():
    def backwards(self: Any, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x

    program = blocked(model(FFN(), FFN(), order=backwards))
    calls = [program.blocks[c.block].paths[c.instance] for c in program.calls]
    assert calls == ["layers.1", "layers.0"]


def test_what_a_layer_reads_from_outside_is_an_argument():
    def scaled(self: Any, x: Tensor) -> Tensor:
        scale = self.scale.exp()
        for layer in self.layers:
            x = layer(x, scale)
        return x

    program = blocked(model(FFN(), FFN(), order=scaled, scale=nn.Parameter(torch.zeros(4))))
    assert [c.args for c in program.calls] == [("linear", "exp"), (program.calls[0].results[0].name, "exp")]


def test_a_layer_may_give_several_results():
    class Pair(FFN):
        def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            h = self.down(F.gelu(self.up(self.norm(x))))
            return x + h, total + h

    def both(self: Any, x: Tensor) -> Tensor:
        total = x
        for layer in self.layers:
            x, total = layer(x, total)
        return x * total

    program = blocked(model(Pair(), Pair(), Pair(), order=both))
    assert (
        outline(program) == "linear Pair[0] Pair2[0] Pair2[1] mul mse_loss div"
    )  # the first is given one tensor twice
    assert [len(c.results) for c in program.calls] == [2, 2, 2]


def test_inner_containers_belong_to_their_layer():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([FFN(), FFN()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.inner:
                x = layer(x)
            return x

    program = blocked(model(Outer(), Outer()))
    assert outline(program) == "linear Outer[0] Outer[1] mse_loss div"
    assert "inner.1.up.weight" in [p.name for p in program.blocks[0].parameters]


def test_names_of_classes_that_are_taken_are_numbered():
    kinds = {name: type(name, (FFN,), {}) for name in ("Model", "S", "FFN2")}
    layers = [kinds["Model"](), kinds["S"](), FFN(6), kinds["FFN2"](), FFN(), kinds["S"](), kinds["Model"]()]
    made = model(*layers, FFN(6), kinds["FFN2"](), FFN())
    classes = {name: type(m).__name__ for name, m in made.named_modules() if name.rpartition(".")[2].isdigit()}
    names = [b.name for b in block(graph_of(made), classes, ("Model", "S")).blocks]
    assert names == ["Model2", "S2", "FFN", "FFN2", "FFN3"]


def test_every_operator_is_in_exactly_one_place():
    made = model(FFN(), Gated(), FFN(6))
    program = blocked(made)
    inside = [op.name for call in program.calls for op in program.blocks[call.block].ops]
    outside = [s.name for s in program.body if isinstance(s, Op)]
    assert len(inside) + len(outside) == len(graph_of(made).ops)


def test_no_size_is_left_at_a_batch():
    program = blocked(model(FFN(), FFN())).at(6)
    assert program.values["linear"].shape == (6, 4)
    assert program.blocks[0].inputs[0].shape == (6, 4)
    assert program.calls[0].results[0].shape == (6, 4)
