"""Rules on gradients that vanish or explode on their way from the last layer to the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap import text
from tensortap.diagnose.history import RunHistory, SiteHistory, steps_where
from tensortap.diagnose.rule import NoData, rule
from tensortap.diagnose.rules.context.shared import gets_on
from tensortap.diagnose.rules.shared import kernels, lasting_to_the_end, streak
from tensortap.finding import Finding

Floats = npt.NDArray[np.float64]


class Depth(NamedTuple):
    """The sizes of gradients at the steps that all layers have: a row a layer, the first layer first."""

    layers: list[SiteHistory]
    steps: npt.NDArray[np.int64]
    sizes: Floats

    @property
    def ratio(self) -> Floats:
        """The first layer's over the last's."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.sizes[0] / self.sizes[-1])

    def sharpest(self, mask: npt.NDArray[np.bool_], sign: int) -> SiteHistory:
        """Return the layer at which the gradient, going backwards, falls (−1) or grows (+1) most."""
        with np.errstate(divide="ignore", invalid="ignore"):
            change = sign * np.diff(np.log(self.sizes[::-1, mask]), axis=0).mean(axis=1)
        return self.layers[::-1][1 + int(np.nanargmax(np.nan_to_num(change, nan=-np.inf, posinf=1e9)))]


@rule("vanishing_gradients", needs=("grad", "grad_output"))
def vanishing_gradients(
    history: RunHistory, *, ratio: float = 1e-3, norm: float = 1e-4, mean: float = 1e-7, steps: int = 3
) -> Iterator[Finding]:
    """The first layer's gradient is less than `ratio` of the last's, and small: L2 norm below `norm` (AutoTrainer).

    Taken of the gradients of kernels; where only `grad_output` was recorded, of those, with mean |g| below `mean`
    (SageMaker Debugger). It must hold at the last `steps` steps. What is exactly zero is for `all_zero` to report.
    """
    known, small = _of_kernels(history), norm
    if not known:
        known, small = _of_outputs(history), mean
    if not known:
        raise NoData("fewer than two layers' gradients were recorded at the same steps")
    for depth in known:
        held = lasting_to_the_end((depth.ratio < ratio) & (depth.sizes[0] < small) & (depth.sizes[0] > 0), steps)
        if not held.any() or _reaches_embeddings(history, depth, held, ratio):
            continue
        first, last = (float(np.median(row[held])) for row in (depth.sizes[0], depth.sizes[-1]))
        where = depth.sharpest(held, -1)
        yield depth.layers[0].finding(
            steps_where(depth.steps, held),
            f"{_what(depth)} is {text.number(first)} in the first layer and {text.number(last)} in the last; the "
            f"sharpest fall is at {where}.",
            "People use ReLU-like activations, He or Xavier initialisation, normalisation and skip connections.",
            first=first, last=last, ratio=first / last if last else 0.0, layers=len(depth.layers), sharpest=str(where),
        )  # fmt: skip


@rule("exploding_gradients", severity="error", needs=("grad", "grad_output"))
def exploding_gradients(
    history: RunHistory, *, ratio: float = 70.0, least: float = 0.1, steps: int = 3
) -> Iterator[Finding]:
    """The first layer's gradient is more than `ratio` times the last's for `steps` steps in a row (AutoTrainer).

    Taken of the gradients of kernels and of `grad_output`: where activations shrink as gradients grow, only the latter
    show it. The L2 norm must be at least `least`: of two tiny gradients the ratio says nothing. It is only noted where
    it was over before the last `steps` steps and the loss falls.
    """
    known = [*_of_kernels(history), *_of_outputs(history, norm=True)]
    if not known:
        raise NoData("fewer than two layers' gradients were recorded at the same steps")
    for depth in known:
        held = np.isfinite(depth.ratio) & (depth.ratio > ratio) & (depth.sizes[0] >= least)
        if not streak(held, steps):
            continue
        first, last = (float(np.median(row[held])) for row in (depth.sizes[0], depth.sizes[-1]))
        where = depth.sharpest(held, 1)
        yield depth.layers[0].finding(
            steps_where(depth.steps, held),
            f"The gradient's L2 norm is {text.number(first)} in the first layer and {text.number(last)} in the last; "
            f"the sharpest rise is at {where}.",
            "People clip the gradient's norm, lower the learning rate, initialise with smaller weights and normalise.",
            first=first, last=last, ratio=first / last, layers=len(depth.layers), sharpest=str(where),
            severity="info" if _is_over(history, held, steps) else "",
        )  # fmt: skip
        return


def _is_over(history: RunHistory, held: npt.NDArray[np.bool_], steps: int) -> bool:
    """Return whether only the first steps exploded, when a layer's gradient may still be tiny, and the loss falls."""
    return len(held) > 2 * steps and not held[-steps:].any() and gets_on(history, least=0.9)


def _reaches_embeddings(history: RunHistory, depth: Depth, held: npt.NDArray[np.bool_], ratio: float) -> bool:
    """Return whether embeddings, which come before all layers, get their gradient.

    Then it does not vanish on its way: in a small attention those of queries and keys are tiny by themselves.
    """
    last, when = float(np.median(depth.sizes[-1][held])), depth.steps[held]
    tables = [site for site in history.sites("grad") if "Embedding" in site.type]
    sizes = [site["l2"][np.isin(site.steps, when)] for site in tables]
    return any(len(size) and float(np.median(size)) >= ratio * last for size in sizes)


def _what(depth: Depth) -> str:
    return "The gradient's L2 norm" if depth.layers[0].place.port == "grad" else "Mean |gradient|"


def _of_kernels(history: RunHistory) -> list[Depth]:
    return _of_each_model(history, kernels(history, "grad"), "l2")


def _of_outputs(history: RunHistory, norm: bool = False) -> list[Depth]:
    backwards = history.leaves("grad_output")
    return _of_each_model(history, backwards[::-1], "l2" if norm else "l1")


def _of_each_model(history: RunHistory, layers: list[SiteHistory], stat: str) -> list[Depth]:
    """Return the layers of each model by themselves: those of a critic say nothing about those of a generator."""
    names = [event.name for event in history.events("model") if event.name]
    mine = [[s for s in layers if f"{s.place.site}.".startswith(f"{name}.")] for name in names] if names else [layers]
    return [depth for part in mine if (depth := _aligned(part, stat)) is not None]


def _aligned(layers: list[SiteHistory], stat: str) -> Depth | None:
    layers = [site for site in layers if site.floating]
    if len(layers) < 2:
        return None
    common = layers[0].steps
    for site in layers[1:]:
        common = np.intersect1d(common, site.steps)
    if not len(common):
        return None
    sizes = [(site[stat] / (site["numel"] if stat == "l1" else 1))[np.isin(site.steps, common)] for site in layers]
    return Depth(layers, common, np.array(sizes))
