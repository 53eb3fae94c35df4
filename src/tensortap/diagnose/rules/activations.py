"""Rules on activations: dead units, saturated layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap import text
from tensortap.diagnose.history import LAST, RunHistory, SiteHistory
from tensortap.diagnose.rule import NoData, rule
from tensortap.diagnose.rules.shared import RELUS, WEIGHTED, kernels, lasting_to_the_end, relu_like
from tensortap.finding import Finding, Steps
from tensortap.reduce.histogram import edges
from tensortap.select.ports import FORWARD_PORTS
from tensortap.store import facts
from tensortap.types import Place

REVIVE: Final = "People lower the learning rate, initialise by He, use LeakyReLU or GELU, or normalise before the ReLU."
_DESATURATE: Final = "People make the initial weights smaller (Xavier), normalise before it, or use another activation."
_LOOKED_BACK: Final = 1024  # steps with kept units that are read to find since when units are dead
_BOUNDED: Final = {"Tanh": "tanh", "tanh": "tanh", "Sigmoid": "sigmoid", "sigmoid": "sigmoid"}

Units = list[tuple[int, npt.NDArray[Any]]]  # step, and what was kept of every unit


@rule("dead_units", needs=(*FORWARD_PORTS, "grad"))
def dead_units(
    history: RunHistory, *, active: float = 0.01, dead: float = 0.5, some: float = 0.1, zeros: float = 0.98,
    zero_gradients: float = 0.7,
) -> Iterator[Finding]:  # fmt: skip
    """Units of a ReLU that hardly ever fire: less than `active` of the time, more than `dead` of the layer.

    With `units()` kept this is exact for each unit (DeadRelu of SageMaker Debugger), and more than `some` is noted.
    Without it a layer is judged by its share of zeros, `zeros` at least; and where the ReLU was not recorded, the layer
    before it by that of its weight's gradient, `zero_gradients` at least (AutoTrainer).
    """
    shown = [site for site in history.sites(*FORWARD_PORTS) if relu_like(site) and not _is_given(history, site)]
    finite = {site.place._replace(op=""): set(site.steps[site.finite].tolist()) for site in shown}
    kept = history.tensors("units", last=LAST, steps=finite)
    reported = set()
    for site in shown:
        if recent := kept.get(site.place):
            place = site.place._replace(op="")
            whole = partial(history.tensors, "units", last=_LOOKED_BACK, steps={place: finite[place]})
            found = _by_unit(site, recent, whole, active, dead, some)
        else:
            found = _by_zeros(site, zeros)
        reported.add(site.module)
        if found:
            yield found
    for site in _before_relu(history, reported):
        yield from _by_gradient(site, zero_gradients)


def _by_unit(
    site: SiteHistory, kept: Units, whole: Callable[[], dict[Place, Units]], active: float, dead: float, some: float
) -> Finding | None:
    width = kept[-1][1].shape[1]
    fitting = [(step, array[0]) for step, array in kept if array.shape[1] == width]
    firing = np.mean([array for _, array in fitting], axis=0)
    silent = np.flatnonzero(firing < active)
    if len(silent) <= some * width:
        return None
    return site.finding(
        _since(silent, [(step, array[0]) for step, array in whole()[site.place] if array.shape[1] == width], active),
        f"{len(silent)} of {width} units are dead: each fired for less than {text.percent(active, 1)} of its elements.",
        REVIVE, severity="warning" if len(silent) > dead * width else "info",
        dead=len(silent), units=width, share=len(silent) / width, which=silent[:32].tolist(),
    )  # fmt: skip


def _since(silent: npt.NDArray[np.int64], kept: Units, active: float) -> Steps:
    """Return the steps, unbroken to the last, in which these units together fired for less than `active`."""
    firing: dict[int, list[float]] = {}
    for step, units in kept:
        firing.setdefault(step, []).append(float(units[silent].mean()))
    steps = sorted(firing)
    alive = [i for i, step in enumerate(steps) if np.mean(firing[step]) >= active]
    dead = steps[alive[-1] + 1 :] if alive else steps
    dead = dead or steps[-1:]
    return Steps(dead[0], dead[-1], len(dead))


def _by_zeros(site: SiteHistory, zeros: float) -> Finding | None:
    held = lasting_to_the_end(site.zeros >= zeros, LAST, site.finite)
    if not held.any():
        return None
    share = float(site.zeros[held].mean())
    message = f"{text.percent(share, 1)} of {int(site['numel'][-1])} elements are zero after the ReLU."
    advice = f"{REVIVE} tt.probe(..., keep=tt.units()) tells which units."
    return site.finding(held, message, advice, zeros=share)


def _before_relu(history: RunHistory, reported: set[str]) -> list[SiteHistory]:
    """Gradients of the weights of layers whose next module is a ReLU that was not recorded itself."""
    paths = list(history.modules)
    after = dict(pairwise(paths))
    return [
        site
        for site in kernels(history, "grad")[1:]  # that of the first is zero where the inputs are
        if site.type.startswith(WEIGHTED) and len(site.shape) > 1 and after.get(site.module, "") not in reported
        if history.modules.get(after.get(site.module, "")) in RELUS
    ]


def _by_gradient(site: SiteHistory, zero_gradients: float) -> Iterator[Finding]:
    held = lasting_to_the_end(site.zeros >= zero_gradients, LAST, site.finite)
    if held.any():
        share = float(site.zeros[held].mean())
        message = f"{text.percent(share, 1)} of the weight's gradient is zero: so many units never fired in a batch."
        yield site.finding(held, message, REVIVE, zeros=share)


@rule("saturated", needs=FORWARD_PORTS)
def saturated(
    history: RunHistory, *, share: float = 0.5, margin: float = 1 / 16, tanh: float = 9.5,
    sigmoid: tuple[float, float] = (-23.0, 17.0),
) -> Iterator[Finding]:  # fmt: skip
    """More than `share` of a tanh's or sigmoid's output lies within `margin` of its bounds, where gradients vanish.

    Where only its input was recorded: outside ±`tanh` or `sigmoid` (SageMaker Debugger). The model's own output is
    only noted: a sure classifier is no fault.
    """
    inside = facts.module_activations(history.snapshot.run_json)  # of layers that apply one to what they compute
    kinds: dict[SiteHistory, str] = {}
    for site in history.sites(*FORWARD_PORTS):
        function = inside.get(site.module, "") if site.place.port == "output" and not _is_state(site) else ""
        if kind := _BOUNDED.get(site.type) or _BOUNDED.get(function):
            kinds[site] = kind
    sites = list(kinds)
    if not sites:
        raise NoData("no tanh or sigmoid module was recorded")
    final = _last_of_each_model(history)
    outputs = {site.module for site in sites if site.place.port == "output"}
    for site in sites:
        kind = kinds[site]
        if site.place.port == "output":
            part, way = _near_bounds(history, site, kind, margin)
            where = f"within {text.number(margin)} of the bounds"
        elif site.module not in outputs:
            low, high = (-tanh, tanh) if kind == "tanh" else sigmoid
            part, way = _outside(history, site, low, high), "from the histogram"
            where = f"from inputs outside {text.number(low)} to {text.number(high)}"
        else:
            continue
        if part > share:
            least = "At least " if way.startswith("at least") else ""
            said = f"{least}{text.percent(part, 1)} of the {kind}'s output is {where}."
            note = "info" if site in final else ""
            yield site.finding(_now(site), said, _DESATURATE, severity=note, share=part, known=way)


def _is_state(site: SiteHistory) -> bool:
    """Return whether it is a state that a recurrent layer hands on, such as an LSTM's sum, which has no bounds."""
    return "[1]" in site.place.slot


def _now(site: SiteHistory) -> Steps:
    last = site.steps[-LAST:]
    return Steps(int(last[0]), int(last[-1]), len(last))


def _near_bounds(history: RunHistory, site: SiteHistory, kind: str, margin: float) -> tuple[float, str]:
    histogram = history.histogram(site)
    if histogram is not None:
        low = histogram.share(0.0, margin) if kind == "sigmoid" else 0.0
        return low + histogram.share(1 - margin, np.inf), "from the histogram"
    # Without one, from the mean square of the output, stretched to ±1, by Markov's inequality: at least so many.
    finite = np.maximum(site["numel"] - site["nan"], 1)[-LAST:]
    square, mean = (site["l2"][-LAST:] ** 2 / finite).mean(), site["mean"][-LAST:].mean()
    bound = 1 - (2 if kind == "sigmoid" else 1) * margin
    square = 4 * square - 4 * mean + 1 if kind == "sigmoid" else square
    return max(0.0, float((square - bound**2) / (1 - bound**2))), "at least, from mean and L2"


def _is_given(history: RunHistory, site: SiteHistory) -> bool:
    """Return whether a tensor is what a model is called with: data may be zero nearly everywhere, as edges are."""
    return site.place.port == "input" and site.place.site in {"", *(event.name for event in history.events("model"))}


def _last_of_each_model(history: RunHistory) -> list[SiteHistory]:
    """Return the sites that give the models' own outputs, as the last module of a generator and of its critic."""
    names = [event.name for event in history.events("model") if event.name] or [""]
    outputs = history.sites("output") if history.modules else []
    mine = [[s for s in outputs if not name or f"{s.place.site}.".startswith(f"{name}.")] for name in names]
    return [site for sites in mine for site in sites[-1:]]


def _outside(history: RunHistory, site: SiteHistory, low: float, high: float) -> float:
    histogram = history.histogram(site)
    if histogram is None:
        return 0.0
    low_edge, high_edge = edges(histogram.offset + np.arange(len(histogram.counts)))
    beyond = (high_edge <= low) | (low_edge >= high)
    return float(histogram.counts[beyond].sum() / max(histogram.finite, 1))
