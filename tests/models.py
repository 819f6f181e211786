"""Tiny models of the families that people train, how one process trains them, and the plans that tests make for them.

A `Case` is a model with its batches: `build()` makes it from a seed, `batch(step)` gives a global batch of 12 rows
with unequal numbers of valid targets, the same in every process. Nothing random runs inside the models, unless a test
asks for dropout. `planned` is the compiler itself; a model is captured once for all plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, SEQ = 12, 16
IGNORED = -100
# Valid targets per row. Cut in three, the second part has 18 of 99; cut in four, the second part has none at all.
VALID = (1, 15, 7, 0, 0, 0, 15, 3, 15, 15, 15, 15)


@dataclass(frozen=True)
class Case:
    """A model, its batches, and the loss function where the model has no loss of its own."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], Tensor] | None = None

    def build(self) -> nn.Module:
        """The model in training mode, the same weights in every process."""
        torch.manual_seed(0)
        model = self.make().train()
        # LayerNorm and biases as they are initialised hide what goes wrong with them
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2 and not parameter.is_meta:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return model

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.build().state_dict().items()}

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """The loss of the whole batch on one process."""
        if self.loss_fn is not None:
            return self.loss_fn(model(*inputs_of(batch)), batch)
        return model(**batch)["loss"] if isinstance(batch, dict) else model(*batch)[1]


def inputs_of(batch: Any) -> tuple[Tensor, ...]:
    """What goes into forward where a loss function takes the rest."""
    return (batch["x"],) if isinstance(batch, dict) else batch[:1]


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


# -- batches ----------------------------------------------------------------------------------------------------------


def tokens(vocabulary: int, step: int) -> dict[str, Tensor]:
    """A causal language model's batch; the model shifts the labels, so the first one is no target."""
    ids = torch.randint(1, vocabulary, (ROWS, SEQ), generator=generator(step))
    labels = ids.clone()
    for row, valid in enumerate(VALID):
        labels[row, 1 + valid :] = IGNORED
    return {"input_ids": ids, "labels": labels}


def positional(vocabulary: int, step: int) -> tuple[Tensor, Tensor]:
    """ids and next ids, as nanoGPT takes them."""
    ids = torch.randint(0, vocabulary, (ROWS, SEQ + 1), generator=generator(step))
    targets = ids[:, 1:].clone()
    for row, valid in enumerate(VALID):
        targets[row, valid:] = IGNORED
    return ids[:, :-1].clone(), targets


def regression(step: int) -> dict[str, Tensor]:
    g = generator(step)
    return {"x": torch.randn(ROWS, 24, generator=g), "y": torch.randn(ROWS, 8, generator=g)}


def masked(step: int) -> dict[str, Tensor]:
    """Masked language modelling: every label is a target or ignored, and rows end in padding."""
    g = generator(step)
    ids = torch.randint(1, 256, (ROWS, SEQ), generator=g)
    labels, mask = ids.clone(), torch.ones(ROWS, SEQ, dtype=torch.int64)
    for row, valid in enumerate(VALID):
        labels[row, valid:] = IGNORED
        mask[row, SEQ - row % 5 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def images(step: int) -> dict[str, Tensor]:
    g = generator(step)
    return {
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=g),
        "labels": torch.randint(0, 10, (ROWS,), generator=g),
    }


def without(batch: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != name}


def translation(step: int) -> dict[str, Tensor]:
    g = generator(step)
    labels = torch.randint(2, 250, (ROWS, 8), generator=g)
    for row, valid in enumerate(VALID):
        labels[row, 1 + valid // 2 :] = IGNORED
    return {"input_ids": torch.randint(2, 250, (ROWS, SEQ), generator=g), "labels": labels}


# -- models -----------------------------------------------------------------------------------------------------------


def gpt2(**more: Any) -> nn.Module:
    """Tied embeddings, fused QKV, a vocabulary that nothing divides."""
    still = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    size = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 257, "use_cache": False}
    import transformers  # here: takes seconds, and most ranks need none of it

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(size | still | more)))


def llama(**more: Any) -> nn.Module:
    """Grouped-query attention, RMSNorm, SwiGLU, rotary tables."""
    size = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64, "use_cache": False,
    }  # fmt: skip
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(size | more)))


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=256,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        # from 0.02 (meant for 768 wide) the first norm amplifies rounding: one process is off itself by the whole bound
        initializer_range=0.1,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=16, patch_size=4,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        d_model=48, d_ff=96, d_kv=12, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=257,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


class Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.resid = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (one.view(b, t, self.heads, c // self.heads).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )  # [b, heads, t, c / heads]
        return self.resid(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT as it is written by hand: tied embedding and head, fused QKV, the loss in forward."""

    def __init__(self, vocabulary: int = 257, width: int = 48, heads: int = 4, layers: int = 2, dropout: float = 0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([Layer(width, heads, dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 * math.sqrt(layers))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device)))
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=IGNORED)
        return logits, loss


class Normed(nn.Module):
    """PyTorch's own RMSNorm and dropout, which CUDA fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.5), nn.Linear(48, 24))
            for _ in range(4)
        )
        self.head = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(x)
        return out


def partly_trained() -> nn.Module:
    """Frozen position embeddings and a frozen bias, and a layer that the loss never reads."""
    model = NanoGPT()
    model.spare = nn.Linear(48, 48)
    model.wpe.weight.requires_grad_(False)
    model.h[1].ln_2.bias.requires_grad_(False)
    return model


class MLP(nn.Module):
    """A regression; neither width is a multiple of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(24, 98), nn.Linear(98, 50), nn.Linear(50, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.mid(F.gelu(self.up(x)))))


def sequential() -> nn.Module:
    """Layers that are the model's own children, the first of them frozen, and nothing before them."""
    model = nn.Sequential(*(Residual() for _ in range(4)), nn.Linear(24, 8))
    model[0].requires_grad_(False)
    return model


class Conv(nn.Module):
    """Convolution, group norm, activation."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, stride, 1)
        self.norm = nn.GroupNorm(4, outside)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Three levels, the skip connections over all that lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.down1, self.down2 = Conv(3, 8), Conv(8, 16, 2), Conv(16, 24, 2)
        self.middle = Conv(24, 24)
        self.up2, self.up1, self.out = Conv(24 + 16, 16), Conv(16 + 8, 8), nn.Conv2d(8, 3, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        a = self.inp(pixel_values)
        b = self.down1(a)
        x = self.middle(self.down2(b))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2.0), b], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), a], 1))
        return self.out(x)


class BasicBlock(nn.Module):
    """The residual block of a ResNet, with group norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(4, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    """Three stages of one residual block each, as torchvision has them with two or more."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer1 = nn.Conv2d(3, 8, 3, 1, 1), BasicBlock(8)
        self.down, self.layer2 = nn.Conv2d(8, 16, 3, 2, 1), BasicBlock(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer2(self.down(self.layer1(self.stem(pixel_values))))
        logits = self.fc(x.mean((2, 3)))
        return logits, F.cross_entropy(logits, labels)


class Residual(nn.Module):
    """A layer that is fed the batch itself where it is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Four residual layers between two linear ones; what is made of their weights beside them is for others to say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 8)
        self.layers = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers[:2]:
            x = layer(x)
        x = self.middle(x)
        for layer in self.layers[2:]:
            x = layer(x)
        return self.last(self.end(x))

    def middle(self, x: Tensor) -> Tensor:
        return x

    def end(self, x: Tensor) -> Tensor:
        return x


class TiedThrice(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.third.weight = self.first.weight

    def middle(self, x: Tensor) -> Tensor:
        return x + self.second(x)

    def end(self, x: Tensor) -> Tensor:
        return x + self.third(x)


class LateBias(Chain):
    """A bias made of weights alone in the middle, and added at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Parameter(torch.randn(1, 24)), nn.Linear(24, 24)

    def middle(self, x: Tensor) -> Tensor:
        self.bias = torch.tanh(self.mix(self.table))
        return x

    def end(self, x: Tensor) -> Tensor:
        return x + self.bias


class Detached(Chain):
    """A weight that is read a second time without a gradient."""

    def end(self, x: Tensor) -> Tensor:
        return x @ self.first.weight.detach()


class Turned(Chain):
    """A view of a weight that is made before anything is read."""

    def forward(self, x: Tensor) -> Tensor:
        self.turned = self.first.weight.t()
        return super().forward(x)

    def end(self, x: Tensor) -> Tensor:
        return x @ self.turned


class Weighted(Chain):
    """A mean over what counts, weighted by a buffer that only its denominator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.rand(1, 8) + 0.5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output, counts = super().forward(x), y > 0
        return output, ((output - y) ** 2 * counts).sum() / (counts * self.share).sum()


def denoising(step: int) -> tuple[Tensor, Tensor]:
    g = generator(step)
    return torch.randn(ROWS, 3, 8, 8, generator=g), torch.randn(ROWS, 3, 8, 8, generator=g)


def squared_error(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch["y"] if isinstance(batch, dict) else batch[1])


CASES = {
    case.name: case
    for case in (
        Case("gpt2", gpt2, lambda step: tokens(257, step)),
        Case("llama", llama, lambda step: tokens(256, step)),
        Case("nanogpt", NanoGPT, lambda step: positional(257, step)),
        Case("mlp", MLP, regression, squared_error),
        Case("sequential", sequential, lambda step: tuple(regression(step).values()), squared_error),
        Case("few-kv-heads", lambda: llama(num_key_value_heads=2), lambda step: tokens(256, step)),
        Case("partly-trained", partly_trained, lambda step: positional(257, step)),
        Case("dropout", lambda: NanoGPT(dropout=0.5), lambda step: positional(257, step)),
        Case("bert", bert, masked),
        Case("bert-unmasked", bert, lambda step: without(masked(step), "attention_mask")),
        *(
            Case(name, model, lambda step: tuple(regression(step).values()), squared_error)
            for name, model in (
                ("tied-thrice", TiedThrice),
                ("late-bias", LateBias),
                ("detached", Detached),
                ("turned", Turned),
            )
        ),
        Case("normed", Normed, lambda step: tuple(regression(step).values()), squared_error),
        Case("weighted", Weighted, lambda step: tuple(regression(step).values())),
        Case("unet", UNet, denoising, squared_error),
        Case("resnet", ResNet, lambda step: tuple(images(step).values())),
        Case("vit", vit, images),
        Case("t5", t5, translation),
    )
}


# -- what one process trains ------------------------------------------------------------------------------------------

STEPS = 20
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    # a gradient that is zero but for rounding (of a key's bias) is no update
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3),
}


@dataclass(frozen=True)
class Training:
    """What a training shows of itself: losses, gradients of the first and the last step, and the weights after it."""

    losses: tuple[float, ...]
    first: Mapping[str, Tensor]
    last: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    norms: tuple[float | None, ...] = ()  # of the gradients, before they were clipped
    drifted: frozenset[str] = frozenset()  # parameters whose copies on several ranks are no longer the same


@cache
def reference(
    case: Case, optimizer: str, steps: int = STEPS, clip: float | None = None, precision: str = "fp32"
) -> Training:
    """The training of the user's model by a plain loop. Of the names of a tied weight, gradients have the first.

    bf16 is that of the program: weights and their update in fp32, forward and backward on copies.
    """
    model = case.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    own = OPTIMIZERS[optimizer](trained)
    losses, gradients, norms = [], [], []
    for step in range(steps):
        own.zero_grad()
        loss = case.loss(model if precision == "fp32" else in_bf16(model), case.batch(step))
        loss.backward()
        losses.append(loss.item())
        if step in (0, steps - 1):
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(trained, clip).item())
        own.step()
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Training(tuple(losses), gradients[0], gradients[-1], weights, tuple(norms))


def in_bf16(model: nn.Module) -> Callable[..., Any]:
    """The model's forward on bf16 copies of its parameters."""
    copies = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
    return lambda *args, **more: torch.func.functional_call(model, copies, args, more)


def trained(
    name: str,
    text: str,
    held: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    optimizer: str,
    steps: int = STEPS,
    clip: float | None = None,
) -> Training:
    """On every rank: the program's training from these weights. Tensors are on rank 0 alone."""
    from autopar.job import load_program
    from autopar.runtime import Trainer

    trainer = Trainer(load_program(text), OPTIMIZERS[optimizer], "cpu", clip_grad_norm=clip)
    trainer.load_state_dict(weights)
    trainer.load_buffers(held)
    losses, gradients, norms = [], [], []
    for step in range(steps):
        batch = CASES[name].batch(step)
        if step in (0, steps - 1):
            trainer.backward(batch)
            gradients.append(trainer.full_gradients())
        losses.append(trainer.step(batch))
        if clip is not None:
            norms.append(trainer.last_grad_norm)
    return Training(tuple(losses), gradients[0], gradients[-1], trainer.state_dict(), tuple(norms), drifted(trainer))


def drifted(trainer: Any) -> frozenset[str]:
    """Parameters of which two ranks hold different copies.

    Over tp where they are whole, over dp without ZeRO, over pp where stages share them.
    """
    from autopar.runtime import S, ShardedModule
    from autopar.runtime.mesh import current
    from autopar.runtime.weights import local

    models = [module for module in (trainer.model, *trainer.model.children()) if isinstance(module, ShardedModule)]
    layouts = {name: layout for model in models for name, layout in model.layouts().items()}
    tensors = {
        name: local(p).detach().numpy().tobytes()
        for model in models
        for name, p in model.named_parameters()
        if name in layouts
    }
    at = {name: axis.rank for name, axis in current().axes.items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (at, tensors))
    replicated = trainer.program.zero == 0 and trainer.program.precision == "fp32"
    found = set()
    for name, layout in layouts.items():
        copies: dict[object, bytes] = {}
        for at, held in everywhere:
            if name in held:
                rank = at.get("tp", 0) if isinstance(layout.placement, S) else 0
                place = (rank, 0 if replicated else at["dp"])
                if copies.setdefault(place, held[name]) != held[name]:
                    found.add(name)
    return frozenset(found)


RELATIVE, ABSOLUTE = 1e-5, 1e-6  # of the norm, and root mean square


def off(found: Tensor, wanted: Tensor) -> float:
    """How far a tensor is from what it should be, in units of what is allowed: over 1 is wrong."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, f"{found.shape} {found.dtype}"
    a, b = found.double(), wanted.double()
    allowed = RELATIVE * b.norm() + ABSOLUTE * math.sqrt(max(1, b.numel()))
    value = ((a - b).norm() / allowed).item()
    return math.inf if math.isnan(value) else value


def differences(found: Training, wanted: Training) -> dict[str, tuple[float, str]]:
    """The worst `off` of losses, gradients and weights, and where it is."""
    losses = [
        abs(a - b) / (RELATIVE * abs(b)) if math.isfinite(a) else math.inf
        for a, b in zip(found.losses, wanted.losses, strict=True)
    ]
    worst = {"loss": max((value, f"step {step}") for step, value in enumerate(losses))}
    for what in ("first", "last", "weights"):
        a, b = getattr(found, what), getattr(wanted, what)
        worst[what] = max(
            ((off(a[name], b[name]), name) for name in sorted(a.keys() & b.keys())), default=(math.inf, "")
        )
    return worst


# -- plans ------------------------------------------------------------------------------------------------------------


def pins(fix: str) -> dict[str, str]:
    return dict(pin.split("=") for pin in fix.split(",")) if fix else {}


def ranks(fix: str) -> int:
    """How many processes a plan takes that is pinned so."""
    return math.prod(int(value) for key, value in pins(fix).items() if key in ("pp", "dp", "tp"))


@cache
def prepared(case: Case, precision: str = "fp32") -> Any:
    """The compiler's state where what is left depends on the cluster and the pins."""
    from costmodels.cluster import Cluster
    from passes.pipeline import PIPELINE, SEARCH
    from passes.state import State, Task, run

    before = PIPELINE[: PIPELINE.index(SEARCH)]
    task = Task(case.build(), case.batch(0), case.loss_fn, Cluster.preset("cpu:1"), ROWS, precision, "adamw", {})
    return run(before, State(task, lambda text: None, lambda: False))


@cache
def planned(
    case: Case, fix: str, world: int = 0, limit_bytes: int = 0, precision: str = "fp32", thin: bool = False
) -> Any:
    """The compiler's last state: plan, lowered program, text. `world` ranks, or as many as the pins take.

    On tiny tensors a collective costs its latency. `thin` links have none, and so few bytes per second that only
    traffic counts: other plans win there.
    """
    from costmodels.cluster import Cluster, Link
    from passes.pipeline import PIPELINE, SEARCH
    from passes.state import run

    cluster = Cluster.preset(f"cpu:{world or ranks(fix)}")
    if thin:
        cluster = replace(cluster, intra_node=Link(1e7, 1e-9))
    if limit_bytes:
        cluster = cluster.with_memory_limit(limit_bytes)
    state = prepared(case, precision)
    task = replace(state.task, cluster=cluster, fix=pins(fix))
    return run(PIPELINE[PIPELINE.index(SEARCH) :], replace(state, task=task))


def buffers(state: Any) -> dict[str, Tensor]:
    """What a program needs beside the weights."""
    from autopar.weights import full_buffers

    return full_buffers(state.task.model) | dict(state.captured.constants)
