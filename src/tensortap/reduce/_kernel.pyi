"""Types of the C extension; what it computes is described in csrc/kernel.c."""

from collections.abc import Callable
from typing import Any, Final

LEVELS: Final[tuple[str, ...]]
STATISTICS: Final[tuple[str, ...]]

def level() -> str: ...
def set_level(name: str, /) -> None: ...
def threads() -> int: ...
def set_threads(number: int, /) -> None: ...
def address(array: object, /) -> int: ...
def message(layout_address: int, plan_address: int, metadata: bytes, into: bytearray, /) -> None: ...
def xla() -> object: ...
def borrow(address: int, threads: int, /) -> None: ...
def reduce(
    row_address: int,
    hist_address: int,
    address: int,
    dtype: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    hash: bool = False,
    /,
) -> tuple[int, int]: ...
def reduce_columns(out_address: int, address: int, dtype: int, rows: int, width: int, /) -> None: ...
def hash_bytes(address: int, count: int, /) -> int: ...
def gather_rows(out_address: int, addresses_address: int, count: int, size: int, /) -> None: ...
def round_bfloat16(out_address: int, address: int, count: int, /) -> None: ...
def record(
    layout_address: int,
    key: int,
    probes: int,
    want: int,
    recomputed: bool | int,
    dtype: int,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    /,
) -> int: ...
def use_exchange(capsule: object, /) -> bool: ...
def record_tensor(
    layout_address: int, key: int, probes: int, want: int, recomputed: bool | int, tensor: object, /
) -> int: ...
def record_many(layout_address: int, entries_address: int, tensors: tuple[object, ...], first: int, /) -> int: ...
def show_call(kind: type[NativeHook], function: Callable[..., Any], /) -> bool: ...

class Reader:
    def __init__(
        self,
        compiler: dict[str, Any],
        tracing: Callable[[], object],
        backward_task: Callable[[], int],
        tensor: type,
        parameter: type,
        steps: object,
        recorder: object,
    ) -> None: ...
    def disable(self) -> None: ...

class NativeHook:
    def connect(self, reader: Reader | None, python: Callable[..., Any], position: int, /) -> None: ...
    def use_point(self, key: int, probes: int, keeping: int, /) -> None: ...

def commit(
    layout_address: int,
    key: int,
    probes: int,
    recomputed: bool | int,
    dtype: int,
    shape: tuple[int, ...],
    row_address: int,
    hist_offset: int,
    hist_address: int,
    hist_length: int,
    /,
) -> int: ...
