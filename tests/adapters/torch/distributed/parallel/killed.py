"""What torchrun starts to see one rank die: rank 1 kills itself in the middle of a step."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tensortap as tt


def main(out: Path) -> None:
    """Five steps, of which rank 1 lives to close three."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(model, "**:output", "**:param", to=out / "run") as tap:
        for number in range(5):
            loss = model(torch.randn(2, 4)).sum()
            if number == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tap.step(loss=loss)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
