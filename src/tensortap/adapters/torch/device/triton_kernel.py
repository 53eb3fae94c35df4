"""The reduction kernel in Triton: the row of `reduce/numpy_moments.py`, computed where the tensor lies.

A program takes a run of blocks. A block stays in registers, so it is read once: counts and ends first, then sums around
the block's own mean. Sums are taken in float64, as on the CPU; blocks merge by Chan's formula, and the programs'
results by the same formula for many parts at once. Nothing depends on the order in
which programs run: floats are added in a fixed order, and only integers by atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensortap.adapters.torch.device.operations import COUNTS, as_real, scale_of, write_power
from tensortap.reduce.numpy_memory import FP8
from tensortap.types import DTYPES

_GROUPS: Final = 512  # rows of eight elements in a block
_MOST_PROGRAMS: Final = 1024
_PARTS: Final = 12
OPTIONS: Final = {"num_warps": 8, "enable_fp_fusion": False}  # rounded as written, on every device

# How a type is read: the integers that hold its bits where Triton has no such type on every device.
_FLOAT, _BF16, _TABLE, _BOOL, _U16, _U32, _U64, _INT = range(8)
_KINDS: Final = {
    "bfloat16": (_BF16, torch.int16),
    "bool": (_BOOL, torch.uint8),
    "uint16": (_U16, torch.int16),
    "uint32": (_U32, torch.int32),
    "uint64": (_U64, torch.int64),
    **{d.name: (_TABLE, torch.uint8) for d in DTYPES if d.name.startswith("float8")},
    **dict.fromkeys(("float64", "float32", "float16"), (_FLOAT, None)),
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8"), (_INT, None)),
}
_WIDE: Final = frozenset(("float64", "int32", "int64", "uint32", "uint64"))

jit: Callable[[Any], Any] = triton.jit  # its own type says nothing about launching


@jit
def _load(x, table, at, inside, KIND: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Elements as float32 where that is exact, else as float64."""
    raw = tl.load(x + at, mask=inside, other=0)
    if KIND == 1:
        v = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 2:
        v = tl.load(table + raw.to(tl.int32), mask=inside, other=0.0)
    elif KIND == 3:
        v = (raw != 0).to(tl.float32)
    elif KIND == 4:
        v = (raw.to(tl.int32) & 0xFFFF).to(tl.float32)
    elif KIND == 5:
        v = (raw.to(tl.int64) & 0xFFFFFFFF).to(tl.float64)
    elif KIND == 6:
        v = raw.to(tl.uint64, bitcast=True).to(tl.float64)
    elif WIDE:
        v = raw.to(tl.float64)
    else:
        v = raw.to(tl.float32)
    return v


@jit
def _total(v):  # type: ignore[no-untyped-def]
    """A block's sum, in groups of eight."""
    return tl.sum(tl.sum(v, axis=1), axis=0)


@jit
def _count(flags):  # type: ignore[no-untyped-def]
    return tl.sum(tl.sum(flags.to(tl.int32), axis=1), axis=0).to(tl.float64)


@jit
def _cut(v):  # type: ignore[no-untyped-def]
    """The bits of finite doubles as float32: cut, never rounded, as `numpy_kernel._cut` does."""
    bits = v.to(tl.int64, bitcast=True)
    size = bits & 0x7FFFFFFFFFFFFFFF
    exponent = size >> 52
    mantissa = (size & 0xFFFFFFFFFFFFF) | (1 << 52)
    shift = tl.minimum(tl.maximum(29 + 897 - exponent, 0), 63)
    small = tl.maximum(mantissa >> shift, 1)
    cut = tl.where(exponent >= 897, (size >> 29) - (896 << 23), small)
    cut = tl.where(exponent >= 1023 + 128, 0x7F7FFFFF, cut)
    return (cut | ((bits >> 63) & 1) << 31).to(tl.int32)


@jit
def _reduce_blocks(  # type: ignore[no-untyped-def]
    x, table, scale, parts, counts, numel, blocks,
    KIND: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr, HISTOGRAM: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr, PARTS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    lanes = (tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]).to(tl.int64)
    n = tl.full((), 0.0, tl.float64)
    nan, posinf, neginf, zeros, mean, m2, m3, m4, l1 = n, n, n, n, n, n, n, n, n
    low_all = tl.full((), float("inf"), tl.float64)
    high_all = -low_all
    for block in range(blocks):
        at = (program * blocks + block) * (GROUPS * 8) + lanes
        inside = at < numel
        v = _load(x, table, at, inside, KIND, WIDE)
        infinite = tl.abs(v) == float("inf")
        finite = inside & (v == v) & (infinite == 0)
        low = tl.min(tl.min(tl.where(finite, v, float("inf")), axis=1), axis=0)
        high = tl.max(tl.max(tl.where(finite, v, float("-inf")), axis=1), axis=0)
        number = _count(finite)
        some = number > 0
        v = tl.where(inside, v, 1.0)
        nan += _count(v != v)
        posinf += _count(infinite & (v > 0))
        neginf += _count(infinite & (v < 0))
        zeros += _count(v == 0)
        low_all = tl.minimum(low_all, low.to(tl.float64))
        high_all = tl.maximum(high_all, high.to(tl.float64))
        if HISTOGRAM:
            known = tl.where(finite, v, 0.0)
            bits = _cut(known) if WIDE else known.to(tl.int32, bitcast=True)
            bucket = ((bits >> 19) & 0xFFE) | ((bits >> 31) & 1)
            tl.atomic_add(counts + bucket, 1, mask=finite & (v != 0), sem="relaxed")
        u = tl.where(finite, v, 0.0).to(tl.float64)
        if SCALED:
            u = u * tl.load(scale)
        few = tl.maximum(number, 1.0)
        shift = _total(u) / few
        deviation = tl.where(finite, u - shift, 0.0)
        centre = shift + _total(deviation) / few
        deviation = tl.where(finite, u - centre, 0.0)
        squares = deviation * deviation
        q, c, f = _total(squares), _total(squares * deviation), _total(squares * squares)
        share = number / tl.maximum(n + number, 1.0)
        delta = tl.where(some, centre - mean, 0.0)
        other = 1.0 - share
        square = delta * delta
        mean += delta * share
        m4 += f + square * square * (n * share) * (other * other - other * share + share * share)
        m4 += 6 * square * (other * other * q + share * share * m2) + 4 * delta * (other * c - share * m3)
        m3 += c + square * delta * (n * share) * (other - share) + 3 * delta * (other * q - share * m2)
        m2 += q + square * (n * share)
        l1 += _total(tl.abs(u))
        n += number
    out = parts + program * PARTS
    tl.store(out + 0, n)
    tl.store(out + 1, nan)
    tl.store(out + 2, posinf)
    tl.store(out + 3, neginf)
    tl.store(out + 4, zeros)
    tl.store(out + 5, low_all)
    tl.store(out + 6, high_all)
    tl.store(out + 7, mean)
    tl.store(out + 8, m2)
    tl.store(out + 9, l1)
    tl.store(out + 10, m3)
    tl.store(out + 11, m4)


@jit
def _merge_parts(parts, words, programs, PROGRAMS: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """One program: all programs' results by Chan's formula for many parts, written as the row's words."""
    at = tl.arange(0, PROGRAMS)
    inside = at < programs
    start = parts + at * PARTS
    n = tl.load(start, mask=inside, other=0.0)
    mean = tl.load(start + 7, mask=inside, other=0.0)
    total = tl.maximum(tl.sum(n, axis=0), 1.0)
    whole = tl.sum(mean * (n / total), axis=0)
    apart = mean - whole
    square = apart * apart
    each2 = tl.load(start + 8, mask=inside, other=0.0)
    each3 = tl.load(start + 10, mask=inside, other=0.0)
    each4 = tl.load(start + 11, mask=inside, other=0.0)
    m2 = tl.sum(each2 + n * square, axis=0)
    m3 = tl.sum(each3 + 3 * apart * each2 + n * square * apart, axis=0)
    m4 = tl.sum(each4 + 4 * apart * each3 + 6 * square * each2 + n * square * square, axis=0)
    least, variance = tl.maximum(m2, 1e-300), tl.maximum(m2 / total, 1e-300)
    low = tl.min(tl.load(start + 5, mask=inside, other=float("inf")), axis=0)
    high = tl.max(tl.load(start + 6, mask=inside, other=float("-inf")), axis=0)
    l1 = tl.sum(tl.load(start + 9, mask=inside, other=0.0), axis=0)
    for i in tl.static_range(4):
        tl.store(words + i, tl.sum(tl.load(start + 1 + i, mask=inside, other=0.0), axis=0).to(tl.int64))
    tl.store(words + 4, low.to(tl.int64, bitcast=True))
    tl.store(words + 5, high.to(tl.int64, bitcast=True))
    tl.store(words + 6, whole.to(tl.int64, bitcast=True))
    tl.store(words + 7, m2.to(tl.int64, bitcast=True))
    tl.store(words + 8, l1.to(tl.int64, bitcast=True))
    tl.store(words + 9, (m3 / least / tl.sqrt(variance)).to(tl.int64, bitcast=True))
    tl.store(words + 10, (m4 / least / variance).to(tl.int64, bitcast=True))


@cache
def _table(name: str, device: torch.device) -> Tensor:
    """Return the values of the 256 codes of an eight-bit float."""
    return torch.from_numpy(FP8[next(d.code for d in DTYPES if d.name == name)]).to(device)


def reduce(flat: Tensor, words: Tensor, histogram: bool) -> None:
    """Launch the kernel on a dense run of elements: the row's words, and its counts behind them, are written later."""
    flat = as_real(flat)
    name = str(flat.dtype).removeprefix("torch.")
    (kind, bits), wide, scaled = _KINDS[name], name in _WIDE, name == "float64"
    raw = flat if bits is None else flat.view(bits)
    table = _table(name, flat.device) if kind == _TABLE else raw
    power, scale = scale_of(flat) if scaled else (None, raw)
    blocks = triton.cdiv(flat.numel(), 8 * _GROUPS)
    each = triton.cdiv(blocks, _MOST_PROGRAMS)
    programs = triton.cdiv(blocks, each)
    parts = torch.empty(programs * _PARTS, dtype=torch.float64, device=flat.device)
    counts = words[COUNTS:].view(torch.int32)
    _reduce_blocks[(programs,)](
        raw, table, scale, parts, counts, flat.numel(), each,
        KIND=kind, WIDE=wide, SCALED=scaled, HISTOGRAM=histogram, GROUPS=_GROUPS, PARTS=_PARTS, **OPTIONS,
    )  # fmt: skip
    _merge_parts[(1,)](parts, words, programs, PROGRAMS=triton.next_power_of_2(programs), PARTS=_PARTS, **OPTIONS)
    write_power(words, power)
