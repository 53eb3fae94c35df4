"""Ranks forked from a process that has imported everything: imports are paid once, whatever the number of ranks."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run_ranks(size: int, work: Callable[[], None], out: Path) -> list[int]:
    """Run `work` on so many new gloo ranks, in the environment that torchrun gives; return their exit codes.

    They meet in the folder `out`; one rank alone joins no group. The caller must have run no operation of PyTorch:
    threads do not survive a fork.
    """
    children = [_fork(rank, size, work, out) for rank in range(size)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _fork(rank: int, size: int, work: Callable[[], None], out: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _join(rank, size, out)
        work()
        if dist.is_initialized():
            dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _join(rank: int, size: int, out: Path) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", TORCHELASTIC_RUN_ID=f"forked-{size}")
    torch.set_num_threads(1)
    if size > 1:
        meeting = f"file://{out.absolute()}/meeting{size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
