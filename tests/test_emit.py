"""program.py: its text, that it is Python, and that one process computes with it what the model computes."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.job import load_program
from autopar.runtime import Trainer
from costmodels.cluster import Cluster
from costmodels.errors import BadInput
from passes.capture import forward_arguments
from passes.emit import attribute, emit, tensor
from passes.pipeline import PIPELINE, Compiled, compile_model, problem_of
from passes.price import Axis
from passes.sharding import Terms, shard
from passes.state import State, Task, run
from passes.step import settle
from passes.variant import Pair
from test_capture import Small

BATCH = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), "y": torch.ones(4, 3)}
IDS = torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(1))


def mse(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch["y"])


def compiled(
    model: nn.Module, batch: Any = BATCH, loss_fn: Any = mse, cluster: str = "cpu:1", **fix: int | str
) -> Compiled:
    return compile_model(model, Cluster.preset(cluster), batch, loss_fn, precision="fp32", fix=fix)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """A transformer layer with a fused qkv."""

    def __init__(self, hidden: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (
            part.view(b, s, self.heads, h // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(h, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Two layers, positions, tied embedding; returns its loss."""

    def __init__(self, vocabulary: int = 10, hidden: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(6, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())}


LANGUAGE = {"ids": IDS, "labels": IDS.where(IDS > 1, -100)}


class FFN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


# -- texts ------------------------------------------------------------------------------------------------------------


def test_mlp_over_two_devices(golden):
    golden("program_mlp_tp2.txt", compiled(MLP(), cluster="2xh100", tp=2).program)


def test_gpt_over_two_devices(golden):
    golden("program_gpt_tp2.txt", compiled(GPT(), LANGUAGE, None, "2xh100", tp=2).program)


def test_gpt_in_microbatches_with_recompute(golden):
    made = compiled(GPT(), LANGUAGE, None, "2xh100", tp=1, dp=2, zero=3, microbatch=1, recompute="full")
    golden("program_gpt_dp2.txt", made.program)


def test_the_same_plan_gives_the_same_bytes():
    torch.manual_seed(1)
    one = compiled(GPT(), LANGUAGE, None, "2xh100", tp=2).program
    assert compiled(GPT(), LANGUAGE, None, "2xh100", tp=2).program == one


# -- it is Python -----------------------------------------------------------------------------------------------------


def undefined(text: str) -> set[str]:
    """Names that are read somewhere and bound nowhere in the file."""
    tree = ast.parse(text)
    bound = set(dir(builtins)) | {"__name__"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - bound


@pytest.mark.parametrize("fix", [{"tp": 2}, {"dp": 2, "tp": 1, "zero": 3, "recompute": "full"}], ids=["tp", "dp"])
def test_every_name_is_bound_and_every_import_is_used(fix):
    text = compiled(GPT(), LANGUAGE, None, "2xh100", **fix).program
    assert undefined(text) == set()
    imported = {a.asname or a.name for n in ast.parse(text).body if isinstance(n, ast.ImportFrom) for a in n.names}
    used = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    assert imported <= used
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("head.weight", "self.head.weight"),
        ("layers.0.weight", "self.layers[0].weight"),
        ("0.weight", "self[0].weight"),
        ("scale", "self.scale"),
        ("scales.1", 'getattr(self.scales, "1")'),
        ("towers.en-de.weight", 'getattr(self.towers, "en-de").weight'),
        ("branches.class.bias", 'getattr(self.branches, "class").bias'),
    ],
)
def test_parameters_are_read_under_the_users_names(path, text):
    assert tensor(path) == text


def test_containers_end_in_a_number_too():
    assert attribute("stages.0") == "self.stages[0]"


# -- one process computes what the model computes ---------------------------------------------------------------------


def same_as_the_model(model: nn.Module, batch: Any = BATCH, loss_fn: Any = mse) -> str:
    """The program's loss, gradients and buffers are the model's; gives its text."""
    made = compiled(model, batch, loss_fn)
    trainer = Trainer(load_program(made.program), device="cpu")
    trainer.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    trainer.load_buffers({name: value.clone() for name, value in model.named_buffers()} | dict(made.buffers))
    loss = trainer.backward({one.name: batch[one.key] for one in made.captured.inputs})
    args, kwargs = forward_arguments(model.forward, batch)
    output = model(*args, **kwargs)
    expected = output["loss"] if loss_fn is None else loss_fn(output, batch)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    gradients = trainer.full_gradients()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, msg=lambda text, n=name: f"{n}: {text}")
    held = dict(trainer.model.named_buffers())
    for name, buffer in model.named_buffers():
        if name in held:
            torch.testing.assert_close(held[name], buffer)
    assert undefined(made.program) == set()
    return made.program


def test_gpt_with_tied_embedding_and_ignored_targets():
    text = same_as_the_model(GPT(), LANGUAGE, None)
    assert 'self.alias("head.weight", "tokens.weight")' in text
    assert "        for block in self.layers:\n            x = block(x)\n" in text


def test_a_sequential_model():
    same_as_the_model(
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), {"input": BATCH["x"], "y": BATCH["y"]}
    )


def test_layers_beside_others_in_one_container():
    net = nn.Sequential(FFN(), FFN(), nn.Linear(4, 3))
    text = same_as_the_model(Small(lambda self, x: self.net(self.a(x)), a=nn.Linear(4, 4), net=net))
    assert "        for number in range(0, 2):\n            x = self.net[number](x)\n" in text


def test_layers_that_do_not_start_at_zero():
    model = nn.Sequential(nn.Linear(4, 4), FFN(), FFN(), nn.Linear(4, 3))
    batch = {"input": BATCH["x"], "y": BATCH["y"]}
    task = Task(model, batch, mse, Cluster.preset("cpu:1"), 4, "fp32", "adamw", {})
    problem = problem_of(run(PIPELINE[:4], State(task, lambda text: None, lambda: False)))
    pair = Pair(1, 1, 4)
    sharding = shard(problem.program.at(4), Axis.of(problem.cluster, "tp", 1, 1), Terms(), problem.rows)
    assert sharding is not None
    text = emit(settle(problem, pair, sharding).lowered, replace(problem.emission, mesh={"dp": 1}, recompute=((0,),)))
    assert 'self.blocks("", {1: FFN(), 2: FFN()})' in text
    trainer = Trainer(load_program(text), device="cpu")
    trainer.load_state_dict(model.state_dict())
    assert trainer.evaluate(batch) == pytest.approx(mse(model(BATCH["x"]), BATCH).item(), rel=1e-5)


def running(order: Callable[[Any, Tensor], Tensor], count: int = 3) -> Small:
    """A model of `count` layers and a head, in which `order` calls the layers."""
    torch.manual_seed(0)
    return Small(
        lambda self, x: self.head(order(self, x)),
        layers=nn.ModuleList(FFN() for _ in range(count)),
        head=nn.Linear(4, 3),
    )


def skipping(self: Any, x: Tensor) -> Tensor:
    first = self.layers[0](x)
    second = self.layers[1](first)
    return first + self.layers[2](second + first)


def repeating(self: Any, x: Tensor) -> Tensor:
    for layer in (*self.layers, *self.layers):
        x = layer(x)
    return x


def backwards(self: Any, x: Tensor) -> Tensor:
    for layer in reversed(self.layers):
        x = layer(x)
    return x


@pytest.mark.parametrize("order", [skipping, repeating, backwards])
def test_layers_in_any_order(order):
    same_as_the_model(running(order))


def test_a_parameter_that_two_layers_share():
    model = running(lambda self, x: self.layers[2](self.layers[1](self.layers[0](x))))
    model.layers[1].up.weight = model.layers[0].up.weight
    same_as_the_model(model)


class Shifted(FFN):
    """Reads what all layers share before what the layer before gave."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(shift * 2 + x)


@pytest.mark.parametrize("trained", [True, False])
def test_layers_that_read_a_shared_tensor_first(trained):
    def compute(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        for layer in self.layers:
            x = layer(x, self.shift)
        return self.b(x)

    shift = nn.Parameter(torch.ones(4)) if trained else torch.ones(4)
    layers = nn.ModuleList(Shifted() for _ in range(3))
    text = same_as_the_model(Small(compute, a=nn.Linear(4, 4), layers=layers, b=nn.Linear(4, 3), shift=shift))
    assert "        for block in self.layers:\n            x = block(self.shift, x)\n" in text


def test_layers_that_all_read_the_input():
    def compute(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        for layer in self.layers:
            h = layer(h, x)
        return self.b(h)

    layers = nn.ModuleList(Shifted() for _ in range(3))
    same_as_the_model(Small(compute, a=nn.Linear(4, 4), layers=layers, b=nn.Linear(4, 3)))


def test_a_layer_that_differs_and_frozen_parameters():
    model = running(lambda self, x: self.layers[2](self.layers[1](self.layers[0](x))))
    model.layers[0].norm = nn.Identity()
    model.head.bias.requires_grad_(False)
    assert 'self.parameter("head.bias", 3, requires_grad=False)' in same_as_the_model(model)


def test_names_that_python_keeps_for_itself():
    batch = {"x": BATCH["x"], **{name: BATCH["y"] for name in ("class", "self", "torch", "sum", "mse_loss")}}
    layers = nn.ModuleDict({name: nn.Linear(4, 3) for name in ("1x1", "lambda", "en-de", "list")})
    model = Small(lambda self, x: sum(layer(x) for layer in self.towers.values()), towers=layers)
    same_as_the_model(model, batch, lambda o, b: sum(F.mse_loss(o, b[name]) for name in batch if name != "x"))


@pytest.mark.parametrize("name", ["Model", "Input", "S", "Program", "ShardedModule", "ROWS", "F", "range"])
def test_layers_whose_class_is_called_like_something_else(name):
    kind = type(name, (FFN,), {})
    layers = nn.ModuleList([kind(), kind(), nn.Linear(4, 3)])
    text = same_as_the_model(Small(lambda self, x: self.net[2](self.net[1](self.net[0](x))), net=layers))
    assert f"class {name}2(ShardedModule)" in text


def test_a_batch_whose_keys_python_or_the_program_keep_for_themselves():
    class Shadowing(Small):
        def forward(self, F: Tensor) -> Any:
            return self.a(F)

    model = Shadowing(skipping, a=nn.Linear(4, 3))
    batch = {"F": BATCH["x"], "class": torch.tensor([0, 2, -100, 1])}
    text = same_as_the_model(model, batch, lambda o, b: F.cross_entropy(o, b["class"]))
    assert "def normalizers(self, F_2, class_):" in text


def test_parameters_that_belong_to_no_module():
    scales = nn.ParameterList([nn.Parameter(torch.full((3,), 2.0)), nn.Parameter(torch.tensor(0.5))])
    same_as_the_model(Small(lambda self, x: self.a(x) * self.s[0] + self.s[1], a=nn.Linear(4, 3), s=scales))


def test_parameters_behind_a_detach_are_frozen():
    def compute(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if layer is self.layers[1]:
                x = x.detach()
        return self.a(x) * self.scale.detach() + torch.ones_like(self.shape)

    layers = nn.ModuleList(FFN() for _ in range(4))
    scale, shape = nn.Parameter(torch.full((3,), 2.0)), nn.Parameter(torch.zeros(3))
    text = same_as_the_model(Small(compute, a=nn.Linear(4, 3), layers=layers, scale=scale, shape=shape))
    assert 'self.parameter("shape", 3, requires_grad=False)' in text
    assert 'self.parameter("scale", 3, requires_grad=False)' in text
    frozen, trained = text.split("class ")[1:3]
    assert frozen.count("requires_grad=False") == 6 and "requires_grad=False" not in trained


def test_unused_parameters_stay_part_of_the_model():
    text = same_as_the_model(Small(lambda self, x: self.a(x), a=nn.Linear(4, 3), b=nn.Linear(2, 2)))
    assert 'self.parameter("b.weight", 2, 2' in text


def test_batch_norm_and_a_counter():
    def compute(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return self.norm(self.a(x))

    same_as_the_model(Small(compute, a=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), count=torch.tensor(0)))


def test_buffers_literals_and_tables():
    def compute(self: Any, x: Tensor) -> Tensor:
        return self.a(x) * torch.tensor([1.0, 2.0, 3.0]) + self.shift + torch.tensor([float(i) for i in range(99)])[:3]

    same_as_the_model(Small(compute, a=nn.Linear(4, 3), shift=torch.ones(3)))


def test_writes_into_views():
    def compute(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, 1:] = x[:, :2]
        return h.unsqueeze(0).unbind(0)[0]

    same_as_the_model(Small(compute, a=nn.Linear(4, 3)))


def test_images_and_group_norm():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
    )
    same_as_the_model(Small(lambda self, x: self.net(x.view(-1, 1, 2, 2)), net=net))


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_model_from_which_no_gradient_comes():
    with pytest.raises(BadInput, match="no parameter of Small that requires a gradient reaches the loss"):
        compiled(Small(lambda self, x: self.a(x).detach() + x[:, :3], a=nn.Linear(4, 3)))


def test_a_batch_without_rows():
    with pytest.raises(BadInput, match="the batch has no rows"):
        compiled(MLP(), {"x": torch.zeros(0, 4), "y": torch.zeros(0, 3)})


def test_complex_parameters():
    table = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    model = Small(lambda self, x: self.a((x * self.table).real), a=nn.Linear(4, 3), table=table)
    with pytest.raises(BadInput, match="parameter table is complex, which is not supported"):
        compiled(model)


def test_complex_tables():
    def compute(self: Any, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.a(x).view(-1, 2, 2)) * self.table
        return self.b(torch.view_as_real(turned).flatten(1))

    same_as_the_model(
        Small(compute, a=nn.Linear(4, 4), b=nn.Linear(4, 3), table=torch.polar(torch.ones(2), BATCH["x"][0, :2]))
    )


# -- randomness -------------------------------------------------------------------------------------------------------


def test_dropout_runs_under_a_seed_of_its_own():
    model = Small(
        lambda self, x: F.dropout(self.b(F.dropout(self.a(x), 0.5)), 0.1), a=nn.Linear(4, 4), b=nn.Linear(4, 3)
    )
    text = compiled(model).program
    assert "with self.rng(1):\n" in text and "with self.rng(2):\n" in text


def drawing(draw: Callable[[Tensor], Tensor]) -> Small:
    torch.manual_seed(0)
    return Small(lambda self, x: self.b(draw(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 3))


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: h + torch.randint(0, 3, (h.shape[0], 1)),
        lambda h: h + torch.normal(0.0, 1.0, (1, 4)),
        lambda h: h + torch.normal(h.detach(), 2.0),
        lambda h: h + torch.empty(h.shape[0], 1).uniform_(),
        lambda h: h + torch.empty(h.shape[0], 1).random_(5),
        lambda h: F.gumbel_softmax(h),
        lambda h: F.rrelu(h, training=True),
        lambda h: h + torch.multinomial(h.detach().sigmoid(), 4),
        lambda h: h + torch.randperm(4),
        lambda h: F.dropout2d(h[:, :, None, None], 0.5).flatten(1),
    ],
    ids=["randint", "normal", "normal of means", "uniform", "random", "exponential", "rrelu", "multinomial",
         "randperm", "dropout2d"],
)  # fmt: skip
def test_whatever_draws_numbers_does_so_under_a_seed_of_its_own(draw):
    for fix in ({"tp": 2}, {"dp": 2}):
        text = compiled(drawing(draw), cluster="2xh100", **fix).program
        guarded = text.split("with self.rng(1")[1].splitlines()
        assert guarded[0] in ("):", ', axes=("tp",)):') and text.count("self.rng") == 1
        if guarded[0] != "):":
            assert "S(1) over tp" in guarded[1]  # what is not cut is equal on every rank of tp
    Trainer(load_program(compiled(drawing(draw)).program), device="cpu").evaluate(BATCH)


def test_a_buffer_is_filled_with_noise_under_a_seed():
    def compute(self: Any, x: Tensor) -> Tensor:
        self.noise.normal_()
        return self.a(x) + self.noise

    text = compiled(Small(compute, a=nn.Linear(4, 3), noise=torch.zeros(3)), cluster="2xh100", tp=2).program
    assert text.count("with self.rng(") == 1
