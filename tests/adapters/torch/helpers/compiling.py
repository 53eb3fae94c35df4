"""Models for the tests of torch.compile, the ways to compile them, and what is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt

COMPILING = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning"
    ),
]
EVERYTHING = "**:{output,input,grad_output,grad_input}"


class Block(nn.Module):
    """A transformer's block, made of modules that can be seen."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 2, w // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Gives a dict; calls one of its modules twice."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = self.norm(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x)), "ignored": None}


class Residual(nn.Module):
    """Half a block: few kernels, for Inductor takes seconds to build each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": x + self.down(self.act(self.up(self.norm(x))))}


def tokens() -> Tensor:
    """A batch."""
    return torch.arange(10).view(2, 5)


def fresh(layers: int = 1) -> Transformer:
    """Always the same one."""
    torch.manual_seed(0)
    return Transformer(layers)


def as_whole(model: nn.Module, backend: str) -> Callable[..., Any]:
    """`torch.compile(model)`."""
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: str) -> Callable[..., Any]:
    """`model.compile()`."""
    model.compile(backend=backend, fullgraph=True)
    return model


def by_regions(model: nn.Module, backend: str) -> Callable[..., Any]:
    """Every block by itself."""
    for block in model.get_submodule("blocks").children():
        block.compile(backend=backend, fullgraph=True)
    return model


def in_a_function(model: nn.Module, backend: str) -> Callable[..., Any]:
    """A function of the user's that calls the model."""
    return torch.compile(lambda *args: model(*args), backend=backend, fullgraph=True)


WAYS = [as_whole, in_place, by_regions, in_a_function]


def train(
    run: Callable[..., Any], model: nn.Module, steps: int = 2, batch: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The last step's logits and gradients; nothing is updated."""
    for _ in range(steps):
        model.zero_grad()
        logits = run(tokens() if batch is None else batch)["logits"]
        logits.square().mean().backward()
    return logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def graphs() -> int:
    """How many graphs were made."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def rows(records: list[tt.Record]) -> dict[tuple[str, int, int], tuple[float, ...]]:
    """What was recorded, by place, call and step."""
    stats = ("numel", "nan", "zeros", "min", "max", "mean", "std", "l1", "l2")
    return {(str(r.place), r.call, r.step): tuple(r[name] for name in stats) for r in records}


def exactly(a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]]) -> bool:
    """Whether two runs gave the same bits."""
    return torch.equal(a[0], b[0]) and a[1].keys() == b[1].keys() and all(torch.equal(a[1][k], b[1][k]) for k in a[1])
