"""The kernel in threads, forked processes and other environments; what it leaves alone."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from reduce.kernel_checks import _kernel, run, same

from tensortap.reduce import numpy_kernel as fallback
from tensortap.reduce.statistics import ROW
from tensortap.types import DTYPE_CODE, DTYPES


def test_threads_may_call_at_the_same_time():
    """Calls from several threads, large and small, do not disturb each other."""
    rng = np.random.default_rng(10)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (900_000, 3000, 700_001, 50)]
    expected = [run(a) for a in arrays]
    _kernel.set_threads(2)
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(15):
            if not same(run(arrays[i]), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in (0, 1, 2, 3, 0)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def _in_child(array: np.ndarray, expected: bytes, queue: Any) -> None:
    queue.put(run(array)[0].tobytes() == expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own():
    """After a fork the child reduces large tensors although its parent's threads are gone."""
    array = np.random.default_rng(11).standard_normal(1_500_000).astype(np.float32)
    _kernel.set_threads(2)
    expected = run(array)[0].tobytes()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(array, expected, queue))
    child.start()
    child.join(30)
    assert child.exitcode == 0 and queue.get()


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with every warning shown."""
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=60
    )


USE = """
import sys
{before}
import numpy as np
from tensortap.reduce import kernel as kernels
from tensortap.reduce.statistics import ROW
print(kernels.ACTIVE)
row, x = np.zeros(1, ROW), np.arange(5, dtype=np.float32)
for _ in range(3):
    kernels.reduce(row.ctypes.data, 0, x.ctypes.data, 1, (5,), None)
print(float(row["mean"][0]))
"""


@pytest.mark.parametrize("name", [*_kernel.LEVELS, "numpy"])
def test_the_environment_chooses_the_kernel(name):
    """TENSORTAP_KERNEL forces a level, without a warning."""
    done = python(USE.format(before=""), TENSORTAP_KERNEL=name)
    assert done.stdout.split() == [name if name == "numpy" else f"c:{name}", "2.0"]
    assert done.stderr == ""


def test_an_unknown_kernel_is_refused():
    """A name that is not available raises and lists those that are."""
    done = python("import tensortap.reduce.kernel", TENSORTAP_KERNEL="fast")
    assert "TENSORTAP_KERNEL='fast'" in done.stderr and "numpy" in done.stderr


def test_without_the_extension_one_warning_says_what_to_do():
    """Where the extension was not built, NumPy works, and the first use warns once."""
    done = python(USE.format(before="sys.modules['tensortap.reduce._kernel'] = None"))
    assert done.stdout.split() == ["numpy", "2.0"]
    assert done.stderr.count("RuntimeWarning") == 1 and "pip install" in done.stderr


def test_the_number_of_threads_comes_from_the_environment():
    """TENSORTAP_THREADS sets how many threads a reduction may use."""
    done = python("from tensortap.reduce import _kernel; print(_kernel.threads())", TENSORTAP_THREADS="3")
    assert done.stdout.split() == ["3"]


def test_memory_is_not_written():
    """Reducing leaves the elements as they were."""
    array = np.random.default_rng(12).standard_normal(10_000).astype(np.float16)
    before = array.tobytes()
    for module in (_kernel, fallback):
        run(array[::-2], module)
    assert array.tobytes() == before


def test_dtype_table_matches_the_kernel():
    """Every type's size is the one the kernel steps by."""
    for dtype in DTYPES:
        zero = (ctypes.c_char * (4 * dtype.itemsize))()
        row = np.zeros(1, ROW)
        _kernel.reduce(
            row.ctypes.data, 0, ctypes.addressof(zero), dtype.code, (2, 2), (2 * dtype.itemsize, dtype.itemsize)
        )
        assert row[0]["zeros"] == 4


def test_threads_are_taken_back_during_a_reduction() -> None:
    """A reduction that has begun with lent threads ends with them; what comes after has none."""
    calls = []
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def team(task: int, data: int, threads: int, flags: int) -> None:
        calls.append(threads)
        _kernel.borrow(0, 1)
        for _ in range(threads):
            work(task)(data)

    lent = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(team)
    large = np.full(1 << 19, 1e200)  # is reduced twice: as it is, and scaled
    row = np.zeros((), ROW)
    _kernel.borrow(ctypes.cast(lent, ctypes.c_void_p).value, 2)
    try:
        for _ in range(8):  # alone a few times, to see how fast that is
            _kernel.reduce(row.ctypes.data, 0, large.ctypes.data, DTYPE_CODE["float64"], large.shape, None)
    finally:
        _kernel.borrow(0, 1)
    assert calls == [2, 2] and row["mean"] == 1e200
