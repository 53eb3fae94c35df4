"""Rules on representations that collapse, and on attention that looks at one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap import text
from tensortap.diagnose.history import RunHistory, SiteHistory
from tensortap.diagnose.measures import attention_entropy, effective_rank, spread
from tensortap.diagnose.rule import NoData, rule
from tensortap.diagnose.rules.context.shared import gets_on
from tensortap.finding import Finding, Steps
from tensortap.select.ports import FORWARD_PORTS

_MOST_ROWS: Final = 1024
_KEPT: Final = ("full", "rows")


@rule("representation_collapse", needs=FORWARD_PORTS)
def representation_collapse(
    history: RunHistory, *, rank: float = 2.0, apart: float = 1e-3, least: int = 8
) -> Iterator[Finding]:
    """A kept tensor's rows differ in fewer than `rank` effective dimensions, or by less than `apart` of their size.

    Effective rank is that of Roy and Vetterli (2007), of centred rows; at least `least` rows and features are needed.
    The model's own output is left out: what two classes need is one dimension.
    """
    judged = False
    for site, step, array in _kept(history):
        rows = _rows(array)
        if rows is None or min(rows.shape) < least or not np.isfinite(rows).all() or not rows.any():
            continue
        judged = True
        dimensions, distance = effective_rank(rows), spread(rows)
        if dimensions < rank or distance < apart:
            yield site.finding(
                Steps(step, step, 1),
                f"{rows.shape[0]} rows of {rows.shape[1]} features span {text.number(dimensions)} effective dimensions "
                f"and differ by {text.percent(distance, 1)} of their size.",
                "All inputs come to look the same: people normalise, add skip connections, lower the learning rate, or "
                "add a term that keeps representations apart.",
                rank=dimensions, spread=distance, rows=rows.shape[0], features=rows.shape[1],
            )  # fmt: skip
    if not judged:
        raise NoData(f"no tensor with {least} rows and features was kept: tt.probe(..., keep=tt.full())")


def _kept(history: RunHistory) -> Iterator[tuple[SiteHistory, int, npt.NDArray[Any]]]:
    sites = {site.place._replace(op=""): site for site in history.sites(*FORWARD_PORTS)}
    final = history.sites("output")[-1:] if history.modules else []
    for place, arrays in history.tensors(*_KEPT).items():
        if place in sites and sites[place] not in final and sites[place].floating:
            yield sites[place], *arrays[-1]


def _rows(array: npt.NDArray[Any]) -> npt.NDArray[np.float64] | None:
    """Samples (and positions) by features."""
    if array.ndim < 2:
        return None
    features = np.moveaxis(array, 1, -1) if array.ndim in (4, 5) else array
    rows = features.reshape(-1, features.shape[-1])
    step = max(1, len(rows) // _MOST_ROWS)
    return np.asarray(rows[::step], np.float64)


@rule("attention_collapse", needs=FORWARD_PORTS)
def attention_collapse(
    history: RunHistory, *, entropy: float = 0.05, heads: float = 0.5, concentration: float = 0.9
) -> Iterator[Finding]:
    """Most heads look at one place: entropy below `entropy` of the most it could be, in more than `heads` of them.

    Attention is what was kept whole, is never negative and sums to 1 over its last axis. Where only statistics were
    recorded, the mean of Σp² of such rows, from their L2 norm, must reach `concentration`. Where the loss falls to a
    fifth it is only noted: a head that copies the token before looks at one place, and rightly so.
    """
    kept = {site: attention_entropy(array) for site, _, array in _kept(history)}
    judged = {site: each for site, each in kept.items() if each is not None}
    others = [site for site in history.sites(*FORWARD_PORTS) if site not in judged]
    guessed = [site for site in others if _sums_to_one(history, site)]
    if not judged and not guessed:
        raise NoData("no attention weights were recorded: tt.tap(weights, 'attn') or the module that returns them")
    severity: Any = "info" if gets_on(history) else ""
    for site, each in judged.items():
        low = each < entropy
        if low.mean() > heads:
            share = float(each.mean())
            of = f"{low.sum()} of {len(each)} heads"
            said = f"{of} look at one place: their entropy is {text.percent(share, 1)} of the most possible."
            yield _collapsed(site, said, severity, entropy=share, heads=len(each), collapsed=int(low.sum()))
    for site in guessed:
        squares = float(site["l2"][-1] ** 2 * site.shape[-1] / site["numel"][-1])
        if squares >= concentration:
            said = f"Attention is on one place: the mean of Σp² is {text.number(squares)}."
            yield _collapsed(site, said, severity, squares=squares)


def _sums_to_one(history: RunHistory, site: SiteHistory) -> bool:
    if len(site.shape) < 3 or site.shape[-1] < 4 or not site.floating or site in history.sites("output")[-1:]:
        return False
    rows = site["numel"] / site.shape[-1]
    if site["zeros"][0] == site["numel"][0] - rows[0]:  # ones and zeros from the first step on are classes, as data
        return False
    return bool(np.all(site["min"] >= 0) and np.all(site["max"] <= 1.001) and np.allclose(site["l1"], rows, rtol=1e-3))


def _collapsed(site: SiteHistory, message: str, severity: Any, **evidence: Any) -> Finding:
    advice = "People normalise queries and keys, lower the learning rate or warm it up, and clip gradients."
    last = int(site.steps[-1])
    return site.finding(Steps(last, last, 1), message, advice, severity=severity, **evidence)
