"""The row that a device computes, against the CPU kernel's: in torch operations here, in Triton under its interpreter.

Triton decides when it is imported whether it interprets, so the same tests run once more in a process of their own.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tensortap as tt
from tensortap.adapters.torch.device import hashing
from tensortap.adapters.torch.device.batch import Batch
from tensortap.adapters.torch.device.devices import _flat
from tensortap.adapters.torch.device.streams import HostStream
from tensortap.reduce.content_hash import finished
from tensortap.types import DTYPES

TRITON = Path(sys.prefix, "triton")  # apart from the environment: its LLVM and TensorFlow's do not share a process
ROOT = Path(__file__).resolve().parents[4]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXACT = ("numel", "nan", "posinf", "neginf", "zeros", "min", "max")
NAMES = [d.name for d in DTYPES if hasattr(torch, d.name)]
INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module")
def kernel() -> Any:
    return importlib.import_module(
        f"tensortap.adapters.torch.device.{'triton_kernel' if INTERPRETED else 'operations'}"
    )


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(not TRITON.is_dir(), reason="Triton is not installed beside the environment: see the Makefile")
def test_all_of_these_hold_for_the_triton_kernel(warm_python, tmp_path):
    """Every test of this file passes with the Triton kernel under its interpreter."""
    start = tmp_path / "with_triton.py"
    start.write_text(f"import sys, pytest\nsys.path.insert(0, {str(TRITON)!r})\nsys.exit(pytest.main(sys.argv[1:]))\n")
    done = warm_python.run([start, __file__, "-x", "-p", "no:xdist"], ROOT, env={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed, 1 skipped", done.stdout)
    assert passed and int(passed[1]) > 2 * len(NAMES), done.stdout


def reduced(kernel: Any, tensor: Tensor) -> tuple[Any, tuple[int, np.ndarray]]:
    """The row and the histogram, by the way that a step takes."""
    batch = Batch(HostStream(), tensor.device)
    kernel.reduce(_flat(tensor), batch.reserve(0, tensor.numel(), True), True)
    batch.start_copy()
    arrived = batch.wait()
    return arrived.values[0], arrived.histograms[0]


def check(kernel: Any, tensor: Tensor) -> None:
    """Counts, ends and buckets are the CPU kernel's; sums differ by no more than roundings."""
    row, (offset, counts) = reduced(kernel, tensor)
    want = tt.summarize(tensor)
    for name in EXACT:
        assert row[name] == want[name] or (math.isnan(row[name]) and math.isnan(want[name])), name
    assert counts.tolist() == want["hist_counts"].tolist()
    assert offset == want["hist_offset"] or not len(counts)
    finite = want["numel"] - want["nan"] - want["posinf"] - want["neginf"]
    if finite:
        near = 1e-6 * want["l1"] / finite
        assert abs(row["mean"] - want["mean"]) <= near
        assert row["std"] == pytest.approx(want["std"], rel=1e-6, abs=1e-9 * near)
        assert row["l2"] == pytest.approx(want["l2"], rel=1e-6)
    assert row["l1"] == pytest.approx(want["l1"], rel=1e-6)


def some(name: str, numel: int) -> Tensor:
    """Values of a type with zeros in it and, where the type has them, NaN and infinities."""
    dtype = getattr(torch, name)
    torch.manual_seed(numel)
    x = 30 * torch.randn(numel)
    x[::7] = 0
    if dtype.is_complex:
        return torch.complex(x, torch.randn(numel)).index_fill(0, torch.tensor([numel // 2]), NAN).to(dtype)
    if not dtype.is_floating_point:
        return (x.abs() if name.startswith("u") else x).clamp(-128, 127).to(torch.int64).to(dtype)
    for place, value in ((3, NAN), (10, INF), (11, -INF)):
        x[place : place + 1] = value
    return x.to(dtype)


@pytest.mark.parametrize("numel", [1, 4097])
@pytest.mark.parametrize("name", NAMES)
def test_every_type(kernel, name, numel):
    """Every element type gives the CPU kernel's row, whatever its number of elements."""
    check(kernel, some(name, numel))


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("float8", "float16", "bfloat16"))])
def test_every_value_of_a_small_float(kernel, name):
    """All bit patterns of eight- and sixteen-bit floats are read as what they mean."""
    dtype = getattr(torch, name)
    codes = torch.arange(1 << 8 * dtype.itemsize)
    bits = codes.to(torch.uint8) if dtype.itemsize == 1 else (codes - (1 << 16) * (codes >= 1 << 15)).to(torch.int16)
    check(kernel, bits.view(dtype))


@pytest.mark.parametrize("name", ["int64", "uint64", "int32", "uint32", "uint16"])
def test_the_ends_of_integers(kernel, name):
    """The smallest and largest integers of a type."""
    info = np.iinfo(name)
    check(kernel, torch.from_numpy(np.array([info.min, info.max, info.max - 1, 0, 1], name)))


EDGES = {
    "nothing finite": [NAN, INF, -INF],
    "zeros": [0.0, -0.0, 0.0],
    "one": [-3.25],
    "tiny": [1e-45, -3e-45, 1e-39, 0.0],
    "huge": [3.4e38, -3.4e38, 3e38],
    "both": [3e38, 1e-40, -1e-40, 5.0],
    "constant": [0.1] * 5000,
    "powers": [2.0**i for i in range(-149, 128)],
}


@pytest.mark.parametrize("case", EDGES)
def test_edges_of_float32(kernel, case):
    """Values at the ends of the range, alike or not finite, lose nothing."""
    check(kernel, torch.tensor(EDGES[case]))


def test_a_small_spread_around_a_large_mean(kernel):
    """The deviation of values that are nearly alike is not lost in their size."""
    x = 1000 + 0.01 * torch.randn(20_000)
    row, _ = reduced(kernel, x)
    assert row["std"] == pytest.approx(float(x.double().std(correction=0)), rel=1e-6)
    assert row["mean"] == pytest.approx(float(x.double().mean()), rel=1e-9)


@pytest.mark.parametrize("scale", [1e300, 1e-300, 5e-324, 1.0])
@pytest.mark.parametrize("name", ["float64", "complex128"])
def test_edges_of_float64(kernel, name, scale):
    """Doubles whose squares leave the range of doubles, or lie below it."""
    x = torch.randn(100, dtype=torch.float64) * scale
    check(kernel, x if name == "float64" else torch.complex(x, x.flip(0)))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:, 1:], lambda x: x[:1].expand(5, -1),
        lambda x: x.reshape(2, 3, 4, 5).permute(2, 0, 3, 1),
    ],
)  # fmt: skip
def test_views_of_any_stride(kernel, view):
    """A view is reduced over its own elements, dense or not."""
    check(kernel, view(torch.randn(10, 12)))


@pytest.mark.parametrize("numel", [1, 63, 5000])
def test_hashes(numel, monkeypatch):
    """The content hash that a device takes is the host's: of every type, in pieces, whatever the strides."""
    monkeypatch.setattr(hashing, "_PIECE", 4096)
    raw = torch.randint(0, 256, (16 * numel,), dtype=torch.uint8)
    whole = [
        raw.view(dtype)[:numel] for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64)
    ]
    whole += [raw[:numel] > 99, torch.view_as_complex(torch.randn(numel, 2)), raw[:numel].view(torch.float8_e4m3fn)]
    for x in [*whole, whole[0].reshape(-1, 1).expand(-1, 3), torch.randn(7, numel).t()]:
        linear = int(hashing.linear_hash_on_device(x)) & (2**64 - 1)
        assert finished(linear, x.numel() * x.element_size()) == tt.summarize(x, hash=True).hash


def test_parts_merge(kernel, monkeypatch):
    """Many programs with many blocks each, or many pieces, give one row."""
    name, few = ("_MOST_PROGRAMS", 3) if INTERPRETED else ("_PIECE", 4000)
    monkeypatch.setattr(kernel, name, few)
    x = torch.randn(40_000) * torch.linspace(0.1, 10, 40_000) + torch.linspace(-5, 50, 40_000)
    x[20_000:29_000] = NAN
    check(kernel, x)


def test_the_same_bits_every_time(kernel):
    """Two reductions of one tensor agree in every bit."""
    x = torch.randn(30_000)
    first, second = reduced(kernel, x), reduced(kernel, x)
    assert first[0].tobytes() == second[0].tobytes() and np.array_equal(first[1][1], second[1][1])


def test_without_a_histogram(kernel):
    """A row without a histogram touches no more than its own words."""
    buffer = torch.zeros(64, dtype=torch.int64)
    kernel.reduce(torch.randn(100), buffer[16:32], False)
    assert not buffer[:16].any() and not buffer[32:].any() and buffer[16:32].any()


def test_a_watched_step_uses_this_kernel(kernel, watch, monkeypatch):
    """By the way of a step: the rows in the record are this kernel's."""
    monkeypatch.setenv("TENSORTAP_DEVICE_PATH", "triton" if INTERPRETED else "torch")
    calls = []
    reduce = kernel.reduce
    monkeypatch.setattr(kernel, "reduce", lambda *args: (calls.append(1), reduce(*args)))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
    seen = watch(model, "{0,1}:{input,output}")
    x = torch.randn(6, 3)
    y = model(x)
    seen.tap.step()
    assert len(calls) == 4 and not seen.tap.counts
    assert seen.one("0:input")["max"] == float(x.max()) and seen.one("1:output")["min"] == float(y.detach().min())
    assert seen.one("1:output")["hist_counts"].sum() == 24
