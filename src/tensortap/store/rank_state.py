"""The state of a rank in `_rank.json`: write it, and read it even when it is damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from tensortap.distributed.shards import Shard
from tensortap.record.counters import Counters
from tensortap.store import checked_json
from tensortap.store.files import Files
from tensortap.types import Place

_NUMBER: Final = (int, float)
_OF_PARTS: Final = {"mesh": dict, "at": list, "placements": list, "ranks": list, "summand": bool}


class RankState:
    """The content of a rank's `_rank.json`: state, counts, and what else is true of this rank alone.

    `total_records` and `sealed`, the rows in sealed files by kind, count over all launches of a run: so a file that is
    deleted later is missed.
    """

    def __init__(self, files: Files, name: str, counters: Counters) -> None:
        self._files = files
        self._name = name
        self._counters = counters
        self.lines: Mapping[str, str] = {}
        self.parts = 0  # how many parts of tensors the content names
        self.content: dict[str, Any] = {"state": "live", "pid": os.getpid(), "steps": 0, "records": 0}
        before = self._before()
        self.content["total_records"] = recorded(before)
        self.content["sealed"] = dict(before.get("sealed", {}))

    def note(self, **more: Any) -> None:
        """Add what is true of this rank, and save."""
        self.content |= more
        self.save()

    def note_layout(self, parts: Mapping[Place, Shard], phase: str | None) -> None:
        """Note which part of each tensor this rank holds, and the phase where each has numbers of its own.

        That is as durable as the rows that need it to be read.
        """
        if len(parts) != self.parts:
            self.parts = len(parts)
            self.note(parts={str(place): part.as_json() for place, part in list(parts.items())})
        known = self.content.get("phases", ())
        if phase is not None and phase not in known:
            self.note(phases=[*known, phase])

    def count_step(self, number: int, rows: int = 0) -> None:
        """Count a step that was written, and its records."""
        content = self.content
        content["steps"] += 1
        content["last_step"] = max(number, content.get("last_step", 0))
        if rows:
            content["records"] += rows
            content["total_records"] += rows

    def lose_records(self, rows: int) -> None:
        """Count records no more that were written and are lost again."""
        self.content["total_records"] = max(self.content["total_records"] - rows, 0)

    def count_sealed(self, what: str, rows: int) -> None:
        """Count rows that lie in a sealed file now."""
        self.content["sealed"] = {**self.content["sealed"], what: self.content["sealed"].get(what, 0) + rows}

    def forget_files(self) -> None:
        """Reset the counts: the folder was deleted, and its rows are not counted as missing."""
        self.content |= {"total_records": 0, "sealed": {}}

    def save(self) -> None:
        """Write the file, with the counts as they are now."""
        state = {**self.content, "counts": self._counters.counts(), "details": self._counters.details()}
        if self.lines:
            state["lines"] = dict(self.lines)
        self._files.write(self._name, checked_json.encode(state))

    def _before(self) -> dict[str, Any]:
        try:
            return valid_state(checked_json.decode(self._files.read(self._name))[0])
        except (OSError, ValueError):
            return {}


def recorded(state: Mapping[str, Any]) -> int:
    """Return how many records a rank has written at least; version 1 counted those of the last launch."""
    return int(state.get("total_records", state.get("records", 0)))


def read_state(data: bytes) -> tuple[dict[str, Any], str]:
    """Return the usable content of `_rank.json`, and what is wrong with it; raise ValueError if nothing is usable."""
    said, wrong = checked_json.decode(data)
    state = valid_state(said)
    return state, wrong or ("" if state == said else "some of it has another form than was written")


def valid_state(said: Any) -> dict[str, Any]:
    """Return what `_rank.json` says without what has another form than was written."""
    if not isinstance(said, dict):
        raise ValueError("it is not an object")
    return {name: value for name, value in said.items() if name not in _FORMS or _FORMS[name](value)}


def _dict_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)


def _is_part(value: Any) -> bool:
    if not isinstance(value, dict) or any(not isinstance(value.get(name), kind) for name, kind in _OF_PARTS.items()):
        return False
    return len(value["at"]) == len(value["placements"]) == len(value["mesh"]) and _all_plain(value)


def _all_plain(part: dict[str, Any]) -> bool:
    lists = [*part["at"], *part["placements"], *part["ranks"], *part["mesh"].values()]
    return all(isinstance(item, (str, int)) for item in lists)


def _is_cost(value: Any) -> bool:
    if value is None:
        return True
    numbers = _is(*_NUMBER)
    if not isinstance(value, dict) or not all(numbers(value.get(name)) for name in ("share", "seconds", "steps")):
        return False
    return _dict_of(numbers)(value.get("by_site", {}))


_FORMS: Final[dict[str, Callable[[Any], bool]]] = {
    "state": _is(str),
    "records": _is(int),
    "total_records": _is(int),
    "sealed": _dict_of(_is(int)),
    "last_step": lambda value: _is(int)(value) and -1 <= value < 1 << 62,
    "counts": _dict_of(_is(int)),
    "unseen": _dict_of(_is(str)),
    "lines": _dict_of(_is(str)),
    "parts": _dict_of(_is_part),
    "cost": _is_cost,
}
