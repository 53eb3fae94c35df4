"""Rule on precision: what fewer bits would lose, and what half precision is losing already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from tensortap import text
from tensortap.diagnose.history import RunHistory, SiteHistogram, SiteHistory
from tensortap.diagnose.rule import NoData, rule
from tensortap.finding import Finding
from tensortap.select.ports import MODULE_PORTS

_PORTS: Final = (*MODULE_PORTS, "param", "grad")


class Format(NamedTuple):
    """A number format: what rounds to infinity, what rounds to zero, and whether tensors are scaled to fill it."""

    name: str
    too_large: float
    too_small: float
    scaled: bool = False


FORMATS: Final = (
    Format("fp16", 65520.0, 2.0**-25),
    Format("bf16", 2.0**128 * (1 - 2.0**-9), 2.0**-134),
    Format("fp8 e4m3", 448.0, 2.0**-10, scaled=True),
    Format("fp8 e5m2", 57344.0, 2.0**-17, scaled=True),
)
_HALVES: Final = {"float16": Format("fp16", 65520.0, 2.0**-14), "bfloat16": Format("bf16", 2.0**128, 2.0**-126)}


@rule("low_precision", severity="info", needs=_PORTS)
def low_precision(
    history: RunHistory, *, lost: float = 0.05, headroom: float = 2.0, tiny: float = 0.1
) -> Iterator[Finding]:
    """What would be lost if tensors were cast: overflow of any element, or more than `lost` of them becoming zero.

    One finding for each format and direction, at the site that loses most. fp8 is taken with each tensor scaled to fill
    its range, as it is used. Tensors that are half precision already are warned about when they come within `headroom`
    of overflow, or when more than `tiny` of their elements are subnormal.
    """
    sites = [site for site in history.sites(*_PORTS) if site.floating and np.isfinite(site.absmax).any()]
    if not sites:
        raise NoData("no tensor of floats was recorded")
    full = [site for site in sites if site.dtype in ("float32", "float64")]
    known = {site: h for site in full if (h := history.histogram(site)) is not None}
    for format in FORMATS:
        if not format.scaled:
            yield from _worst(format, "overflow", {s: _overflow(s, known.get(s), format) for s in full}, 0.0)
        yield from _worst(format, "become zero", {s: _underflow(h, format) for s, h in known.items()}, lost)
    for site in sites:
        if site.dtype in _HALVES:
            yield from _already(history, site, _HALVES[site.dtype], headroom, tiny)


def _overflow(site: SiteHistory, histogram: SiteHistogram | None, format: Format) -> float:
    beyond = float(np.nanmax(site.absmax)) >= format.too_large
    share = histogram.share(format.too_large, np.inf) if histogram is not None else 0.0
    return max(share, 1e-9) if beyond else 0.0


def _underflow(histogram: SiteHistogram, format: Format) -> float:
    top = max(abs(histogram.minimum), abs(histogram.maximum))
    small = format.too_small * (top / format.too_large if format.scaled and top else 1.0)
    return histogram.share(0.0, small) - histogram.zeros / max(histogram.finite, 1)


def _worst(format: Format, what: str, lost: dict[SiteHistory, float], most: float) -> Iterator[Finding]:
    losing = {site: share for site, share in lost.items() if share > most}
    if not losing:
        return
    site = max(losing, key=lambda s: losing[s])
    more = len(losing) - 1
    others = (
        f"; {more} other site{'s lose' if more > 1 else ' loses'} more than {text.percent(most, 1)} too" if more else ""
    )
    scaled = ", scaled to its range," if format.scaled else ""
    advice = (
        "Keep this site in float32 or bf16." if what == "overflow"
        else "Scale the loss for gradients; for activations and weights, scale each channel or keep float32."
    )  # fmt: skip
    yield site.finding(
        np.ones(len(site.steps), bool),
        f"In {format.name}{scaled} {text.percent(losing[site], 1)} of it would {what}{others}.", advice,
        format=format.name, share=losing[site], sites=len(losing),
    )  # fmt: skip


def _already(history: RunHistory, site: SiteHistory, format: Format, headroom: float, tiny: float) -> Iterator[Finding]:
    near = site.absmax * headroom >= format.too_large
    if near.any():
        top = float(np.nanmax(site.absmax))
        yield site.finding(
            near, f"It reaches {text.number(top)} of the {text.number(format.too_large)} that {format.name} can hold.",
            "Use bf16, scale it down, or keep this layer in float32.", severity="warning", absmax=top,
        )  # fmt: skip
    histogram = history.histogram(site)
    small = 0.0 if histogram is None else histogram.share(0.0, format.too_small) - histogram.zeros / histogram.finite
    if small > tiny:
        yield site.finding(
            np.ones(len(site.steps), bool),
            f"{text.percent(small, 1)} of it is subnormal in {format.name}, where digits and then values are lost.",
            "Scale the loss (torch.amp.GradScaler), or use bf16.", severity="warning", share=small,
        )  # fmt: skip
