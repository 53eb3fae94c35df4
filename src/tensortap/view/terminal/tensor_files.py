"""Tensors of a .npy, .npz or .safetensors file on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
from rich.text import Text
from safetensors import safe_open

from tensortap.reduce.summary import describe, summarize
from tensortap.sinks.line import nonfinite
from tensortap.sinks.npy import load_npy
from tensortap.sinks.plain import plain
from tensortap.text import printable
from tensortap.view.terminal import formats
from tensortap.view.terminal.screen import Screen
from tensortap.view.terminal.tensor import show_tensor

_SUFFIXES: Final = (".npy", ".npz", ".safetensors")


def holds_tensors(path: str) -> bool:
    """Return whether a path is a file that holds tensors."""
    return path.endswith(_SUFFIXES) and Path(path).is_file()


def show_tensors(path: str, as_json: bool = False, stream: IO[str] | None = None) -> None:
    """Show one tensor in detail, or a line for each of several."""
    found = dict(_read(path))
    if as_json:
        said = {name: plain(dict(summarize(array))) for name, array in found.items()}
        json.dump(said, stream or sys.stdout, allow_nan=False, indent=1)
    elif len(found) == 1:
        show_tensor(*found.values(), name=next(iter(found)), file=stream)
    else:
        _draw(found, Screen(stream))


def _draw(found: dict[str, npt.NDArray[Any]], screen: Screen) -> None:
    widest = max(map(len, found), default=0)
    for name, array in found.items():
        summary = summarize(array)
        style = formats.ALARM if nonfinite(summary) else ""
        screen.draw(Text(f"{printable(name):<{widest}}  {describe(summary)}", style=style))


def _read(path: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    if path.endswith(".npy"):
        yield Path(path).name, load_npy(path)
    elif path.endswith(".npz"):
        with np.load(path, allow_pickle=False) as archive:
            yield from archive.items()
    else:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                yield name, file.get_tensor(name)
