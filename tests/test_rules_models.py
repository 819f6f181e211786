"""The operators of real training graphs: each has a rule, and each call is run whole and in slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.rules import RULES
from test_rules import one_thread, proved, recorded_calls  # noqa: F401  (a fixture)

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 40, (2, 6), generator=torch.Generator().manual_seed(0))
LANGUAGE = {"input_ids": IDS, "labels": IDS.clone()}
Built = tuple[nn.Module, dict[str, Tensor]]

# written in place (capture makes them functional), checked away, or of data-dependent order
WITHOUT_RULE = {
    "aten._assert_tensor_metadata.default",
    "aten.add_.Tensor",
    "aten.copy_.default",
    "aten.div_.Tensor",
    "aten.fill_.Tensor",
    "aten.histc.default",
    "aten.index_put_.default",
    "aten.masked_fill_.Scalar",
}


def gpt2() -> Built:
    config = transformers.GPT2Config(
        vocab_size=41, n_embd=12, n_layer=1, n_head=2, n_positions=8, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), LANGUAGE


def llama() -> Built:
    config = transformers.LlamaConfig(
        vocab_size=41, hidden_size=16, intermediate_size=21, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), LANGUAGE


def mixtral() -> Built:
    config = transformers.MixtralConfig(
        vocab_size=41, hidden_size=16, intermediate_size=18, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), LANGUAGE


def bert() -> Built:
    config = transformers.BertConfig(
        vocab_size=41, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=3,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), {**LANGUAGE, "attention_mask": torch.ones_like(IDS)}


def vit() -> Built:
    config = transformers.ViTConfig(
        hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=3, image_size=8, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.tensor([1, 2])}


def t5() -> Built:
    config = transformers.T5Config(
        vocab_size=41, d_model=12, d_kv=4, d_ff=20, num_layers=1, num_heads=3, use_cache=False, dropout_rate=0.0,
        decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), LANGUAGE


class Nano(nn.Module):
    """A hand-written GPT: fused projection, tied embedding, loss of flattened tokens."""

    def __init__(self, vocabulary: int = 41, hidden: int = 12, heads: int = 2, length: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.norm, self.last = nn.LayerNorm(hidden), nn.LayerNorm(hidden, bias=False)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        batch, length = input_ids.shape
        x = self.tokens(input_ids) + self.positions(torch.arange(length))
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(x.shape[-1], dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).contiguous().view(batch, length, -1))
        x = x + F.dropout(self.down(F.gelu(self.up(x))), 0.0)
        logits = self.head(self.last(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-1)


def nano() -> Built:
    return Nano(), LANGUAGE


@pytest.mark.parametrize("build", [gpt2, llama, mixtral, bert, vit, t5, nano])
def test_every_call_of_a_training_graph(build: Callable[[], Built]) -> None:
    torch.manual_seed(0)
    model, batch = build()
    exported = torch.export.export(model.double().train(), (), batch, strict=False)
    targets = {str(n.target) for n in exported.graph.nodes if n.op == "call_function"}
    unknown = {t for t in targets if "getitem" not in t} - RULES.keys() - WITHOUT_RULE
    assert not unknown
    seen: set[Any] = set()
    for made in recorded_calls(exported.module(), *batch.values()):
        key = (str(made.site.op.args), made.target, *(v.sizes for v in made.site.operands))
        if key not in seen:
            seen.add(key)
            proved(made)
    assert len(seen) > 20
