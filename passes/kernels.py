"""Functions of torch.nn.functional that keep less on CUDA than on the CPU, where programs run on fake tensors.

What fused kernels keep for the backward, and what they allocate (torch 2.13, ATen/native):

    attention   with dropout what it keeps without: it never writes down what it dropped
    dropout     a mask of one byte per element, not of the input's dtype
    rms_norm    its input and a number per row; where input and weight differ in dtype it is not fused
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, *operands: Any, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    return F_ATTENTION(query, key, value, *operands, **options)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1 or inplace:
        return F_DROPOUT(input, p, training, inplace)
    return cast(Tensor, applied(_Dropout, input))


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return F_RMS_NORM(input, list(normalized_shape), weight, eps)
    return cast(Tensor, applied(_RMSNorm, input, weight, prod(normalized_shape)))


# torch's own: a dry run puts those above in their place
F_ATTENTION, F_DROPOUT, F_RMS_NORM = F.scaled_dot_product_attention, F.dropout, F.rms_norm
ON_CUDA: Mapping[str, Callable[..., Tensor]] = {
    one.__name__: one for one in (scaled_dot_product_attention, dropout, rms_norm)
}


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (_,) = ctx.saved_tensors  # as the kernel does: under recompute it is made again up to here
        return torch.empty_like(gradients[0])


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, length: int) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.numel() // length, dtype=torch.float32))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        return torch.empty_like(x) if of_x else None, torch.empty_like(weight) if of_weight else None, None
