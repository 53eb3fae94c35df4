"""One site over steps as a figure: by matplotlib where it is installed, else as SVG."""

from __future__ import annotations

import io
from typing import Any

from tensortap import markup
from tensortap.store.run import Run
from tensortap.view.notebook.curves import Curves, curves_of
from tensortap.view.notebook.svg import SvgFigure


def plot(run: Run, site: str, **place: Any) -> Any:
    """Return the figure of a site: `savefig` writes it to a file, a notebook shows it."""
    curves = curves_of(run, site, **place)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return SvgFigure(curves)
    return _matplotlib(Figure, curves)


def _matplotlib(base: Any, curves: Curves) -> Any:
    # Not pyplot: it keeps figures alive, opens windows and shows a figure twice in a notebook.
    figure = _shown(base)(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(curves.steps, curves.low, curves.high, color=markup.CALM, alpha=0.18, lw=0, label="min … max")
    if curves.q05 is not None:
        axes.fill_between(curves.steps, curves.q05, curves.q95, color=markup.CALM, alpha=0.35, lw=0, label="5 … 95 %")
    axes.plot(curves.steps, curves.mean, color=markup.CALM, lw=1.5, label="mean")
    for i, step in enumerate(curves.bad.tolist()):
        axes.axvline(step, color=markup.ALARM, lw=1, label="NaN or Inf" if not i else None)
    axes.set(xlabel="step", title=curves.title)
    axes.legend(frameon=False, ncols=4, fontsize="small")
    return figure


def _shown(base: Any) -> Any:
    """Return a figure that a notebook shows without pyplot."""

    class SiteFigure(base):  # type: ignore[misc]
        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=110)
            return out.getvalue()

    return SiteFigure
