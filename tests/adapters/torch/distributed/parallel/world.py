"""What torchrun starts: every scenario in turn, with what was seen by hand written beside the runs."""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byhand import train
from scenes import Ddp, Fsdp, Grid, Hybrid, Inner, Pipeline, Scene, Tensors
from small import SMALL
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import tensortap as tt

KEEP = [tt.stats(), tt.histogram()]
MODULES = tt.probe("**:output", "**:grad_output", "**:input", "**:grad_input", keep=KEEP)
PARAMETERS = tt.probe("**:param", "**:grad", "**:update", keep=[*KEEP, lambda tensor: tensor.float().mean()])


def scene(kind: type[Scene]) -> Callable[[Path], Any]:
    """A scenario that trains bare, tapped and by hand."""
    return lambda path: train(kind(path), MODULES, PARAMETERS)


class GPipe(Pipeline):
    """All forwards, then all backwards."""

    schedule = ScheduleGPipe


class OneByOne(Pipeline):
    """A forward, a backward."""

    schedule = Schedule1F1B


TWO = {
    "ddp": scene(Ddp), "inner": scene(Inner), "fsdp": scene(Fsdp), "tensors": scene(Tensors), "gpipe": scene(GPipe),
    "1f1b": scene(OneByOne), **SMALL,
}  # fmt: skip
FOUR = {
    "ddp": scene(Ddp), "fsdp": scene(Fsdp), "hybrid": scene(Hybrid), "tensors": scene(Tensors), "1f1b": scene(OneByOne),
    "grid": scene(Grid),
}  # fmt: skip


def main(out: Path) -> None:
    """Run them; what one raised is its result."""
    faulthandler.dump_traceback_later(90, exit=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    scenarios = TWO if dist.get_world_size() == 2 else FOUR
    results: dict[str, Any] = {}
    for name in sys.argv[2:] or scenarios:
        try:
            results[name] = scenarios[name](out / name)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        (out / f"{dist.get_rank()}.json").write_text(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
