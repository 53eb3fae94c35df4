"""Rules on parameters that do not change, change too much, or were initialised poorly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tensortap import text
from tensortap.diagnose.history import RunHistory, SiteHistory, steps_where
from tensortap.diagnose.rule import NoData, rule
from tensortap.diagnose.rules.context.shared import gets_on, goes_wrong, owner
from tensortap.diagnose.rules.shared import WEIGHTED, kernels, named
from tensortap.finding import Finding
from tensortap.reduce.statistics import STATISTICS

Steps = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
_EARLY: Final = 10


@rule("unchanged", needs="param")
def unchanged(history: RunHistory, *, steps: int = 3, rtol: float = 0.0, atol: float = 0.0) -> Iterator[Finding]:
    """A parameter's statistics are the same at every step recorded, `steps` at least (UnchangedTensor).

    Exactly the same, unless `rtol` and `atol` say otherwise: what learns changes some of min, max, mean, std, L1 and L2
    at least in the last bit. Parameters that get no gradient while others do were frozen on purpose, and only noted;
    so are biases whose layer learns: in a difference of two outputs, or before a normalisation, they cancel out.
    """
    sites = [site for site in history.sites("param") if site.floating]
    if all(len(site.steps) < steps for site in sites):
        raise NoData(f"parameters were recorded at fewer than {steps} steps")
    still = [site for site in sites if len(site.steps) >= steps and _same(site, rtol, atol)]
    taught = _taught(history)
    learning = {site.module for site in sites if site not in still}
    stuck = [site for site in still if not taught or site.place.site in taught]
    stuck = [site for site in stuck if len(site.shape) > 1 or site.module not in learning]
    frozen = [site for site in still if site not in stuck]
    idle = not taught and len(still) == len(sites)
    if stuck:
        yield _still(stuck, len(sites), "info" if idle else "warning", (
            "Nothing trains: expected of an evaluation." if idle
            else "Look whether the optimizer was given it, and whether the learning rate is 0."
        ))  # fmt: skip
    if frozen:
        yield _still(frozen, len(sites), "info", "Frozen on purpose, cancelled out, or cut off by a detach()?")


def _taught(history: RunHistory) -> set[str]:
    """Return the parameters whose gradient is large enough to move them: that of a bias before a norm is rounding."""
    sizes = {s: float(np.nanmax(s["l2"], initial=0.0)) for port in ("grad", "update") for s in history.sites(port)}
    usual = {port: [v for s, v in sizes.items() if s.place.port == port and v > 0] for port in ("grad", "update")}
    least = {port: 1e-5 * float(np.median(known)) if known else 0.0 for port, known in usual.items()}
    return {s.place.site for s, size in sizes.items() if size > least[s.place.port]}


def _same(site: SiteHistory, rtol: float, atol: float) -> bool:
    return all(np.allclose(site[s], site[s][0], rtol=rtol, atol=atol, equal_nan=True) for s in STATISTICS)


def _still(sites: Sequence[SiteHistory], of: int, severity: str, advice: str) -> Finding:
    lead, others = sites[0], [str(site) for site in sites[1:]]
    also = f"; nor did {named(others)}" if others else ""
    return lead.finding(
        np.ones(len(lead.steps), bool), f"It did not change over {len(lead.steps)} recorded steps{also}.", advice,
        severity=severity, unchanged=len(sites), of=of, also=others[:8],
    )  # fmt: skip


@rule("update_ratio", needs="update")
def update_ratio(history: RunHistory, *, high: float = 10.0, low: float = 1e-8, steps: int = 3) -> Iterator[Finding]:
    """A kernel's update is more than `high` times, or always less than `low` times, its size (WeightUpdateRatio).

    `low` must hold at every step, of `steps` at least; an update of exactly zero is for `unchanged` to report. A step
    of LBFGS is many updates: where the loss falls, `high` is only noted.
    """
    shapes = {site.place: site for site in history.sites("update")}
    for place, (when, ratio) in history.numbers("update", "ratio").items():
        if place not in shapes or len(shapes[place].shape) < 2:
            continue  # biases start at zero, from where every step is infinitely large
        much = np.isfinite(ratio) & (ratio > high)
        moved = ratio[ratio > 0]
        if much.any():
            said = f"up to {text.number(float(ratio[much].max()))} times"
            found = _ratio(shapes[place], when, much, ratio, said, "Lower the learning rate, or warm it up.")
            yield replace(found, severity="info") if _iterates(history) and gets_on(history) else found
        elif len(moved) >= steps and np.all(moved < low):
            said = f"at most {text.number(float(moved.max()))} times"
            yield _ratio(shapes[place], when, ratio > 0, ratio, said, "Raise the learning rate.")


def _iterates(history: RunHistory) -> bool:
    """Return whether an optimizer takes many steps in one, by a closure."""
    return any(event.name == "LBFGS" for event in history.events("optimizer"))


def _ratio(site: SiteHistory, when: Steps, mask: Mask, ratio: Floats, said: str, advice: str) -> Finding:
    message = f"An update was {said} as large as the weight."
    return site.finding(steps_where(when, mask), message, f"{advice} About 0.001 is usual.",
                        ratio=float(ratio[mask].max()), median=float(np.median(ratio)))  # fmt: skip


@rule("poor_initialisation", needs=("param", "output"))
def poor_initialisation(
    history: RunHistory, *, gain: tuple[float, float] = (0.05, 5.0), variance: float = 1e4
) -> Iterator[Finding]:
    """At the beginning a kernel's gain, std·√fan_in, lies outside `gain`, or its elements are all equal.

    Without `:param`, by outputs: the variance of one layer's is more than `variance` times that of another's. (The
    published bound of 10 on variances of weights is exceeded by PyTorch's own initialisation of different widths.)
    """
    early = [site for site in kernels(history, "param") if site.steps[0] < _EARLY]
    outputs = [s for s in history.sites("output") if s.type.startswith(WEIGHTED) and s.steps[0] < _EARLY]
    if not early and len(outputs) < 2:
        raise NoData(f"neither parameters nor layers' outputs were recorded in the first {_EARLY} steps")
    small = [site for site in early if _gain(site, history) < gain[0]]
    few = 2 * len(small) < len(early) and not goes_wrong(history)  # as people begin an output layer near zero
    meant = few or gets_on(history)  # what follows may make up for it, as the factor in a sine's argument does
    tied = set() if goes_wrong(history) else _tied_to_tables(history)
    for site in early:
        noted = (meant and site in small) or site.place.site in tied
        found = _weights(site, gain, _output_last(history))
        yield from (replace(f, severity="info") if noted and f.evidence["std"] else f for f in found)
    for site in history.sites("param"):
        yield from _table(site)
    if not early:
        yield from _outputs(outputs, variance)


def _gain(site: SiteHistory, history: RunHistory) -> float:
    return float(site["std"][0]) * math.sqrt(_fan_in(site, _output_last(history)))


def _tied_to_tables(history: RunHistory) -> set[str]:
    """Return the names of kernels that are a table of embeddings too, which begin with a std of 1."""
    ties = [names for event in history.events("model") for names in event.data.get("ties") or ()]
    return {n for names in ties if any("Embedding" in history.modules.get(owner(m), "") for m in names) for n in names}


def _weights(site: SiteHistory, bounds: tuple[float, float], output_last: bool) -> Iterator[Finding]:
    std, value = float(site["std"][0]), float(site["max"][0])
    inputs = _fan_in(site, output_last)
    gain = std * math.sqrt(inputs)
    first = site.steps == site.steps[0]
    if std == 0 and value and site["numel"][0] > 1:
        yield site.finding(first, f"All weights are {text.number(value)}: its units compute and learn the same.",
                           "Initialise it at random.", std=std, value=value)  # fmt: skip
    elif not std and not value and len(site.steps) > 2 and not np.any(site["max"] - site["min"]):
        yield site.finding(first, "All weights are 0, and stay 0: its units compute and learn the same.",
                           "Initialise it at random.", std=std, value=value)  # fmt: skip
    elif std and not bounds[0] <= gain <= bounds[1]:
        way = "large" if gain > bounds[1] else "small"
        yield site.finding(
            first, f"The weights begin too {way}: std·√fan_in is {text.number(gain)}, usual is 0.5 to 1.5.",
            "People initialise by He for ReLU (1.41) and Xavier for tanh (1).",
            std=std, gain=gain, fan_in=inputs,
        )  # fmt: skip


def _table(site: SiteHistory, most: float = 10.0) -> Iterator[Finding]:
    """Judge embeddings by their size, for they have no fan-in: 1 is usual, or less."""
    std = float(site["std"][0])
    if "Embedding" in site.type and site.steps[0] < _EARLY and std > most:
        yield site.finding(site.steps == site.steps[0], f"The embeddings begin with a std of {text.number(std)}.",
                           "1 is usual, 0.02 in language models.", std=std)  # fmt: skip


def _output_last(history: RunHistory) -> bool:
    """Return whether kernels are (…, input, output), as those of Keras and JAX are."""
    model = history.snapshot.run_json.get("model")
    return isinstance(model, Mapping) and model.get("framework") in ("keras", "jax")


def _fan_in(site: SiteHistory, output_last: bool = False) -> int:
    if output_last:
        return math.prod(site.shape[:-1])
    if "Transpose" in site.type:
        return math.prod((site.shape[0], *site.shape[2:]))
    return math.prod(site.shape[1:])


def _outputs(sites: list[SiteHistory], most: float) -> Iterator[Finding]:
    power = np.array([float(site["std"][0]) for site in sites]) ** 2
    known = power > 0
    if known.sum() < 2 or power[known].max() <= most * power[known].min():
        return
    middle = np.log(np.median(power[known]))
    apart = np.where(known, np.abs(np.log(np.where(known, power, 1)) - middle), 0)
    worst = sites[int(np.argmax(apart))]
    spread = float(power[known].max() / power[known].min())
    yield worst.finding(
        worst.steps == worst.steps[0],
        f"Between layers the outputs' variance differs {text.number(spread)}-fold at the beginning.",
        "People initialise by He or Xavier, and normalise.", variance=float(power[sites.index(worst)]), spread=spread,
    )  # fmt: skip
