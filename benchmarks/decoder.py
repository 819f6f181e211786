"""The decoder-only transformers that published runs train, from their dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.blocks import Blocked, Call
from passes.graph import Op, Ref, map_op


@dataclass(frozen=True)
class Shape:
    """What a decoder looks like.

    Fused attention writes no probabilities down, a fused gate nothing but its result. Of the loss, `fused` keeps the
    logits alone, as they are; `in_place` probabilities in fp32, with one copy more for a moment; `plain` is PyTorch's,
    and `shifted` the same of copies in fp32 without the last row. A composite norm is made of operators in fp32.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool
    tied: bool
    learned_positions: int
    fused: bool
    fused_gate: bool
    loss: str
    composite_norm: bool


class Attention(nn.Module):
    """Causal attention with grouped queries; rotary positions where the model learns none."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        bias, kv = not shape.gated, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=bias)
        self.k = nn.Linear(shape.hidden, kv, bias=bias)
        self.v = nn.Linear(shape.hidden, kv, bias=bias)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        shape = self.shape
        rows, sequence, _ = x.shape
        q, k, v = (
            one(x).view(rows, sequence, heads, shape.head_dim).transpose(1, 2)
            for one, heads in ((self.q, shape.heads), (self.k, shape.kv_heads), (self.v, shape.kv_heads))
        )
        if shape.gated:
            q, k = q * cos + halves_swapped(q) * sin, k * cos + halves_swapped(k) * sin
        if shape.fused:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.kv_heads < shape.heads)
        else:
            k, v = (one.repeat_interleave(shape.heads // shape.kv_heads, 1) for one in (k, v))
            scores = q @ k.transpose(-2, -1) / math.sqrt(shape.head_dim)
            attended = torch.softmax(scores if mask is None else scores + mask, -1) @ v
        out: Tensor = self.o(attended.transpose(1, 2).reshape(rows, sequence, -1))
        return out


def halves_swapped(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fused = shape.gated and shape.fused_gate
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False) if shape.gated and not self.fused else None
        self.up = nn.Linear(shape.hidden, shape.ffn * (1 + self.fused), bias=not shape.gated)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=not shape.gated)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            inner = F.glu(self.up(x))  # another function than SwiGLU, of the same bytes in and out
        elif self.gate is not None:
            inner = F.silu(self.gate(x)) * self.up(x)
        else:
            inner = F.gelu(self.up(x))
        out: Tensor = self.down(inner)
        return out


class CompositeNorm(nn.Module):
    """RMSNorm as transformers writes it (models/llama/modeling_llama.py)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(torch.float32)
        precise = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * precise.to(x.dtype)


def norm(shape: Shape) -> nn.Module:
    if not shape.gated:
        return nn.LayerNorm(shape.hidden)
    return CompositeNorm(shape.hidden) if shape.composite_norm else nn.RMSNorm(shape.hidden)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention, self.before_ffn = norm(shape), norm(shape)
        self.attention, self.ffn = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.before_attention(x), cos, sin, mask)
        return x + self.ffn(self.before_ffn(x))


class Decoder(nn.Module):
    """Token ids [rows, sequence] to logits [rows, sequence, vocab], or to the loss of each row where one stands in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.learned_positions, shape.hidden) if shape.learned_positions else None
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(shape.sequence, shape.head_dim))
        self.register_buffer("mask", None if shape.fused else torch.empty(shape.sequence, shape.sequence))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, self.cos, self.sin, self.mask)
        logits: Tensor = self.head(self.norm(x))
        return STAND_INS[self.shape.loss](logits) if self.shape.loss in STAND_INS else logits


# Of each row; not cross-entropy, but they keep and move what such kernels of it do. What works in place from the start
# (Megatron-LM's) never has two of them in fp32; nanotron's, which subtracts first, has.
STAND_INS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "fused": lambda logits: F.silu(logits).sum((1, 2)),  # keeps its argument, makes the gradient in one pass
    "in_place": lambda logits: logits.float().exp().sum((1, 2)),  # keeps its result
}


def of_rows(losses: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a model that gives that of each row."""
    return losses.sum()


def next_token(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The loss of predicting every next token."""
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def shifted(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The same of labels that are not shifted yet."""
    predicted, labels = logits.float()[:, :-1].contiguous(), batch["labels"][:, 1:].contiguous()
    return F.cross_entropy(predicted.flatten(0, 1), labels.flatten())


LOSSES: Mapping[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {"plain": next_token, "shifted": shifted}


def deepened(program: Blocked, layers: int) -> Blocked:
    """The program with so many layers, of one that has a few of one kind, each given what the one before returns."""
    (block,) = program.blocks
    calls = program.calls
    at = program.body.index(calls[-1])
    last = calls[-1]
    passed = {v.name: i for i, v in enumerate(calls[-2].results)}
    more: list[Call] = []
    for number in range(len(calls), layers):
        before = (more or [last])[-1]
        args = tuple(before.results[passed[a]].name if a in passed else a for a in last.args)
        results = tuple(replace(v, name=f"{v.name}_of_{number}") for v in last.results)
        more.append(Call(last.block, number, args, results))
    given = {v.name: new.name for v, new in zip(last.results, (more or [last])[-1].results, strict=True)}

    def renamed(op: Op) -> Op:
        return map_op(op, lambda arg: Ref(given.get(arg.name, arg.name)) if isinstance(arg, Ref) else arg)

    rest = tuple(renamed(s) if isinstance(s, Op) else s for s in program.body[at + 1 :])
    stem = block.paths[0].rpartition(".")[0]
    paths = tuple(f"{stem}.{number}" for number in range(layers))
    return replace(program, body=(*program.body[: at + 1], *more, *rest), blocks=(replace(block, paths=paths),))
