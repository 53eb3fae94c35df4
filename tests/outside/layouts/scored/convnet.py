"""A residual network of convolutions, whose batch normalisation takes the statistics of all ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outside.layouts.model import region

CHANNELS, CLASSES, SIZE = 8, 10, 6


class SyncNorm(nn.Module):
    """Batch normalisation over images and pixels, of all ranks of `group` when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS))
        self.register_buffer("running_mean", torch.zeros(CHANNELS))
        self.register_buffer("running_var", torch.ones(CHANNELS))
        self.group: Any = None
        self.backward_sum = "sum"

    def forward(self, x: Tensor) -> Tensor:
        """Mean and mean square are averaged over ranks, in single precision."""
        y = x.float()
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        moments = torch.stack([y.mean((0, 2, 3)), y.square().mean((0, 2, 3))]) / ranks
        mean, square = region(moments, self.group, "sum", self.backward_sum)
        variance = square - mean.square()
        self.remember(y, mean.detach(), variance.detach())
        scale = torch.rsqrt(variance + 1e-5)[:, None, None]
        return ((y - mean[:, None, None]) * scale).to(x.dtype) * self.weight[:, None, None] + self.bias[:, None, None]

    def remember(self, x: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Keep running averages."""
        with torch.no_grad():
            for buffer, value in ((self.running_mean, mean), (self.running_var, variance)):
                buffer.lerp_(value.to(buffer.dtype), 0.1)  # type: ignore[operator]


class Unit(nn.Module):
    """Convolution, norm, ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, CHANNELS, 3, padding=1, bias=False), SyncNorm()

    def forward(self, x: Tensor) -> Tensor:
        """As named."""
        return torch.relu(self.norm(self.conv(x)))


class Residual(nn.Module):
    """Two units and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Unit(CHANNELS), Unit(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        """As named."""
        result: Tensor = x + self.second(self.first(x))
        return result


class ConvNet(nn.Module):
    """Stem, blocks, mean over pixels, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Unit(3)
        self.blocks = nn.ModuleDict({str(i): Residual() for i in range(2)})
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        x = self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        result: Tensor = self.head(x.mean((2, 3)))
        return result
