"""How a tensor lies over the ranks of one mesh axis, and how to cut it and put it together again.

    S(d, k)  dim d is cut into k equal blocks and each rank holds its slice of every block; so is the gradient
    R        same value on all ranks; the gradient arrives as partial sums
    I        same value and same gradient on all ranks
    P        the value is the sum over ranks; the gradient is the same on all ranks

    S(1, 2) of [2, 8] on two ranks:   rank 0   a b . . e f . .
                                      rank 1   . . c d . . g h

Slices follow `torch.chunk`: all have the same size but the last, which holds what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import torch
from torch import Tensor


class Whole(Enum):
    """The placements that do not cut the tensor."""

    R = "R"
    I = "I"  # noqa: E741  (the algebra's own letter)
    P = "P"

    def __repr__(self) -> str:
        return self.value


@dataclass(frozen=True)
class S:
    """Dim `dim` cut into `blocks` equal blocks, each of them sliced over the ranks."""

    dim: int
    blocks: int = 1

    def __repr__(self) -> str:
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim}, {self.blocks})"


R, I, P = Whole.R, Whole.I, Whole.P  # noqa: E741
Placement: TypeAlias = S | Whole


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where a rank's slice of `size` elements starts, and its length, as `torch.chunk` cuts."""
    step = -(-size // ranks)
    start = min(step * rank, size)
    return start, min(step, size - start)


@dataclass(frozen=True)
class Layout:
    """A tensor of `shape` (the whole of it) placed over one mesh axis."""

    shape: tuple[int, ...]
    placement: Placement = I

    def __post_init__(self) -> None:
        if not isinstance(self.placement, S):
            return
        dim, blocks = self.placement.dim, self.placement.blocks
        if not 0 <= dim < len(self.shape):
            raise ValueError(f"{self.placement!r} of a tensor of shape {list(self.shape)}: there is no dim {dim}")
        if self.shape[dim] % blocks:
            raise ValueError(f"{self.placement!r}: dim {dim} has size {self.shape[dim]}, not a multiple of {blocks}")

    def local_shape(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
        if not isinstance(self.placement, S):
            return self.shape
        dim, blocks = self.placement.dim, self.placement.blocks
        _, length = chunk(self.shape[dim] // blocks, ranks, rank)
        return (*self.shape[:dim], blocks * length, *self.shape[dim + 1 :])

    def local(self, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        """One rank's part of the whole tensor: a view where the part lies in one piece."""
        if not isinstance(self.placement, S):
            return tensor
        dim, blocks = self.placement.dim, self.placement.blocks
        start, length = chunk(self.shape[dim] // blocks, ranks, rank)
        cut = tensor.reshape(*self.shape[:dim], blocks, self.shape[dim] // blocks, *self.shape[dim + 1 :])
        part = cut.narrow(dim + 1, start, length)
        return part.reshape(self.local_shape(rank, ranks))

    def full(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor, of every rank's part in order of ranks."""
        if self.placement is P:
            return torch.stack(tuple(shards)).sum(0)
        if not isinstance(self.placement, S):
            return shards[0]
        dim, blocks = self.placement.dim, self.placement.blocks
        before, after = self.shape[:dim], self.shape[dim + 1 :]
        parts = [part.reshape(*before, blocks, part.shape[dim] // blocks, *after) for part in shards]
        return torch.cat(parts, dim + 1).reshape(self.shape)
