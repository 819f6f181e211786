"""A GPT written by hand: fused query, key and value, tied embedding, the loss computed by the model.

autopar plan examples/nanogpt.py:gpt2 --cluster 8xh100 --global-batch 512
autopar plan examples/nanogpt.py:small --cluster cpu:4 --precision fp32 --fix dp=2,tp=2 --out out
autopar verify out
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # x [rows, sequence, width]
        rows, sequence, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(rows, sequence, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [rows, heads, sequence, width / heads]
        return self.out(x.transpose(1, 2).reshape(rows, sequence, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm_2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, positions: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # both [rows, sequence]
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # [rows, sequence, vocabulary]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(rows: int, sequence: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (rows, sequence + 1), generator=torch.Generator().manual_seed(0))
    return {"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def small():
    torch.manual_seed(0)
    return GPT(vocabulary=257, positions=32, width=64, heads=4, layers=4), batch(8, 32, 257)


def gpt2():
    with torch.device("meta"):  # shapes only: a plan needs no weights
        model = GPT(vocabulary=50257, positions=1024, width=768, heads=12, layers=12)
    return model, batch(8, 1024, 50257)
