"""A decoder with a short convolution, phases of positions, ALiBi, norms across heads and smoothed labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from outside.layouts.reports.context import GatherSequence
from outside.layouts.third.mixer import Copy, Sum
from outside.layouts.third.scene import ROWS, Loop, Scene, average_gradients, begin, generator, mesh, share

VOCAB, WIDTH, HEADS, SIZE, LENGTH = 24, 16, 4, 4, 8
PAD, SMOOTHING, START, KERNEL, DECAY = 0, 0.1, 1000, 3, 0.5


class SumOfBoth(torch.autograd.Function):
    """All-reduce, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class ShortConv(nn.Module):
    """A causal convolution of each channel; a context-parallel rank needs the last tokens of the one before."""

    group: Any = None
    forgets = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 1, KERNEL) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.zeros_like(x[:, :1]).expand(-1, KERNEL - 1, -1)
        if self.group is not None and not self.forgets:
            rank, ends = dist.get_rank(self.group), GatherSequence.apply(x[:, 1 - KERNEL :], self.group, 1)
            parts = ends.split(KERNEL - 1, 1)
            before = parts[rank - 1] if rank else parts[0] * 0
        return F.conv1d(torch.cat([before, x], 1).transpose(1, 2), self.weight, groups=WIDTH).transpose(1, 2)


class Phase(nn.Module):
    """Adds what tells positions apart; frequencies are no part of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1.5, WIDTH), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + 0.5 * (positions[:, None].float() * self.frequencies.float()).sin().to(x.dtype)  # type: ignore[operator]


class WideNorm(nn.Module):
    """RMSNorm over the features of all heads, of which a tensor-parallel rank has some."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        squares, count = x.float().square().sum(-1, keepdim=True), x.shape[-1]
        if self.group is not None:
            squares, count = SumOfBoth.apply(squares, self.group), WIDTH
        return (x.float() * (squares / count + 1e-5).rsqrt()).to(x.dtype) * self.weight


class Core(nn.Module):
    """Causal attention with a bias for the distance that each head has its own slope for."""

    group: Any = None
    first = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keys = positions
        if self.group is not None:
            k, v = (GatherSequence.apply(t, self.group, 2) for t in (k, v))
            parts = [torch.empty_like(positions) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(parts, positions.contiguous(), group=self.group)
            keys = torch.cat(parts)
        away = (positions[:, None] - keys[None, :]).float()
        slopes = 2.0 ** -(torch.arange(q.shape[1]) + self.first + 1.0)
        scores = (q @ k.transpose(-1, -2)).float() / SIZE**0.5 - slopes[:, None, None] * away
        return scores.masked_fill(away < 0, -1e9).softmax(-1).to(v.dtype) @ v


class Attention(nn.Module):
    """Heads may lie on tensor-parallel ranks."""

    tensor: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm, self.k_norm, self.core = WideNorm(), WideNorm(), Core()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        own = x if self.tensor is None else Copy.apply(x, self.tensor)
        q, k, v = (
            t.unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for t in (self.q_norm(self.q(own)), self.k_norm(self.k(own)), self.v(own))
        )
        y = self.out(self.core(q, k, v, positions).transpose(1, 2).flatten(2))
        return y if self.tensor is None else Sum.apply(y, self.tensor)


class Layer(nn.Module):
    """Convolution, attention, feed-forward."""

    tensor: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.conv, self.phase, self.attn = nn.LayerNorm(WIDTH), ShortConv(), Phase(), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attn(self.phase(self.conv(self.norm1(x)), positions), positions)
        h = self.norm2(x)
        if self.tensor is None:
            return x + self.down(F.gelu(self.up(h)))
        return x + Sum.apply(self.down(F.gelu(self.up(Copy.apply(h, self.tensor)))), self.tensor)


class VocabularyEmbedding(nn.Embedding):
    """A tensor-parallel rank has some of the rows; the row of padding is not trained."""

    tensor: Any = None
    first = 0
    trains_padding = False

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tensor is None:
            return F.embedding(tokens, self.weight, padding_idx=PAD)
        own = (tokens >= self.first) & (tokens < self.first + len(self.weight))
        padding = PAD - self.first if 0 <= PAD - self.first < len(self.weight) and not self.trains_padding else None
        found = F.embedding((tokens - self.first) * own, self.weight)
        if padding is not None:
            found = torch.where((tokens == PAD)[..., None], found.detach(), found)
        return Sum.apply(found * own[..., None], self.tensor)


class Model(nn.Module):
    """Gives logits, of this rank's part of the vocabulary."""

    tensor: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabularyEmbedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        x = self.norm(x)
        return self.head(x if self.tensor is None else Copy.apply(x, self.tensor))


def cut(scene: Scene, model: Model, group: Any) -> None:
    """Lay heads, features and vocabulary over tensor-parallel ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def part(owner: nn.Module, name: str, dim: int) -> None:
        setattr(owner, name, nn.Parameter(getattr(owner, name).data.chunk(size, dim)[rank].clone()))

    model.tensor = model.embed.tensor = group
    for owner in (model.embed, model.head):
        part(owner, "weight", 0)
    model.embed.first = rank * len(model.embed.weight)
    model.embed.trains_padding = scene.fault == "padding trained"
    for layer in model.layers:
        attn: Any = layer.attn
        layer.tensor = attn.tensor = group
        for owner in (attn.q, attn.k, attn.v, attn.q_norm, attn.k_norm, layer.up):
            part(owner, "weight", 0)
        part(layer.up, "bias", 0)
        for owner in (attn.out, layer.down):
            part(owner, "weight", 1)
        attn.core.first = 0 if scene.fault == "slopes by own heads" else rank * HEADS // size
        for norm in (attn.q_norm, attn.k_norm):
            norm.group = None if scene.fault == "norm of own heads" else group


def smoothed(scene: Scene, logits: Tensor, labels: Tensor, group: Any) -> Tensor:
    """Cross-entropy of each token with smoothed labels; with a group, over ranks' parts of the vocabulary."""
    if group is None:
        return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING, reduction="none")
    most = logits.detach().amax(-1)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    z, first = logits - most[:, None], dist.get_rank(group) * logits.shape[-1]
    own = (labels >= first) & (labels < first + logits.shape[-1])
    right = z.gather(-1, ((labels - first) * own)[:, None])[:, 0] * own
    mean = z.mean(-1) if scene.fault == "smoothed over own part" else Sum.apply(z.sum(-1), group) / VOCAB
    return Sum.apply(z.exp().sum(-1), group).log() - (1 - SMOOTHING) * Sum.apply(right, group) - SMOOTHING * mean


def make_optimizer(scene: Scene, model: nn.Module) -> Any:
    """Norms are not decayed."""
    if not scene.has("decay"):
        adam = scene.has("adamw")
        return torch.optim.AdamW(model.parameters(), 0.01) if adam else torch.optim.SGD(model.parameters(), 0.1, 0.9)
    named = list(model.named_parameters())
    norms = [p for name, p in named if "norm" in name]
    rest = [p for name, p in named if "norm" not in name]
    of_norms = DECAY if scene.fault == "norms decayed" else 0.0
    groups = [{"params": rest, "weight_decay": DECAY}, {"params": norms, "weight_decay": of_norms}]
    return torch.optim.AdamW(groups, 0.01)


def train(scene: Scene) -> Loop:
    """Set up the training."""
    core: Any = begin(scene, Model)
    model, group, layout = core, None, scene.layout
    for layer in core.layers:
        layer.phase.frequencies = layer.phase.frequencies.float()
    if layout in ("tp", "cp"):
        group = mesh((layout, scene.world)).get_group()
    if layout == "tp":
        cut(scene, core, group)
    for layer in core.layers if layout == "cp" else ():
        layer.conv.group = layer.attn.core.group = group
        layer.conv.forgets = scene.fault == "halo forgotten"
    for layer in core.layers if scene.fault == "frequencies lost" else ():
        layer.phase.frequencies.zero_()  # as memory that to_empty() has made
    if layout == "fsdp":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if scene.has("mixed") else MixedPrecisionPolicy()
        for layer in core.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(core, mp_policy=policy)
    if layout == "ddp":
        model = DistributedDataParallel(core)
    optimizer = make_optimizer(scene, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n) if scene.has("schedule") else None

    def step(number: int) -> None:
        tokens = torch.randint(0, VOCAB, (ROWS - scene.has("uneven"), LENGTH + 1), generator=generator(2100 + number))
        positions = torch.arange(START, START + LENGTH)
        x, y = tokens[:, :-1], tokens[:, 1:].clone()
        if layout in ("dp", "ddp", "fsdp"):
            x, y = share(x, scene.rank, scene.world), share(y, scene.rank, scene.world)
        if layout == "cp":
            x, y, positions = (t.chunk(scene.world, -1)[scene.rank] for t in (x, y, positions))
            if scene.fault == "labels shifted by rank":
                y = torch.cat([x[:, 1:], torch.full_like(x[:, :1], -100)], 1)
        if scene.fault == "positions cast":
            positions = positions.float()
        losses = smoothed(scene, model(x, positions).flatten(0, 1).float(), y.flatten(), core.tensor)
        parts = scene.world if layout in ("dp", "ddp", "fsdp") else 1
        count = len(tokens) * LENGTH / parts if scene.has("uneven") else (y != -100).sum()
        (losses.sum() / count).backward()
        if layout in ("dp", "cp"):
            average_gradients(core)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(scene.world if scene.fault == "rate stepped by ranks" else 1):
            if scheduler is not None:
                scheduler.step()

    return Loop(model, step)
