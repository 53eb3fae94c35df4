"""The models that benchmarks observe: built here, with nothing to download."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


class Block(nn.Module):
    """A transformer block out of plain modules, so that every leaf can be seen."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, both residual."""
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Six layers, width 256, vocabulary 5000."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 256)
        self.blocks = nn.ModuleList(Block(256, 8) for _ in range(6))
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 5000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for every token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or given != width:
            self.skip = nn.Sequential(nn.Conv2d(given, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two convolutions and a shortcut."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.skip(x))


def resnet18() -> nn.Module:
    """ResNet-18 without its download."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    given = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(given, width, stride), Residual(width, width, 1)]
        given = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def tiny() -> nn.Module:
    """A hundred small layers: the worst case for a cost per tensor."""
    return nn.Sequential(*(m for _ in range(100) for m in (nn.Linear(64, 64), nn.ReLU())))


def blocks(count: int = 2000) -> nn.Module:
    """Many blocks of three modules: what grows with the size of the tree shows here."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(count)))


class Workload(NamedTuple):
    """A model and a function that gives the loss of one batch for any copy of it."""

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]


def workload(name: str) -> Workload:
    """Return one of the models with its batch: transformer, resnet, tiny or blocks."""
    torch.manual_seed(0)
    if name == "transformer":
        tokens, targets = torch.randint(5000, (8, 128)), torch.randint(5000, (8 * 128,))
        return Workload(Transformer(), lambda m: nn.functional.cross_entropy(m(tokens).view(-1, 5000), targets))
    if name == "resnet":
        images, labels = torch.randn(8, 3, 96, 96), torch.randint(1000, (8,))
        return Workload(resnet18(), lambda m: nn.functional.cross_entropy(m(images), labels))
    if name == "tiny":
        x = torch.randn(32, 64)
        return Workload(tiny(), lambda m: m(x).pow(2).mean())
    x = torch.randn(32, 16)
    return Workload(blocks(), lambda m: m(x).pow(2).mean())
