"""Rules on values: nothing but zeros, one value, a few outliers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensortap import text
from tensortap.diagnose.history import RunHistory, SiteHistory
from tensortap.diagnose.rule import rule
from tensortap.diagnose.rules.shared import RELUS, lasting_to_the_end, named
from tensortap.finding import Finding
from tensortap.select.ports import FORWARD_PORTS, GRADIENT_PORTS


@rule("all_zero", needs=(*FORWARD_PORTS, *GRADIENT_PORTS, "param"))
def all_zero(history: RunHistory, *, steps: int = 3) -> Iterator[Finding]:
    """Every element is zero, at the last `steps` steps and before (AllZero of SageMaker Debugger).

    One finding for tensors, one for weights, one for gradients: the first in order of execution leads, what follows
    from it is counted. A ReLU that gives only zeros is a dead layer, and `dead_units` says so. The gradient of a bias
    may well be zero where that of its weight is not: in a difference of two outputs it cancels out.
    """
    forward = [site for site in computed(history) if site.type not in RELUS]
    weights = [site for site in history.sites("param") if len(site.shape) > 1]
    yield from _folded(forward, steps, "Look for a dead layer, a mask or a zeroed weight before it.")
    yield from _folded(weights, steps, "A kernel of zeros passes nothing on: was it meant to be initialised or loaded?")
    yield from _folded(
        _not_cancelled(history.sites(*GRADIENT_PORTS)), steps,
        "Nothing is learnt here: look for a dead layer after it, a detach(), or a loss that does not depend on it.",
    )  # fmt: skip


def _not_cancelled(gradients: list[SiteHistory]) -> list[SiteHistory]:
    """Return the gradients without those of biases whose layer has another gradient that is not zero."""
    taught = {site.module for site in gradients if site.place.port == "grad" and np.any(site["zeros"] < site["numel"])}
    return [s for s in gradients if s.place.port != "grad" or len(s.shape) > 1 or s.module not in taught]


def computed(history: RunHistory) -> list[SiteHistory]:
    """Return what modules compute, and the first input of a model; states, times and masks may well be constant."""
    sites = history.sites(*FORWARD_PORTS)
    roots = {"", *(event.name for event in history.events("model"))}
    given = [site for site in sites if site.place.port == "input" and site.place.site in roots and site.floating]
    others = {site for site in sites if site.place.port == "input"} - set(given[:1])
    return [site for site in sites if site not in others]


def _folded(sites: list[SiteHistory], steps: int, advice: str) -> Iterator[Finding]:
    lasting = {
        s: lasting_to_the_end((s["zeros"] == s["numel"]) & (s["numel"] > 1), steps, s.finite)
        for s in sites
        if s.floating
    }
    zero = [site for site, mask in lasting.items() if mask.any()]
    if not zero:
        return
    lead, others = zero[0], [str(site) for site in zero[1:]]
    also = f", and so are {named(others)}" if others else ""
    numel = int(lead["numel"][-1])
    yield lead.finding(
        lasting[lead], f"All {numel} elements are zero{also}.", advice, numel=numel, sites=len(zero), also=others[:8]
    )


@rule("constant", needs=FORWARD_PORTS)
def constant(history: RunHistory, *, steps: int = 3) -> Iterator[Finding]:
    """Every element is the same, other than zero, at the last `steps` steps and before: std is 0."""
    for site in computed(history):
        same = (site["min"] == site["max"]) & (site["min"] != 0) & (site["numel"] > 1)
        held = lasting_to_the_end(same, steps, site.finite)
        if site.floating and held.any():
            value, numel = float(site["min"][held][-1]), int(site["numel"][-1])
            yield site.finding(
                held, f"All {numel} elements are {text.number(value)}.",
                "It carries no information: look for equal weights, which nothing tells apart, saturation or a clamp.",
                value=value, numel=numel,
            )  # fmt: skip


@rule("outliers", needs=FORWARD_PORTS)
def outliers(history: RunHistory, *, magnitude: float = 100.0, ratio: float = 1000.0) -> Iterator[Finding]:
    """A few activations are giants: above `magnitude`, and `ratio` times the median (Sun et al. 2024).

    The median is that of the magnitudes that are not zero, over the last steps together; at earlier steps, and without
    a histogram, their mean stands in for it.
    """
    for site in history.sites(*FORWARD_PORTS):
        if not site.floating:
            continue
        typical = _typical(history, site)
        giants = (site.absmax >= magnitude) & (site.absmax >= ratio * typical)
        if not giants.any():
            continue
        at = int(np.nanargmax(np.where(giants, site.absmax, -np.inf)))
        top, usual = float(site.absmax[at]), float(typical[at])
        yield site.finding(
            giants, f"The largest magnitude is {text.number(top)}, a typical one {text.number(usual)}.",
            "Harmless in float32, but quantisation and half precision suffer: look at that channel's weight and bias; "
            "people smooth or clip it, or keep this layer in higher precision.",
            absmax=top, typical=usual, ratio=top / usual if usual else float("inf"),
        )  # fmt: skip


def _typical(history: RunHistory, site: SiteHistory) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.asarray(site["l1"] / (site["numel"] - site["zeros"]))
    histogram = history.histogram(site)
    return mean if histogram is None else np.where(site.steps < histogram.steps.first, mean, histogram.magnitude(0.5))
