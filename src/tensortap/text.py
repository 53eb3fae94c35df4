"""Format numbers, shapes, bars and names for people, in one way for every view."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence

_BARS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "kB", "MB", "GB", "TB")


def number(value: float) -> str:
    """Return a number in about seven characters.

    >>> [number(v) for v in (0.0, 0.0131, -4.1, 1234567.0, 3e-09, float("nan"), 12)]
    ['0', '0.0131', '−4.1', '1.23e6', '3e-9', 'nan', '12']
    """
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "−inf"
    text = f"{value:.3g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−", 1) if value < 0 else text


def percent(part: float, whole: float) -> str:
    """Return a share in percent that never rounds something down to nothing.

    >>> percent(1, 1000), percent(1, 10_000_000), percent(0, 5), percent(5, 5), percent(1, 0)
    ('0.1%', '<0.1%', '0%', '100%', '0%')
    """
    if not part or not whole:
        return "0%"
    share = 100 * part / whole
    if share < 0.1 and part:
        return "<0.1%"
    if share > 99.9 and part != whole:
        return ">99.9%"
    return f"{share:.3g}%"


def counted(many: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "probe"), counted(20, "step")
    ('1 probe', '20 steps')
    """
    return f"{many} {noun}" if many == 1 else f"{many} {noun}s"


def a_kind(value: object) -> str:
    """Return a value's type as an error names what it got.

    >>> a_kind([]), a_kind(3), a_kind(None)
    ('a list', 'an int', 'None')
    """
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def wrapped(said: str, width: int) -> str:
    """Return text with its lines broken at a width, each piece under the text of its line; long words stay whole.

    >>> print(wrapped("1. error: constant at fc\\n   All elements are 0.", 16))
    1. error:
       constant at
       fc
       All elements
       are 0.
    """
    return "\n".join(_wrapped_line(line, max(width, 16)) for line in said.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    found = re.match(r"\s*(\d+\. )?", line)
    indent = " " * len(found[0]) if found else ""
    pieces = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(pieces)


def shape(dims: Iterable[int]) -> str:
    """Return a shape without spaces: `[8,128,256]`."""
    return "[" + ",".join(map(str, dims)) + "]"


def size(nbytes: float) -> str:
    """Return a number of bytes with its unit.

    >>> size(0), size(1536), size(3 * 10**9)
    ('0 B', '1.54 kB', '3 GB')
    """
    for unit in _UNITS:
        if nbytes < 1000 or unit == _UNITS[-1]:
            break
        nbytes /= 1000
    return f"{nbytes:.3g} {unit}"


def bars(heights: Sequence[float]) -> str:
    """Return one character a value, from the lowest bar to the highest; a gap where there is nothing.

    >>> bars([0, 1, 4, 8, 4, 1, 0])
    ' ▁▄█▄▁ '
    """
    top = max((h for h in heights if math.isfinite(h)), default=0)
    if top <= 0:
        return " " * len(heights)
    return "".join(_bar(h / top) if math.isfinite(h) and h > 0 else " " for h in heights)


def _bar(share: float) -> str:
    return _BARS[max(0, math.ceil(share * len(_BARS)) - 1)]


def spark(values: Sequence[float], width: int = 16) -> str:
    """Return a line over time: the values between their own minimum and maximum, `!` where one is not finite.

    >>> spark([1, 2, 3, float("nan"), 2])
    '▁▅█!▅'
    """
    picked = [values[i * len(values) // width] for i in range(width)] if len(values) > width else list(values)
    finite = [v for v in picked if math.isfinite(v)]
    if not finite:
        return "!" * len(picked)
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_tick((v - low) / span if span else 0.5) if math.isfinite(v) else "!" for v in picked)


def _tick(share: float) -> str:
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]


def printable(name: str) -> str:
    r"""Return a name with control characters escaped: it can neither break a line nor steer a terminal.

    >>> printable("fc\n\x1b[31m")
    'fc\\n\\x1b[31m'
    """
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
