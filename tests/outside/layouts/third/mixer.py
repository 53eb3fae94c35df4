"""An MLP-Mixer over tensor-parallel ranks: by parallelize_module or by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from outside.layouts.third.scene import ROWS, Loop, Scene, average_gradients, begin, generator, mesh, share

TOKENS, CHANNELS, HIDDEN, DEPTH, OUT = 8, 16, 32, 2, 5


class Sum(torch.autograd.Function):
    """All-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class Copy(torch.autograd.Function):
    """Nothing forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class MaskedDropout(nn.Module):
    """Dropout whose mask belongs to the whole hidden layer; a tensor-parallel rank takes its columns."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.part, self.parts, self.calls = seed, 0, 1, 0

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(HIDDEN, generator=generator(self.seed)) < 0.8
        return x * mask.chunk(self.parts)[self.part].to(x.dtype) / 0.8


class FeedForward(nn.Module):
    """Two layers; `group` is set where they are cut by hand."""

    group: Any = None
    forgets_backward = False

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.fc1, self.act = nn.Linear(width, HIDDEN), nn.GELU()
        self.drop, self.fc2 = MaskedDropout(seed), nn.Linear(HIDDEN, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return self.fc2(self.drop(self.act(self.fc1(x))))
        if not self.forgets_backward:
            x = Copy.apply(x, self.group)
        h = self.drop(self.act(self.fc1(x)))
        return Sum.apply(F.linear(h, self.fc2.weight), self.group) + self.fc2.bias


class MixerBlock(nn.Module):
    """Tokens are mixed, then channels."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm1, self.token_mix = nn.LayerNorm(CHANNELS), FeedForward(TOKENS, 10 + number)
        self.norm2, self.channel_mix = nn.LayerNorm(CHANNELS), FeedForward(CHANNELS, 20 + number)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class Mixer(nn.Module):
    """Stem, blocks, norm, pooling, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, CHANNELS)
        self.blocks = nn.Sequential(*(MixerBlock(i) for i in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x))).mean(1))


def plan() -> dict[str, Any]:
    """For parallelize_module."""
    known: dict[str, Any] = {}
    for i in range(DEPTH):
        for mix in ("token_mix", "channel_mix"):
            known[f"blocks.{i}.{mix}.fc1"] = ColwiseParallel()
            known[f"blocks.{i}.{mix}.fc2"] = RowwiseParallel()
    return known


def cut_by_hand(scene: Scene, model: Mixer, group: Any) -> None:
    """Cut the two layers of every mix."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for name, module in model.named_modules():
        if isinstance(module, FeedForward):
            module.group = group
            w1, w2 = module.fc1.weight.data, module.fc2.weight.data
            if scene.fault == "wrong dimension" and name == "blocks.1.channel_mix":
                w1 = w1.reshape(size, -1, w1.shape[1]).transpose(0, 1).reshape(w1.shape)  # interleaved, not in blocks
            module.fc1.weight = nn.Parameter(w1.chunk(size, 0)[rank].clone())
            module.fc1.bias = nn.Parameter(module.fc1.bias.data.chunk(size)[rank].clone())
            module.fc2.weight = nn.Parameter(w2.chunk(size, 1)[rank].clone())
            module.drop.parts, module.drop.part = size, rank
            if scene.fault == "bias on every rank" and name == "blocks.0.token_mix":
                module.fc2.bias.data.mul_(size)
            if scene.fault == "copy forgotten" and name == "blocks.0.channel_mix":
                module.forgets_backward = True


def train(scene: Scene) -> Loop:
    """Set up the training."""
    model: Any = begin(scene, Mixer)
    dp, tp = 1, 1
    data_rank, group, replicas = 0, None, None
    if scene.layout in ("tp", "tp-hand"):
        tp = scene.world
    elif scene.layout in ("ddp-tp", "fsdp-tp", "dp-tp-hand"):
        dp, tp = scene.world // 2, 2
    if scene.world > 1:
        grid = mesh(("dp", dp), ("tp", tp)) if dp > 1 else mesh(("tp", tp))
        data_rank = grid["dp"].get_local_rank() if dp > 1 else 0
        group = grid["tp"].get_group()
        replicas = grid["dp"].get_group() if dp > 1 else None
        if scene.layout.endswith("hand"):
            cut_by_hand(scene, model, group)
        else:
            model = parallelize_module(model, grid["tp"], plan())
            for module in model.modules():
                if isinstance(module, MaskedDropout):
                    module.parts, module.part = tp, grid["tp"].get_local_rank()
        if scene.fault == "same mask":
            for block in model.blocks:
                block.channel_mix.drop.part = 0
        if scene.layout == "ddp-tp":
            _pre_dp_module_transform(model)
            model = DistributedDataParallel(model, process_group=replicas)
        if scene.layout == "fsdp-tp":
            for block in model.blocks:
                fully_shard(block, mesh=grid["dp"])
            fully_shard(model, mesh=grid["dp"])
    optimizer = (
        torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
        if scene.has("adamw")
        else torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=False)
    )

    def step(number: int) -> None:
        x = torch.randn(ROWS, TOKENS, 6, generator=generator(200 + number)).to(scene.dtype)
        y = torch.randn(ROWS, OUT, generator=generator(300 + number)).to(scene.dtype)
        if scene.layout == "dp-tp-hand" and scene.fault == "rows by global rank" and number == 1:
            x, y = share(x, scene.rank, scene.world), share(y, scene.rank, scene.world)
        else:
            x, y = share(x, data_rank, dp), share(y, data_rank, dp)
        F.mse_loss(model(x).float(), y.float()).backward()
        if scene.layout == "dp-tp-hand":
            wrong = scene.fault == "norms over all ranks"
            average_gradients(model, replicas)
            for name, p in model.named_parameters():
                if wrong and "norm1" in name:
                    p.grad *= 0.5
        if scene.has("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, step)
