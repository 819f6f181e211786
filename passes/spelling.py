"""How a PyTorch user writes each operator: `x.reshape(2, 3)`, `a + b`, `F.linear(x, w, b)`.

One table. What is not in it is written as `torch.<name>(...)` where torch has that function, and as the ATen overload
otherwise, which always works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import torch
import torch.nn.functional as F

from passes.graph import CONSTANT, Arg, Atom, Op, Ref, Rows, Size
from passes.interpret import schema

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
         "ge": ">=", "bitwise_and": "&", "__and__": "&", "bitwise_or": "|", "__or__": "|"}  # fmt: skip
METHODS = frozenset(
    [
        "reshape",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "split",
        "chunk",
        "unbind",
        "flatten",
        "t",
        "contiguous",
        "clone",
        "detach",
        "masked_fill",
        "unflatten",
        "select",
        "narrow",
        "repeat",
        "add_",
        "mul_",
        "copy_",
        "zero_",
        "fill_",
    ]
)
FUNCTIONAL = frozenset(
    [
        "linear",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "gelu",
        "silu",
        "elu",
        "leaky_relu",
        "softplus",
        "mish",
        "hardswish",
        "selu",
        "conv1d",
        "conv2d",
        "conv3d",
        "pad",
        "dropout",
        "glu",
        "relu6",
        "hardtanh",
        "logsigmoid",
        "max_pool2d",
        "avg_pool2d",
        "adaptive_avg_pool2d",
    ]
)
SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
REDUCTIONS = ("none", "mean", "sum")
LOSSES = {
    "cross_entropy_loss": (
        "cross_entropy",
        ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing"),
    ),
    "nll_loss_nd": ("nll_loss", ("input", "target", "weight", "reduction", "ignore_index")),
    "nll_loss": ("nll_loss", ("input", "target", "weight", "reduction", "ignore_index")),
    "mse_loss": ("mse_loss", ("input", "target", "reduction")),
    "l1_loss": ("l1_loss", ("input", "target", "reduction")),
    "smooth_l1_loss": ("smooth_l1_loss", ("input", "target", "reduction", "beta")),
    "huber_loss": ("huber_loss", ("input", "target", "reduction", "delta")),
    "binary_cross_entropy": ("binary_cross_entropy", ("input", "target", "weight", "reduction")),
    "binary_cross_entropy_with_logits": (
        "binary_cross_entropy_with_logits",
        ("input", "target", "weight", "pos_weight", "reduction"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A Python expression, and whether it binds tighter than any infix operator."""

    source: str
    atomic: bool = True

    @property
    def tight(self) -> str:
        return self.source if self.atomic else f"({self.source})"


@dataclass(frozen=True)
class Speller:
    """Writes operators, given how each value is written and where a device comes from."""

    value: Callable[[str], Text]
    device: str

    def arg(self, arg: Arg) -> str:
        if isinstance(arg, Ref):
            return self.value(arg.name).source
        if isinstance(arg, Atom):
            return self.device if arg.source == "device" else arg.source
        if isinstance(arg, Rows):
            return "ROWS" if arg.per_row == 1 else f"(ROWS * {arg.per_row})"
        assert not isinstance(arg, Size), f"a size still depends on the batch: {arg}"
        if isinstance(arg, tuple):
            inner = ", ".join(self.arg(a) for a in arg)
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        if isinstance(arg, float) and not isfinite(arg):
            return f'float("{arg}")'
        return f'"{arg}"' if isinstance(arg, str) else repr(arg)

    def arguments(self, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...] = ()) -> str:
        return ", ".join((*map(self.arg, args), *(f"{k}={self.arg(a)}" for k, a in kwargs)))

    def write(self, op: Op) -> Text:
        """The operator as an expression of its result, or of its results."""
        text = self.expression(op)
        listed = op.target != CONSTANT and isinstance(schema(op).returns[0].type, torch.ListType)
        return Text(f"{text.tight}[0]") if listed and len(op.results) == 1 else text

    def expression(self, op: Op) -> Text:
        _, name, overload = op.target.split(".")
        args, kwargs = op.args, op.kwargs
        if op.target == CONSTANT:
            return Text(f"torch.tensor({self.arg(args[0])}, dtype=torch.{op.results[0].dtype}, device={self.device})")
        if name in INFIX and len(args) == 2 and not kwargs:
            left, right = (self.value(a.name).tight if isinstance(a, Ref) else self.arg(a) for a in args)
            return Text(f"{left} {INFIX[name]} {right}", atomic=False)
        if name == "neg":
            return Text(f"-{self.operand(args[0])}", atomic=False)
        if name == "pow" and not isinstance(args[1], Ref):
            return Text(f"{self.operand(args[0])} ** {self.arg(args[1])}", atomic=False)
        if name == "to" and overload == "dtype":
            return Text(f"{self.operand(args[0])}.to({self.arg(args[1])})")
        if name == "slice":
            return Text(f"{self.operand(args[0])}[{self.slice(op)}]")
        if name == "index" and overload == "Tensor":
            index = ", ".join(":" if a is None else self.arg(a) for a in args[1])  # type: ignore[union-attr]
            return Text(f"{self.operand(args[0])}[{index}]")
        if name == "embedding":
            padding = op.arg(2, "padding_idx", -1)
            extra = "" if padding == -1 else f", padding_idx={self.arg(padding)}"
            return Text(f"F.embedding({self.arg(args[1])}, {self.arg(args[0])}{extra})")
        if name == "scaled_dot_product_attention":
            given = [self.arg(a) for a in args[:3]]
            named = [*zip(SDPA_NAMES[3:], args[3:], strict=False), *kwargs]
            given += [f"{k}={self.arg(a)}" for k, a in named if a is not None]
            return Text(f"F.scaled_dot_product_attention({', '.join(given)})")
        if name in LOSSES:
            function, names = LOSSES[name]
            given = [self.arg(a) for a in args[:2]]
            for k, a in (*zip(names[2:], args[2:], strict=False), *kwargs):
                if a is None:
                    continue
                given.append(
                    f"{k}={self.arg(REDUCTIONS[a]) if k == 'reduction' and isinstance(a, int) else self.arg(a)}"
                )
            return Text(f"F.{function}({', '.join(given)})")
        if name in METHODS and args and isinstance(args[0], Ref):
            rest = args[1:]
            if name in ("reshape", "expand", "permute") and len(rest) == 1 and isinstance(rest[0], tuple):
                rest = rest[0] or rest
            return Text(f"{self.operand(args[0])}.{name}({self.arguments(rest, kwargs)})")
        if name in FUNCTIONAL:
            if name in ("layer_norm", "group_norm"):  # without cudnn_enable
                args = args[:5]
            return Text(f"F.{name}({self.arguments(args, kwargs)})")
        if name == "batch_norm":
            x, weight, bias, mean, variance, *how = args
            return Text(f"F.batch_norm({self.arguments((x, mean, variance, weight, bias, *how[:3]))})")
        declared = [a.name for a in schema(op).arguments]
        if "reduction" in declared and hasattr(F, name):
            return self.loss(op, name, declared)
        if (
            callable(getattr(torch, name, None)) and not name.startswith("_") and name != "index_put"
        ):  # which takes no None there
            return Text(f"torch.{name}({self.arguments(args, kwargs)})")
        return Text(f"torch.ops.{op.target}({self.arguments(args, kwargs)})")

    def loss(self, op: Op, name: str, declared: list[str]) -> Text:
        """With its reduction always written out: the defaults of ATen, torch and F differ."""
        tensors = next((i for i, a in enumerate(op.args) if not isinstance(a, Ref)), len(op.args))
        named = dict((*zip(declared[tensors:], op.args[tensors:], strict=False), *op.kwargs))
        reduction = op.arg(declared.index("reduction"), "reduction", REDUCTIONS.index("mean"))
        assert isinstance(reduction, int), f"a reduction of {reduction}"
        given = [f"{k}={self.arg(a)}" for k, a in named.items() if k != "reduction" and a is not None]
        given = [*map(self.arg, op.args[:tensors]), *given]
        if name == "kl_div":  # F warns of its mean
            return Text(f"torch.kl_div({', '.join((*given, f'reduction={reduction}'))})")
        given.append(f"reduction={self.arg(REDUCTIONS[reduction])}")
        return Text(f"F.{name}({', '.join(given)})")

    def operand(self, arg: Arg) -> str:
        return self.value(arg.name).tight if isinstance(arg, Ref) else self.arg(arg)

    def slice(self, op: Op) -> str:
        dim, start, end, step = (
            op.arg(i, k, d) for i, k, d in ((1, "dim", 0), (2, "start", None), (3, "end", None), (4, "step", 1))
        )
        assert isinstance(dim, int), f"a slice along {dim}"
        rank = len(op.results[0].shape)
        first = "" if start in (None, 0) else self.arg(start)
        last = "" if end is None or (isinstance(end, int) and end >= 2**62) else self.arg(end)
        stride = "" if step in (None, 1) else f":{self.arg(step)}"
        return ", ".join((*[":"] * (dim % rank), f"{first}:{last}{stride}"))
