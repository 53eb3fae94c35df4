"""Leave out tensors that were recorded twice: what a container returns is what its last module returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from tensortap.select.ports import MODULE_PORTS, PORT_INFO

if TYPE_CHECKING:
    from tensortap.diagnose.history import SiteHistory

_TELLING: Final = ("numel", "zeros", "min", "max", "mean", "std", "l1", "l2")


def without_duplicates(sites: Sequence[SiteHistory]) -> list[SiteHistory]:
    """Return the sites in their order, each tensor once: under the first place it was seen at.

    Two tensors are taken for one when all their statistics agree at every step. Constant tensors agree by chance, so
    of those only a container's are left out when something inside it shows the same.
    """
    kept: dict[tuple[object, ...], list[SiteHistory]] = {}
    out = []
    for site in sites:
        same = kept.setdefault(_key(site), [])
        if not any(_telling(site) or _inside(other.module, site.module) for other in same):
            out.append(site)
            same.append(site)
    return out


def _key(site: SiteHistory) -> tuple[object, ...]:
    port = site.place.port
    side = PORT_INFO[port].when if port in MODULE_PORTS else str(site.place)  # parameters are themselves
    return side, site.steps.tobytes(), *(site[name].tobytes() for name in _TELLING)


def _telling(site: SiteHistory) -> bool:
    return bool(np.any(site["std"] > 0))


def _inside(path: str, container: str) -> bool:
    return path == container or not container or path.startswith(f"{container}.")
