"""Attach taps to a small model, record and detach them, many times: `make asan` looks for what was not freed."""

from __future__ import annotations

import gc
import sys

import torch
from torch import nn

import tensortap as tt


def main(times: int) -> None:
    """Record training steps under each of so many taps: from the third on C does most of it."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(times):
        with tt.watch(model, "*", "*:input", "*:grad_output", "**:update", "op:@matmul", to=[]) as watching:
            for _ in range(4):
                model(x).sum().backward()
                optimizer.step()
                watching.step()
    gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]))
