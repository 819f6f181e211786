"""Slices follow torch.chunk, empty ones are not valid, and each resharding costs what the table says."""

from __future__ import annotations

import pytest
import torch

from costmodels.groups import Collective
from passes.placements import I, P, R, S, can_reshard, chunk_sizes, collectives, is_even, is_valid, kind, local_shape

GATHER, SCATTER = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
REDUCE, EXCHANGE = Collective.ALL_REDUCE, Collective.ALL_TO_ALL


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
def test_slices_are_those_of_torch_chunk(size, ranks):
    chunks = [len(part) for part in torch.arange(size).chunk(ranks)]
    assert chunk_sizes(size, ranks) == (*chunks, *[0] * (ranks - len(chunks)))


@pytest.mark.parametrize(
    ("size", "ranks", "sizes"),
    [(6, 2, (3, 3)), (7, 2, (4, 3)), (7, 3, (3, 3, 1)), (6, 4, (2, 2, 2, 0)), (2, 3, (1, 1, 0)), (5, 1, (5,))],
)
def test_slices_written_out(size, ranks, sizes):
    assert chunk_sizes(size, ranks) == sizes


@pytest.mark.parametrize(
    ("placement", "shape", "ranks", "valid", "even"),
    [
        (S(0), (6, 5), 3, True, True),
        (S(1), (6, 5), 3, True, False),  # 2, 2, 1
        (S(0), (6, 5), 4, False, False),  # 2, 2, 2, 0
        (S(1), (6, 2), 3, False, False),  # 1, 1, 0
        (S(0, 3), (12, 5), 2, True, True),
        (S(0, 3), (9, 5), 2, True, False),  # three blocks of 2 and 1
        (S(0, 3), (8, 5), 2, False, False),  # eight are not three equal blocks
        (R, (1,), 8, True, True),
        (I, (), 8, True, True),
        (P, (3, 1), 2, True, True),
    ],
)
def test_a_cut_is_valid_where_every_rank_has_something(placement, shape, ranks, valid, even):
    assert (is_valid(placement, shape, ranks), is_even(placement, shape, ranks)) == (valid, even)


@pytest.mark.parametrize(
    ("placement", "rank", "shape"),
    [
        (S(0), 0, (3, 9)),
        (S(0), 1, (2, 9)),
        (S(1, 3), 0, (5, 6)),  # three blocks of three, two rows of each
        (S(1, 3), 1, (5, 3)),
        (R, 1, (5, 9)),
        (P, 1, (5, 9)),
    ],
)
def test_local_shape_of_5_by_9_on_two_ranks(placement, rank, shape):
    assert local_shape(placement, (5, 9), 2, rank) == shape


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        (S(0), S(1), EXCHANGE, EXCHANGE),
        (S(0), S(0, 2), EXCHANGE, EXCHANGE),
        (S(0), R, GATHER, SCATTER),
        (S(0), I, GATHER, None),
        (R, S(0), None, None),
        (R, I, None, None),
        (I, S(0), None, GATHER),
        (I, R, None, REDUCE),
        (P, S(0), SCATTER, GATHER),
        (P, R, REDUCE, REDUCE),
        (P, I, REDUCE, None),
        (S(0, 2), S(0, 2), None, None),
        (P, P, None, None),
    ],
)
def test_resharding_costs(source, target, forward, backward):
    assert can_reshard(source, target, grad=True)
    assert collectives(source, target) == (forward, backward)


@pytest.mark.parametrize("source", [S(0), R, I])
def test_nothing_becomes_a_partial_sum(source):
    assert not can_reshard(source, P, grad=True)


def test_without_a_gradient_there_are_only_cuts_and_whole_values():
    places = (S(0), S(1), I, R, P)
    allowed = {(kind(a), kind(b)) for a in places for b in places if a != b and can_reshard(a, b, grad=False)}
    assert allowed == {("S", "S"), ("S", "I"), ("I", "S")}


def test_placements_print_as_in_the_table():
    assert [str(p) for p in (S(0), S(1, 3), R, I, P)] == ["S(0)", "S(1, 3)", "R", "I", "P"]
