"""Find the ranks that hold copies of one tensor, and those that hold partial sums: needed to merge rows over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.errors import RunError
from tensortap.types import Place

_PLACE: Final = ("site", "port", "slot")
Key = tuple[str, ...]


class ReplicaGroups(NamedTuple):
    """Rows that do not count, because another rank's are copies of them; and places whose rows are partial sums."""

    replicas: frozenset[tuple[int, Key]]
    partial_sums: frozenset[Key]

    def without_replicas(self, rows: Any) -> Any:
        """Return the rows that count."""
        if not self.replicas or not len(rows):
            return rows
        known, of_row = _distinct([rows[name] for name in ("rank", *_PLACE)])
        counts = np.array([(rank, tuple(place)) not in self.replicas for rank, *place in known], bool)
        return rows.take(pa.array(np.flatnonzero(counts[of_row])))

    def are_partial_sums(self, rows: Any) -> list[bool]:
        """Return for each row whether it was merged from partial sums."""
        return [key in self.partial_sums for key in _keys(rows)]


NO_REPLICAS: Final = ReplicaGroups(frozenset(), frozenset())


def replica_groups(
    said: Mapping[int, Mapping[str, Any]], places: Iterable[Place], copied: Mapping[str, Iterable[Place]]
) -> ReplicaGroups:
    """Combine the shards that ranks recorded with the copies that the user names along a side of the mesh."""
    names = {str(place): place[:3] for place in places}
    known = [(rank, names[name], shard) for rank, of in said.items() for name, shard in of.items() if name in names]
    groups: dict[Any, list[int]] = {}
    for side, alike in copied.items():
        for line in _along(said, side):
            groups |= {(place[:3], tuple(line)): line for place in alike}
    for rank, key, shard in known:
        piece = [at for at, how in zip(shard["at"], shard["placements"], strict=True) if how != "R"]
        if "R" in shard["placements"]:
            mesh = (*shard["mesh"].items(), *shard["ranks"])
            groups.setdefault((key, mesh, tuple(piece)), []).append(rank)
    # Of several copies, the first recorded one counts: ranks may be missing.
    replicas = {(rank, which[0]) for which, ranks in groups.items() for rank in sorted(set(ranks))[1:]}
    return ReplicaGroups(frozenset(replicas), frozenset(key for _, key, shard in known if shard["summand"]))


def _along(said: Mapping[int, Mapping[str, Any]], side: str) -> list[list[int]]:
    """Return the ranks that lie in a line along a side of the mesh; all of them when no side is named."""
    lines: dict[Any, list[int]] = {}
    for rank, of in said.items() if side else ():
        part = next((part for part in of.values() if side in part["mesh"]), None)
        if part is not None:
            others = [at for name, at in zip(part["mesh"], part["at"], strict=True) if name != side]
            lines.setdefault((tuple(part["ranks"]), tuple(others)), []).append(rank)
    if side and not lines:
        raise RunError(
            f"replicated= must name a side of the mesh, got {side!r}, which no mesh in this run has.{_sides(said)}"
        )
    return list(lines.values()) if side else [list(said)]


def _sides(said: Mapping[int, Mapping[str, Any]]) -> str:
    known = dict.fromkeys(name for of in said.values() for part in of.values() for name in part["mesh"])
    return f" There are {', '.join(known)}." if known else ""


def _distinct(columns: Sequence[Any]) -> tuple[list[tuple[Any, ...]], npt.NDArray[np.int64]]:
    """Return the combinations of values in some columns, and for each row which of them it has."""
    code, words = np.zeros(len(columns[0]), np.int64), []
    for column in columns:
        text = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        known = text.combine_chunks().dictionary_encode("encode")
        words.append(known.dictionary.to_pylist())
        code = code * len(words[-1]) + known.indices.to_numpy()
    _, first, of_row = np.unique(code, return_index=True, return_inverse=True)
    at = np.unravel_index(code[first], [len(known) for known in words])
    return [tuple(w[i] for w, i in zip(words, row, strict=True)) for row in zip(*at, strict=True)], of_row


def _keys(rows: Any) -> Iterable[Key]:
    columns = [rows[name].to_pylist() if hasattr(rows[name], "to_pylist") else rows[name] for name in _PLACE]
    return zip(*columns, strict=True)
