"""Two ranks without a launcher: torch.multiprocessing starts them, and a file brings them together."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tensortap as tt


def work(rank: int, out: str) -> None:
    """Watch twice: where it was said, and where ranks agree."""
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=2)
    model = torch.nn.Linear(2, 2)
    for to in (f"{out}/run", None):
        with tt.watch(model, to=to):
            model(torch.ones(1, 2))
    dist.destroy_process_group()


def spawn(out: Path) -> None:
    """Start them; they are forked, so that PyTorch is imported once."""
    os.chdir(out)
    mp.start_processes(work, (str(out),), 2, start_method="fork")
