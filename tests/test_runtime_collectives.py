"""Every resharding against the table of placements, computed on one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar import runtime
from autopar.runtime import I, Layout, P, R, S


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spread(whole, placement, rank, ranks):
    """A tensor's value on one rank, of the whole value."""
    if placement is P:
        parts = [random(*whole.shape, seed=100 + r) for r in range(ranks - 1)]
        return [*parts, whole - sum(parts)][rank] if parts else whole
    return Layout(tuple(whole.shape), placement).local(whole, rank, ranks)


def spread_gradient(whole, placement, rank, ranks):
    """A gradient's value on one rank: partial sums for R, the same everywhere for I and P."""
    dual = {R: P, P: I}.get(placement, placement)
    return spread(whole, dual, rank, ranks)


def check(reshard, source, target, shape, seed=0, in_place=True):
    """Reshard a tensor and, backwards, its gradient; both are the same whole tensors before and after."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runtime.init({"tp": ranks}, "cpu")
    value, gradient = random(*shape, seed=seed + 1), random(*shape, seed=seed + 2)
    x = spread(value, source, rank, ranks).contiguous().requires_grad_()
    y = reshard(x * 1)
    assert torch.allclose(y, spread(value, target, rank, ranks)) or target is P
    assert y.is_contiguous()
    if in_place:
        y.mul_(1)  # the result may be changed in place
    y.backward(spread_gradient(gradient, target, rank, ranks))
    # A partial gradient may be cut into parts in many ways: its sum over ranks counts.
    got = x.grad
    assert got.shape == x.shape
    if source is R:
        got = got.clone()
        dist.all_reduce(got)
        assert torch.allclose(got, gradient)
    else:
        assert torch.allclose(got, spread_gradient(gradient, source, rank, ranks))
    with torch.no_grad():
        assert torch.equal(reshard(x.detach()), y)


def every_resharding(shape, dim, blocks):
    size, on = shape[dim], dict(axis="tp", blocks=blocks)
    s = S(dim, blocks)
    check(lambda x: runtime.all_gather(x, dim, size=size, **on), s, R, shape)
    check(lambda x: runtime.all_gather(x, dim, size=size, backward="slice", **on), s, I, shape)
    check(lambda x: runtime.reduce_scatter(x, dim, size=size, **on), P, s, shape)
    check(lambda x: runtime.all_reduce(x, "tp"), P, R, shape)
    check(lambda x: runtime.all_reduce(x, "tp", backward="identity"), P, I, shape)
    check(lambda x: runtime.shard(x, dim, size=size, **on), R, s, shape)
    check(lambda x: runtime.shard(x, dim, backward="all_gather", **on), I, s, shape)


CASES = {
    "first dim": ((12, 3), 0, 1),
    "last dim": ((2, 3, 12), 2, 1),
    "middle dim": ((2, 12, 3), 1, 1),
    "middle dim behind ones": ((1, 12, 3), 1, 1),
    "uneven first dim": ((11, 3), 0, 1),
    "uneven middle dim": ((2, 11, 3), 1, 1),
    "uneven dim behind ones": ((1, 11, 3), 1, 1),
    "blocks": ((2, 36, 2), 1, 3),
    "blocks of the first dim": ((24,), 0, 2),
    "uneven blocks": ((2, 33, 2), 1, 3),
}


def all_cases():
    for shape, dim, blocks in CASES.values():
        every_resharding(shape, dim, blocks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_resharding_keeps_the_value_and_the_gradient(gloo, ranks):
    gloo.run(ranks, all_cases)


def changes_between_r_and_i():
    check(lambda x: runtime.replicate(x, "tp"), I, R, (3, 4), in_place=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.ones(3, 4, requires_grad=True)
    y = runtime.replicate(x, "tp", backward="first_rank")
    y.backward(torch.full((3, 4), 5.0))
    assert torch.equal(x.grad, torch.full((3, 4), 5.0 if rank == 0 else 0.0))
    bias = torch.full((4,), 2.0, requires_grad=True)
    once = runtime.bias_on_one_rank(bias, "tp")
    once.backward(torch.ones(4))
    dist.all_reduce(bias.grad)
    total = once.detach().clone()
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((4,), 2.0)) and torch.equal(bias.grad, torch.ones(4)), ranks


def test_replicate_and_bias_count_once(gloo):
    gloo.run(3, changes_between_r_and_i)


def all_to_all_cases():
    shapes = [
        ((2, 12, 24), S(1), S(2)),
        ((2, 12, 24), S(2), S(1)),
        ((12, 24), S(0), S(1)),
        ((12, 24), S(1), S(0)),
        ((2, 11, 7), S(1), S(2)),
        ((2, 11, 10, 3), S(2), S(1)),
        ((2, 36, 24), S(1, 3), S(2, 2)),
        ((2, 24, 33), S(1, 2), S(2, 3)),
        ((2, 33, 22), S(2, 2), S(1, 3)),
        ((24, 2), S(0), S(0, 2)),
        ((2, 36), S(1, 3), S(1)),
        ((2, 33), S(1, 3), S(1)),
    ]
    for shape, source, target in shapes:
        check(
            lambda x, source=source, target=target, shape=shape: runtime.all_to_all(
                x,
                source.dim,
                target.dim,
                "tp",
                gather_blocks=source.blocks,
                scatter_blocks=target.blocks,
                gather_size=shape[source.dim],
                scatter_size=shape[target.dim],
            ),
            source,
            target,
            shape,
        )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_to_all_moves_the_cut_from_one_dim_to_another(gloo, ranks):
    gloo.run(ranks, all_to_all_cases)


def other_dtypes():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runtime.init({"tp": ranks}, "cpu")
    ids = torch.arange(6).view(2, 3) + 10 * rank
    whole = runtime.all_gather(ids, 1, "tp")
    assert whole.dtype == torch.int64 and whole.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
    mask = runtime.all_gather(ids > 3, 0, "tp")
    assert mask.dtype == torch.bool and mask[:2].tolist() == [[False, False, False], [False, True, True]]
    half = torch.full((4, 2), 1.5 + rank, dtype=torch.bfloat16, requires_grad=True)
    for y in (
        runtime.all_reduce(half, "tp"),
        runtime.reduce_scatter(half, 0, "tp"),
        runtime.all_gather(half, 1, "tp"),
        runtime.all_to_all(half, 1, 0, "tp"),
    ):
        assert y.dtype == torch.bfloat16
        y.sum().backward()
    assert half.grad.dtype == torch.bfloat16
    assert runtime.all_reduce(half, "tp").unique().tolist() == [4.0]


def test_collectives_take_half_precision_integers_and_masks(gloo):
    gloo.run(2, other_dtypes)


def expanded_gradient():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runtime.init({"tp": ranks}, "cpu")
    x = random(4, 6, seed=rank).t().requires_grad_()  # neither value nor gradient is contiguous
    runtime.all_reduce(x, "tp").sum().backward()
    assert torch.equal(x.grad, torch.full((6, 4), 2.0, dtype=torch.float64))


def test_all_reduce_does_not_write_into_its_operands(gloo):
    gloo.run(2, expanded_gradient)


def one_rank():
    runtime.init({"dp": 2, "tp": 1}, "cpu")
    x = torch.ones(3, 4)
    assert runtime.all_gather(x, 0, "tp") is x
    assert runtime.all_to_all(x, 0, 1, "tp") is x
    assert runtime.bias_on_one_rank(x, "tp") is x
    with pytest.raises(KeyError, match="no axis 'cp', only dp, tp"):
        runtime.all_reduce(x, "cp")
    with pytest.raises(ValueError, match="'slices' is none of"):
        runtime.all_gather(x, 0, "tp", backward="slices")


def test_an_axis_of_one_rank_leaves_the_tensor(gloo):
    gloo.run(2, one_rank)


def vocabulary_embedding_of(size, padding_idx):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runtime.init({"tp": ranks}, "cpu")
    ids = torch.randint(0, size, (3, 5), generator=torch.Generator().manual_seed(0))
    ids[0, :2] = 0 if padding_idx is None else padding_idx % size
    table, gradient = random(size, 4, seed=1), random(3, 5, 4, seed=2)
    layout = Layout((size, 4), S(0))
    part = layout.local(table, rank, ranks).clone().requires_grad_()
    y = runtime.vocabulary_embedding(ids, part, "tp", size, padding_idx)
    y.backward(gradient)
    reference = table.clone().requires_grad_()
    want = F.embedding(ids, reference, padding_idx)
    want.backward(gradient)
    total = y.detach().clone()
    dist.all_reduce(total)
    assert torch.allclose(total, want)
    assert torch.allclose(part.grad, layout.local(reference.grad, rank, ranks))


@pytest.mark.parametrize("ranks, size, padding_idx", [(2, 10, None), (3, 11, 4), (4, 11, -1)])
def test_vocabulary_embedding_sums_to_the_embedding(gloo, ranks, size, padding_idx):
    gloo.run(ranks, vocabulary_embedding_of, size, padding_idx)


def vocabulary_cross_entropy_of(size, scale, reduction, dtype):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runtime.init({"tp": ranks}, "cpu")
    logits = (random(7, size, seed=1) * scale).to(dtype)
    target = torch.randint(0, size, (7,), generator=torch.Generator().manual_seed(3))
    target[2] = target[5] = -100
    layout = Layout((7, size), S(1))
    part = layout.local(logits, rank, ranks).clone().requires_grad_()
    loss = runtime.vocabulary_cross_entropy(part, target, "tp", size, reduction=reduction)
    weight = random(7, seed=4).to(loss.dtype) if reduction == "none" else torch.tensor(0.7, dtype=loss.dtype)
    loss.backward(weight)
    reference = logits.float().requires_grad_() if dtype == torch.bfloat16 else logits.clone().requires_grad_()
    want = F.cross_entropy(reference, target, reduction=reduction)
    want.backward(weight)
    tolerance = dict(rtol=1e-2, atol=1e-3) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-6)
    assert torch.allclose(loss, want, rtol=1e-5)
    assert part.grad.dtype == dtype
    assert torch.allclose(part.grad.to(reference.dtype), layout.local(reference.grad, rank, ranks), **tolerance)
    return loss.detach()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_vocabulary_cross_entropy_is_the_cross_entropy(gloo, ranks, reduction):
    losses = gloo.run(ranks, vocabulary_cross_entropy_of, 11, 1.0, reduction, torch.float32)
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_vocabulary_cross_entropy_of_large_logits_is_finite(gloo):
    losses = gloo.run(3, vocabulary_cross_entropy_of, 8, 1e4, "sum", torch.float32)
    assert losses[0].isfinite()


def test_vocabulary_cross_entropy_of_bf16_logits_is_computed_in_fp32(gloo):
    losses = gloo.run(2, vocabulary_cross_entropy_of, 10, 3.0, "mean", torch.bfloat16)
    assert losses[0].dtype == torch.float32


def cross_entropy_of_bad_target():
    runtime.init({"tp": dist.get_world_size()}, "cpu")
    with pytest.raises(RuntimeError, match=r"no class \(0 to 7\)"):
        runtime.vocabulary_cross_entropy(torch.zeros(1, 4), torch.tensor([8]), "tp", 8)


def test_vocabulary_cross_entropy_refuses_a_target_that_is_no_class(gloo):
    gloo.run(2, cross_entropy_of_bad_target)
