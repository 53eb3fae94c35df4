"""The plain values that the stages pass to each other. No behaviour, no imports of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

PHASES: Final = ("", "train", "eval")
WhenFull = Literal["block", "drop"]


class DType(NamedTuple):
    """One element type the kernel reads: `code` is its number in C, `name` what files say."""

    code: int
    name: str
    short: str
    itemsize: int


DTYPES: Final = tuple(
    DType(code, name, short, itemsize)
    for code, (name, short, itemsize) in enumerate(
        [
            ("float64", "f64", 8),
            ("float32", "f32", 4),
            ("float16", "f16", 2),
            ("bfloat16", "bf16", 2),
            ("float8_e4m3fn", "f8e4m3", 1),
            ("float8_e5m2", "f8e5m2", 1),
            ("int8", "i8", 1),
            ("int16", "i16", 2),
            ("int32", "i32", 4),
            ("int64", "i64", 8),
            ("uint8", "u8", 1),
            ("uint16", "u16", 2),
            ("uint32", "u32", 4),
            ("uint64", "u64", 8),
            ("bool", "bool", 1),
            ("complex64", "c64", 8),
            ("complex128", "c128", 16),
            ("float8_e4m3fnuz", "f8e4m3z", 1),
            ("float8_e5m2fnuz", "f8e5m2z", 1),
        ]
    )
)
DTYPE_CODE: Final[Mapping[str, int]] = {d.name: d.code for d in DTYPES}


class Buffer(NamedTuple):
    """Memory to reduce: where it lies, what it holds, and an owner that keeps it alive.

    `strides` are in bytes; None means the elements lie in one dense run (in any order).
    """

    address: int
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    owner: Any


class Place(NamedTuple):
    """Where a tensor appears: module path, port, slot inside a nested value, operation."""

    site: str
    port: str = "output"
    slot: str = ""
    op: str = ""

    def __str__(self) -> str:
        return f"{self.site}:{self.port}{self.slot}"


class Call(NamedTuple):
    """One call of an operation, as a probe's `where` is asked about it. It must not be kept: it holds tensors.

    `path` is the module that calls, `number` counts operations of the kind in one call of it, `line` is the line of
    the user's code as `file:line  code`.
    """

    op: str
    path: str
    number: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    line: str


class StepOutcome(NamedTuple):
    """The facts about a step when it closes: the user's metrics, how many tensors were non-finite, and which replicas
    were first found not to be equal (empty where none were).
    """

    metrics: Mapping[str, float]
    nonfinite: int = 0
    unequal_replicas: str = ""
