"""A small transformer that can be cut over tensor-parallel ranks by hand, as Megatron does, or by PyTorch's DTensor."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HIDDEN, HEADS, LENGTH, BLOCKS = 32, 16, 32, 4, 8, 2


class _Region(torch.autograd.Function):
    """An operation forward and another backward over a group, as at the borders of Megatron's parallel regions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, ahead: str, back: str) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.back = group, back
        return _communicate(x, group, ahead)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _communicate(gradient, ctx.group, ctx.back), None, None, None


def _communicate(x: Tensor, group: Any, how: str) -> Tensor:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if how == "sum":
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x
    if how == "gather":
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)
    if how == "sum and split":
        return _communicate(x, group, "sum").chunk(size, 1)[rank].contiguous()
    if how == "split":
        return x.chunk(size, 1)[rank].contiguous()
    return x


def region(x: Tensor, group: Any, ahead: str, back: str) -> Tensor:
    """Communicate `ahead` in forward and `back` in backward; without a group nothing is done."""
    result: Tensor = x if group is None else _Region.apply(x, group, ahead, back)  # type: ignore[no-untyped-call]
    return result


@dataclass
class TensorGroup:
    """The ranks over which layers are cut by hand, and whether the sequence is cut between them."""

    group: Any
    sequence: bool = False

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many ranks share a layer."""
        return dist.get_world_size(self.group)


class Columns(nn.Linear):
    """A linear layer of which each rank has some outputs."""

    over: TensorGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Backward sums the gradients of the input over ranks."""
        if self.over is not None:
            ahead, back = ("gather", "sum and split") if self.over.sequence else ("", "sum")
            x = region(x, self.over.group, ahead, back)
        return functional.linear(x, self.weight, self.bias)


class Rows(nn.Linear):
    """A linear layer of which each rank has some inputs; the bias is added once, after the sum."""

    over: TensorGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        if self.over is None:
            return functional.linear(x, self.weight, self.bias)
        ahead, back = ("sum and split", "gather") if self.over.sequence else ("sum", "")
        return region(functional.linear(x, self.weight), self.over.group, ahead, back) + self.bias


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (Columns(WIDTH, WIDTH) for _ in range(3))
        self.out = Rows(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """As many heads as this rank has."""
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        seen = torch.softmax(scores.masked_fill(mask, -1e4), -1) @ v
        result: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return result


class Dropout(nn.Module):
    """Dropout whose mask does not depend on how the features are cut: a rank takes its part of the whole mask."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.part = 0

    def forward(self, x: Tensor) -> Tensor:
        """The same mask in every step, so that steps can be recomputed."""
        generator = torch.Generator().manual_seed(self.seed)
        mask = torch.rand(HIDDEN, generator=generator) > 0.25
        size = HIDDEN // x.shape[-1]
        return x * mask.chunk(size)[self.part if size > 1 else 0].to(x.dtype)


class Mlp(nn.Module):
    """Up, ReLU-like, down."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up, self.act, self.drop, self.down = Columns(WIDTH, HIDDEN), nn.GELU(), Dropout(seed), Rows(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """As named."""
        result: Tensor = self.down(self.drop(self.act(self.up(x))))
        return result


class Positions(nn.Module):
    """Adds where in the sequence a token is; a rank that has a part of the sequence begins at `offset`."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = 0

    def forward(self, x: Tensor) -> Tensor:
        """A wave for each feature."""
        at = torch.arange(self.offset, self.offset + x.shape[1])[:, None] / (1 + torch.arange(WIDTH))
        return x + 0.3 * torch.sin(at).to(x.dtype)


class BatchNorm(nn.Module):
    """Normalises features over the batch, of all ranks of `group` when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Mean and variance are averaged over ranks."""
        share = 1 if self.group is None else dist.get_world_size(self.group)
        mean = region(x.mean((0, 1)) / share, self.group, "sum", "sum")
        variance = region((x - mean).square().mean((0, 1)) / share, self.group, "sum", "sum")
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), 0.1)  # type: ignore[operator]
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.weight + self.bias


class Block(nn.Module):
    """Attention and a gated perceptron, each behind a norm."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.position = Positions()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.router, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1), Mlp(number)

    def forward(self, x: Tensor) -> Tensor:
        """Residuals."""
        x = self.position(x)
        x = x + self.attn(self.norm1(x))
        h = self.norm2(x)
        result: Tensor = x + self.mlp(h) * torch.sigmoid(self.router(h))
        return result


class Net(nn.Module):
    """Embedding, blocks, norm, head. A pipeline's stage has None for what other stages have."""

    over: TensorGroup | None = None

    def __init__(self, *, tied: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block(i) for i in range(BLOCKS)})
        self.norm: nn.Module | None = BatchNorm() if batch_norm else nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to logits, or what a stage makes of what it got."""
        x = self.embed(x) if self.embed is not None else x
        over = self.over if self.over is not None and self.over.sequence else None
        x = x if over is None else region(x, over.group, "split", "gather")
        for block in self.blocks.values():
            x = block(x)
        x = self.norm(x) if self.norm is not None else x
        x = x if over is None else region(x, over.group, "gather", "split")
        return self.head(x) if self.head is not None else x


def make(seed: int = 0, **options: Any) -> Net:
    """The model as every layout begins with it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**options)


def stage_of(model: Net, stage: int, stages: int) -> Net:
    """One stage of a pipeline: a copy of the model without what other stages have, under the same names."""
    part = copy.deepcopy(model)
    names = [["embed"], *([f"blocks.{i}"] for i in range(BLOCKS)), ["norm", "head"]]
    if stages == 2:
        names = [[*names[0], *names[1]], [*names[2], *names[3]]]
    own = set(names[stage])
    for name in [*(f"blocks.{i}" for i in range(BLOCKS)), "embed", "norm", "head"]:
        if name not in own and name.startswith("blocks."):
            del part.blocks[name.removeprefix("blocks.")]
        elif name not in own:
            setattr(part, name, None)
    return part


def cut(model: Net, over: TensorGroup, *, wrong_dimension: str = "") -> Net:
    """Give each rank its part of the layers: columns of the first of two, rows of the second."""
    model.over = over
    for name, module in model.named_modules():
        if isinstance(module, (Columns, Rows)):
            dimension = 0 if isinstance(module, Columns) else 1
            module.over = over
            keep_part(module, "weight", dimension, over, wrong=name == wrong_dimension)
            if dimension == 0:
                keep_part(module, "bias", 0, over)
        if isinstance(module, Dropout):
            module.part = over.rank
        if isinstance(module, Positions) and over.sequence:
            module.offset = over.rank * LENGTH // over.size
    return model


def keep_part(module: nn.Module, name: str, dimension: int, over: TensorGroup, *, wrong: bool = False) -> None:
    """Replace a parameter by this rank's part of it."""
    whole: Tensor = getattr(module, name).data
    part = whole.chunk(over.size, dimension)[over.rank]
    if wrong:  # cut along the other dimension, and of the right shape because the matrix is square
        part = whole.chunk(over.size, 1 - dimension)[over.rank].reshape(part.shape)
    setattr(module, name, nn.Parameter(part.clone(), requires_grad=getattr(module, name).requires_grad))
