"""What every training of this set is told, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

ROWS = 8


@dataclass(frozen=True)
class Scene:
    """One training: a model in a layout, perhaps with a fault. With layout `one` it is the reference."""

    model: str
    layout: str = "one"
    world: int = 1
    dtype: Any = torch.float32
    options: tuple[str, ...] = ()
    fault: str = ""
    steps: int = 3
    seed: int = 0

    @property
    def rank(self) -> int:
        """This process among those of the layout."""
        return dist.get_rank() if self.world > 1 else 0

    def has(self, option: str) -> bool:
        """Whether an option is set."""
        return option in self.options


class Loop(NamedTuple):
    """What a training gives: what is watched, and what does a step."""

    watched: Any
    step: Callable[[int], None]


def mesh(*sides: tuple[str, int]) -> Any:
    """A mesh of all ranks."""
    return init_device_mesh("cpu", tuple(n for _, n in sides), mesh_dim_names=tuple(name for name, _ in sides))


def generator(number: int) -> torch.Generator:
    """Random numbers that every process draws alike."""
    return torch.Generator().manual_seed(number)


def share(x: Tensor, part: int, parts: int) -> Tensor:
    """A process's rows, in blocks."""
    return x.chunk(parts)[part]


def average_gradients(model: nn.Module, group: Any = None, skip: Callable[[str], bool] = lambda name: False) -> None:
    """What DistributedDataParallel does, by hand and in one go."""
    gradients = [p.grad for name, p in model.named_parameters() if p.grad is not None and not skip(name)]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def begin(scene: Scene, make: Callable[[], nn.Module]) -> nn.Module:
    """The model with the same parameters in every process."""
    torch.manual_seed(scene.seed)
    return make().to(scene.dtype)
