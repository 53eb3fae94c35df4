"""A site over steps as SVG, for where there is no matplotlib."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tensortap import markup, text
from tensortap.view.notebook.curves import Curves, Floats

_WIDTH: Final = 720
_HEIGHT: Final = 260
_LEFT: Final = 70
_TOP: Final = 28
_BOTTOM: Final = 34


class SvgFigure:
    """A small figure: notebooks show it, and `savefig` writes it."""

    def __init__(self, curves: Curves) -> None:
        self._curves = curves
        finite = np.concatenate([c[np.isfinite(c)] for c in (curves.low, curves.high, curves.mean)])
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        self._range = (low, high) if low < high else (low - 1, high + 1)

    def savefig(self, path: str | os.PathLike[str]) -> None:
        """Write it as an SVG file."""
        Path(path).write_text(self._repr_svg_(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        style = "font-family:sans-serif;font-size:11px"
        return markup.element(
            "svg", *self._parts(), xmlns="http://www.w3.org/2000/svg", width=_WIDTH, height=_HEIGHT, style=style,
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", fill="currentColor",
        )  # fmt: skip

    def _parts(self) -> Iterator[str]:
        curves = self._curves
        yield markup.element("text", curves.title, x=_LEFT, y=16)
        yield self._band(curves.low, curves.high, 0.18)
        if curves.q05 is not None and curves.q95 is not None:
            yield self._band(curves.q05, curves.q95, 0.35)
        yield from self._line(curves.mean)
        for x in self._x(curves.bad):
            yield markup.element(
                "line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=_TOP, y2=_HEIGHT - _BOTTOM, stroke=markup.ALARM
            )
        yield from self._axes()

    def _x(self, steps: npt.NDArray[np.int64]) -> Floats:
        first, last = self._curves.steps[0], self._curves.steps[-1]
        return np.asarray(_LEFT + (steps - first) / max(last - first, 1) * (_WIDTH - _LEFT - 10), np.float64)

    def _y(self, values: Floats) -> Floats:
        low, high = self._range
        return np.asarray(_HEIGHT - _BOTTOM - (values - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP), np.float64)

    def _points(self, values: Floats) -> list[str]:
        known = np.isfinite(values)
        return [
            f"{x:.1f},{y:.1f}" for x, y in zip(self._x(self._curves.steps[known]), self._y(values[known]), strict=True)
        ]

    def _band(self, low: Floats, high: Floats, opacity: float) -> str:
        around = [*self._points(high), *reversed(self._points(low))]
        return markup.element("polygon", points=" ".join(around), fill=markup.CALM, fill_opacity=opacity)

    def _line(self, values: Floats) -> Iterator[str]:
        points = " ".join(self._points(values))
        yield markup.element("polyline", points=points, fill="none", stroke=markup.CALM, stroke_width=1.5)

    def _axes(self) -> Iterator[str]:
        low, high = self._range
        for value in (low, (low + high) / 2, high):
            y = float(self._y(np.array(value)))
            yield markup.element("text", text.number(value), x=_LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end")
        first, last = int(self._curves.steps[0]), int(self._curves.steps[-1])
        for said, x, anchor in ((f"step {first}", _LEFT, "start"), (str(last), _WIDTH - 10, "end")):
            yield markup.element("text", said, x=x, y=_HEIGHT - 14, text_anchor=anchor)
