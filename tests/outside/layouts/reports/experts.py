"""Experts spread over data-parallel ranks, which exchange tokens; a bias that balances them without a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from outside.layouts.reports.context import GatherSequence
from outside.layouts.third.moe import EXPERTS, LENGTH, WIDTH, Expert
from outside.layouts.third.scene import ROWS, Loop, Scene, average_gradients, begin, generator, mesh, share

VOCAB = 24


class Return(torch.autograd.Function):
    """The sum of what ranks computed for all tokens; a rank keeps its own. Backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        parts = [
            torch.empty_like(g, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(ctx.group))
        ]
        dist.all_gather(parts, g.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Router(nn.Module):
    """Weights of the two best experts; the bias counts for the choice and not for the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS))
        self.register_buffer("counted", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        scores = logits.float().sigmoid()
        best = (scores.detach() + self.expert_bias).topk(2, -1).indices
        chosen = torch.zeros_like(scores).scatter(-1, best, 1.0)
        with torch.no_grad():
            self.counted += chosen.sum(0)
        return (chosen * scores).to(x.dtype), logits.float().logsumexp(-1).square().mean()


class MoE(nn.Module):
    """Routed experts and one that all tokens go to."""

    group: Any = None
    detached = False

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = Router(), Expert()
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        weights, z = self.router(flat)
        tokens = flat
        if self.group is not None:
            tokens = GatherSequence.apply(flat, self.group, 0)
            weights = GatherSequence.apply(weights.detach() if self.detached else weights, self.group, 0)
        y = torch.zeros_like(tokens)
        for name, expert in self.experts.items():
            own = weights[:, int(name)].nonzero()[:, 0]
            y = y.index_add(0, own, expert(tokens[own]) * weights[own, int(name), None])
        if self.group is not None:
            y = Return.apply(y, self.group)
        return (y + self.shared(flat)).view_as(x), z


class Layer(nn.Module):
    """A mixing of tokens, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mix, self.norm2, self.moe = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            MoE(),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + F.silu(self.mix(self.norm1(x).cumsum(1) / LENGTH))
        y, z = self.moe(self.norm2(x))
        return x + y, z


class Model(nn.Module):
    """A language model; gives logits and the mean of the routers' z-loss."""

    recomputed = False

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.tok(tokens), torch.zeros(())
        for layer in self.layers:
            x, z = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
            total = total + z
        return self.output(self.norm(x)), total


def train(scene: Scene) -> Loop:
    """Set up the training. Layouts: `dp` copies experts, `ep` spreads them over the same ranks, `ep-dp` does both."""
    model: Any = begin(scene, Model)
    for layer in model.layers:
        layer.moe.router.float()
        layer.moe.router.gate.to(scene.dtype)
    ep = {"ep": scene.world, "ep-dp": 2}.get(scene.layout, 1)
    group = replicas = None
    if scene.world > 1:
        grid = mesh(("dp", scene.world // ep), ("ep", ep))
        group, replicas = grid["ep"].get_group(), grid["dp"].get_group()
    if ep > 1:
        rank = dist.get_rank(group)
        own = range(rank * EXPERTS // ep, (rank + 1) * EXPERTS // ep)
        for layer in model.layers:
            layer.moe.group, layer.moe.detached = group, scene.fault == "weights gathered without gradient"
            for i in set(range(EXPERTS)) - set(own):
                del layer.moe.experts[str(i)]
    model.recomputed = scene.has("recomputed")
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    if scene.has("adamw"):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(number: int) -> None:
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator(1500 + number))
        tokens = share(tokens, scene.rank, scene.world)
        logits, z = model(tokens[:, :-1])
        weight = 0.05 * (scene.world if scene.fault == "balance added over ranks" else 1)
        (F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) + weight * z).backward()
        if scene.world > 1:
            reduce(scene, model, replicas, ep)
        if scene.has("clip"):
            clip(scene, model, group)
        optimizer.step()
        optimizer.zero_grad()
        balance(scene, model)

    return Loop(model, step)


def reduce(scene: Scene, model: nn.Module, replicas: Any, ep: int) -> None:
    """Average over all ranks; experts have seen the tokens of `ep` ranks already, whose losses are means."""
    average_gradients(model, skip=lambda name: ".experts." in name and ep > 1)
    if ep == 1:
        return
    average_gradients(model, replicas, skip=lambda name: ".experts." not in name)
    for name, p in model.named_parameters():
        if ".experts." in name and p.grad is not None and scene.fault != "experts not scaled":
            p.grad /= ep


def clip(scene: Scene, model: nn.Module, group: Any) -> None:
    """By the norm of all gradients; that of experts is summed over the ranks that hold them."""
    if scene.layout != "ep":
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        return
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    dense, of_experts = (
        torch.stack([p.grad.float().square().sum() for name, p in named if (".experts." in name) == routed]).sum()  # type: ignore[union-attr]
        for routed in (False, True)
    )
    if scene.fault != "norm without other experts":
        dist.all_reduce(of_experts, group=group)
    factor = torch.clamp(0.3 / ((dense + of_experts).sqrt() + 1e-6), max=1.0)
    for _, p in named:
        p.grad.mul_(factor)  # type: ignore[union-attr]


@torch.no_grad()
def balance(scene: Scene, model: Any) -> None:
    """Raise the bias of experts that had few tokens."""
    for layer in model.layers:
        router = layer.moe.router
        counts = router.counted.clone()
        if scene.world > 1 and scene.fault != "balanced by own tokens":
            dist.all_reduce(counts)
        if scene.has("recomputed") and scene.world > 1 and scene.fault != "counted twice":
            counts /= 2  # the second forward pass has counted again
        router.tokens_per_expert += counts
        router.expert_bias += 0.02 * (counts.mean() - counts).sign()
        router.counted.zero_()
