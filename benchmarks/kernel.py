"""How fast the reduction kernel is, as ratios to one framework sum of the same buffer on one thread.

    python benchmarks/kernel.py            # print the tables; exit 1 when a "must reach" is missed
    python benchmarks/kernel.py --level avx2 --repeat 40

Everything is measured in turns within one process, so that a slow moment of the machine hits all candidates alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tensortap.reduce import _kernel
from tensortap.reduce import histogram as buckets
from tensortap.reduce import kernel as kernels
from tensortap.reduce.statistics import ROW
from tensortap.types import DTYPE_CODE, DTYPES

Call = Callable[[], Any]
SIZES = (1 << 12, 1 << 18, 1 << 22)
MUST = {"statistics": 3.0, "with histogram": 8.0}
MUST_BEAT_SEPARATE = 15.0


def in_turns(calls: dict[str, Call], repeat: int, batch: int = 1) -> dict[str, np.ndarray]:
    """Seconds of every call, `repeat` times each, one after the other in turns."""
    times = {name: np.empty(repeat) for name in calls}
    for i in range(-2, repeat):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(batch):
                call()
            if i >= 0:
                times[name][i] = (time.perf_counter() - start) / batch
    return times


def reducer(array: np.ndarray, dtype: int, histogram: bool) -> Call:
    """A call that reduces the array."""
    row, counts = np.zeros(1, ROW), np.zeros(buckets.BUCKETS, np.uint32)
    out, hist, address, shape = row.ctypes.data, counts.ctypes.data if histogram else 0, array.ctypes.data, array.shape
    keep = (row, counts, array)
    return lambda: (_kernel.reduce(out, hist, address, dtype, shape, None), keep)


def separate(x: torch.Tensor) -> Call:
    """The eight reductions that give the same row, as one would write them with the framework, and its histogram."""

    def call() -> None:
        x.isnan().sum(), x.isposinf().sum(), x.isneginf().sum(), (x == 0).sum()
        x.aminmax(), torch.std_mean(x, correction=0), x.abs().sum(), x.norm()
        torch.histc(x, 100)

    return call


def against_sums(size: int, repeat: int) -> bool:
    """One line of ratios for a float32 buffer; whether it reaches what it must."""
    array = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    x = torch.from_numpy(array)
    calls = {
        "numpy": array.sum,
        "torch": x.sum,
        "statistics": reducer(array, DTYPE_CODE["float32"], histogram=False),
        "with histogram": reducer(array, DTYPE_CODE["float32"], histogram=True),
    }
    times = in_turns(calls, repeat, batch=max(1, (1 << 18) // size))
    slow = in_turns({"separate": separate(x)}, max(3, repeat // 20))
    best = {name: t.min() * 1e6 for name, t in (times | slow).items()}
    ok = True
    line = f"{size:>8} | {best['numpy']:>7.1f} {best['torch']:>7.1f} |"
    for name, limit in MUST.items():
        by_numpy, by_torch = (float(np.median(times[name] / times[f])) for f in ("numpy", "torch"))
        ok &= min(by_numpy, by_torch) <= limit
        line += f" {best[name]:>8.1f} {by_numpy:>6.2f}x {by_torch:>6.2f}x |"
    faster = best["separate"] / best["with histogram"]
    ok &= faster >= MUST_BEAT_SEPARATE
    ours, plain = (4 * size / best[name] / 1e3 for name in ("statistics", "torch"))
    line += f" {best['separate']:>9.0f} {faster:>5.0f}x | {ours:>6.1f} {plain:>6.1f}"
    print(line + ("" if ok else "   MISSED"))
    return ok


def per_dtype(size: int, repeat: int) -> None:
    """Microseconds for every element type."""
    print(f"\n{size} elements of each type, µs (statistics, with histogram), GB/s")
    for dtype in DTYPES:
        raw = (np.random.default_rng(1).standard_normal(size) * 20).clip(-100, 100)
        if dtype.itemsize == 2 and "float" in dtype.name:
            array = (
                np.ascontiguousarray(raw.astype(np.float32).view(np.uint16)[1::2])
                if dtype.name[0] == "b"
                else raw.astype(np.float16)
            )
        elif dtype.name.startswith("float8"):
            array = np.random.default_rng(2).integers(0, 0x78, size, dtype=np.uint8)
        elif dtype.name == "bool":
            array = raw > 0
        else:
            array = np.abs(raw).astype(dtype.name)
        times = in_turns({str(h): reducer(array, dtype.code, h) for h in (False, True)}, repeat)
        plain, hist = (times[k].min() * 1e6 for k in ("False", "True"))
        print(f"{dtype.name:>16} {plain:>8.1f} {hist:>8.1f} {size * dtype.itemsize / plain / 1e3:>7.1f}")


def small_records(repeat: int) -> None:
    """Microseconds of one `record` from Python for small tensors."""
    rows = 1 << 10
    table = SimpleNamespace(**{name: np.zeros(1 << 20, dtype) for name, dtype in kernels.COLUMNS})
    table.header = np.zeros(kernels.HEADER_LENGTH, np.int64)
    table.header[:9] = 0, rows, 0, 1 << 20, 0, 1 << 20, 0, 0, 1
    kernels.bind(table)
    address = table.header.ctypes.data
    print("\none record() from Python, µs (statistics, with histogram)")
    for size in (1, 64, 512, 2048, 4096):
        array = np.random.default_rng(3).standard_normal(size, dtype=np.float32)

        def call(want: int, at: int = array.ctypes.data, shape: tuple[int, ...] = array.shape) -> None:
            table.header[[0, 2, 4]] = 0
            for _ in range(500):
                _kernel.record(address, 0, 1, want, 0, 1, at, shape, None)

        times = in_turns({"0": lambda: call(0), "1": lambda: call(1)}, repeat)
        print(f"{size:>8} {times['0'].min() / 500 * 1e6:>7.2f} {times['1'].min() / 500 * 1e6:>7.2f}")


def threads(repeat: int) -> None:
    """What more threads bring, alone and between multi-threaded framework operations."""
    print("\nthreads: µs with 1 and with 2 threads (statistics, with histogram), alone and between torch operations")
    torch.set_num_threads(2)
    for size in (1 << 18, 1 << 19, 1 << 20, 1 << 22):
        array = np.random.default_rng(4).standard_normal(size, dtype=np.float32)
        x, y = torch.from_numpy(array), torch.empty(size)
        line = f"{size:>8}"
        for between in (False, True):
            for histogram in (False, True):
                call = reducer(array, 1, histogram)
                best = []
                for count in (1, 2):
                    _kernel.set_threads(count)
                    times = np.empty(repeat)
                    for i in range(repeat):
                        if between:
                            torch.mul(x, 2.0, out=y)
                        start = time.perf_counter()
                        call()
                        times[i] = time.perf_counter() - start
                    best.append(float(np.median(times)) * 1e6)
                line += f" | {best[0]:>8.1f} {best[1]:>8.1f}"
        print(line)
    torch.set_num_threads(1)
    _kernel.set_threads(1)


def main() -> int:
    """Print the tables and say whether all that must be reached is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--level", default=_kernel.level(), choices=_kernel.LEVELS)
    parser.add_argument("--only-sums", action="store_true", help="only the part that must be reached")
    options = parser.parse_args()
    _kernel.set_level(options.level)
    _kernel.set_threads(1)
    torch.set_num_threads(1)
    print(f"kernel c:{options.level}, one thread, float32; µs (best), ratios to numpy's and torch's sum (median)")
    print("elements |   numpy   torch |     statistics, ratios   |  with histogram, ratios  | ", end="")
    print("separate, slower | GB/s ours, one sum (a plain read)")
    reached = sum(against_sums(size, options.repeat) for size in SIZES) == len(SIZES)
    if not options.only_sums:
        small_records(options.repeat)
        per_dtype(1 << 18, options.repeat)
        threads(options.repeat)
    limits = ", ".join(f"{name} <= {limit:g}x one sum" for name, limit in MUST.items())
    print(f"\nmust reach: {limits}, >= {MUST_BEAT_SEPARATE:g}x faster than separate: {'yes' if reached else 'NO'}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
