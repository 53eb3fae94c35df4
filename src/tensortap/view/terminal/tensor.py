"""One tensor as a few lines that a person can read: `tt.show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
from rich.text import Text

from tensortap import text
from tensortap.reduce.buffers import array_of, buffer_of, nbytes
from tensortap.reduce.summary import Summary, head, summarize, trouble
from tensortap.text import printable
from tensortap.view.terminal import formats
from tensortap.view.terminal.screen import Screen

_ENDS: Final = 4
_BARS: Final = 16
_KINDS: Final = {"torch": "torch", "numpy": "numpy", "jaxlib": "jax", "jax": "jax", "tensorflow": "tf"}


def show_tensor(value: Any, *, name: str = "", file: IO[str] | None = None) -> None:
    """Print any array or tensor so that it can be read: what it is, what is wrong, its range, its values.

    >>> import numpy as np, sys, tensortap as tt
    >>> tt.show(np.array([[1.0, -2.0], [float("nan"), 0.0]], np.float32), file=sys.stdout)
    numpy.ndarray [2,2] f32 cpu · 16 B
    NaN 1 (25%)
    −2 █         █    █ 1  mean −0.333 ± 1.25  zeros 25%
    1 −2 nan 0

    Works for PyTorch, NumPy, JAX and TensorFlow, lists and numbers; the tensor stays as it is.
    """
    screen = Screen(file)
    if name:
        screen.draw(Text(printable(name), style="bold"))
    screen.draw(*lines(value))


def lines(value: Any) -> Iterator[Text]:
    """Return the lines to print; NaN and Inf are named before any number."""
    buffer = buffer_of(value)
    summary = summarize(value)
    about = " ".join(filter(None, [_kind(value), head(summary), _device(value), _gradient(value)]))
    yield Text(f"{about} · {text.size(nbytes(buffer))}")
    if bad := trouble(summary):
        yield Text(bad, style=formats.ALARM)
    if summary.finite:
        yield Text(_range(summary))
    if summary.numel > 1:
        yield Text(_values(array_of(buffer)), style="dim")


def _range(summary: Summary) -> str:
    low, high, mean, std = (text.number(summary[name]) for name in ("min", "max", "mean", "std"))
    if summary.numel == 1:
        return low
    if summary.min == summary.max:
        return f"every finite element is {low}"
    return f"{low} {summary.bars(_BARS)} {high}  mean {mean} ± {std}  zeros {formats.zeros_text(summary)}"


def _values(array: npt.NDArray[Any]) -> str:
    """Return the first and the last elements in memory order."""
    if array.size <= 2 * _ENDS:
        return " ".join(map(_value, array.flat))
    ends = [*range(_ENDS), *range(array.size - _ENDS, array.size)]
    said = [_value(array.flat[i]) for i in ends]
    return " ".join([*said[:_ENDS], "…", *said[_ENDS:]])


def _value(value: Any) -> str:
    return str(value) if np.iscomplexobj(value) or isinstance(value, np.bool) else text.number(float(value))


def _kind(value: Any) -> str:
    cls = type(value)
    root = _KINDS.get(cls.__module__.partition(".")[0])
    return f"{root}.{ {'ArrayImpl': 'Array', 'EagerTensor': 'Tensor'}.get(cls.__name__, cls.__name__) }" if root else ""


def _device(value: Any) -> str:
    found = getattr(value, "device", "")
    return "" if callable(found) else str(found).rpartition("device:")[2]


def _gradient(value: Any) -> str:
    return "requires_grad" if getattr(value, "requires_grad", False) is True else ""
