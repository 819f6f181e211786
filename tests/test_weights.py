"""Weights and buffers of a model on meta: what its own initialisers make of them, and what they leave out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.weights import full_buffers, full_weights
from costmodels.errors import BadInput


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


class LinearAlone(nn.Module):
    """Initialises Linear only, through .data, and leaves all else as torch makes it."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(7.0)


class Net(LinearAlone):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.batch_norm = nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)


def test_init_weights_adds_to_reset_parameters():
    made = full_weights(on_meta(Net))
    for name, value in Net().state_dict().items():
        if name.startswith("linear"):
            assert made[name].eq(7).all() if name.endswith("weight") else made[name].ne(0).all()
        else:
            assert torch.equal(made[name], value), name


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10 ** torch.arange(0.0, 4.0), persistent=False)


class Rotating(LinearAlone):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.linear = Rotary(), nn.Linear(4, 4)


def test_a_buffer_that_nothing_initialises_is_named():
    mine = on_meta(Rotating)
    assert full_weights(mine).keys() == {"linear.weight", "linear.bias"}, "no state dict holds it"
    with pytest.raises(BadInput, match=r"rotary \(Rotary\) is on meta and nothing initialises inv_freq: .* on the CPU"):
        full_buffers(mine)


class Root(LinearAlone):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.linear = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 4)


def test_a_root_parameter_that_nothing_initialises_is_named():
    with pytest.raises(BadInput, match=r"the model \(Root\) is on meta and nothing initialises token: "):
        full_weights(on_meta(Root))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_a_mask_beside_a_weight_is_named_whatever_its_dtype(dtype):
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("mask", torch.ones(4, 4).tril().to(dtype))

    with pytest.raises(BadInput, match=r"0 \(Masked\) is on meta and nothing initialises mask: "):
        full_weights(on_meta(lambda: nn.Sequential(Masked())))


class Counting(nn.Module):
    """Integers and bools that reset_parameters writes in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("written", "through_data", "replaced", "bool"):
            self.register_buffer(name, torch.zeros(2, dtype=torch.bool if name == "bool" else torch.int64))
        self.child = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        self.written.zero_()
        self.through_data.data.zero_()
        self.replaced = torch.zeros(2, dtype=torch.int64)
        self.bool.fill_(False)
        self.child.reset_parameters()


def test_integers_and_bools_that_are_written_are_taken():
    made = full_weights(on_meta(Counting))
    assert all(made[name].eq(0).all() for name in ("written", "through_data", "replaced", "bool"))
    assert made["child.weight"].ne(0).all()


def test_tensors_that_are_not_on_meta_stay():
    mine = on_meta(Net)
    mine.norm = nn.LayerNorm(4)
    mine.linear.bias = nn.Parameter(torch.full((4,), 3.0))
    with torch.no_grad():
        mine.norm.weight.fill_(5.0)
    made = full_weights(mine)
    assert made["norm.weight"].eq(5).all() and made["linear.bias"].eq(3).all() and made["linear.weight"].eq(7).all()


def test_a_tied_weight_is_initialised_once():
    def tied() -> nn.Module:
        net = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 5, bias=False))
        net[1].weight = net[0].weight
        return net

    made = full_weights(on_meta(tied))
    assert made["0.weight"] is made["1.weight"] and made["0.weight"][0].eq(0).all()


class Parent(LinearAlone):
    """Initialises a child from above, as GPT-2 does its residual projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Sequential):
            module[0].bias.data.fill_(2.0)


def test_what_a_parent_writes_into_its_children_counts():
    mine = on_meta(Parent)
    made = full_weights(mine)
    assert made["inner.0.bias"].eq(2).all() and made["inner.0.weight"].eq(7).all()
    assert all(p.is_meta for p in mine.parameters())
