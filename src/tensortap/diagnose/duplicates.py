"""Leave out tensors that were recorded twice: a container often returns the output of its last module."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.reduce.statistics import BOUNDED
from tensortap.select.ports import MODULE_PORTS, PORT_INFO
from tensortap.types import Place

if TYPE_CHECKING:
    from tensortap.diagnose.history import SiteHistory

Key = tuple[object, ...]
_COMPARED: Final = ("numel", "zeros", *BOUNDED)


def without_duplicates(sites: Sequence[SiteHistory], keys: dict[Place, Key]) -> list[SiteHistory]:
    """Return the sites in their order, each tensor once: under the first place it was seen at.

    Two tensors are taken for one when all their statistics agree at every step. Constant tensors agree by chance, so of
    those only a container's are left out when something inside it shows the same. `keys` keeps what was computed for a
    site, for the next call.
    """
    kept: dict[Key, list[SiteHistory]] = {}
    out = []
    for site in sites:
        if site.place not in keys:
            keys[site.place] = _key(site)
        same = kept.setdefault(keys[site.place], [])
        if not any(_varies(site) or _inside(other.module, site.module) for other in same):
            out.append(site)
            same.append(site)
    return out


def _key(site: SiteHistory) -> Key:
    port = site.place.port
    side = PORT_INFO[port].when if port in MODULE_PORTS else str(site.place)  # parameters are themselves
    return side, len(site.steps), _digest(site.steps), *(_digest(site[name]) for name in _COMPARED)


def _digest(values: npt.NDArray[Any]) -> bytes:
    """Return a few bytes that tell arrays apart; the arrays themselves would hold a long run in memory once more."""
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).digest()


def _varies(site: SiteHistory) -> bool:
    return bool(np.any(site["std"] > 0))


def _inside(path: str, container: str) -> bool:
    return path == container or not container or path.startswith(f"{container}.")
