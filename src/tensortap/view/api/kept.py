"""Which tensors were kept of which place: read once from each file's index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tensortap.store import names as layout
from tensortap.store.catalog import settled
from tensortap.store.run import Run
from tensortap.store.tail import read_tail
from tensortap.store.tensors import TensorKey, TensorReader
from tensortap.view.api.block import Triple

Entry = dict[str, Any]


class Index:
    """A run's kept tensors by place. Sealed files do not change, so each is read once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._files: dict[str, list[tuple[TensorKey, Entry]]] = {}

    def by_place(self) -> dict[Triple, list[Entry]]:
        """What was kept, by step, rank and call."""
        found: dict[Triple, dict[TensorKey, Entry]] = {}
        for key, entry in settled(lambda: list(self._all())):
            if not key.recomputed:
                found.setdefault((key.site, key.port, key.slot), {})[key] = entry
        return {triple: [held[key] for key in sorted(held)] for triple, held in found.items()}

    def _all(self) -> Iterator[tuple[TensorKey, Entry]]:
        files = self._run.files
        for rank in self._run.ranks:
            folder = layout.tensors_folder(rank)
            tails = sorted((files.staging() / folder).glob("_tail-*.arrows"))
            names = [name for name in files.list(folder) if layout.tensor_file(name)]
            sealed = {layout.tensors_id(name) for name in names}
            for name in names:
                yield from self._of_file(f"{folder}/{name}")
            for path in tails:
                if layout.tail_id(path.name) not in sealed:
                    yield from _of_tail(read_tail(path))

    def _of_file(self, name: str) -> list[tuple[TensorKey, Entry]]:
        if name not in self._files:
            try:
                with self._run.files.open(name) as file:
                    reader = TensorReader(file)
                    said = [entry for _, entry in reader.entries.values()]
                    self._files[name] = [
                        (key, _entry(key, e)) for key, e in zip(reader.keys().values(), said, strict=True)
                    ]
            except FileNotFoundError:
                raise
            except (OSError, ValueError, TypeError, KeyError):  # the run counts it as damaged
                self._files[name] = []
        return self._files[name]


def _of_tail(table: Any) -> Iterator[tuple[TensorKey, Entry]]:
    if table is not None:
        for row in table.select(["entry", "dtype", "shape"]).to_pylist():
            key = TensorKey(**json.loads(row["entry"]))
            yield key, _entry(key, row)


def _entry(key: TensorKey, said: Any) -> Entry:
    return {
        "step": key.step, "rank": key.rank, "call": key.call, "keeper": key.kind, "probe": key.probe,
        "dtype": said["dtype"], "shape": list(said["shape"]),
    }  # fmt: skip
