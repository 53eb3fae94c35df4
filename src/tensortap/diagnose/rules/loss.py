"""Rules on the loss: whether it falls, and whether it jumps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tensortap import text
from tensortap.diagnose.history import RunHistory, steps_where
from tensortap.diagnose.rule import NoData, rule
from tensortap.diagnose.rules.context.shared import needs_not_fall
from tensortap.diagnose.rules.samples import spike_of_one_sample, with_sample
from tensortap.finding import Finding

Series = tuple[str, npt.NDArray[np.int64], npt.NDArray[np.float64]]


def _losses(history: RunHistory, metric: str, least: int) -> list[Series]:
    """Return the metrics that are losses of training, with at least so many finite values."""
    names = [name for name in history.metrics if name not in history.metrics.of_evaluation]
    exact = [metric] if metric in names else []
    close = [name for name in names if metric in name.lower() and not _of_evaluation(name)]
    found = [(name, *history.metrics[name]) for name in exact or close]
    enough = [(name, s[np.isfinite(v)], v[np.isfinite(v)]) for name, s, v in found if np.isfinite(v).sum() >= least]
    if not enough:
        raise NoData(f"no {metric} of {least} steps was given: tap.step(loss=loss)" if not found
                     else f"{found[0][0]} was given at fewer than {least} steps")  # fmt: skip
    return enough


def _of_trainings(history: RunHistory, losses: list[Series], least: int) -> list[Series]:
    """Return the losses of each training by itself, where a script has several in turn: folds, or a sweep.

    A new training begins with a new model and with an optimizer for other parameters. Where any of them has as many
    values as are needed, shorter ones are left out.
    """
    cuts = _cuts(history)
    parts = [
        (name, s, v)
        for name, steps, values in losses
        for s, v in zip(*(np.split(a, np.searchsorted(steps, cuts)) for a in (steps, values)), strict=True)
    ]
    long = [part for part in parts if len(part[1]) >= least]
    return long if cuts and long else losses


def _cuts(history: RunHistory) -> list[int]:
    # An optimizer may be made in a step of evaluation, which is numbered apart: its training begins where it steps.
    begins = {e.data.get("number"): e.step for e in reversed(history.events("holds"))}
    made = [e for e in history.events("optimizer") if not e.data.get("same_parameters")]
    later = [e for e in made if e.step > 0 or e.data.get("steps_before")]
    return sorted({step for e in later if (step := begins.get(e.data.get("number"), e.step)) > 0})


def _of_evaluation(name: str) -> bool:
    return any(part in name.lower() for part in ("val", "eval", "test"))


@rule("loss_not_decreasing")
def loss_not_decreasing(
    history: RunHistory, *, metric: str = "loss", steps: int = 10, sure: int = 100, drop: float = 0.001,
    noise: float = 2.0,
) -> Iterator[Finding]:  # fmt: skip
    """Over the whole run, of `steps` at least, the loss fell by less than `drop` of itself (LossNotDecreasing).

    The mean of the second half is held against that of the first, and so are those of the logarithms, which a few large
    losses at the beginning do not rule; a fall within `noise` standard errors is none. In fewer than `sure` steps many
    healthy trainings get nowhere yet: there it is a remark, unless the loss rises, and so it is where the noise would
    hide a fall by a fifth. The loss is the metric of the name `metric`, or those that have it in their name and are of
    no evaluation.
    """
    parts = _of_trainings(history, _losses(history, metric, steps), steps)
    still = [(part, finding) for part in parts if (finding := _not_falling(part, drop, noise)) is not None]
    some = len(still) < len(parts) and bool(_cuts(history))  # of a sweep or of folds, some may fail
    for (name, _, values), finding in still:
        early = len(values) < sure and not _rises(finding, noise)
        untold = early or _is_vague(finding, noise)
        yield replace(finding, severity="info") if some or untold or _may_rise(history, name) else finding


def _not_falling(part: Series, drop: float, noise: float) -> Finding | None:
    name, when, values = part
    early, late = np.array_split(values, 2)
    fall = float(early.mean() - late.mean())
    error = float(np.sqrt(early.var() / len(early) + late.var() / len(late)))
    # A steady line has no noise, however steep: what is left after its trend is what counts.
    error = min(error, _residual(values) * np.sqrt(2 / len(early)))
    if (fall >= drop * abs(early.mean()) and fall > noise * error) or _falls_by_ratio(values, noise):
        return None
    return Finding(
        "", "", f"metric {name}", steps_where(when, np.ones(len(when), bool)),
        {"first_half": float(early.mean()), "second_half": float(late.mean()), "noise": error},
        f"The {name} does not fall: {text.number(float(early.mean()))} in the first half of {len(values)} steps, "
        f"{text.number(float(late.mean()))} in the second (± {text.number(error)}).",
        "Overfit one batch first; then look at the learning rate, at frozen parameters and at the labels.",
    )  # fmt: skip


def _falls_by_ratio(values: npt.NDArray[np.float64], noise: float, least: float = 0.1) -> bool:
    """Return whether the logarithms of a loss fall by `least`, and beyond their noise, to less than it began with.

    A few large losses at the beginning hide on the linear scale that all of the later ones are far smaller.
    """
    if np.any(values <= 0):
        return False
    early, late = np.array_split(np.log(values), 2)
    error = float(np.sqrt(early.var() / len(early) + late.var() / len(late)))
    below = float(np.median(late)) < float(np.log(values[: max(3, len(values) // 20)]).min())
    return below and float(early.mean() - late.mean()) > max(noise * error, least)


def _rises(finding: Finding, noise: float) -> bool:
    seen = finding.evidence
    return bool(seen["second_half"] - seen["first_half"] > noise * seen["noise"])


def _is_vague(finding: Finding, noise: float, share: float = 0.2) -> bool:
    """Return whether the noise would hide a fall by `share`, and the loss does not rise: batches may be tiny."""
    seen = finding.evidence
    return bool(noise * seen["noise"] > share * abs(seen["first_half"])) and not _rises(finding, noise)


def _may_rise(history: RunHistory, name: str) -> bool:
    """Return whether a loss need not fall: several models have their own, as in a GAN, or it is no error on data."""
    return needs_not_fall(history) or ("/" in name and sum(other.startswith("loss/") for other in history.metrics) > 1)


def _residual(values: npt.NDArray[np.float64]) -> float:
    x = np.arange(len(values))
    return float(np.std(values - np.polyval(np.polyfit(x, values, 1), x)))


def _spread(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Return before each step how far the steps so far lay from the mean of those before them; large ones count too."""
    mean = np.convolve(values, np.ones(window) / window, "valid")[:-1]
    apart = np.abs(values[window:] - mean)
    first = np.abs(values[:window] - np.median(values[:window])).mean()
    return np.array([max(first, *apart[max(0, i - 50) : i].tolist(), 0.0) / 2 for i in range(len(apart))])


def _relative(values: npt.NDArray[np.float64], before: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Return how many times its usual scatter a loss's ratio to the mean before it is, as logarithms.

    The loss of small batches is spread evenly on that scale. It says nothing about losses that are not positive.
    """
    if np.any(values <= 0) or np.any(before <= 0):
        return np.full(len(before), np.inf)
    ratios = np.log(values[window:] / before)
    first = np.std(np.log(values[:window]))
    spread = [
        max(0.1, float(np.std(ratios[max(0, i - 50) : i])) if i >= window else float(first)) for i in range(len(ratios))
    ]
    return np.asarray(ratios / np.array(spread))


def _is_one_batch(values: npt.NDArray[np.float64], spikes: npt.NDArray[np.bool_], usual: float) -> bool:
    """Return whether the loss is high at single steps and as before right after each of them."""
    at = np.flatnonzero(spikes)
    after = [values[i + 1 : i + 6] for i in at]
    low = all(len(part) and np.median(part) <= 1.5 * abs(usual) for part in after)
    return low and bool(np.all(values[at] < 10 * abs(usual)) and np.all(np.diff(at) > 1))


@rule("loss_spike")
def loss_spike(
    history: RunHistory,
    *,
    metric: str = "loss",
    window: int = 10,
    factor: float = 2.0,
    floor: float = 0.1,
    sigma: float = 4.0,
) -> Iterator[Finding]:
    """The loss exceeds the mean of the `window` steps before by `factor` times that mean (Lightning's spike detection).

    It must exceed it by `sigma` times the spread of the steps before, of losses and of their logarithms, so that the
    noise of small batches is none.
    Below `floor` of what the loss began with, nothing is a spike. One that is still there at the end is an error. The
    loss is found by its name, `metric`, as above. A smaller one that one sample has made is only noted, and so is one
    step less than tenfold after which all is as before, and in which no sample stands out: a batch that is harder.
    """
    noted = True
    for name, when, values in _of_trainings(history, _losses(history, metric, window + 2), window + 2):
        before = np.convolve(values, np.ones(window) / window, "valid")[:-1]
        above = values[window:] - before
        spikes = np.zeros(len(values), bool)
        high = values[window:] >= floor * np.abs(values[:window]).mean()
        spikes[window:] = high & (above >= factor * np.abs(before)) & (above >= sigma * _spread(values, window))
        spikes[window:] &= _relative(values, before, window) >= sigma
        if not spikes.any():
            continue
        first = int(np.flatnonzero(spikes)[0])
        usual, stays = float(before[first - window]), float(np.median(values[-3:]))
        gone = stays >= (1 + factor) * abs(usual) and len(values) - first >= 3
        end = f", and it is still {text.number(stays)} at the end" if gone else ""
        value = float(values[first])
        found = Finding(
            "", "error" if gone else "", f"metric {name}", steps_where(when, spikes),
            {"value": value, "before": usual, "end": stays},
            f"The {name} jumps from {text.number(usual)} to {text.number(value)} at step {when[first]}{end}.",
            "People lower or warm up the learning rate, clip gradients, and look at the batch of that step.",
        )  # fmt: skip
        noted = False
        found = with_sample(history, found)
        hard = found.evidence.get("sample_is_clear") is False and _is_one_batch(values, spikes, usual)
        yield replace(found, severity="info") if hard or _may_rise(history, name) else found
    if noted and (small := spike_of_one_sample(history, factor)) is not None:
        yield small
