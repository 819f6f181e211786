"""How a tensor lies on one mesh axis, and what it costs to lay it differently.

    S(d, k)  dim d is cut into k equal blocks and each rank holds its slice of every block; so is the gradient
    R        same value on all ranks; the gradient arrives as partial sums (its consumers differ by rank)
    I        same value and same gradient on all ranks (everyone repeats the same work)
    P        the value is the sum over ranks; the gradient is the same on all ranks

Reshardings, forward / backward ("-" is free; slicing and padding are local):

    from \\ to   S(d)                          R                           I
    S(e)        all-to-all / all-to-all       all-gather / reduce-scatter all-gather / slice
    R           slice / zero-pad              -                           - / count one rank only
    I           slice / all-gather            - / all-reduce              -
    P           reduce-scatter / all-gather   all-reduce / all-reduce     all-reduce / -

Slices follow `torch.chunk`; a placement that would leave a rank with an empty slice is not valid.
A tensor without a gradient (ids, masks) knows only S and I: R and I would be the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from costmodels.groups import Collective


class Whole(Enum):
    """The placements that do not cut the tensor."""

    R = "R"
    I = "I"  # noqa: E741  (the algebra's own letter)
    P = "P"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, order=True)
class S:
    """Dim `dim` cut into `blocks` equal blocks, each of them sliced over the ranks."""

    dim: int
    blocks: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim}, {self.blocks})"


R, I, P = Whole.R, Whole.I, Whole.P  # noqa: E741
Placement: TypeAlias = "S | Whole"


def chunk_size(size: int, ranks: int, rank: int) -> int:
    """What `torch.chunk` gives one rank of a dim of `size` (0 where nothing is left)."""
    step = -(-size // ranks)
    return max(0, min(step, size - step * rank))


def chunk_sizes(size: int, ranks: int) -> tuple[int, ...]:
    """What `torch.chunk` gives each rank."""
    return tuple(chunk_size(size, ranks, rank) for rank in range(ranks))


def is_valid(placement: Placement, shape: tuple[int, ...], ranks: int) -> bool:
    """Whether every rank gets a non-empty slice."""
    if not isinstance(placement, S):
        return True
    size = shape[placement.dim]
    return size % placement.blocks == 0 and chunk_size(size // placement.blocks, ranks, ranks - 1) > 0


def is_even(placement: Placement, shape: tuple[int, ...], ranks: int) -> bool:
    """Whether every rank gets a slice of the same size."""
    return not isinstance(placement, S) or shape[placement.dim] % (placement.blocks * ranks) == 0


def local_shape(placement: Placement, shape: tuple[int, ...], ranks: int, rank: int = 0) -> tuple[int, ...]:
    """The shape of one rank's part. Rank 0 holds the largest."""
    if not isinstance(placement, S):
        return shape
    size = placement.blocks * chunk_size(shape[placement.dim] // placement.blocks, ranks, rank)
    return (*shape[: placement.dim], size, *shape[placement.dim + 1 :])


_SINGLE: dict[tuple[str, str], tuple[Collective | None, Collective | None]] = {
    ("S", "S"): (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL),
    ("S", "R"): (Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    ("S", "I"): (Collective.ALL_GATHER, None),
    ("R", "S"): (None, None),
    ("R", "I"): (None, None),
    ("I", "S"): (None, Collective.ALL_GATHER),
    ("I", "R"): (None, Collective.ALL_REDUCE),
    ("P", "S"): (Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
    ("P", "R"): (Collective.ALL_REDUCE, Collective.ALL_REDUCE),
    ("P", "I"): (Collective.ALL_REDUCE, None),
}


def kind(placement: Placement) -> str:
    """The placement's letter."""
    return "S" if isinstance(placement, S) else placement.value


def can_reshard(source: Placement, target: Placement, grad: bool) -> bool:
    """Whether the table has an entry. Without a gradient there is neither R nor P."""
    if source == target:
        return True
    if not grad and (source in (R, P) or target in (R, P)):
        return False
    return (kind(source), kind(target)) in _SINGLE


def collectives(source: Placement, target: Placement) -> tuple[Collective | None, Collective | None]:
    """The collectives of a resharding, forward and backward; None where it is free or local."""
    if source == target:
        return None, None
    return _SINGLE[kind(source), kind(target)]
