"""Which ranks hold copies of one tensor, and where they hold partial sums of it: what folding over ranks must know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tensortap.errors import RunError
from tensortap.types import Place

_PLACE: Final = ("site", "port", "slot")
Key = tuple[str, ...]


class Parts(NamedTuple):
    """Rows that count nowhere, because another rank's are copies of them; and places whose rows are partial sums."""

    replicas: frozenset[tuple[int, Key]]
    partial_sums: frozenset[Key]

    def without_replicas(self, rows: Any) -> Any:
        """The rows that count."""
        if not self.replicas or not len(rows):
            return rows
        ranked = zip(rows["rank"].to_pylist(), _keys(rows), strict=True)
        return rows.filter(pa.array([key not in self.replicas for key in ranked]))

    def are_partial_sums(self, rows: Any) -> list[bool]:
        """For each row whether it was folded from partial sums."""
        return [key in self.partial_sums for key in _keys(rows)]


NO_PARTS: Final = Parts(frozenset(), frozenset())


def parts_of(
    said: Mapping[int, Mapping[str, Any]], places: Iterable[Place], copied: Mapping[str, Iterable[Place]]
) -> Parts:
    """What ranks said of their parts, and what the user says is the same along a side of the mesh, or everywhere."""
    names = {str(place): place[:3] for place in places}
    known = [(rank, names[name], part) for rank, of in said.items() for name, part in of.items() if name in names]
    holders: dict[Any, list[int]] = {}
    for side, alike in copied.items():
        for group in _along(said, side):
            holders |= {(place[:3], tuple(group)): group for place in alike}
    for rank, key, part in known:
        piece = [at for at, how in zip(part["at"], part["placements"], strict=True) if how != "R"]
        if "R" in part["placements"]:
            mesh = (*part["mesh"].items(), *part["ranks"])
            holders.setdefault((key, mesh, tuple(piece)), []).append(rank)
    # Of those that hold the same, the first that records counts: not all ranks need be there.
    replicas = {(rank, which[0]) for which, ranks in holders.items() for rank in ranks if rank != min(ranks)}
    return Parts(frozenset(replicas), frozenset(key for _, key, part in known if part["summand"]))


def _along(said: Mapping[int, Mapping[str, Any]], side: str) -> list[list[int]]:
    """The ranks that lie in a line along a side of the mesh; all of them when no side is named."""
    lines: dict[Any, list[int]] = {}
    for rank, of in said.items() if side else ():
        part = next((part for part in of.values() if side in part["mesh"]), None)
        if part is not None:
            others = [at for name, at in zip(part["mesh"], part["at"], strict=True) if name != side]
            lines.setdefault((tuple(part["ranks"]), tuple(others)), []).append(rank)
    if side and not lines:
        raise RunError(f"replicated= names a side {side!r} that no mesh in this run has.{_sides(said)}")
    return list(lines.values()) if side else [list(said)]


def _sides(said: Mapping[int, Mapping[str, Any]]) -> str:
    known = dict.fromkeys(name for of in said.values() for part in of.values() for name in part["mesh"])
    return f" There are {', '.join(known)}." if known else ""


def _keys(rows: Any) -> Iterable[Key]:
    columns = [rows[name].to_pylist() if hasattr(rows[name], "to_pylist") else rows[name] for name in _PLACE]
    return zip(*columns, strict=True)
