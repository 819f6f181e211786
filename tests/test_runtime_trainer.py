"""A hand-written program on 2 x 2 ranks trains what one process trains, under every engine."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime import (
    Input,
    P,
    Program,
    R,
    S,
    ShardedModule,
    Trainer,
    all_gather,
    axis,
    bias_on_one_rank,
    recompute,
    reduce_scatter,
    replicate,
    shard,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)

ROWS, SEQ, VOCAB, HIDDEN, FFN = 12, 5, 11, 6, 7  # over 2 ranks neither seq, vocabulary nor ffn is even


class Block(ShardedModule):
    """blocks.0 and 1: norm along the sequence, ffn over tp, a bias added to partial sums."""

    def __init__(self):
        super().__init__()
        self.parameter("norm.weight", HIDDEN, tp=R)
        self.parameter("up.weight", FFN, HIDDEN, tp=S(0))
        self.parameter("up.bias", FFN, tp=S(0))
        self.parameter("down.weight", HIDDEN, FFN, tp=S(1))
        self.parameter("down.bias", HIDDEN, tp=R)

    def forward(self, x):  # [b, seq over tp, h]
        h = F.layer_norm(x, (HIDDEN,), self.norm.weight)
        h = all_gather(h, dim=1, axis="tp", size=SEQ)
        h = F.gelu(F.linear(h, self.up.weight, self.up.bias))
        h = F.linear(h, self.down.weight) + bias_on_one_rank(self.down.bias, "tp")
        return x + reduce_scatter(h, dim=1, axis="tp")


class Model(ShardedModule):
    def __init__(self):
        super().__init__()
        self.parameter("wte.weight", VOCAB, HIDDEN, tp=S(0))
        self.parameter("frozen.weight", HIDDEN, requires_grad=False)
        self.parameter("scale")
        self.blocks("blocks", [Block() for _ in range(2)])
        self.buffer("offset", HIDDEN)
        self.buffer("table", VOCAB, 2, tp=S(0), persistent=False)
        self.alias("head.weight", "wte.weight")

    def normalizers(self, ids, labels):
        return ((labels != -100).sum(),)

    def run(self, block, x):
        return block(x)

    def forward(self, ids, labels, count):
        x = vocabulary_embedding(ids, self.wte.weight, "tp", VOCAB)
        x = reduce_scatter(x, dim=1, axis="tp")  # [b, seq over tp, h]
        for block in self.blocks:
            x = self.run(block, x)
        x = all_gather(x, dim=1, axis="tp", size=SEQ)
        # scale is read alike by all tp ranks, but with their own part of the gradient
        x = (x + self.offset.to(x.dtype)) * self.frozen.weight * replicate(torch.exp(self.scale), "tp")
        logits = F.linear(x.flatten(0, 1), self.wte.weight).float()  # [b * seq, vocabulary over tp]
        return vocabulary_cross_entropy(logits, labels.flatten(), "tp", VOCAB) / count


class Recomputed(Model):
    def run(self, block, x):
        return recompute(block, x)


INPUTS = (Input("ids", (SEQ,), "int64", high=VOCAB), Input("labels", (SEQ,), "int64", high=VOCAB))
BUFFERS = {"offset": torch.linspace(-1, 1, HIDDEN), "table": torch.arange(2.0 * VOCAB).view(VOCAB, 2)}


def program(model=Model, dp=2, tp=2, cp=1, **more):
    return Program(model=model, mesh={"dp": dp, "cp": cp, "tp": tp}, rows=ROWS, inputs=INPUTS, **more)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)  # an update of rounding noise stays noise


def weights():
    shapes = {"wte.weight": (VOCAB, HIDDEN), "frozen.weight": (HIDDEN,), "scale": ()}
    for i in range(2):
        for name, *shape in (
            ("norm.weight", HIDDEN),
            ("up.weight", FFN, HIDDEN),
            ("up.bias", FFN),
            ("down.weight", HIDDEN, FFN),
            ("down.bias", HIDDEN),
        ):
            shapes[f"blocks.{i}.{name}"] = tuple(shape)
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def batch(step):
    drawn = {one.name: one.random(ROWS, 10 * step + i) for i, one in enumerate(INPUTS)}
    for row, valid in enumerate((5, 1, 3, 0)):  # unequal numbers of valid targets, none at all in the fourth row
        drawn["labels"][row, valid:] = -100
    return drawn


def plain_loss(w, ids, labels):
    x = F.embedding(ids, w["wte.weight"])
    for i in range(2):
        at = f"blocks.{i}."
        h = F.layer_norm(x, (HIDDEN,), w[at + "norm.weight"])
        h = F.gelu(F.linear(h, w[at + "up.weight"], w[at + "up.bias"]))
        x = x + F.linear(h, w[at + "down.weight"], w[at + "down.bias"])
    x = (x + BUFFERS["offset"]) * w["frozen.weight"] * torch.exp(w["scale"])
    return F.cross_entropy(F.linear(x, w["wte.weight"]).flatten(0, 1), labels.flatten())


def train_plain(steps, clip=None, norm_type=2.0):
    """Losses, the last gradients before the update, their norm, and the weights after it."""
    w = {name: value.requires_grad_(name != "frozen.weight") for name, value in weights().items()}
    trained = [value for value in w.values() if value.requires_grad]
    optimizer = adamw(trained)
    losses, norm = [], None
    for step in range(steps):
        optimizer.zero_grad()
        loss = plain_loss(w, **batch(step))
        loss.backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(trained, clip, norm_type).item()
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: value.grad for name, value in w.items() if value.grad is not None}
    return losses, gradients, norm, {name: value.detach() for name, value in w.items()}


def new_trainer(program, **more):
    trainer = Trainer(program, adamw, "cpu", **more)
    trainer.load_buffers(BUFFERS)
    trainer.load_state_dict({**weights(), "head.weight": weights()["wte.weight"], "offset": BUFFERS["offset"]})
    return trainer


def train(program, steps, **more):
    trainer = new_trainer(program, **more)
    losses = [trainer.step(batch(step)) for step in range(steps)]
    return losses, trainer.full_gradients(), trainer.last_grad_norm, trainer.state_dict()


def assert_same(got, want, tolerance):
    __tracebackhide__ = True
    assert got.keys() == want.keys()
    worst = {name: (got[name] - want[name]).abs().max().item() / (want[name].abs().max().item() + 0.1) for name in want}
    assert max(worst.values()) <= tolerance, sorted(worst.items(), key=lambda item: -item[1])[:3]


def assert_trains_like_one_process(answers, reference, tolerance=1e-5):
    __tracebackhide__ = True
    losses, gradients, _, after = reference
    for rank, (got, *whole) in enumerate(answers):
        assert got == pytest.approx(losses, rel=tolerance), f"losses on rank {rank}"
        assert (whole[0] is None) == (whole[2] is None) == (rank > 0)
    _, got_gradients, _, state = answers[0]
    assert_same(got_gradients, gradients, tolerance)
    want = {**after, "head.weight": after["wte.weight"], "offset": BUFFERS["offset"]}
    assert_same(state, want, tolerance)


ENGINES = {
    "zero 0": dict(),
    "zero 0 in 3 microbatches": dict(microbatches=3),
    "zero 1 in 3 microbatches": dict(zero=1, zero_group=2, microbatches=3),
    "zero 2": dict(zero=2, zero_group=2),
    "zero 2 in 3 microbatches": dict(zero=2, zero_group=2, microbatches=3),
    "zero 3 in 3 microbatches": dict(zero=3, zero_group=2, microbatches=3),
    "4 uneven microbatches": dict(microbatches=4),
    "hybrid zero 1": dict(dp=4, tp=1, zero=1, zero_group=2, microbatches=3),
    "hybrid zero 2": dict(dp=4, tp=1, zero=2, zero_group=2, microbatches=3),
    "hybrid zero 3": dict(dp=4, tp=1, zero=3, zero_group=2, microbatches=3),
    "recomputed": dict(model=Recomputed, microbatches=3),
    "recomputed zero 3": dict(model=Recomputed, zero=3, zero_group=2, microbatches=3),
}


@pytest.fixture(scope="module")
def plain():
    return train_plain(3)


@pytest.mark.parametrize("engine", ENGINES)
def test_training_is_that_of_one_process(gloo, plain, engine):
    answers = gloo.run(4, train, program(**ENGINES[engine]), 3)
    assert_trains_like_one_process(answers, plain)


def test_training_on_3_data_parallel_ranks_is_that_of_one_process(gloo, plain):
    answers = gloo.run(3, train, program(dp=3, tp=1, zero=2, zero_group=3), 3)
    assert_trains_like_one_process(answers, plain)
    answers = gloo.run(3, train, program(dp=3, tp=1), 3)
    assert_trains_like_one_process(answers, plain)


class Seen(TorchDispatchMode, list):
    """The names of all operators that ran."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.append(str(func))
        return func(*args, **kwargs or {})


def count_collectives(program):
    trainer = new_trainer(program)
    trainer.step(batch(0))
    with Seen() as seen:
        trainer.step(batch(1))
    return tuple(seen.count(f"c10d.{op}.default") for op in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_"))


@pytest.mark.parametrize(
    "engine, all_gathers, reduce_scatters, all_reduces",
    [
        # 3 units: two blocks and the rest. 3 microbatches. Always 2 all-reduces: of the count and of the loss, and
        # with ZeRO a third of the parameter that is a number.
        (dict(), 0, 0, 2 + 1),
        (dict(zero=1, zero_group=2), 3, 3, 3),
        (dict(zero=2, zero_group=2), 3, 3 * 3, 3),
        (dict(zero=3, zero_group=2), 3 * (2 * 2 + 1), 3 * 3, 3),  # blocks twice, the rest once
        (dict(dp=4, zero=1, zero_group=2), 3, 3, 3 + 3),
        (dict(dp=4, zero=3, zero_group=2), 3 * (2 * 2 + 1), 3 * 3, 3 + 3),
        (dict(precision="bf16"), 0, 0, 3 + 3),
    ],
)
def test_each_stage_communicates_as_often_as_it_says(gloo, engine, all_gathers, reduce_scatters, all_reduces):
    settings = dict(dp=2, tp=1, microbatches=3) | engine
    counts = gloo.run(settings["dp"], count_collectives, program(**settings))
    assert counts[0] == (all_gathers, reduce_scatters, all_reduces)


BF16 = {
    "zero 0": dict(),
    "zero 1 in 3 microbatches": dict(zero=1, zero_group=2, microbatches=3),
    "zero 3 in 3 microbatches": dict(zero=3, zero_group=2, microbatches=3),
    "hybrid zero 2": dict(dp=4, tp=1, zero=2, zero_group=2, microbatches=3),
}


@pytest.mark.parametrize("engine", BF16)
def test_bf16_trains_fp32_parameters_to_bf16_precision(gloo, plain, engine):
    answers = gloo.run(4, train, program(precision="bf16", **BF16[engine]), 3)
    assert_trains_like_one_process(answers, plain, tolerance=0.05)
    losses, gradients, _, state = answers[0]
    assert {value.dtype for value in (*gradients.values(), *state.values())} == {torch.float32}
    assert abs(losses[0] - plain[0][0]) > 1e-6 * plain[0][0], "this was computed in fp32"


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("engine", ["zero 0", "zero 3 in 3 microbatches", "hybrid zero 2"])
def test_clipping_counts_each_parameter_once(gloo, engine, norm_type):
    limit = 0.05  # of a norm near 1
    reference = train_plain(2, limit, norm_type)
    answers = gloo.run(4, clipped, program(**ENGINES[engine]), limit, norm_type)
    assert_trains_like_one_process(answers, reference)
    assert all(answer[2] == pytest.approx(reference[2], rel=1e-5) for answer in answers)


def clipped(program, limit, norm_type):
    return train(program, 2, clip_grad_norm=limit, norm_type=norm_type)


def evaluate_between_steps(program):
    trainer = new_trainer(program)
    seen = [trainer.evaluate(batch(0))]
    before = trainer.full_gradients()
    first, count = trainer.program.own_rows(axis("dp").rank)
    own = {name: value[first : first + count] for name, value in batch(0).items()}
    seen.append(trainer.backward(own, sharded=True))
    seen.append(trainer.backward(tuple(batch(0).values())))  # gradients do not add up over calls
    seen.append(trainer.evaluate(batch(1)))
    gradients = trainer.full_gradients()
    trainer.optimizer.step()
    seen.append(trainer.evaluate(batch(1)))
    seen.append(trainer.step(batch(1)))
    return seen, before, gradients


@pytest.mark.parametrize("engine", ["zero 0 in 3 microbatches", "zero 2 in 3 microbatches", "zero 3 in 3 microbatches"])
def test_evaluate_and_backward_leave_the_weights(gloo, plain, engine):
    answers = gloo.run(4, evaluate_between_steps, program(**ENGINES[engine]))
    reference = train_plain(1)
    with torch.no_grad():
        unchanged = plain_loss(weights(), **batch(1)).item()
    want = [plain[0][0]] * 3 + [unchanged] + [plain[0][1]] * 2
    assert all(seen == pytest.approx(want, rel=1e-5) for seen, *_ in answers)
    assert answers[0][1] == {}
    assert_same(answers[0][2], reference[1], 1e-5)


class PartialLoss(ShardedModule):
    """Each tp rank sums the loss over its own features."""

    def __init__(self):
        super().__init__()
        self.parameter("w", 5, tp=S(0))
        self.parameter("b", tp=R)

    def forward(self, x, scale):
        h = shard(replicate(x, "tp"), 1, "tp")
        return ((h * self.w + self.b) ** 2).sum() * scale[0] / ROWS


def train_partial_loss():
    x, scale = torch.linspace(-1, 1, ROWS * 5).view(ROWS, 5), torch.tensor([2.0])
    inputs = (Input("x", (5,)), Input("scale", (1,), rows=False))
    trainer = Trainer(
        Program(PartialLoss, {"dp": 2, "tp": 2}, ROWS, inputs, microbatches=2, loss=P), device="cpu", seed=1
    )
    w, b = torch.linspace(1, 2, 5).requires_grad_(), torch.tensor(0.5, requires_grad=True)
    trainer.load_state_dict(lambda name: {"w": w, "b": b}[name].detach())
    want = ((x * w + b) ** 2).sum() * 2 / ROWS
    want.backward()
    return trainer.backward({"scale": scale, "x": x}), want.item(), trainer.full_gradients(), {"w": w.grad, "b": b.grad}


def test_a_partial_loss_is_summed_over_tp(gloo):
    answers = gloo.run(4, train_partial_loss)
    for got, want, *_ in answers:
        assert got == pytest.approx(want, rel=1e-6)
    assert_same(answers[0][2], answers[0][3], 1e-6)


def drawn(program, seed):
    trainer = Trainer(program, device="cpu", seed=seed)
    return trainer.state_dict()


def test_initial_weights_do_not_depend_on_the_plan(gloo):
    one = gloo.run(1, drawn, program(dp=1, tp=1), 3)[0]
    assert_same(gloo.run(4, drawn, program(zero=3, zero_group=2), 3)[0], one, 0.0)
    other = gloo.run(1, drawn, program(dp=1, tp=1), 4)[0]
    assert not torch.equal(one["wte.weight"], other["wte.weight"])
    assert not torch.equal(one["blocks.0.up.weight"], one["blocks.1.up.weight"])
    assert one["wte.weight"].std().item() == pytest.approx(0.02, rel=0.3)
    assert one["blocks.0.norm.weight"].tolist() == [1.0] * HIDDEN and one["blocks.0.up.bias"].tolist() == [0.0] * FFN


def load_wrongly():
    trainer = Trainer(program(zero=1, zero_group=2), device="cpu")
    good = {**weights(), "offset": BUFFERS["offset"]}
    bad = copy.copy(good)
    bad["wte.wieght"] = bad.pop("wte.weight")
    bad["blocks.1.up.bias"] = torch.zeros(FFN + 1)
    with pytest.raises(ValueError) as error:
        trainer.load_state_dict(bad)
    with pytest.raises(RuntimeError, match="buffers were never loaded: offset, table"):
        trainer.step(batch(0))
    good["head.weight"] = good.pop("wte.weight")  # the tied name will do
    trainer.load_state_dict({**good, "table": BUFFERS["table"]})
    trainer.step(batch(0))
    return str(error.value)


def test_a_state_dict_that_does_not_fit_is_refused_with_every_reason(gloo):
    message = gloo.run(4, load_wrongly)[0]
    assert "wte.weight is missing" in message and "wte.wieght is unexpected" in message
    assert f"blocks.1.up.bias has shape [{FFN + 1}], not [{FFN}]" in message


def give_wrong_batches():
    trainer = new_trainer(program())
    ids, labels = batch(0).values()
    with pytest.raises(ValueError, match=r"ids of the global batch has shape \[8, 5\].* for \[12, 5\]"):
        trainer.step((ids[:8], labels[:8]))
    with pytest.raises(ValueError, match=r"ids of rank \d of 2 of a sharded batch has shape \[12, 5\].* \[6, 5\]"):
        trainer.step((ids, labels), sharded=True)
    with pytest.raises(ValueError, match="the batch has no labels, only ids"):
        trainer.step({"ids": ids})
    with pytest.raises(ValueError, match="has 1 tensors, but the program reads 2: ids, labels"):
        trainer.step((ids,))
    with pytest.raises(ValueError, match="labels of the global batch is a ndarray, but the program reads a tensor"):
        trainer.step((ids, labels.numpy()))
    with pytest.raises(ValueError, match="ids of the global batch is float64, but the program is for int64"):
        trainer.step((ids.double(), labels))


def test_a_batch_of_another_shape_is_refused(gloo):
    gloo.run(4, give_wrong_batches)


def other_world():
    with pytest.raises(ValueError, match=r"for 4 processes \(dp 2, cp 1, tp 2\), but 2 were started"):
        Trainer(program(), device="cpu")


def test_a_world_of_another_size_is_refused(gloo):
    gloo.run(2, other_world)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(zero=4), "zero is 4"),
        (dict(zero_group=3), "zero_group 3 does not divide the 2"),
        (dict(microbatches=7), "12 rows are fewer than 2 ranks x 7 microbatches"),
        (dict(precision="fp8"), "precision is 'fp8'"),
        (dict(loss=R), "the loss is placed R"),
        (dict(tp=1, cp=2), "the mesh has cp"),
        (dict(optimizer="lion"), "optimizer is 'lion'"),
    ],
)
def test_an_impossible_program_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        program(**wrong)


def take_turns():
    """Two trainers on one process, on meshes of other shapes, and then one on the first's again."""
    first = new_trainer(program(dp=1, tp=2))
    seen = [first.evaluate(batch(0))]
    other = new_trainer(program(dp=2, tp=1))
    for i in range(2):
        seen += [first.step(batch(i)), other.step(batch(i))]
    weights = first.state_dict()
    assert new_trainer(program(dp=1, tp=2))._mesh is first._mesh, "process groups are made once"
    return seen, weights, other.state_dict()


def test_trainers_on_several_meshes_take_turns(gloo, plain):
    losses, _, _, after = train_plain(2)
    want = {**after, "head.weight": after["wte.weight"], "offset": BUFFERS["offset"]}
    answers = gloo.run(2, take_turns)
    for seen, *_ in answers:
        assert seen == pytest.approx([losses[0], losses[0], losses[0], losses[1], losses[1]], rel=1e-5)
    for state in answers[0][1:]:
        assert_same(state, want, 1e-5)


class Counting(ShardedModule):
    """Keeps a running mean, as batch norms do."""

    def __init__(self):
        super().__init__()
        self.parameter("w", 5)
        self.buffer("mean", 5)
        self.buffer("calls", dtype=torch.int64)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.calls += 1
        return (x * self.w).square().mean()


def evaluate_a_running_mean():
    trainer = Trainer(Program(Counting, {"dp": 2}, ROWS, (Input("x", (5,)),)), device="cpu")
    trainer.load_state_dict({"w": torch.ones(5), "mean": torch.zeros(5), "calls": torch.tensor(3)})
    x = {"x": torch.ones(ROWS, 5)}
    evaluated, kept = trainer.evaluate(x), {name: b.tolist() for name, b in trainer.model.named_buffers()}
    trainer.step(x)
    return evaluated, kept, {name: b.tolist() for name, b in trainer.model.named_buffers()}


def test_evaluate_leaves_running_statistics(gloo):
    for _, kept, stepped in gloo.run(2, evaluate_a_running_mean):
        assert kept == {"mean": [0.0] * 5, "calls": 3}
        assert stepped["mean"] == pytest.approx([0.1] * 5) and stepped["calls"] == 4
