"""PyTorch's own sample inputs of its operators (op_db), each run whole and in slices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from passes.rules import RULES
from test_rules import Case, case, proved

pytest.importorskip("expecttest", reason="op_db needs it")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.opinfo.core import OpInfo  # noqa: E402

SAMPLES = 4  # of each operator
LARGEST = 4096  # elements
ALIASES = {"__getitem__", "cross_entropy", "interpolate", "dropout", "scaled_dot_product_attention"}
PACKETS = {target.split(".")[1] for target in RULES} | ALIASES
NAMES = sorted({op.name for op in op_db if {op.aten_name, op.name.split(".")[-1]} & PACKETS})
LEAST = 230  # operators with a rule that these samples reach


class Recorder(Interpreter):
    """Runs a traced call and keeps every operator that has a rule, with its operands."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.cases: list[Case] = []

    def run_node(self, n: Node) -> Any:
        if n.op == "call_function" and str(n.target) in RULES:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.cases.append(case(str(n.target), *args, **kwargs))
        return super().run_node(n)


def spread(samples: list[Any]) -> list[Any]:
    """A few of them, from first to last."""
    step = max(1, -(-len(samples) // SAMPLES))
    return samples[::step]


def recorded(info: OpInfo) -> Iterator[Case]:
    dtypes = info.supported_dtypes("cpu")
    dtype = next(d for d in (torch.float64, torch.int64, torch.bool, *dtypes) if d in dtypes)
    for sample in spread(list(info.sample_inputs("cpu", dtype))):
        given: list[Tensor] = []

        def hide(tensor: Tensor, given: list[Tensor] = given) -> int:
            given.append(tensor)
            return len(given) - 1

        tree = tree_map_only(Tensor, hide, (sample.input, sample.args, sample.kwargs))
        places = iter(range(len(given)))
        del tree
        if any(t.numel() == 0 or t.numel() > LARGEST for t in given):
            continue

        def run(*tensors: Tensor, sample: Any = sample) -> Any:
            rest = iter(tensors)
            first, args, kwargs = tree_map_only(
                Tensor, lambda _: next(rest), (sample.input, sample.args, sample.kwargs)
            )
            return info.op(first, *args, **kwargs)

        recorder = Recorder(make_fx(run, pre_dispatch=True)(*given))
        with torch.no_grad():
            recorder.run(*given)
        yield from recorder.cases
