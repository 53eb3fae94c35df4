"""A mixture of experts: experts spread over ranks, a router that every rank has, sequence-parallel by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from outside.layouts.third.mixer import Copy, Sum
from outside.layouts.third.scene import ROWS, Loop, Scene, average_gradients, begin, generator, mesh, share

WIDTH, EXPERTS, LENGTH, VOCAB = 12, 4, 6, 20


class Scatter(torch.autograd.Function):
    """A rank's part of the sequence; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _gathered(g, ctx.group), None


class Gather(torch.autograd.Function):
    """The whole sequence; backward takes this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)].contiguous(), None


def _gathered(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


class Expert(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 16, bias=False), nn.Linear(WIDTH, 16, bias=False)
        self.w2 = nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    """Every token goes to its two best experts; `group` holds whole experts on each rank."""

    group: Any = None

    def __init__(self, top: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})
        self.top, self.jitter = top, 0.0

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        if self.jitter:
            logits = logits + self.jitter * torch.rand(logits.shape, generator=generator(1)).to(x.dtype)
        best = logits.topk(self.top, -1).indices
        weights = torch.zeros_like(logits).scatter(-1, best, 1.0) * logits.softmax(-1)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.group is not None:
            x, weights = Copy.apply(x, self.group), Copy.apply(weights, self.group)
        y = sum(weights[..., int(i), None] * expert(x) for i, expert in self.experts.items())
        return y if self.group is None else Sum.apply(y, self.group)


class Layer(nn.Module):
    """A recurrent mixing of tokens, and experts."""

    sequence: Any = None

    def __init__(self, top: int) -> None:
        super().__init__()
        self.mix_norm, self.mix = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe_norm, self.moe = nn.RMSNorm(WIDTH), SparseMoE(top)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix_norm(x)
        x = x + F.silu(self.mix(h.cumsum(1) / torch.arange(1, h.shape[1] + 1).to(h.dtype)[:, None]))
        if self.sequence is None:
            return x + self.moe(self.moe_norm(x))
        part = Scatter.apply(x, self.sequence)
        return x + Gather.apply(self.moe(self.moe_norm(part)), self.sequence)


class MoE(nn.Module):
    """A language model."""

    def __init__(self, top: int = EXPERTS) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(top) for _ in range(2))
        self.final_norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.final_norm(x))


def train(scene: Scene) -> Loop:
    """Set up the training. Layouts: `ep` spreads experts, `sp` the sequence, `dp` the batch; `dp-ep` two of them."""
    model: Any = begin(scene, lambda: MoE(2 if scene.has("top2") else EXPERTS))
    dp = scene.world if scene.layout == "dp" else 2 if scene.layout == "dp-ep" else 1
    grid = mesh(("dp", dp), ("ep", scene.world // dp)) if scene.world > 1 else None
    replicas, group = (None, None) if grid is None else (grid["dp"].get_group(), grid["ep"].get_group())
    data_rank = 0 if grid is None else grid["dp"].get_local_rank()
    if scene.layout in ("ep", "dp-ep"):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        own = set(range(EXPERTS)[rank * EXPERTS // size : (rank + 1) * EXPERTS // size])
        for layer in model.layers:
            layer.moe.group = group
            for i in range(EXPERTS):
                if i not in own:
                    del layer.moe.experts[str(i)]
    if scene.layout == "sp":
        for layer in model.layers:
            layer.sequence = group
    if scene.fault == "jitter" and scene.rank == 1:
        model.layers[1].moe.jitter = 0.05
    optimizer = torch.optim.AdamW(model.parameters(), 0.01) if scene.has("adamw") else torch.optim.SGD(
        model.parameters(), 0.2)  # fmt: skip

    def step(number: int) -> None:
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator(400 + number))
        tokens = share(tokens, data_rank, dp)
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if scene.layout == "sp":
            for name, p in model.named_parameters():
                forgotten = (scene.fault == "gate not reduced" and "gate" in name) or (
                    scene.fault == "norm not reduced" and "layers.1.moe_norm" in name
                )
                if ".moe" in name and not forgotten:
                    dist.all_reduce(p.grad, group=group)
        if dp > 1:
            skip = (lambda name: ".experts." in name) if scene.fault == "experts not averaged" else lambda name: False
            average_gradients(model, replicas, skip)
        optimizer.step()
        if scene.fault == "expert skipped" and number == 1 and scene.rank == 0:
            model.layers[0].moe.experts["1"].w2.weight.data.mul_(1.001)
        optimizer.zero_grad()

    return Loop(model, step)
