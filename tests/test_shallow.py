"""The shallow twin: a deep model is traced as it would be in full, or the twin is not taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from passes import capture as capturing
from passes.capture import Captured, capture
from passes.graph import Size, rename
from passes.normalize import without_noops
from passes.shallow import make_shallow

SIZES = {"vocab_size": 64, "max_position_embeddings": 16}
IDS = torch.zeros(4, 16, dtype=torch.long)
LM = {"input_ids": IDS, "labels": IDS}
X = {"x": torch.zeros(4, 6)}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=6, vocab_size=64, n_positions=16, resid_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def gemma() -> nn.Module:
    """Layers of two kinds that only their number tells apart: every other one has a sliding window."""
    config = transformers.Gemma2Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, sliding_window=4, use_cache=False, **SIZES,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def t5() -> nn.Module:
    """Two stacks whose first layers have a table of positions that the others use."""
    config = transformers.T5Config(
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=10,
        num_heads=2,
        vocab_size=64,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


class Stack(nn.Module):
    """Eight linear layers; `forward` is the test's own."""

    def __init__(self, layers: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or (nn.Linear(6, 6) for _ in range(8)))


class Plain(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.sum()


class Counted(Stack):
    """Needs all its layers."""

    def forward(self, x: Tensor) -> Tensor:
        for i in range(8):
            x = self.layers[i](x)
        return x.sum()


class Numbered(Stack):
    """The last layers do what the first ones do not."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i < 5 else F.relu(layer(x))
        return x.sum()


def both(model: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Captured, Captured, list[bool]]:
    """The capture with the twin, in full, and whether the twin was taken."""
    taken: list[bool] = []

    def watched(*args: Any) -> Any:
        found = with_sizes_of(*args)
        taken.append(found is not None)
        return found

    with_sizes_of = capturing.with_sizes_of
    monkeypatch.setattr(capturing, "with_sizes_of", watched)
    quick = capture(model, batch, None)
    monkeypatch.setattr(capturing, "make_shallow", lambda model: False)
    return quick, capture(model, batch, None), taken


def assert_equal(quick: Captured, full: Captured) -> None:
    """The same graph but for names, which count nodes that are not kept."""
    one, other = without_noops(quick.graph), without_noops(full.graph)
    pairs = list(zip(one.ops, other.ops, strict=True))
    names = {mine.name: its.name for a, b in pairs for mine, its in zip(a.results, b.results, strict=True)}
    assert [rename(op, names) for op in one.ops] == list(other.ops)
    assert (one.inputs, one.parameters) == (other.inputs, other.parameters)
    assert names[one.loss] == other.loss
    assert any(isinstance(size, Size) for value in one.values.values() for size in value.shape)
    assert (quick.inputs, quick.coupled, quick.constants.keys()) == (full.inputs, full.coupled, full.constants.keys())


@pytest.mark.parametrize("make", [gpt2, gemma, pytest.param(t5, marks=pytest.mark.slow)])
def test_a_deep_model_is_traced_as_in_full(make, monkeypatch):
    quick, full, taken = both(make(), LM, monkeypatch)
    assert taken == [True]
    assert_equal(quick, full)


def test_operators_between_layers_are_found_in_the_twin(monkeypatch):
    quick, full, taken = both(Plain(), X, monkeypatch)
    assert taken == [True]
    assert_equal(quick, full)


@pytest.mark.parametrize(("model", "tried"), [(Counted(), []), (Numbered(), [False])], ids=["counted", "numbered"])
def test_where_the_twin_says_nothing_the_model_is_traced_with_the_symbol(model, tried, monkeypatch):
    quick, full, taken = both(model, X, monkeypatch)
    assert taken == tried
    assert quick == full


def test_the_users_model_keeps_its_layers():
    model = Plain()
    capture(model, X, None)
    assert len(model.layers) == 8


def test_two_layers_of_every_kind_are_kept_in_order():
    kinds = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    model = nn.Sequential(nn.Sequential(*kinds, *(nn.Tanh() for _ in range(12))))
    assert make_shallow(model)
    assert [str(layer) for layer in model[0]] == [str(kinds[i]) for i in (0, 1, 2, 4, 4)]


def test_a_model_with_few_layers_is_left():
    assert not make_shallow(Stack([nn.Linear(6, 6), nn.Linear(6, 6)]))
