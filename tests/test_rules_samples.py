"""PyTorch's own sample inputs of its operators (op_db), each run whole and in slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from passes.graph import CONSTANT
from passes.rules import RULES
from passes.rules.pointwise import POINTWISE
from passes.rules.randomness import draws
from test_rules import CASES, RANDOM, UNSET, Case, one_thread, proved, recorded_calls  # noqa: F401  (a fixture)
from test_rules import ELEMENTWISE as BY_SCHEMA
from test_rules_views import BY_KEYWORD
from test_rules_views import CASES as VIEWS

pytest.importorskip("expecttest", reason="op_db needs it")
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

SAMPLES = 3  # of each operator; one where it works element by element
LARGEST = 1024  # elements
ALIASES = {"__getitem__", "cross_entropy", "interpolate", "dropout", "scaled_dot_product_attention"}
PACKETS = {target.split(".")[1] for target in RULES} | ALIASES
ELEMENTWISE = {target.split(".")[1] for target in POINTWISE}
NAMES = sorted(
    {op.name for op in op_db if {op.aten_name, op.name.split(".")[-1]} & PACKETS and not op.name.startswith("masked.")}
)
SKIPPED = {"sparse.mm", "nn.functional.embedding"}  # sparse gradients
NOT_RUN = {"transformers.grouped_mm_fallback.default", CONSTANT}  # in test_rules_models; has no factors
LEAST = 240  # operators with a rule that these samples reach


def spread(samples: list[Any], count: int) -> list[Any]:
    """A few of them, from the first on."""
    return samples[:: max(1, -(-len(samples) // count))]


def recorded(info: OpInfo) -> Iterator[Case]:
    """The operators that sample calls run, with their operands."""
    dtypes = [d for d in (torch.float64, torch.int64, torch.bool) if d in info.supported_dtypes("cpu")]
    if not dtypes:
        return
    # not info.sample_inputs(): it seeds and inspects the stack for each sample
    samples = list(info.sample_inputs_func(info, "cpu", dtypes[0], False))
    for sample in spread(samples, 1 if info.name in ELEMENTWISE else SAMPLES):
        leaves, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        given = [leaves[i] for i in places]
        if any(t.numel() == 0 or t.numel() > LARGEST or t.is_complex() for t in given):
            continue

        def run(*tensors: Tensor) -> Any:
            now = dict(zip(places, tensors, strict=True))  # noqa: B023  (called before the next turn)
            first, args, kwargs = tree_unflatten([now.get(i, leaf) for i, leaf in enumerate(leaves)], tree)  # noqa: B023
            return info.op(first, *args, **kwargs)

        yield from recorded_calls(make_fx(run, pre_dispatch=True)(*given), *given, smooth=99)


@pytest.fixture(scope="module")
def reached() -> set[str]:
    """The operators that samples reach; all of them hold."""
    torch.manual_seed(0)
    found: set[str] = set()
    for info in (op for op in op_db if op.name in NAMES and op.name not in SKIPPED):
        for made in recorded(info):
            if not draws(made.site.op):
                proved(made)
                found.add(made.target)
    return found


def test_sample_inputs_reach_many_operators(reached: set[str]) -> None:
    assert len(reached) >= LEAST, f"{len(reached)} operators"


def test_every_rule_is_proved(reached: set[str]) -> None:
    """By samples, or by the cases of the other files."""
    by_hand = {f"aten.{row[0]}" for row in (*CASES, *VIEWS)} | set(BY_SCHEMA) | set(BY_KEYWORD)
    random = set(RANDOM)
    assert RULES.keys() - reached - by_hand - random - set(UNSET) == NOT_RUN
