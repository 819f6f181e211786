"""Layouts, generated modules, the mesh, random numbers, and the command line of a program."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autopar.report import read_run
from autopar.runtime import I, Input, Layout, P, Program, R, S, ShardedModule, Trainer, init, main, mesh, recompute
from autopar.runtime.module import Randomness, randomness

# Layouts


@pytest.mark.parametrize(
    "shape, placement, ranks, shapes",
    [
        ((4, 6), I, 2, [(4, 6), (4, 6)]),
        ((4, 6), S(0), 2, [(2, 6), (2, 6)]),
        ((4, 7), S(1), 3, [(4, 3), (4, 3), (4, 1)]),
        ((4, 21), S(1, 3), 2, [(4, 12), (4, 9)]),
        ((5,), S(0), 4, [(2,), (2,), (1,), (0,)]),
    ],
)
def test_shards_have_their_shapes_and_make_the_whole(shape, placement, ranks, shapes):
    layout = Layout(shape, placement)
    whole = torch.randn(shape)
    shards = [layout.local(whole, rank, ranks) for rank in range(ranks)]
    assert [tuple(part.shape) for part in shards] == shapes
    assert [layout.local_shape(rank, ranks) for rank in range(ranks)] == shapes
    assert torch.equal(layout.full(shards), whole)


def test_slices_are_those_of_chunk_in_every_block():
    whole = torch.arange(14)
    assert Layout((14,), S(0)).local(whole, 1, 3).tolist() == whole.chunk(3)[1].tolist() == [5, 6, 7, 8, 9]
    assert Layout((14,), S(0, 2)).local(whole, 0, 2).tolist() == [0, 1, 2, 3, 7, 8, 9, 10]


def test_the_whole_of_partial_sums_is_their_sum():
    assert Layout((2,), P).full([torch.ones(2), torch.ones(2)]).tolist() == [2.0, 2.0]


def test_a_layout_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="there is no dim 2"):
        Layout((4, 6), S(2))
    with pytest.raises(ValueError, match="size 7, not a multiple of 3"):
        Layout((7,), S(0, 3))


# The mesh


def places():
    made = init({"dp": 2, "tp": 2}, "cpu")
    assert init({"dp": 2, "tp": 2}, "cpu") is made, "process groups are made once"
    dp, tp = mesh.axis("dp"), mesh.axis("tp")
    split = mesh.shard_mesh(1)
    return (dp.rank, tp.rank), dist.get_process_group_ranks(tp.group), split.shape


def test_the_last_axis_is_innermost(gloo):
    answers = gloo.run(4, places)
    assert [answer[0] for answer in answers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [answer[1] for answer in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert answers[0][2] == (2, 1)


# Modules


class Layer(ShardedModule):
    def __init__(self):
        super().__init__()
        self.parameter("attn.qkv.weight", 12, 4, tp=S(0, 3))
        self.parameter("net.0.bias", 4, tp=R, dtype=torch.bfloat16, requires_grad=False)
        self.buffer("attn.mask", 2, dtype=torch.bool)
        self.buffer("attn.freq", 2, persistent=False)
        self.alias("tied", "attn.qkv.weight")


class Model(ShardedModule):
    """A model whose own names are those of methods of its base class."""

    def __init__(self):
        super().__init__()
        self.parameter("buffer.weight", 3)
        self.blocks("blocks", [Layer(), Layer()])
        self.blocks("stack.inner", {2: Layer(), 5: Layer()})


def describe():
    init({"tp": 2}, "cpu")
    model = Model()
    assert isinstance(model.blocks, nn.ModuleList) and len(model.blocks) == 2
    assert model.buffer.weight.shape == (3,) and model.stack.inner[5].attn.qkv.weight.shape == (6, 4)
    layer = model.blocks[1]
    assert layer.net[0].bias.dtype == torch.bfloat16 and not layer.net[0].bias.requires_grad
    assert layer.attn.freq.isnan().all(), "a buffer that nobody loaded must not look like a value"
    return (
        list(model.state_dict()),
        ShardedModule.layouts(model)["blocks.1.attn.qkv.weight"],
        ShardedModule.layouts(model)["stack.inner.5.net.0.bias"],
        ShardedModule.aliases(model)["blocks.1.tied"],
    )


def test_a_module_has_the_users_names_and_local_shapes(gloo):
    names, qkv, bias, tied = gloo.run(2, describe)[0]
    blocks = ("blocks.0", "blocks.1", "stack.inner.2", "stack.inner.5")
    tensors = ("attn.qkv.weight", "attn.mask", "net.0.bias")
    assert sorted(names) == sorted(["buffer.weight", *(f"{block}.{name}" for block in blocks for name in tensors)])
    assert qkv == Layout((12, 4), S(0, 3)) and bias == Layout((4,), R)
    assert tied == "blocks.1.attn.qkv.weight"


class Hiding(ShardedModule):
    """Parameters, a buffer and a child with the names of methods."""

    def __init__(self):
        super().__init__()
        self.parameter("rng", 4)
        self.parameter("alias", 4)
        self.parameter("normalizers", 4)
        self.buffer("buffer", 4, persistent=False)
        self.blocks("blocks", [Hidden(), Hidden()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x * self.rng * self.alias * self.normalizers * self.buffer).sum()


class Hidden(ShardedModule):
    def __init__(self):
        super().__init__()
        self.parameter("parameter", 4)

    def forward(self, x):
        return x * self.parameter


def train_hiding(zero):
    program = Program(Hiding, {"dp": 2}, 2, (Input("x", (4,)),), zero=zero, zero_group=2)
    trainer = Trainer(program, lambda parameters: torch.optim.SGD(parameters, lr=0.1), "cpu")
    trainer.load_buffers({"buffer": torch.ones(4)})
    trainer.load_state_dict(lambda name: torch.ones(4))
    losses = [trainer.step({"x": torch.ones(2, 4)}) for _ in range(2)]
    return losses, trainer.state_dict()


@pytest.mark.parametrize("zero", (0, 3))
def test_names_of_methods_are_the_users(gloo, zero):
    losses, state = gloo.run(2, train_hiding, zero)[0]
    assert losses == pytest.approx([8.0, 8 * 0.8**5])  # five ones, each with the gradient 2
    assert sorted(state) == ["alias", "blocks.0.parameter", "blocks.1.parameter", "normalizers", "rng"]


def register_wrongly():
    init({"tp": 3}, "cpu")
    module = ShardedModule()
    module.parameter("w", 4)
    with pytest.raises(ValueError, match="w is registered twice"):
        module.parameter("w", 4)
    try:
        module.parameter("v", 4, tp=S(0))  # slices of 2, 2 and 0
    except ValueError as error:
        return str(error)


def test_a_parameter_is_registered_once_and_leaves_no_rank_without_a_slice(gloo):
    assert gloo.run(3, register_wrongly) == [None, None, "S(0) of [4] leaves nothing for rank 2 of 3"]


# Random numbers


class Noise(ShardedModule):
    def __init__(self, seen):
        super().__init__()
        self.parameter("norm.weight", 64)
        self.seen = seen

    def forward(self, x):
        x = x * self.norm.weight
        with self.rng(0):
            same = F.dropout(torch.ones_like(x), 0.5)
        with self.rng(1, axes=("tp",)):
            other = F.dropout(torch.ones_like(x), 0.5)
        self.seen.append((self._path, same.flatten().tolist(), other.flatten().tolist()))
        return x * same * other


class Noisy(ShardedModule):
    def __init__(self, recomputed):
        super().__init__()
        self.seen = []
        self.recomputed = recomputed
        self.blocks("h", [Noise(self.seen), Noise(self.seen)])

    def forward(self, x):
        for block in self.h:
            x = recompute(block, x) if self.recomputed else block(x)
        return x.sum()


class NoisyRecomputed(Noisy):
    def __init__(self):
        super().__init__(True)


class NoisyKept(Noisy):
    def __init__(self):
        super().__init__(False)


def masks(model, seed):
    """What was drawn in two steps of two microbatches, and the gradient of the last."""
    program = Program(model, {"dp": 2, "tp": 2}, 4, (Input("x", (64,)),), microbatches=2)
    trainer = Trainer(program, device="cpu", seed=seed)
    before = torch.get_rng_state()
    for step in range(2):
        trainer.step(program.random_batch(0, step))
    assert torch.equal(torch.get_rng_state(), before), "the generator is left as it was found"
    return trainer.model.seen, trainer.full_gradients()


def test_masks_are_equal_on_replicas_and_different_on_shards_steps_and_blocks(gloo):
    ranks = [seen for seen, _ in gloo.run(4, masks, NoisyKept, 0)]  # by dp, then tp
    assert [path for path, *_ in ranks[0]] == ["h.0", "h.1"] * 4
    same = [[mask for _, mask, _ in seen] for seen in ranks]
    other = [[mask for *_, mask in seen] for seen in ranks]
    assert same[0] == same[1] and same[2] == same[3]
    distinct = [*same[0], *same[2], *other[0], *other[1], *other[2], *other[3]]
    assert all(one != another for i, one in enumerate(distinct) for another in distinct[:i])
    again, reseeded = (gloo.run(4, masks, NoisyKept, seed)[0][0] for seed in (0, 1))
    assert again == ranks[0] and reseeded != ranks[0]


def test_a_recomputed_block_draws_the_same_masks(gloo):
    kept = gloo.run(4, masks, NoisyKept, 0)
    recomputed = gloo.run(4, masks, NoisyRecomputed, 0)
    for (drawn, _), (twice, _) in zip(kept, recomputed, strict=True):
        first = [*twice[0:2], *twice[4:6], *twice[8:10], *twice[12:14]]
        second = [*twice[3:1:-1], *twice[7:5:-1], *twice[11:9:-1], *twice[15:13:-1]]
        assert first == second == drawn
    assert all(torch.equal(kept[0][1][name], value) for name, value in recomputed[0][1].items())


def recompute_later():
    init({"dp": 1, "tp": 1}, "cpu")
    seen = []
    block = Noise(seen)
    nn.init.ones_(block.norm.weight)
    with randomness(Randomness(microbatch=0)):
        y = recompute(block, torch.ones(64))
    with randomness(Randomness(microbatch=1)):
        y.sum().backward()
        block(torch.ones(64))
    assert seen[0] == seen[1] != seen[2]


def test_a_block_recomputed_during_another_microbatch_draws_its_own_masks(gloo):
    gloo.run(1, recompute_later)


# The command line

PROGRAM = """
import torch
from autopar.runtime import I, Input, Program, S, ShardedModule, main, replicate, all_reduce

class Model(ShardedModule):
    def __init__(self):
        super().__init__()
        self.parameter("w", 4, 3, tp=S(0))
        self.buffer("shift", 3, persistent=False)

    def forward(self, x):
        y = all_reduce(x[:, : self.w.shape[0]] @ self.w, "tp", backward="identity") + self.shift
        return (y**2).sum() / 8

PROGRAM = Program(model=Model, mesh={"dp": 1, "tp": 1}, rows=8, inputs=(Input("x", (4,)),), optimizer="sgd")
if __name__ == "__main__":
    main(PROGRAM)
    import sys
    assert not {"passes", "costmodels", "ortools", "networkx"} & set(sys.modules)
"""


def run_program(folder, *arguments, **environment):
    root = str(Path(__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "program.py", "--device", "cpu", *arguments],
        cwd=folder,
        env={"PATH": "", "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_program_runs_by_itself_and_loads_what_it_is_given(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "plan.yaml").touch()
    torch.save({"shift": torch.tensor([1.0, 2.0, 2.0])}, tmp_path / "buffers.pt")
    torch.save({"w": torch.zeros(4, 3)}, tmp_path / "weights.pt")
    torch.save([{"x": torch.ones(8, 4)}], tmp_path / "data.pt")
    done = run_program(tmp_path, "--steps", "2", "--weights", "weights.pt", "--data", "data.pt")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first.startswith("step    0   loss 9.000000   ") and first.endswith(" GiB of the process")
    assert second.startswith("step    1   loss 8.85")  # w moves by 1e-3 * 2 * shift in each of 4 rows
    measured = read_run(tmp_path)
    assert measured is not None and (measured.ranks, measured.steps, measured.memory) == (1, 1, ())
    assert measured.fastest_step_s == measured.step_time_s == measured.slowest_step_s
    assert f"{measured.step_time_s:.3f} s" in second


def test_without_a_plan_beside_it_a_program_writes_nothing(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    torch.save({"shift": torch.ones(3)}, tmp_path / "buffers.pt")
    done = run_program(tmp_path, "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["buffers.pt", "program.py"]


def command_line(program, arguments):
    import contextlib
    import io

    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        try:
            main(program, ["--device", "cpu", *arguments])
            code = 0
        except SystemExit as stop:
            code = stop.code
    return code, said.getvalue(), complained.getvalue()


def noisy(dp=2, tp=2):
    return Program(NoisyKept, {"dp": dp, "tp": tp}, 4, (Input("x", (64,)),))


def test_rank_0_reports_each_step_and_the_seed_decides(gloo):
    first = gloo.run(4, command_line, noisy(), ["--steps", "2"])
    again = gloo.run(4, command_line, noisy(), ["--steps", "2"])
    other = gloo.run(4, command_line, noisy(), ["--steps", "2", "--seed", "1"])
    losses = [[line.split()[3] for line in run[0][1].splitlines()] for run in (first, again, other)]
    assert len(losses[0]) == 2 and losses[0] == losses[1] != losses[2]
    assert [answer[0] for answer in first] == [0] * 4 and [answer[1] for answer in first[1:]] == [""] * 3


def test_a_world_of_another_size_ends_with_code_2_and_one_sentence(gloo):
    answers = gloo.run(2, command_line, noisy(), [])
    assert [code for code, *_ in answers] == [2, 2]
    assert "the program is for 4 processes (dp 2, tp 2), but 2 were started" in answers[0][2]
    assert answers[0][2].count("\n") == 1 and answers[1][2] == ""


def test_files_that_do_not_fit_end_with_code_2_and_one_sentence(gloo, tmp_path):
    (tmp_path / "text.pt").write_text("no tensors")
    torch.save({"h.0.w": torch.zeros(64)}, tmp_path / "other.pt")
    torch.save([(torch.zeros(3, 64),)], tmp_path / "rows.pt")
    for argument, file, says in (
        ("--weights", "nowhere.pt", "No such file"),
        ("--weights", "text.pt", "does not hold tensors"),
        ("--weights", "other.pt", "h.0.w is unexpected"),
        ("--data", "rows.pt", "x of the global batch has shape [3, 64], but the program is for [4, 64]"),
    ):
        code, _, complaint = gloo.run(1, command_line, noisy(1, 1), [argument, str(tmp_path / file)])[0]
        assert code == 2 and says in complaint and "Traceback" not in complaint


def test_a_program_without_its_buffers_ends_with_code_2(gloo):
    program = Program(Shifted, {"dp": 1}, 4, (Input("x", (64,)),))
    code, _, complaint = gloo.run(1, command_line, program, [])[0]
    assert code == 2 and "buffers.pt is to hold the buffers shift" in complaint


class Shifted(ShardedModule):
    def __init__(self):
        super().__init__()
        self.parameter("w", 3)
        self.buffer("shift", 3, persistent=False)
