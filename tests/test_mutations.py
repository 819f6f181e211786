"""The tests of the promises can fail: a collective or a gradient sum that is left out is noticed.

Also promise 2, that what is priced is what runs, and promise 3, that no plan exceeds the limit; each broken once.
"""

import ast
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime import axis
from autopar.runtime.layout import chunk
from costmodels.errors import NoPlanFits
from models import CASES, OPTIMIZERS, buffers, differences, planned, reference, trained
from passes.lower import LocalOp, Reshard
from passes.pipeline import the_plan_fits
from passes.placements import S, chunk_sizes, collectives

STEPS_TO_NOTICE = 3
NOTICED = 1e-4  # relative


# -- what is left of a collective that is left out --------------------------------------------------------------------


class Alone:
    """The functions of the runtime without communication: of the right shape, and wrong."""

    @staticmethod
    def all_gather(x, dim, axis="tp", backward="", *, blocks=1, size=None):
        n = ranks_of(axis)
        return torch.cat([x] * (n + 1), dim).narrow(dim, 0, size or n * x.shape[dim])

    @staticmethod
    def reduce_scatter(x, dim, axis="tp", *, blocks=1, size=None):
        return own_slice(x, dim, axis, blocks)

    @staticmethod
    def all_reduce(x, axis, backward=""):
        return x.clone()

    @staticmethod
    def replicate(x, axis, backward=""):
        return x.clone()

    @staticmethod
    def bias_on_one_rank(bias, axis):
        return bias.clone()

    @staticmethod
    def all_to_all(
        x, gather_dim, scatter_dim, axis, *, gather_blocks=1, scatter_blocks=1, gather_size=None, scatter_size=None
    ):
        whole = Alone.all_gather(x, gather_dim, axis, size=gather_size)
        return own_slice(whole, scatter_dim, axis, scatter_blocks)

    @staticmethod
    def vocabulary_embedding(ids, weight, axis, size, padding_idx=None):
        return F.embedding(ids % weight.shape[0], weight)

    @staticmethod
    def vocabulary_cross_entropy(logits, target, axis, size, ignore_index=-100, reduction="sum"):
        target = torch.where(target == ignore_index, target, target % logits.shape[1])
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


COLLECTIVES = [name for name in vars(Alone) if not name.startswith("_")]


def ranks_of(name):
    return axis(name).size


def own_slice(x, dim, name, blocks):
    on = axis(name)
    cut = x.unflatten(dim, (blocks, -1)) if blocks > 1 else x.unsqueeze(dim)
    start, length = chunk(cut.shape[dim + 1], on.size, on.rank)
    return cut.narrow(dim + 1, start, length).flatten(dim, dim + 1)


# -- the mutants of a program -----------------------------------------------------------------------------------------


def calls(text):
    """Every collective that the program calls: what it is, and where its name stands in the text."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = [
        (node.func.id, starts[node.func.lineno - 1] + node.func.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in COLLECTIVES
    ]
    return sorted(found, key=lambda one: one[1])


def without_call(text, place):
    text = f"{text[:place]}Alone.{text[place:]}"
    return text.replace("\nROWS = ", "\nfrom test_mutations import Alone\n\nROWS = ", 1)


def without_sums(text):
    """A mutant for each parameter whose partial gradients are summed over tp: it is declared to have whole ones."""
    mutants = {}
    lines = text.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if "self.parameter(" in line and "tp=R" in line:
            name = line.split('"')[1]
            mutants[f"sum of {name}'s gradient"] = "".join([*lines[:i], line.replace(", tp=R", ""), *lines[i + 1 :]])
    return mutants


def with_own_count(text):
    """The loss divided by what this rank's rows count, not by what the whole batch counts."""
    head = "def forward(self, input_ids, labels, cross_entropy_loss_count):\n"
    assert head in text
    return text.replace(head, f"{head}        (cross_entropy_loss_count,) = self.normalizers(input_ids, labels)\n")


def mutants(state):
    text = state.program
    found = {}
    for name, place in calls(text):
        line = text.count("\n", 0, place) + 1
        found[f"line {line}: {text.splitlines()[line - 1].strip()[:80]} ({name} left out)"] = without_call(text, place)
    return found | without_sums(text)


def train_all(name, texts, held, weights):
    return [trained(name, text, held, weights, "sgd", STEPS_TO_NOTICE) for text in texts]


def noticed(found, name):
    """The largest relative difference that a mutant makes to a loss, a gradient or a weight, and where."""
    worst = differences(found, reference(CASES[name], "sgd", STEPS_TO_NOTICE))
    value, where = max(worst.values())
    return value * 1e-5, where


@pytest.mark.parametrize(
    "name, fix, thin",
    [
        ("llama", "dp=2,tp=2", False),
        ("gpt2", "tp=2", False),
        ("gpt2", "tp=2", True),
        pytest.param("llama", "dp=2,tp=2", True, marks=pytest.mark.slow),
        pytest.param("bert", "tp=2", True, marks=pytest.mark.slow),
        pytest.param("t5", "tp=2", True, marks=pytest.mark.slow),
        pytest.param("gpt2", "tp=4", False, marks=pytest.mark.slow),
    ],
)
def test_every_collective_and_gradient_sum_that_is_left_out_is_noticed(gloo, name, fix, thin):
    state = planned(CASES[name], fix, thin=thin)
    found = mutants(state)
    assert len(found) >= 5
    args = (name, [state.program, *found.values()], buffers(state), CASES[name].weights)
    whole, *broken = gloo.run(state.plan.mesh.devices, train_all, *args, timeout_s=90)[0]
    assert noticed(whole, name)[0] < 1e-6 and not whole.drifted
    values = {what: noticed(one, name) for what, one in zip(found, broken, strict=True)}
    missed = []
    for (what, (value, where)), one in zip(values.items(), broken, strict=True):
        print(f"{value:.1e} {what} ({where}), {len(one.drifted)} drift")
        if not (value > NOTICED or one.drifted):
            missed.append(what)
    assert not missed, missed


def test_loss_divided_by_a_ranks_own_count_is_noticed(gloo):
    state = planned(CASES["llama"], "dp=2,tp=2")
    args = ("llama", with_own_count(state.program), buffers(state), CASES["llama"].weights, "sgd", STEPS_TO_NOTICE)
    assert noticed(gloo.run(4, trained, *args)[0], "llama")[0] > NOTICED


def without_dp_sum(*args):
    from autopar.runtime.engine import Replicated, Sharded

    def unsummed(engine):
        loss = engine.loss
        return lambda self, inputs, last: loss(self, inputs, False)

    with patch.object(Replicated, "loss", unsummed(Replicated)), patch.object(Sharded, "loss", unsummed(Sharded)):
        return trained(*args)


@pytest.mark.parametrize("fix", ("dp=2", "dp=2,zero=1"))
def test_gradients_not_summed_over_data_parallel_ranks_are_noticed(gloo, fix):
    state = planned(CASES["llama"], fix)
    args = ("llama", state.program, buffers(state), CASES["llama"].weights, "sgd", STEPS_TO_NOTICE)
    assert noticed(gloo.run(2, trained, *args)[0], "llama")[0] < 1e-6
    assert noticed(gloo.run(2, without_dp_sum, *args)[0], "llama")[0] > NOTICED


# -- priced = emitted -------------------------------------------------------------------------------------------------

KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
}


class Recorder(TorchDispatchMode):
    """Every collective that this process starts, whoever calls it: kind, bytes, and the ranks of the group.

    The bytes are those of the full tensor; of an all-to-all, what this rank puts in.
    """

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("c10d::"):
            kind = KINDS[name]
            tensors = args[0] if kind == "all_reduce" else [args[0 if kind == "all_gather" else 1]]
            group = next(a for a in args if not isinstance(a, torch.Tensor | list | tuple))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            if tensors[0].dtype != torch.float64:  # the loss and its divisor: a number each
                self.seen.append((kind, sum(t.nbytes for t in tensors), tuple(ranks)))
        return func(*args, **(kwargs or {}))


def recorded(name, text, held, weights):
    """What a step runs before the optimizer."""
    from autopar.job import load_program
    from autopar.runtime import Trainer

    trainer = Trainer(load_program(text), OPTIMIZERS["sgd"], "cpu")
    trainer.load_state_dict(weights)
    trainer.load_buffers(held)
    with Recorder() as recorder:
        trainer.backward(CASES[name].batch(0))
    return recorder.seen


def ran(gloo, name, state, text=""):
    """The collectives that rank 0 runs in one step: (kind, bytes of the full tensor) over tp, and over dp."""
    args = (name, text or state.program, buffers(state), CASES[name].weights)
    by_rank = gloo.run(state.plan.mesh.devices, recorded, *args)
    assert all(len(rank) == len(by_rank[0]) for rank in by_rank), "the ranks run different collectives"
    over = {True: Counter(), False: Counter()}
    tp = tuple(range(state.plan.mesh.tp))
    for i, (kind, size, ranks) in enumerate(by_rank[0]):
        if kind == "all_to_all":
            size = sum(by_rank[rank][i][1] for rank in ranks)
        over[ranks == tp][kind, size] += 1
    return over[True], over[False]


def priced(state):
    """The tensor-parallel collectives of one step that the plan has paid for."""
    found = Counter()
    for use in state.plan.collectives:
        if use.axis == "tp":
            found[use.name, use.full_bytes] += use.count
    return found


def lowered(state):
    """The same, walked through the lowered program; uneven dims rounded up, as gloo and NCCL move them."""
    variant = state.found.best.variant
    steps, ranks = state.plan.schedule.microbatches, state.plan.mesh.tp
    found = Counter()
    for region, count in variant.settled.lowered.regions():
        for statement in region.statements:
            if isinstance(statement, Reshard):
                size = padded(statement.value, statement.source, statement.target, ranks)
                forward, backward = collectives(statement.source, statement.target)
                for kind in (forward, backward if statement.value.grad else None):
                    if kind is not None:
                        found[kind.value, size] += steps * count
            elif isinstance(statement, LocalOp):
                for kind, size in statement.strategy.inside:
                    found[kind.value, size] += steps * count
    if partial := variant.settled.partial_bytes(variant.shards):
        found["all_reduce", partial] += 1
    return found


def padded(value, source, target, ranks):
    cuts = [placement for placement in (source, target) if isinstance(placement, S)]
    if len(cuts) != 1:  # an all-to-all is not padded
        return value.bytes
    size = value.sizes[cuts[0].dim] // cuts[0].blocks
    return value.bytes // size * chunk_sizes(size, ranks)[0] * ranks


EVEN = [  # every dim that is cut divides
    ("llama", "tp=2", False),
    ("llama", "tp=4", True),
    ("llama", "dp=2,tp=2", False),
    ("llama", "tp=2,microbatches=4", True),
    ("llama", "tp=2,recompute=full", False),
    ("llama", "dp=2,tp=2,zero=3", True),
    ("bert", "dp=2,tp=2,zero=1,microbatches=1", True),
]
UNEVEN = [("gpt2", "tp=2", False), ("gpt2", "tp=4", True), ("nanogpt", "tp=2", True), ("mlp", "tp=4", True)]


@pytest.mark.parametrize("name, fix, thin", EVEN)
def test_collectives_that_run_are_those_that_the_plan_lists(gloo, name, fix, thin):
    state = planned(CASES[name], fix, thin=thin)
    assert ran(gloo, name, state)[0] == priced(state)


@pytest.mark.parametrize("name, fix, thin", UNEVEN)
def test_collectives_that_run_are_those_of_the_lowered_program(gloo, name, fix, thin):
    state = planned(CASES[name], fix, thin=thin)
    assert ran(gloo, name, state)[0] == lowered(state)
    assert sum(priced(state).values()) == sum(lowered(state).values())


@pytest.mark.parametrize("name, fix, thin", [*EVEN[:2], *UNEVEN[:2]])
def test_collective_that_is_deleted_is_missing_from_what_runs(gloo, name, fix, thin):
    state = planned(CASES[name], fix, thin=thin)
    place = next(at for kind, at in calls(state.program) if kind not in ("bias_on_one_rank", "vocabulary_embedding"))
    assert ran(gloo, name, state, without_call(state.program, place))[0] != lowered(state)


@pytest.mark.parametrize(
    "fix",
    ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,microbatches=3,zero=1", "dp=2,microbatches=3,zero=3"),
)
def test_data_parallel_traffic_is_what_is_priced(gloo, fix):
    """ZeRO-0 reduces once; 1 and 2 gather once; 3 gathers, and blocks again for backward, for every microbatch."""
    state = planned(CASES["llama"], fix)
    variant = state.found.best.variant
    *blocks, root = variant.settled.units
    steps = state.plan.schedule.microbatches
    whole = 4 * sum(unit.elements * unit.count for unit in (*blocks, root))
    again = 4 * sum(unit.elements * unit.count for unit in blocks)
    wanted = {
        0: {"all_reduce": whole},
        1: {"all_gather": whole, "reduce_scatter": whole},
        2: {"all_gather": whole, "reduce_scatter": steps * whole},
        3: {"all_gather": steps * (whole + again), "reduce_scatter": steps * whole},
    }[variant.zero]
    listed, moved = Counter(), Counter()
    for use in state.plan.collectives:
        listed[use.name] += use.count * use.full_bytes
    for (kind, size), times in ran(gloo, "llama", state)[1].items():
        moved[kind] += size * times
    assert moved == listed == wanted


# -- fits -------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)  # eight searches, three of them through everything
@pytest.mark.parametrize("name", ("mlp", pytest.param("llama", marks=pytest.mark.slow)))
def test_no_plan_exceeds_the_limit(name):
    free = planned(CASES[name], "", 4)
    needed = max(rank.peak_bytes for rank in free.plan.memory)
    fitted = 0
    for share in (1.0, 0.7, 0.5, 0.35, 0.2, 0.1, 0.02):
        limit = int(needed * share)
        try:
            plan = planned(CASES[name], "", 4, limit_bytes=limit).plan
        except NoPlanFits:
            continue
        fitted += 1
        assert all(rank.peak_bytes <= limit for rank in plan.memory)
        assert plan.step_time_s >= free.plan.step_time_s * (1 - 1e-9), "less memory made it faster"
    assert fitted >= 3
    with pytest.raises(NoPlanFits):
        planned(CASES[name], "", 4, limit_bytes=int(needed * 0.02))


def test_plan_above_the_limit_breaks_the_promise():
    state = planned(CASES["mlp"], "dp=2")
    the_plan_fits(state)
    less = state.task.cluster.with_memory_limit(state.found.best.bytes.peak - 1)
    with pytest.raises(AssertionError, match="exceed the limit"):
        the_plan_fits(replace(state, task=replace(state.task, cluster=less)))
