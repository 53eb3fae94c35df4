"""A decoder as large language models have it: RMSNorm, rotary positions, grouped queries, experts, LoRA, tied head."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from outside.layouts.model import LENGTH, VOCABULARY, WIDTH, Columns, Rows, TensorGroup, keep_part, region

HEAD, EXPERTS, HIDDEN, LAYERS, LORA = 4, 4, 24, 2, 4


class RowsWithoutBias(Rows):
    """A row-parallel layer without a bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        y = functional.linear(x, self.weight)
        if self.over is None:
            return y
        ahead, back = ("sum and split", "gather") if self.over.sequence else ("sum", "")
        return region(y, self.over.group, ahead, back)


class Lora(nn.Module):
    """A frozen layer and a trained difference of low rank."""

    def __init__(self, base: Columns) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, LORA, bias=False)
        self.b = Columns(LORA, base.out_features, bias=False)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Base and difference."""
        result: Tensor = self.base(x) + self.b(self.a(x)) * self.scale
        return result


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] / 100 ** (torch.arange(half) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class GroupedAttention(nn.Module):
    """Causal attention, of which two heads of queries share one of keys and values."""

    def __init__(self, *, lora: bool) -> None:
        super().__init__()
        self.q: nn.Module = Columns(WIDTH, WIDTH, bias=False)
        self.k: nn.Module = Columns(WIDTH, WIDTH // 2, bias=False)
        self.v: nn.Module = Columns(WIDTH, WIDTH // 2, bias=False)
        self.out = RowsWithoutBias(WIDTH, WIDTH, bias=False)
        if lora:
            self.q, self.v = Lora(self.q), Lora(self.v)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """As many heads as this rank has."""
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        seen = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        result: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return result


class Expert(nn.Module):
    """A gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (Columns(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = RowsWithoutBias(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As named."""
        result: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return result


class Mixture(nn.Module):
    """Experts, weighted by a router. `spread` is the group over which whole experts are shared out."""

    def __init__(self, *, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})
        self.chosen = chosen  # how many experts a token has; 0 for all of them
        self.spread: Any = None
        self.summed_backward = True
        self.batch_group: Any = None
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The gradients of what all ranks share are summed where experts are spread."""
        chances = torch.softmax(self.router(x).float(), -1)
        self.balance = self._balance(chances)
        gates = chances
        if self.chosen:
            best = torch.zeros_like(gates).scatter(-1, gates.topk(self.chosen).indices, 1.0)
            gates = gates * best / (gates * best).sum(-1, keepdim=True)
        gates = region(gates.to(x.dtype), self.spread if self.summed_backward else None, "", "sum")
        x = region(x, self.spread, "", "sum")
        total = sum(gates[..., int(n)].unsqueeze(-1) * expert(x) for n, expert in self.experts.items())
        return region(total, self.spread, "sum", "")  # type: ignore[arg-type]

    def _balance(self, chances: Tensor) -> Tensor:
        """How unevenly tokens of the whole batch are shared out."""
        share = chances.detach().mean((0, 1))
        if self.batch_group is not None:
            dist.all_reduce(share, group=self.batch_group)
            share = share / dist.get_world_size(self.batch_group)
        return EXPERTS * (share * chances.mean((0, 1))).sum()


class Layer(nn.Module):
    """Attention and experts, each behind a norm."""

    def __init__(self, *, lora: bool, chosen: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(WIDTH, 1e-6), GroupedAttention(lora=lora)
        self.norm2, self.moe = nn.RMSNorm(WIDTH, 1e-6), Mixture(chosen=chosen)

    def forward(self, x: Tensor) -> Tensor:
        """Residuals."""
        x = x + self.attn(self.norm1(x))
        result: Tensor = x + self.moe(self.norm2(x))
        return result


class Decoder(nn.Module):
    """Embedding, layers, norm, head. A pipeline's stage has None for what other stages have."""

    over: TensorGroup | None = None

    def __init__(self, *, lora: bool = False, chosen: int = 0, tied: bool = False) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer(lora=lora, chosen=chosen) for i in range(LAYERS)})
        self.norm: nn.Module | None = nn.RMSNorm(WIDTH, 1e-6)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to logits, or what a stage makes of what it got."""
        x = self.embed(x) if self.embed is not None else x
        over = self.over if self.over is not None and self.over.sequence else None
        x = x if over is None else region(x, over.group, "split", "gather")
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        x = x if over is None else region(x, over.group, "gather", "split")
        return self.head(x) if self.head is not None else x


def make_decoder(seed: int, **options: Any) -> Decoder:
    """The model as every layout begins with it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(**options)


def decoder_stage(model: Decoder, stage: int) -> Decoder:
    """Leave one of two stages of a pipeline of the model, under its names."""
    del model.layers[str(1 - stage)]
    for name in ("norm", "head") if stage == 0 else ("embed",):
        setattr(model, name, None)
    return model


def cut_decoder(model: Decoder, over: TensorGroup, *, experts: bool = False) -> Decoder:
    """Cut layers over ranks by hand; with `experts` each rank has whole experts instead of parts of all of them."""
    model.over = over
    for mixture in (module for module in model.modules() if isinstance(module, Mixture)):
        if experts:
            mixture.spread = over.group
            for number in range(EXPERTS):
                if number * over.size // EXPERTS != over.rank:
                    del mixture.experts[str(number)]
    spread = [module for module in model.modules() if isinstance(module, Expert)] if experts else []
    whole = {id(layer) for expert in spread for layer in expert.modules()}
    for module in model.modules():
        if isinstance(module, (Columns, Rows)) and id(module) not in whole:
            module.over = over
            keep_part(module, "weight", 0 if isinstance(module, Columns) else 1, over)
    return model


__all__ = ["LENGTH", "Decoder", "Lora", "Mixture", "cut_decoder", "decoder_stage", "make_decoder"]
