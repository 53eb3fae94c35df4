"""What several rules share: kinds of layers, masks over steps, order of depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tensortap.diagnose.history import RunHistory, SiteHistory
from tensortap.select.ports import FORWARD_PORTS

Mask = npt.NDArray[np.bool_]
RELUS: Final = frozenset(("ReLU", "ReLU6", "Threshold", "relu", "relu_", "threshold", "relu6"))
WEIGHTED: Final = ("Linear", "Conv", "Bilinear")
MIXING: Final = (
    *WEIGHTED,
    "LSTM",
    "GRU",
    "RNN",
    "MultiheadAttention",
    "LazyLinear",
    "LazyConv",
    "Dense",
    "EinsumDense",
)
_OTHERS: Final = (  # modules that are no ReLU, whatever their output looks like
    *WEIGHTED, "Norm", "Pool", "Dropout", "Flatten", "Identity", "Embedding", "Softmax", "Sigmoid", "Upsample", "Pad",
)  # fmt: skip


def relu_like(site: SiteHistory) -> bool:
    """Return whether a site is a ReLU's output: by its class or, where that is unknown, by never being negative."""
    if site.type in RELUS:
        return True
    if any(part in site.type for part in _OTHERS) or not site.floating or len(site.shape) < 2:
        return False
    return bool(np.all(site["min"][site.finite] >= 0) and np.any(site["max"] > 0) and np.any(site["zeros"] > 0))


def lasting_to_the_end(mask: Mask, count: int, finite: Mask | None = None) -> Mask:
    """Return the last steps, unbroken to the end, at which the mask holds; nothing when they are fewer than `count`.

    With `finite`, steps that are not finite are left out of account: what was wrong before a NaN stays named.
    """
    if finite is not None:
        out = np.zeros_like(mask)
        out[finite] = lasting_to_the_end(mask[finite], count)
        return out
    held = np.logical_and.accumulate(mask[::-1])[::-1]
    return held if held.sum() >= min(count, len(mask)) and mask.any() else np.zeros_like(mask)


def streak(mask: Mask, count: int) -> bool:
    """Return whether the mask holds `count` times in a row; at every step when there are fewer."""
    if not mask.any():
        return False
    sums = np.convolve(mask, np.ones(min(count, len(mask)), np.int64), "valid")
    return bool(sums.max() >= min(count, len(mask)))


def kernels(history: RunHistory, port: str) -> list[SiteHistory]:
    """Parameters with two axes or more that mix their inputs, from the first layer to the last.

    Parameters of a user's own module count where they are factors of a product: tables of positions and the like are
    only added. Where no training context tells, they count if there are no others.
    """
    found = [site for site in history.sites(port) if len(site.shape) > 1 and "Embedding" not in site.type]
    factors = {name for event in history.events("backward") for name in event.data.get("multiplied") or ()}
    mixing = [site for site in found if site.place.site in factors or site.type.startswith(MIXING)]
    found = mixing if factors or mixing else found
    ran = _execution_order(history)
    listed = {path: i for i, path in enumerate(history.modules)}

    def depth(site: SiteHistory) -> tuple[int, int]:
        return _nearest(site.module, ran), listed.get(site.module, 0)

    return sorted(found, key=depth) if ran else found


def _execution_order(history: RunHistory) -> dict[str, int]:
    order: dict[str, int] = {}
    for place in history.places:
        if place.port in FORWARD_PORTS:
            order.setdefault(place.site, len(order))
    return order


def _nearest(path: str, order: dict[str, int]) -> int:
    """Return when a module ran, or the nearest module around it where it is never called itself."""
    while path and path not in order:
        path = path.rpartition(".")[0]
    return order.get(path, len(order))


def named(sites: Sequence[str], most: int = 3) -> str:
    """Return a few names, and how many more."""
    more = f" and {len(sites) - most} more" if len(sites) > most else ""
    return ", ".join(sites[:most]) + more
