"""Write and read tensors in safetensors files, bf16 and fp8 included, one at a time from any file system."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tensortap.record.step import Step
from tensortap.reduce.buffers import NUMPY_DTYPES
from tensortap.reduce.kernel import crc32
from tensortap.store.files import load_json
from tensortap.store.names import tensor_file
from tensortap.types import Place

Array = npt.NDArray[Any]
_BY_NAME = {dtype.name: dtype for dtype in NUMPY_DTYPES}
_KEY_TYPES = (int, int, str, str, str, int, str, bool, int, str)
_INDEX_CRC = "tensortap_crc32"
_FILE = "tensortap_file"
_LONGEST_NAME = "?" * 200
_ANY_STEP = "step=*"
_ANY_ENTRY = '{"step": null'
_UNSUPPORTED = frozenset(("complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"))
_FORMAT: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""How the format calls the types that it knows."""


class TensorKey(NamedTuple):
    """Which tensor: the record it belongs to and the reducer that kept it."""

    step: int
    rank: int
    site: str
    port: str
    slot: str
    call: int
    kind: str
    recomputed: bool = False
    probe: int = 0
    phase: str = ""  # given where each phase has its own numbers of steps

    @property
    def place(self) -> Place:
        """Where it was seen."""
        return Place(self.site, self.port, self.slot)

    def name(self) -> str:
        """Return how it is called in its file."""
        again = "r" if self.recomputed else ""
        probe = f"/probe={self.probe}" if self.probe else ""  # another probe's tensor of this kind may come later
        phase = f"{self.phase}/" if self.phase else ""
        return f"{phase}step={self.step}/{self.site}:{self.port}{self.slot}/call={self.call}{again}/{self.kind}{probe}"


def key_of(entry: Mapping[str, Any]) -> TensorKey:
    """Return the key that an entry of a file's index tells; TypeError or ValueError when it is damaged."""
    key = TensorKey(**{field: entry[field] for field in TensorKey._fields if field in entry})
    if not all(isinstance(value, kind) for value, kind in zip(key, _KEY_TYPES, strict=True)):
        raise ValueError(f"{key} is not the key of a tensor")
    return key


class Stored(NamedTuple):
    """A tensor on its way to a file: its name there, what the file's index says of it, its elements."""

    name: str
    entry: str
    array: Array


def tensors_of(step: Step) -> Iterator[Stored]:
    """Yield what a step kept of tensors, under names that do not collide."""
    for kept in tensors_of_any_step(step):
        yield Stored(*of_step(step.number, kept.name, kept.entry), kept.array)


def of_step(number: int, name: str, entry: str) -> tuple[str, str]:
    """Return name and entry of a tensor with the number of its step, which `tensors_of_any_step` leaves open.

    >>> of_step(7, "step=*/x:output/call=0/full", '{"step": null, "rank": 0}')
    ('step=7/x:output/call=0/full', '{"step": 7, "rank": 0}')
    """
    if not entry.startswith(_ANY_ENTRY):
        return name, entry
    return name.replace(_ANY_STEP, f"step={number}", 1), f'{{"step": {number}{entry[len(_ANY_ENTRY) :]}'


def tensors_of_any_step(step: Step) -> Iterator[Stored]:
    """Yield what a step kept of tensors. Names and entries are the same in every step that keeps the same."""
    taken: dict[str, int] = {}
    columns = step.table.columns
    phase = step.phase if step.numbered_by_phase else ""
    before = f"{phase}/" if phase else ""
    for kept in step.table.tensors:
        row = kept.row
        name, entry = _name_and_entry(
            step.place(row), step.rank, int(columns["call"][row]), kept.kind,
            bool(columns["recomputed"][row >> 3] >> (row & 7) & 1), kept.probe.bit_length() - 1, phase,
        )  # fmt: skip
        name = f"{before}{_ANY_STEP}{name}"
        taken[name] = taken.get(name, 0) + 1
        yield Stored(name if taken[name] == 1 else f"{name}~{taken[name]}", f"{_ANY_ENTRY}{entry}", kept.array)


@lru_cache(maxsize=4096)
def _name_and_entry(
    place: Place, rank: int, call: int, kind: str, recomputed: bool, probe: int, phase: str
) -> tuple[str, str]:
    """Return name and index entry of a tensor without their beginnings, the step: mostly the same in every step."""
    key = TensorKey(
        step=0, rank=rank, site=place.site, port=place.port, slot=place.slot, call=call, kind=kind,
        recomputed=recomputed, probe=probe, phase=phase,
    )  # fmt: skip
    return key.name().partition("step=0")[2], index_entry(key).removeprefix('{"step": 0')


def write_tensors(path: Path, tensors: Iterable[Stored], name: str = "") -> None:
    """Write a safetensors file, which will be called `name` in its run.

    Types that the format does not know go in as bytes; the index knows better.
    """
    content: dict[str, Array] = {}
    index: dict[str, Any] = {}
    for tensor, entry, array in tensors:
        array = np.asarray(array, order="C")
        raw = array.tobytes()
        index[tensor] = _indexed(entry, array.dtype.name, array.shape, crc32(raw))
        content[tensor] = np.frombuffer(raw, np.uint8) if array.dtype.name in _UNSUPPORTED else array
    save_file(content, path, metadata=_metadata(index, name))


def _indexed(entry: str, dtype: str, shape: Sequence[int], crc: int) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(entry)
    return said | {"dtype": dtype, "shape": list(shape), "crc32": crc}


def _metadata(index: Mapping[str, Any], name: str) -> dict[str, str]:
    said = json.dumps(index)
    return {"tensortap": said, _INDEX_CRC: str(crc32(said.encode())), _FILE: name}


class Placed(Protocol):
    """A tensor whose bytes lie in a file already."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def entry(self) -> str:
        """What the index says of it."""

    @property
    def dtype(self) -> str:
        """The type of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def size(self) -> int:
        """Its bytes."""

    @property
    def crc32(self) -> int:
        """Their checksum."""


def encoded_header(tensors: Iterable[Placed], room: int, name: str) -> bytes | None:
    """Return the beginning of the safetensors file `name`, `room` bytes long, of tensors that follow one another.

    None where it does not fit.
    """
    header: dict[str, Any] = {}
    index: dict[str, Any] = {}
    at = 0
    for tensor in tensors:
        kind, shape = _FORMAT.get(tensor.dtype, "U8"), list(tensor.shape)
        header[tensor.name] = {
            "dtype": kind, "shape": shape if tensor.dtype in _FORMAT else [tensor.size],
            "data_offsets": [at, at + tensor.size],
        }  # fmt: skip
        index[tensor.name] = _indexed(tensor.entry, tensor.dtype, shape, tensor.crc32)
        at += tensor.size
    text = json.dumps({"__metadata__": _metadata(index, name), **header}).encode()
    return (room - 8).to_bytes(8, "little") + text.ljust(room - 8) if room % 8 == 0 and len(text) <= room - 8 else None


_SAMPLE_STEP: Final = 10**15  # of as many digits as a step's number will ever have


def header_bound(tensors: Iterable[Stored]) -> int:
    """Return how many bytes of a header these tensors take at most, with whatever step and place; of none: the rest."""
    header: dict[str, Any] = {}
    index: dict[str, Any] = {}
    for name, entry, array in tensors:
        name, entry = of_step(_SAMPLE_STEP, name, entry)
        header[name] = {"dtype": "F8_E4M3", "shape": list(array.shape), "data_offsets": [1 << 50, 1 << 50]}
        index[name] = _indexed(entry, array.dtype.name, array.shape, 1 << 32)
    return len(json.dumps({"__metadata__": _metadata(index, "" if index else _LONGEST_NAME), **header})) + 16


def array_of_bytes(dtype: str, shape: Sequence[int], data: bytes) -> Array:
    """Return an array of its own from raw bytes."""
    return np.frombuffer(bytearray(data), _BY_NAME[dtype]).reshape(shape)


def index_entry(key: TensorKey) -> str:
    """Return what a file's metadata says of a tensor."""
    return json.dumps(key._asdict())


def misplaced(name: str, rank: int, keys: Iterable[TensorKey]) -> str:
    """Return why tensors do not belong in a file: files of version 1 do not tell under which name they were written.

    Empty where they are of the steps in its name and of the rank of its folder.
    """
    said = tensor_file(name.rpartition("/")[2])
    fits = said is not None and all(said.first <= key.step <= said.last and key.rank == rank for key in keys)
    return "" if fits else "it holds tensors of other steps, or of another rank, than its name says"


class TensorReader:
    """Read the header of a safetensors file once, then single tensors out of it.

    safetensors' own NumPy loader knows no fp8 and no remote files; the format is a JSON header and raw bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"its header says it is {length} bytes long, of a file of {size}")
        header = load_json(file.read(length))
        self._data = 8 + length
        metadata = header.pop("__metadata__", {})
        self.written_as = str(metadata.get(_FILE, ""))  # its name, when it was written
        said = metadata.get("tensortap", "{}")
        if metadata.get(_INDEX_CRC, crc := str(crc32(said.encode()))) != crc:
            raise ValueError("the checksum of its index does not hold")
        index = load_json(said)
        if index.keys() != header.keys():
            raise ValueError("its index and its header name other tensors")
        self.entries = {name: (header[name], index[name]) for name in index}
        if any(self._data + entry["data_offsets"][1] > size for entry, _ in self.entries.values()):
            raise ValueError("it is shorter than its header says")

    def keys(self) -> dict[str, TensorKey]:
        """Return the tensors in the file."""
        return {name: key_of(entry) for name, (_, entry) in self.entries.items()}

    def read(self, name: str, file: IO[bytes] | None = None) -> Array:
        """Return one tensor, as an array of its own; out of `file` when the first one was closed meanwhile."""
        header, entry = self.entries[name]
        begin, end = header["data_offsets"]
        source = file or self._file
        source.seek(self._data + begin)
        raw = source.read(end - begin)
        if "crc32" in entry and crc32(raw) != entry["crc32"]:
            raise ValueError(f"the checksum of {name} does not hold")
        return array_of_bytes(entry["dtype"], entry["shape"], raw)
