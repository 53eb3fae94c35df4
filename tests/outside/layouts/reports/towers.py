"""A text model with a tower for images that not every rank has; Muon on whole matrices; ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from outside.layouts.third.scene import ROWS, Loop, Scene, begin, generator, share

WIDTH, VOCAB, LENGTH, PIXELS = 16, 24, 6, 20


class Block(nn.Module):
    """A feed-forward over tokens that sees what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x.cumsum(1) / LENGTH))))


class Model(nn.Module):
    """Text, and images in front of some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.vision = nn.Sequential(nn.Linear(PIXELS, 24), nn.Tanh(), nn.Linear(24, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, has_image: Tensor, images: Tensor) -> Tensor:
        x = self.embed(tokens)
        if len(images):
            x = x.index_add(0, has_image.nonzero()[:, 0], self.vision(images)[:, None].expand(-1, LENGTH, -1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal for matrices: of all of a matrix, or of what a rank holds of it."""

    def __init__(self, parameters: Any, lr: float, *, of_shards: bool = False) -> None:
        super().__init__(parameters, {"lr": lr})
        self.of_shards = of_shards

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.5)
                p.sub_(group["lr"] * self.direction(momentum))

    def direction(self, momentum: Any) -> Any:
        """Return the update for one parameter."""
        if momentum.ndim != 2:
            return momentum
        if not isinstance(momentum, DTensor):
            return orthogonal(momentum)
        if self.of_shards:
            made = orthogonal(momentum.to_local())
            return DTensor.from_local(made, momentum.device_mesh, momentum.placements, shape=momentum.shape,
                                      stride=momentum.stride())  # fmt: skip
        whole = DTensor.from_local(orthogonal(momentum.full_tensor()), momentum.device_mesh, run_check=False)
        return whole.redistribute(placements=momentum.placements)


def orthogonal(x: Tensor) -> Tensor:
    """Newton-Schulz, cubic."""
    y = x.float() / (x.float().norm() + 1e-7)
    for _ in range(6):
        y = 1.5 * y - 0.5 * y @ y.T @ y
    return y.to(x.dtype)


class OwnStates(torch.optim.Optimizer):
    """ZeRO-1 by hand: a rank updates every n-th parameter and sends it to the others, at once or when it is needed."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], lr: float, *, later: Callable[[str], bool]) -> None:
        super().__init__([p for _, p in named], {"lr": lr})
        self.named, self.later, self.waiting = named, later, dict[str, tuple[int, nn.Parameter]]()
        own = [p for i, (_, p) in enumerate(named) if i % dist.get_world_size() == dist.get_rank()]
        self.inner = torch.optim.Adam(own, lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()
        for i, (name, p) in enumerate(self.named):
            owner = i % dist.get_world_size()
            if self.later(name):
                self.waiting[name] = owner, p
            else:
                dist.broadcast(p.data, owner)

    def send(self, prefix: str) -> None:
        """Send what waits of a module."""
        for name in [n for n in self.waiting if n.startswith(prefix)]:
            owner, p = self.waiting.pop(name)
            dist.broadcast(p.data, owner)


def make_optimizer(scene: Scene, model: Any) -> Any:
    """The optimizer of a scene."""
    if scene.has("muon"):
        return Muon(model.parameters(), 0.02, of_shards=scene.fault == "orthogonal by shard")
    if scene.layout == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    if scene.has("sgd"):
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if scene.layout != "zero-hand":
        return torch.optim.Adam(model.parameters(), 0.01)
    late = scene.fault == "sent too late"
    optimizer = OwnStates(
        list(model.named_parameters()), 0.01,
        later=lambda name: scene.has("overlapped") or (late and name.startswith("blocks.1.fc1.")),
    )  # fmt: skip
    if scene.has("overlapped"):
        for name, module in model.named_modules():
            if next(module.parameters(False), None) is not None:
                module.register_forward_pre_hook(lambda module, args, name=name: optimizer.send(f"{name}."))
    elif late:
        model.blocks[1].register_forward_hook(lambda module, args, output: optimizer.send("blocks.1.fc1."))
    return optimizer


def train(scene: Scene) -> Loop:
    """Set up the training."""
    core: Any = begin(scene, Model)
    model = core
    if scene.layout in ("ddp", "zero"):
        model = DistributedDataParallel(model, find_unused_parameters=True)
    if scene.layout == "fsdp":
        for block in core.blocks:
            fully_shard(block)
        fully_shard(core)
    optimizer = make_optimizer(scene, core if scene.layout == "zero-hand" else model)

    def step(number: int) -> None:
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator(1700 + number))
        images = torch.randn(ROWS // 2, PIXELS, generator=generator(1800 + number)).to(scene.dtype)
        tokens = share(tokens, scene.rank, scene.world)
        rows = torch.arange(ROWS)
        has_image = rows % 2 == 0 if scene.has("spread images") else rows < ROWS // 2
        own = images[share(has_image.cumsum(0) - 1, scene.rank, scene.world)[share(has_image, scene.rank, scene.world)]]
        found = model(tokens[:, :-1], share(has_image, scene.rank, scene.world), own)
        F.cross_entropy(found.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        if scene.layout in ("hand", "zero-hand"):
            average(scene, core)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, step)


def average(scene: Scene, model: nn.Module) -> None:
    """Average over ranks; one that has no gradient counts as one of zeros."""
    for name, p in model.named_parameters():
        having = torch.tensor(float(p.grad is not None))
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        dist.all_reduce(having)
        few = scene.fault == "mean of ranks with images" and name.startswith("vision.")
        p.grad /= having.item() if few else scene.world
