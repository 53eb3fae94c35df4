"""Give the sites of one model the same names in every wrapper, so that runs of different layouts can be paired."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from tensortap.select.ports import RESULT_PORTS
from tensortap.types import Place

SiteName = Callable[[str], str | None]
WRAPPERS: Final = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"))
_STAGE: Final = re.compile(r"stage(\d+)")


def unwrapped(site: str) -> str:
    """Return a site's name without the prefixes of wrappers.

    >>> unwrapped("module._orig_mod.blocks.0.fc"), unwrapped("stage1.blocks.3"), unwrapped("module"), unwrapped("fc")
    ('blocks.0.fc', 'blocks.3', '', 'fc')
    """
    parts = [part for part in site.split(".") if part not in WRAPPERS]
    while parts and (parts[0] == "module" or (_STAGE.fullmatch(parts[0]) and len(parts) > 1)):
        parts = parts[1:]
    return ".".join(parts)


def common_names(places: Iterable[Place], rename: SiteName | None = None) -> dict[Place, Place]:
    """Return the name that each place has in any layout. Where two wrappers name one module, the inner one counts.

    A pipeline's first stage has the model's input and its last one the output; what lies between has no counterpart.
    """
    known = list(places)
    stages = [int(stage[1]) for place in known if (stage := _STAGE.fullmatch(place.site))]
    ends = (min(stages), max(stages)) if stages else (0, 0)
    names = {place: name for place in known if (name := _renamed(place, rename, ends)) is not None}
    common = {place: place._replace(site=name, op="") for place, name in names.items()}
    inner: dict[Place, int] = {}
    for place, found in common.items():
        inner[found] = max(inner.get(found, 0), _depth(place.site))
    return {place: found for place, found in common.items() if _depth(place.site) == inner[found]}


def _depth(site: str) -> int:
    return len(site.split(".")) if site else 0


def _renamed(place: Place, rename: SiteName | None, ends: tuple[int, int]) -> str | None:
    if rename is not None and (name := rename(place.site)) is not None:
        return name
    found = _STAGE.fullmatch(place.site)
    if found is None:
        return unwrapped(place.site)
    wanted = ends[1] if place.port in RESULT_PORTS else ends[0]
    return "" if int(found[1]) == wanted else None
