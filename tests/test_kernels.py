"""Functions as CUDA has them: what they keep and give, beside those of the CPU. One GPU would tell more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from passes.kernels import ON_CUDA

ROWS, LENGTH = 6, 16
X = ROWS * LENGTH  # elements


def kept(function: Callable[..., Tensor], *args: Any, **options: Any) -> int:
    """Bytes of the storages that are kept for the backward, each once."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*args, **options)
    assert out.requires_grad
    return sum(sizes.values())


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype).requires_grad_()


def test_they_are_called_as_those_of_torch() -> None:
    for name in ("dropout", "rms_norm"):
        own, of_torch = (inspect.signature(one).parameters for one in (ON_CUDA[name], getattr(F, name)))
        assert own.keys() == of_torch.keys()


def test_a_norm_keeps_its_input_and_a_number_of_each_row() -> None:
    with FakeTensorMode():
        x, weight = fake(ROWS, LENGTH), fake(LENGTH)
        assert kept(ON_CUDA["rms_norm"], x, (LENGTH,), weight) == 2 * X + 2 * LENGTH + 4 * ROWS
        assert kept(F.rms_norm, x, (LENGTH,), weight) > 4 * X  # as on the CPU: in fp32
        assert kept(ON_CUDA["rms_norm"], x, (LENGTH,)) == 2 * X + 4 * ROWS


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_norm_of_two_dtypes_is_not_fused() -> None:
    with FakeTensorMode():
        args = fake(ROWS, LENGTH), (LENGTH,), fake(LENGTH, dtype=torch.float32)
        assert kept(ON_CUDA["rms_norm"], *args) == kept(F.rms_norm, *args)


def test_dropout_keeps_a_byte_of_each_element() -> None:
    with FakeTensorMode():
        assert kept(ON_CUDA["dropout"], fake(ROWS, LENGTH), 0.1) == X
        assert kept(F.dropout, fake(ROWS, LENGTH), 0.1) == 2 * X
        x = fake(ROWS, LENGTH)
        assert ON_CUDA["dropout"](x, 0.1, training=False) is F.dropout(x, 0.1, training=False) is x


def test_attention_keeps_no_probabilities() -> None:
    with FakeTensorMode():
        heads = [fake(1, 2, ROWS, LENGTH) for _ in range(3)]
        attention = ON_CUDA["scaled_dot_product_attention"]
        assert kept(attention, *heads, dropout_p=0.1) == kept(F.scaled_dot_product_attention, *heads)


@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_look_as_those_of_torch(weighted: bool) -> None:
    def gradients(norm: Callable[..., Tensor], drop: Callable[..., Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
        x, weight = fake(ROWS, LENGTH), fake(LENGTH)
        drop(norm(x * 2, (LENGTH,), weight if weighted else None), 0.1).sum().backward()
        return [(g.shape, g.dtype) for g in (x.grad, weight.grad) if g is not None]

    with FakeTensorMode():
        found = gradients(ON_CUDA["rms_norm"], ON_CUDA["dropout"])
        assert len(found) == 1 + weighted and found == gradients(F.rms_norm, F.dropout)
