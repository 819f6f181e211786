"""A regression with a loss of its own.

autopar plan examples/mlp.py:small --cluster cpu:4 --precision fp32 --out out
autopar verify out
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, outputs)
        )

    def forward(self, x: Tensor) -> Tensor:  # x [rows, inputs]
        return self.layers(x)  # [rows, outputs]


def squared_error(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def small():
    torch.manual_seed(0)
    return MLP(24, 96, 8), {"x": torch.randn(12, 24), "y": torch.randn(12, 8)}, squared_error


def large():
    with torch.device("meta"):  # shapes only: a plan needs no weights
        model = MLP(4096, 65536, 4096)
    return model, {"x": torch.zeros(512, 4096), "y": torch.zeros(512, 4096)}, squared_error
