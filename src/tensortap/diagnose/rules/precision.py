"""Rule on precision: what fewer bits would lose, and what half precision is losing already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
_ROUNDING: Final = 2.0**-20  # of the layer's largest gradient; float32 rounds to 2^-24, and sums add up
_CANCELLED: Final = 2.0**-10
_HALVES: Final = {"float16": Format("fp16", 65520.0, 2.0**-14), "bfloat16": Format("bf16", 2.0**128, 2.0**-126)}


@rule("low_precision", severity="info", needs=_PORTS)
def low_precision(
    history: RunHistory, *, lost: float = 0.05, headroom: float = 2.0, tiny: float = 0.1
) -> Iterator[Finding]:
    """What would be lost if tensors were cast: overflow of any element, or more than `lost` of them becoming zero.

    One finding for each format and direction, at the site that loses most. fp8 is taken as it is used: of what products
    multiply, each tensor scaled to fill its range. Of gradients what is only rounding does not count. Tensors that are
    half precision already are warned about when they come within `headroom` of overflow, or when more than `tiny` of
    their elements are subnormal.
    """
    sites = [site for site in history.sites(*_PORTS) if site.floating and np.isfinite(site.absmax).any()]
    if not sites:
        raise NoData("no tensor of floats was recorded")
    full = [site for site in sites if site.dtype in ("float32", "float64")]
    known = {site: h for site in full if (h := history.histogram(site)) is not None}
    rounding = _rounding(known)
    for format in FORMATS:
        if not format.scaled:
            yield from _worst(format, "overflow", {s: _overflow(s, known.get(s), format) for s in full}, 0.0)
        cast = {site: h for site, h in known.items() if not format.scaled or _is_factor(site)}
        shares = {site: _underflow(h, format, rounding.get(site, 0.0)) for site, h in cast.items()}
        yield from _worst(format, "become zero", shares, lost)
    for site in sites:
        if site.dtype in _HALVES:
            yield from _already(history, site, _HALVES[site.dtype], headroom, tiny)


def _overflow(site: SiteHistory, histogram: SiteHistogram | None, format: Format) -> float:
    beyond = float(np.nanmax(site.absmax)) >= format.too_large
    share = histogram.share(format.too_large, np.inf) if histogram is not None else 0.0
    return max(share, 1e-9) if beyond else 0.0


def _is_factor(site: SiteHistory) -> bool:
    """Return whether a tensor may be a factor of a product, which is what fp8 is used for: no bias is."""
    return site.place.port in MODULE_PORTS or len(site.shape) > 1


def _largest(histogram: SiteHistogram) -> float:
    return max(abs(histogram.minimum), abs(histogram.maximum))


def _rounding(known: Mapping[SiteHistory, SiteHistogram]) -> dict[SiteHistory, float]:
    """Return below which size the elements of each gradient are what rounding leaves of zero.

    Such are the gradients of keys in the bias of a fused attention, and of a bias before a normalisation: in exact
    arithmetic they cancel out. They are told by the largest gradient of the layer, of which they are a tiny part: an
    element of `_ROUNDING`, a whole bias of `_CANCELLED`.
    """
    tops = {site: _largest(histogram) for site, histogram in known.items() if site.place.port == "grad"}
    of_layer: dict[str, float] = {}
    for site, top in tops.items():
        of_layer[site.module] = max(top, of_layer.get(site.module, 0.0))
    return {
        site: np.inf if len(site.shape) < 2 and top < _CANCELLED * of_layer[site.module]
        else _ROUNDING * of_layer[site.module]
        for site, top in tops.items()
    }  # fmt: skip


def _underflow(histogram: SiteHistogram, format: Format, rounding: float) -> float:
    """Return the share of elements that would become zero, are not zero, and are more than rounding."""
    top = _largest(histogram)
    small = format.too_small * (top / format.too_large if format.scaled and top else 1.0)
    if rounding > 0:
        return histogram.share(rounding, small) if rounding < small else 0.0
    return histogram.share(0.0, small) - histogram.zeros / max(histogram.finite, 1)


def _worst(format: Format, what: str, lost: dict[SiteHistory, float], most: float) -> Iterator[Finding]:
    losing = {site: share for site, share in lost.items() if share > most}
    if not losing:
        return
    site = max(losing, key=lambda s: losing[s])
    more = len(losing) - 1
    others = f"; {text.counted(more, 'other site')} {_too(what, more, most)}" if more else ""
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


def _too(what: str, more: int, most: float) -> str:
    """Return what other sites would do too."""
    if not most:
        return f"would {what} too"
    return f"{'loses' if more == 1 else 'lose'} more than {text.percent(most, 1)} too"


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
