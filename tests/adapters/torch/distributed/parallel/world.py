"""Every scenario in turn, on two ranks and then on four, with what was seen by hand written beside the runs."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from byhand import train
from forked_ranks import run_ranks
from scenes import Ddp, Fsdp, Grid, Hybrid, Inner, Pipeline, Scene, Tensors
from small import SMALL, local_parts
from spawned import spawn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import tensortap as tt

# What every rank would import in its first scenario: once here, before they are forked.
WARM = ("torch._dynamo", "pandas", "pyarrow.dataset", "tensortap.watch", "tensortap.adapters.torch.framework",
        "tensortap.store.run", "tensortap.diagnose")  # fmt: skip
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
FOUR = {"grid": scene(Grid), "local parts": local_parts}
# What two ranks or the grid show, on four.
FOUR_AGAIN = {
    "hybrid": scene(Hybrid), "tensors": scene(Tensors), "ddp": scene(Ddp), "fsdp": scene(Fsdp), "1f1b": scene(OneByOne),
}  # fmt: skip


def play(out: Path, scenarios: dict[str, Callable[[Path], Any]]) -> None:
    """Run them on this rank; what one raised is its result."""
    faulthandler.dump_traceback_later(120, exit=True)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            results[name] = scenario(out / name)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        (out / f"{dist.get_rank()}.json").write_text(json.dumps(results))
        dist.barrier()


def main(out: Path, thorough: bool) -> int:
    """Start the ranks: two with a launcher's environment, two without one, four."""
    failed = False
    for module in WARM:
        importlib.import_module(module)
    gc.freeze()  # ranks that look through all of this for garbage copy it
    (out / "spawned").mkdir()
    spawn(out / "spawned")
    for size, scenarios in ((2, TWO), (4, {**FOUR, **(FOUR_AGAIN if thorough else {})})):
        folder = out / str(size)
        folder.mkdir()
        failed |= any(run_ranks(size, lambda folder=folder, chosen=scenarios: play(folder, chosen), folder))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), thorough="thorough" in sys.argv[2:]))
