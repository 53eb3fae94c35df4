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
def append_rows(layout_address: int, plan_address: int, metadata: bytes, into: bytearray, file: int, /) -> int: ...
def crc32(data: object, /) -> int | None: ...
def settle(layout_address: int, plan_address: int, step: int, /) -> bool: ...
def charge(layout_address: int, totals_address: int, length: int, /) -> float: ...
def reopen(layout_address: int, capacity: int, time: int, hash_probes: int, /) -> None: ...
def memory(address: int, size: int, /) -> memoryview: ...
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
def copy_tensors(copies_address: int, buffer_address: int, buffer_size: int, tensors: tuple[object, ...], /) -> int: ...
def record_changes(
    layout_address: int,
    entries_address: int,
    copies_address: int,
    buffer_address: int,
    norms_address: int,
    tensors: tuple[object, ...],
    first: int,
    /,
) -> int: ...
def norms(tensors: tuple[object, ...], /) -> list[float | None]: ...
def show_call(kind: type, function: Callable[..., Any], /) -> bool: ...

class Reader:
    def __init__(
        self,
        compiler: dict[str, Any],
        tracing: Callable[[], object],
        backward_task: Callable[[], int],
        tensor: type,
        parameter: type,
        steps: object,
        recorder: RecorderState,
        mode_is_on: Callable[[], bool],
        grad_enabled: Callable[[], bool],
        compiler_callback: Callable[[], object],
    ) -> None: ...
    def disable(self) -> None: ...

class RecorderState:
    current: Any
    per_thread: bool

class StepState:
    armed: int
    hist: int
    closed: bool

class NativeHook:
    step: Any
    place: Any
    call: int
    index: int
    def connect(self, reader: Reader | None, python: Callable[..., Any], position: int, /) -> None: ...
    def use_point(self, key: int, probes: int, keeping: int, /) -> None: ...
    def keep_whole(self, probes: int, /) -> None: ...
    def await_gradients(self, hook: NativeHook, probes: int, /) -> None: ...

class ModuleCall:
    owner: Final[object]
    path: Final[str]
    sites: Final[dict[str, list[Any]]]
    counts: Final[dict[str, int]]
    visible: bool
    def __init__(
        self, owner: object, path: str, sites: dict[str, list[Any]], visible: bool, counts: dict[str, int]
    ) -> None: ...

class RunningCalls:
    calls: Final[list[ModuleCall]]
    is_on: bool
    mode: object
    def __init__(
        self,
        push: Callable[[Any], object],
        pop: Callable[[], object],
    ) -> None: ...

class ScopeHook:
    def connect(
        self, reader: Reader | None, python: Callable[..., Any], running: object, visibility: object, owner: object, /
    ) -> None: ...
    def use_call(self, call: ModuleCall, generation: int, /) -> None: ...

class ModeCall:
    def __init__(
        self,
        reader: Reader,
        mode: object,
        python: Callable[..., Any],
        known: dict[Any, str | None],
        taps: object,
        state: RunningCalls,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

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
