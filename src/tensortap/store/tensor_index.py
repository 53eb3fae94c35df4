"""Finding and reading raw tensors of a run, sealed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tensortap.errors import RunError
from tensortap.store import names as layout
from tensortap.store.files import Files
from tensortap.store.segments import tensor_rows
from tensortap.store.tail import read_tail
from tensortap.store.tensors import Array, TensorKey, TensorReader
from tensortap.types import Place


class Held(NamedTuple):
    """A kept tensor and how to read it."""

    key: TensorKey
    read: Callable[[], Array]


class Vault:
    """A run's raw tensors."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.damaged: set[str] = set()

    def all(self, ranks: list[int], step: int | None = None) -> Iterator[Held]:
        """Every kept tensor, or those of one step; none twice."""
        seen: set[tuple[int, str]] = set()
        for rank in ranks:
            for name, held in sorted(self._of_rank(rank, step), key=lambda found: found[1].key.step):
                if (rank, name) not in seen:
                    seen.add((rank, name))
                    yield held

    def get(self, key: TensorKey) -> Array:
        """The tensor of a key that was listed a moment ago, wherever it lies now."""
        for held in self.all([key.rank], key.step):
            if held.key == key:
                return held.read()
        raise FileNotFoundError(f"{key.name()} is not there any more")

    def one(
        self, place: Place, step: int, call: int, kind: str | None, probe: int | None, ranks: list[int]
    ) -> Array:  # fmt: skip
        """The one tensor that is meant, or an error that says what there is instead."""
        found = [
            held
            for held in self.all(ranks, step)
            if held.key.place == place and held.key.step == step and held.key.call == call
            if kind in (None, held.key.kind) and probe in (None, held.key.probe) and not held.key.recomputed
        ]
        if len(found) == 1 or (found and {held.key.kind for held in found} == {"full"} and len(ranks) == 1):
            return found[0].read()  # two probes that both keep all of it keep the same
        what = f"{place} at step {step}, call {call}" + (f", kind {kind!r}" if kind else "")
        if found:
            options = sorted({f"kind={k.kind!r}, rank={k.rank}, probe={k.probe}" for k, _ in found})
            raise RunError(f"several tensors were kept of {what}; say which: {' or '.join(options)}")
        raise RunError(f"no tensor was kept of {what}; {self._instead(place, step, ranks)}")

    def _instead(self, place: Place, step: int, ranks: list[int]) -> str:
        kept = [held.key for held in self.all(ranks) if held.key.place == place]
        if not kept:
            return 'none was kept there at any step: probe it with keep=full(), e.g. probe("**", keep=full())'
        steps = sorted({key.step for key in kept}, key=lambda s: (abs(s - step), s))
        return (
            f"kept there: {', '.join(sorted({k.kind for k in kept}))}; nearest steps {', '.join(map(str, steps[:5]))}"
        )

    def _of_rank(self, rank: int, step: int | None) -> Iterator[tuple[str, Held]]:
        folder = layout.tensors_folder(rank)
        tails = sorted((self._files.staging() / folder).glob("_tail-*.arrows"))
        names = self._files.list(folder)
        sealed = {layout.tensors_id(name) for name in names}
        for name in names:
            found = layout.tensor_file(name)
            if found and (step is None or found.first <= step <= found.last):
                yield from self._of_file(f"{folder}/{name}")
        for path in tails:
            if layout.tail_id(path.name) not in sealed:
                table = read_tail(path)
                for row in tensor_rows(table) if table is not None else ():
                    yield row.name, Held(TensorKey(**json.loads(row.entry)), lambda row=row: row.array)  # type: ignore[misc]

    def _of_file(self, name: str) -> Iterator[tuple[str, Held]]:
        try:
            with self._files.open(name) as file:
                reader = TensorReader(file)
                keys = reader.keys()
        except FileNotFoundError:
            raise
        except (OSError, ValueError, TypeError, KeyError):
            self.damaged.add(name)
            return
        for tensor, key in keys.items():
            yield tensor, Held(key, lambda tensor=tensor: self._read(name, reader, tensor))  # type: ignore[misc]

    def _read(self, name: str, reader: TensorReader, tensor: str) -> Array:
        with self._files.open(name) as file:
            return reader.read(tensor, file)
