"""A small language model and its data, which the tests of harvests share."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(torch.relu(self.mlp(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def make_data(count: int = 60) -> list[dict[str, Any]]:
    """Samples of two to eight tokens, with a text that no model takes."""
    lengths = [2 + i % 7 for i in range(count)]
    return [
        {"input_ids": (np.arange(n) + i) % 50, "attention_mask": np.ones(n, np.int64), "text": f"sample {i}"}
        for i, n in enumerate(lengths)
    ]


def contents(folder: Path) -> dict[str, str]:
    """Every file of a folder, by a hash of its bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
