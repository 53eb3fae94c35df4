"""A residual net with BatchNorm under DistributedDataParallel; batch statistics over all ranks, or a rank's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from outside.layouts.third.scene import ROWS, Loop, Scene, begin, generator, share


class SyncedBatchNorm(nn.BatchNorm2d):
    """torch.nn.SyncBatchNorm takes no CPU tensors: the same with a differentiable all-reduce."""

    def forward(self, x: Tensor) -> Tensor:
        world = dist.get_world_size()
        count = x.numel() // x.shape[1] * world
        mean = all_reduce(x.float().sum((0, 2, 3))) / count
        centred = x.float() - mean[:, None, None]
        variance = all_reduce(centred.square().sum((0, 2, 3))) / count
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * count / (count - 1), self.momentum)
                self.num_batches_tracked += 1
        y = centred * torch.rsqrt(variance + self.eps)[:, None, None]
        return (y * self.weight.float()[:, None, None] + self.bias.float()[:, None, None]).to(x.dtype)


class BasicBlock(nn.Module):
    """Two convolutions, a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layer1, self.layer2 = nn.Sequential(BasicBlock(8, 8, 1)), nn.Sequential(BasicBlock(8, 16, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.avgpool(x).flatten(1))


def synced(model: nn.Module, but: str = "") -> None:
    """Let BatchNorm layers take the statistics of all ranks."""
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d) and name != but:
            module.__class__ = SyncedBatchNorm


def train(scene: Scene) -> Loop:
    """Set up the training."""
    model: Any = begin(scene, ResNet)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and scene.dtype != torch.float32:
            module.float()
            module.weight.data, module.bias.data = module.weight.data, module.bias.data
    if scene.has("frozen statistics"):
        model.eval()
    elif scene.world > 1 and scene.fault != "no sync":
        synced(model, "layer1.0.bn2" if scene.fault == "one not synced" else "")
    if scene.world > 1:
        model = DistributedDataParallel(model, broadcast_buffers=scene.has("broadcast"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    def step(number: int) -> None:
        images = torch.randn(ROWS, 3, 10, 10, generator=generator(600 + number)).to(scene.dtype)
        classes = torch.randint(0, 4, (ROWS,), generator=generator(700 + number))
        x, y = share(images, scene.rank, scene.world), share(classes, scene.rank, scene.world)
        if scene.fault == "unnormalised" and scene.rank == 1 and number >= 1:
            x = x * 1.5
        F.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, step)
