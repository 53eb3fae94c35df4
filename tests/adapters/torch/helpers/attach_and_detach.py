"""Attach taps to a small model, record and detach them, many times: `make asan` looks for what was not freed."""

from __future__ import annotations

import gc
import sys

import torch
from torch import nn

import tensortap as tt


def main(times: int) -> None:
    """Record two training steps under each of so many taps."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    for _ in range(times):
        with tt.watch(model, "*", "*:input", "*:grad_output", to=[]) as watching:
            for _ in range(2):
                model(x).sum().backward()
                watching.step()
    gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]))
