"""Make answers small: numbers of four digits, and as many items as fit into one answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

ROOM: Final = 6000  # characters of JSON, about two thousand tokens
_DIGITS: Final = 4


def brief(value: Any) -> Any:
    """Return plain values with numbers rounded to four digits; what is not finite is a word.

    >>> brief({"mean": 0.123456, "max": float("inf"), "steps": (1, 2)})
    {'mean': 0.1235, 'max': 'inf', 'steps': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): brief(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [brief(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def paged(name: str, items: Sequence[Any], page: int = 0, room: int = ROOM, **more: Any) -> dict[str, Any]:
    """Return one page of items under a name, with what else there is to say, within so many characters.

    >>> paged("rows", ["a" * 30, "b" * 30], room=60)
    {'rows': ['aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'], 'page': 0, 'pages': 2, 'total': 2}
    """
    pages: list[list[Any]] = [[]]
    used = 0
    for item in map(brief, items):
        size = len(json.dumps(item, ensure_ascii=False)) + 2
        if pages[-1] and used + size > room:
            pages.append([])
            used = 0
        pages[-1].append(item)
        used += size
    if not 0 <= page < len(pages):
        raise ValueError(f"page must be from 0 to {len(pages) - 1}, got {page}")
    found = {name: pages[page], **brief(more)}
    return found | ({"page": page, "pages": len(pages), "total": len(items)} if len(pages) > 1 else {})


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Return evenly spread values, the first and the last among them.

    >>> thinned(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
