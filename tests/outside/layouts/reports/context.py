"""A decoder whose sequence is cut over ranks (context parallel, Ulysses), or whose heads and vocabulary are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from outside.layouts.third.mixer import Copy, Sum
from outside.layouts.third.scene import ROWS, Loop, Scene, average_gradients, begin, generator, mesh, share

VOCAB, WIDTH, HEADS, SIZE, LENGTH = 32, 16, 4, 4, 8


class GatherSequence(torch.autograd.Function):
    """All ranks' parts, one behind the other; backward sums what ranks send back and takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None


class Exchange(torch.autograd.Function):
    """All-to-all: gather along one dimension, keep this rank's part of another. Backward is the inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, gather: int, split: int) -> Tensor:
        ctx.group, ctx.gather, ctx.split = group, gather, split
        return _exchanged(x, group, gather, split)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _exchanged(g, ctx.group, ctx.split, ctx.gather), None, None, None


def _exchanged(x: Tensor, group: Any, gather: int, split: int) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    mine = [part.chunk(len(parts), split)[dist.get_rank(group)] for part in parts]
    return torch.cat(mine, gather).contiguous()


class Rope(nn.Module):
    """Rotates queries and keys by their positions, of which a context-parallel rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.index = torch.arange(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        angle = self.index[:, None].float() * torch.tensor([1.0, 0.1])
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Core(nn.Module):
    """Attention within documents; `how` says what ranks that have parts of the sequence do about it."""

    def __init__(self) -> None:
        super().__init__()
        self.how, self.group, self.index, self.sees_documents = "", None, torch.arange(LENGTH), True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, docs: Tensor) -> Tensor:
        keys, of_keys, own, of_own = self.index, docs, self.index, docs
        if self.how == "gather":
            k, v = (GatherSequence.apply(t, self.group, 2) for t in (k, v))
        if self.how == "exchange":
            q, k, v = (Exchange.apply(t, self.group, 2, 1) for t in (q, k, v))
        if self.how:
            keys, of_keys = _all(self.index, self.group, 0), _all(docs, self.group, 1)
        if self.how == "exchange":
            own, of_own = keys, of_keys
        seen = own[:, None] >= keys[None, :]
        if self.sees_documents:
            seen = seen & (of_own[:, :, None] == of_keys[:, None, :])
        seen = seen.expand(len(docs), -1, -1)[:, None]
        out = ((q @ k.transpose(-1, -2)).float() / SIZE**0.5).masked_fill(~seen, -1e9).softmax(-1).to(v.dtype) @ v
        return Exchange.apply(out, self.group, 1, 2) if self.how == "exchange" else out


def _all(x: Tensor, group: Any, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


class Attention(nn.Module):
    """One head of keys and values for all queries, and a norm of each head."""

    tensor: Any = None
    summed_by = "value"

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, (2 if shared else 2 * HEADS) * SIZE)
        self.q_norm, self.k_norm, self.rope, self.core = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE), Rope(), Core()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, docs: Tensor) -> Tensor:
        own = x if self.tensor is None else Copy.apply(x, self.tensor)
        if self.tensor is not None and self.summed_by == "value":
            q, kv = self.q(own), Copy.apply(self.kv(x), self.tensor)
        else:
            q, kv = self.q(own), self.kv(own)
        k, v = kv.chunk(2, -1)
        q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in (q, k, v))
        k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
        y = self.core(self.rope(self.q_norm(q)), self.rope(self.k_norm(k)), v, docs).transpose(1, 2).flatten(2)
        y = self.out(y)
        return y if self.tensor is None else Sum.apply(y, self.tensor)


class Layer(nn.Module):
    """Attention and a feed-forward."""

    tensor: Any = None

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.RMSNorm(WIDTH), Attention(shared), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, x: Tensor, docs: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), docs)
        h = self.norm2(x)
        if self.tensor is None:
            return x + self.down(F.silu(self.up(h)))
        return x + Sum.apply(self.down(F.silu(self.up(Copy.apply(h, self.tensor)))), self.tensor)


class CutEmbedding(nn.Embedding):
    """A rank's part of the vocabulary."""

    group: Any = None
    first = 0
    beyond = 0  # how many tokens more a rank takes for its own

    def forward(self, tokens: Tensor) -> Tensor:
        own = (tokens >= self.first) & (tokens < self.first + self.weight.shape[0] + self.beyond)
        at = (tokens - self.first).clamp(0, self.weight.shape[0] - 1)
        return Sum.apply(F.embedding(at, self.weight) * own[..., None].to(self.weight.dtype), self.group)


class CutHead(nn.Linear):
    """Logits of a rank's part of the vocabulary."""

    group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Copy.apply(x, self.group), self.weight)


class Next(nn.Module):
    """Predicts the token after the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.proj(self.norm(x))))


class Decoder(nn.Module):
    """Two layers, a head, and perhaps one for the token after the next."""

    def __init__(self, shared: bool, ahead: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(shared) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.mtp = Next() if ahead else None

    def forward(self, tokens: Tensor, docs: Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, docs)
        logits = self.head(self.norm(x))
        return logits if self.mtp is None else (logits, self.mtp(x))


def places(layout: str, rank: int, ranks: int) -> Tensor:
    """Return which tokens a rank has: a block, or a block of the first half and its mirror image of the second."""
    index = torch.arange(LENGTH)
    if layout != "zigzag":
        return index.chunk(ranks)[rank]
    parts = index.chunk(2 * ranks)
    return torch.cat([parts[rank], parts[-1 - rank]])


def spread_sequence(scene: Scene, model: Decoder, group: Any) -> Tensor:
    """Tell layers which part of the sequence a rank has; return which."""
    index = places(scene.layout, dist.get_rank(group), dist.get_world_size(group))
    for module in model.modules():
        if isinstance(module, Rope):
            module.index = index
            if scene.fault == "positions in blocks":
                module.index = places("cp", dist.get_rank(group), dist.get_world_size(group))
        if isinstance(module, Core):
            module.how, module.group = "exchange" if scene.layout == "ulysses" else "gather", group
            module.index, module.sees_documents = index, scene.fault != "documents not seen"
    return index


def cut_tensors(scene: Scene, model: Decoder, group: Any) -> None:
    """Cut heads, the feed-forward and the vocabulary over tensor-parallel ranks; keys and values stay whole."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def cut(module: Any, dim: int) -> None:
        module.weight = nn.Parameter(module.weight.data.chunk(ranks, dim)[rank].clone())

    for layer in model.layers:
        layer.tensor = layer.attn.tensor = group
        by_parameter = scene.has("reduced by parameter") or scene.fault == "keys and values not reduced"
        layer.attn.summed_by = "parameter" if by_parameter else "value"
        for module, dim in ((layer.attn.q, 0), (layer.attn.out, 1), (layer.up, 0), (layer.down, 1)):
            cut(module, dim)
    cut(model.embed, 0)
    cut(model.head, 0)
    model.embed.__class__, model.head.__class__ = CutEmbedding, CutHead
    model.embed.group = model.head.group = group  # type: ignore[assignment]
    model.embed.first = rank * VOCAB // ranks  # type: ignore[assignment]
    model.embed.beyond = 1 if scene.fault == "border token twice" else 0  # type: ignore[assignment]


class CutCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits whose vocabulary is cut over ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Any) -> Tensor:
        top = logits.float().amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        powers = (logits.float() - top[:, None]).exp()
        total = powers.sum(-1)
        own = (targets >= first) & (targets < first + logits.shape[-1])
        at = (targets - first).clamp(0, logits.shape[-1] - 1)
        picked = (logits.float().gather(-1, at[:, None])[:, 0] - top) * own
        dist.all_reduce(total, group=group)
        dist.all_reduce(picked, group=group)
        ctx.save_for_backward(powers / total[:, None], at, own)
        ctx.dtype = logits.dtype
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        shares, at, own = ctx.saved_tensors
        shares = shares.scatter_add(-1, at[:, None], -own.float()[:, None])
        return (shares * g / len(at)).to(ctx.dtype), None, None, None


def train(scene: Scene) -> Loop:
    """Set up the training: `cp`, `zigzag` and `ulysses` cut the sequence, `dp-cp` the batch too, `tp` the layers."""
    model: Any = begin(scene, lambda: Decoder(scene.has("shared keys"), scene.has("ahead")))
    dp = 2 if scene.layout == "dp-cp" else 1
    grid = mesh(("dp", dp), ("cp", scene.world // dp)) if scene.world > 1 else None
    group = None if grid is None else grid["cp"].get_group()
    data_rank = 0 if grid is None else grid["dp"].get_local_rank()
    index, first = torch.arange(LENGTH), 0
    if scene.layout in ("cp", "zigzag", "ulysses", "dp-cp"):
        index = spread_sequence(scene, model, group)
    if scene.layout == "tp":
        cut_tensors(scene, model, group)
        first = int(model.embed.first)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if scene.has("adamw"):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        if scene.layout != "tp":
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        if scene.fault == "gathered logits":  # each rank takes all of the vocabulary for its own part
            whole = GatherSequence.apply(logits, group, -1)
            return CutCrossEntropy.apply(whole.flatten(0, 1), targets.flatten(), 0, group)
        return CutCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), first, group)

    def step(number: int) -> None:
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 2), generator=generator(1300 + number))
        tokens[:, 2] = VOCAB // 2
        starts = torch.randint(2, LENGTH - 1, (ROWS, 1), generator=generator(1400 + number))
        docs = (torch.arange(LENGTH) >= starts).long()
        tokens, docs = share(tokens, data_rank, dp), share(docs, data_rank, dp)
        found = model(tokens[:, index], docs[:, index])
        logits = found[0] if scene.has("ahead") else found
        loss = loss_of(logits, tokens[:, index + 1])
        if scene.has("ahead"):
            weight = 0.3 / (scene.world if scene.fault == "second loss divided by ranks" else 1)
            loss = loss + weight * F.cross_entropy(found[1].flatten(0, 1).float(), tokens[:, index + 2].flatten())
        loss.backward()
        reduce(scene, model, group)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, step)


def reduce(scene: Scene, model: Decoder, group: Any) -> None:
    """What ranks do to gradients."""
    if scene.world == 1 or scene.fault == "sequence ranks not reduced":
        return
    if scene.layout != "tp":
        average_gradients(model)
        return
    for name, p in model.named_parameters():
        of_heads = ".q_norm." in name or ".k_norm." in name
        by_parameter = ".kv." in name and scene.has("reduced by parameter")
        if (of_heads and scene.fault != "norms of heads not reduced") or by_parameter:
            dist.all_reduce(p.grad, group=group)
