"""Images and texts that belong together, told from all others of the batch, those of other ranks too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from outside.layouts.reports.context import GatherSequence
from outside.layouts.third.scene import ROWS, Loop, Scene, average_gradients, begin, generator, share

PIXELS, WORDS, LENGTH, WIDTH = 12, 20, 5, 8


class Texts(nn.Module):
    """The mean of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens).mean(1))


class Model(nn.Module):
    """Directions of images and texts, and how sharply to tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(PIXELS, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.text = Texts()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image, text = (F.normalize(x.float(), dim=-1) for x in (self.image(images), self.text(tokens)))
        return image, text, self.scale.float().exp()


def everyone(scene: Scene, own: Tensor) -> Tensor:
    """Return the features of all ranks."""
    if scene.world == 1:
        return own
    if scene.fault != "gathered without gradient":
        return GatherSequence.apply(own, None, 0)
    parts = [torch.empty_like(own) for _ in range(scene.world)]
    dist.all_gather(parts, own.detach().contiguous())
    parts[scene.rank] = own
    return torch.cat(parts)


def train(scene: Scene) -> Loop:
    """Set up the training."""
    core = begin(scene, Model)
    model: Any = DistributedDataParallel(core) if scene.layout == "ddp" else core
    optimizer = torch.optim.SGD(model.parameters(), 0.2, 0.9)

    def step(number: int) -> None:
        images = torch.randn(ROWS, PIXELS, generator=generator(2300 + number)).to(scene.dtype)
        tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator(2400 + number))
        image, text, scale = model(*(share(x, scene.rank, scene.world) for x in (images, tokens)))
        labels = torch.arange(len(image)) + (0 if scene.fault == "labels of rank 0" else scene.rank * len(image))
        one = F.cross_entropy(scale * image @ everyone(scene, text).T, labels)
        other = F.cross_entropy(scale * text @ everyone(scene, image).T, labels)
        ((one + other) / 2).backward()
        if scene.layout == "dp":
            average_gradients(core)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, step)
