"""Which ranks hold copies of one tensor, and where they hold summands of it: what folding over ranks must know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tensortap.types import Place

_PLACE: Final = ("site", "port", "slot")
Key = tuple[str, ...]


class Parts(NamedTuple):
    """Rows that count nowhere, because another rank's are copies of them; and places whose rows are summands."""

    replicas: frozenset[tuple[int, Key]]
    summands: frozenset[Key]

    def without_replicas(self, rows: Any) -> Any:
        """The rows that count."""
        if not self.replicas or not len(rows):
            return rows
        ranked = zip(rows["rank"].to_pylist(), _keys(rows), strict=True)
        return rows.filter(pa.array([key not in self.replicas for key in ranked]))

    def are_summands(self, rows: Any) -> list[bool]:
        """For each row whether it was folded from summands."""
        return [key in self.summands for key in _keys(rows)]


NO_PARTS: Final = Parts(frozenset(), frozenset())


def parts_of(said: Mapping[int, Mapping[str, Any]], places: Iterable[Place], copied: Iterable[Place]) -> Parts:
    """What ranks said of their parts, and what the user says is the same on all of them."""
    names = {str(place): place[:3] for place in places}
    known = [(rank, names[name], part) for rank, of in said.items() for name, part in of.items() if name in names]
    holders: dict[Any, list[int]] = {(place[:3],): list(said) for place in copied}
    for rank, key, part in known:
        piece = [at for at, how in zip(part["at"], part["placements"], strict=True) if how != "R"]
        if "R" in part["placements"]:
            holders.setdefault((key, tuple(part["mesh"].items()), tuple(piece)), []).append(rank)
    # Of those that hold the same, the first that records counts: not all ranks need be there.
    replicas = {(rank, which[0]) for which, ranks in holders.items() for rank in ranks if rank != min(ranks)}
    return Parts(frozenset(replicas), frozenset(key for _, key, part in known if part["summand"]))


def _keys(rows: Any) -> Iterable[Key]:
    columns = [rows[name].to_pylist() if hasattr(rows[name], "to_pylist") else rows[name] for name in _PLACE]
    return zip(*columns, strict=True)
