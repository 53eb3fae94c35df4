"""Write HTML for notebooks: all text escaped, no scripts, colours for light and dark pages."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Final

ALARM: Final = "#d6453d"
WARN: Final = "#b8860b"
CALM: Final = "#3f8fbf"
_CELL: Final = "padding:1px 12px 1px 0;text-align:{};border:0;background:transparent;white-space:nowrap"
_TABLE: Final = "border-collapse:collapse;border:0;margin:4px 0;font:inherit;color:inherit"
_PAGE: Final = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px;line-height:1.45;overflow-x:auto"


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, *inside: str, style: str = "", **attributes: object) -> Html:
    """Return an element; what is inside is escaped unless it is HTML already.

    >>> element("b", "<mlp>", style="color:red")
    '<b style="color:red">&lt;mlp&gt;</b>'
    """
    given = ({"style": style} if style else {}) | attributes
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(v))}"' for key, v in given.items())
    return Html(f"<{name}{said}>{''.join(map(escaped, inside))}</{name}>")


def escaped(text: str) -> str:
    """Return text as HTML: markup and control characters are escaped."""
    if isinstance(text, Html):
        return text
    return html.escape("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def page(*inside: str) -> Html:
    """Return the block that a notebook shows."""
    return element("div", *inside, style=_PAGE)


def line(*parts: str, colour: str = "") -> Html:
    """Return a line."""
    return element("div", *parts, style=f"color:{colour}" if colour else "")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Html:
    """Return a table whose first `left` columns are aligned left, the others right."""
    sides = ["left" if i < left else "right" for i in range(len(heads))]
    head = [
        element("th", name, style=_CELL.format(side) + ";opacity:.65") for name, side in zip(heads, sides, strict=True)
    ]
    body = [
        element("tr", *(element("td", cell, style=_CELL.format(side)) for cell, side in zip(row, sides, strict=True)))
        for row in rows
    ]
    return element("table", element("tr", *head), *body, style=_TABLE)


def coloured(text: str, colour: str) -> str:
    """Return text in a colour, or unchanged without one."""
    return element("span", text, style=f"color:{colour};font-weight:600") if colour else text


def bars(heights: Sequence[float], width: int = 96, height: int = 18, title: str = "") -> Html:
    """Return a small histogram."""
    top = max((h for h in heights if math.isfinite(h)), default=0.0)
    if top <= 0:
        return Html("")
    each = width / len(heights)
    drawn = [
        element("rect", x=f"{i * each:.1f}", y=f"{height - h / top * height:.1f}", width=f"{max(each - 0.5, 0.5):.1f}",
                height=f"{h / top * height:.1f}")
        for i, h in enumerate(heights) if h > 0
    ]  # fmt: skip
    return _svg(width, height, element("g", *drawn, fill=CALM), title)


def spark(values: Sequence[float], width: int = 96, height: int = 18, title: str = "") -> Html:
    """Return a small line over steps, red where a value is not finite."""
    finite = [v for v in values if math.isfinite(v)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    apart = width / max(len(values) - 1, 1)
    parts: list[str] = []
    points: list[str] = []
    for i, value in enumerate(values):
        if math.isfinite(value):
            share = (value - low) / span if span else 0.5
            points.append(f"{i * apart:.1f},{height - 1 - share * (height - 2):.1f}")
        else:
            x = f"{i * apart:.1f}"
            parts.append(element("line", x1=x, x2=x, y1=0, y2=height, stroke=ALARM))
    drawn = element("polyline", points=" ".join(points), fill="none", stroke=CALM, stroke_width="1.3")
    return _svg(width, height, Html(drawn + "".join(parts)), title)


def _svg(width: int, height: int, inside: Html, title: str) -> Html:
    named = [element("title", title)] if title else []
    return element("svg", *named, inside, width=width, height=height, viewBox=f"0 0 {width} {height}", role="img",
                   style="vertical-align:middle")  # fmt: skip
