"""PyTorch's threads help the kernel, and nobody can tell from the results."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

import tensortap as tt
from tensortap.adapters.torch.threads import SharedThreads, _gomp_parallel
from tensortap.reduce import kernel as kernels

pytestmark = pytest.mark.skipif(kernels.ACTIVE == "numpy", reason="NumPy's twin uses one thread")


@pytest.fixture
def threads():
    """PyTorch with two threads, and the kernel on its own again afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    kernels.borrow(0, 1)


def test_borrowed_threads_give_the_same_bits(threads):
    """A large tensor's summary does not depend on who reduced it."""
    x = torch.randn(5_000_003, generator=torch.Generator().manual_seed(0))
    x[17], x[4_000_000] = float("nan"), float("-inf")
    kernels.borrow(0, 1)
    alone = tt.summarize(x, histogram=True)
    assert _gomp_parallel(), "this build of PyTorch has no OpenMP to borrow from"
    kernels.borrow(_gomp_parallel(), 2)
    for _ in range(3):  # both ways are tried in turn
        assert _same(tt.summarize(x, histogram=True), alone)


def test_watching_borrows_as_many_threads_as_pytorch_has(threads, tmp_path):
    """A model's large outputs are summarised exactly, whatever the number of threads is set to meanwhile."""
    model = torch.nn.Linear(64, 4096)
    x = torch.randn(256, 64)
    memory = tt.Memory()
    with tt.watch(model, to=memory) as tap:
        for number in (2, 1, 2):
            torch.set_num_threads(number)
            y = model(x)
            tap.step()
    assert [record["mean"] for record in memory.records] == [tt.summarize(y).mean] * 3


def test_a_forked_child_has_no_borrowed_threads(threads):
    """Threads do not survive a fork: a child that counted on them would wait for ever."""
    x = np.ones(1 << 20, np.float32)
    SharedThreads().update()
    tt.summarize(x)
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if tt.summarize(x).l1 == 1 << 20 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _same(a: tt.Summary, b: tt.Summary) -> bool:
    return str(a) == str(b) and a.mean == b.mean and a.std == b.std and a.l2 == b.l2
