"""The run folder as a sink: every step appended to a tail before the step returns, sealed in the background."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from tensortap.ledger import Ledger
from tensortap.step import Step
from tensortap.store import layout, seal
from tensortap.store.claim import Lock, claim, launch_id
from tensortap.store.files import Files
from tensortap.store.schema import METRICS, RECORDS, TENSORS, Batches, MetricBatches
from tensortap.store.tail import Tail
from tensortap.store.tensors import Stored, tensors_of, write_tensors

SEAL_ROWS: Final = 50_000
SEAL_SECONDS: Final = 30.0
SYNC_SECONDS: Final = 5.0
INLINE_BYTES: Final = 1 << 20  # raw tensors up to this many bytes a step are as durable as the rows
_RETRY_SECONDS: Final = 1.0

_SCHEMAS: Final = {"records": RECORDS, "metrics": METRICS, "tensors": TENSORS}


class RunFolder:
    """Writes one rank's part of a run.

    `append` returns when the step's rows, metrics and small tensors are in the operating system's hands, so that
    they outlive the process. Large tensors and sealing are left to the writer's thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        about: Mapping[str, Any] | None = None,
        resume: bool = False,
        overwrite: bool = False,
        launch: str | None = None,
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = Files(path)
        self.rank = rank
        self.ledger = ledger or Ledger()
        self._clock = clock
        self._info = claim(
            self.files, rank, about or {}, resume=resume, overwrite=overwrite, launch=launch or launch_id()
        )
        self._folders = {
            "records": layout.rank_folder(rank),
            "metrics": layout.metrics_folder(rank),
            "tensors": layout.tensors_folder(rank),
        }
        self._lock = threading.RLock()
        self._held = Lock(self.files.staging() / layout.rank_folder(rank) / layout.LOCK)
        self._tails: dict[str, Tail] = {}
        self._sealing: deque[tuple[str, Path]] = deque(self._orphans())
        self._batches: Batches | None = None
        self._metrics = MetricBatches()
        self._retry_at = 0.0
        self._synced_at = clock()
        self._state: dict[str, Any] = {"state": "live", "pid": os.getpid(), "steps": 0, "records": 0}
        self._save_state()

    def __str__(self) -> str:
        return str(self.files)

    @property
    def info(self) -> Mapping[str, Any]:
        """The content of `run.json`."""
        return self._info

    def describe(self, **more: Any) -> None:
        """Add to `run.json`: the model's tree, the probes, what was learnt while running."""
        self._info = {**self._info, **more}
        self.files.write(layout.RUN_JSON, json.dumps(self._info, indent=1).encode())

    def append(self, step: Step) -> bool:
        """Put a step's rows, metrics and small tensors into the tails. True when the thread has work to do."""
        with self._lock:
            if self._clock() < self._retry_at:
                raise OSError(f"{self} could not be written a moment ago; trying again shortly")
            try:
                inline = self._append_tensors(step)
                self._append_metrics(step)
                self._append_rows(step)
            except (OSError, pa.ArrowException):
                self._abandon()
                raise
            return self._rotate() or not inline

    def write(self, step: Step) -> None:
        """On the thread: write a step's large tensors to a file of their own, and seal what is due."""
        if step.table.tensor_bytes > INLINE_BYTES:
            self._write_tensors(step)
        self._seal()

    def _write_tensors(self, step: Step) -> None:
        name = layout.tensors_name(step.number, step.number, layout.new_id())
        try:
            with self.files.replacing(f"{self._folders['tensors']}/{name}") as hidden:
                write_tensors(hidden, tensors_of(step))
        except OSError:
            self.ledger.add("dropped_tensors", len(step.table.tensors))
            raise

    def tick(self) -> None:
        """On the thread, now and then: seal, sync, save the counts, and notice when the folder is gone."""
        with self._lock:
            if any(tail.gone() for tail in self._tails.values()):
                self._vanished()
            self._rotate()
        self._seal()
        if self._clock() - self._synced_at >= SYNC_SECONDS:
            self._synced_at = self._clock()
            for tail in list(self._tails.values()):
                tail.sync()
        self._save_state()

    def close(self) -> None:
        """Seal everything and say that the run is finished."""
        with self._lock:
            self._rotate(everything=True)
            try:
                self._seal()
                self._state["state"] = "finished"
                self._save_state()
            finally:
                self._held.close()

    def _append_rows(self, step: Step) -> None:
        self._state["steps"] += 1
        if not step.table.rows or step.tensors_only:
            return
        if self._batches is None:
            self._batches = Batches(step.names)
        self._tail("records").append(self._batches.of(step))
        self._state["records"] += step.table.rows

    def _append_metrics(self, step: Step) -> None:
        if step.metrics and not step.tensors_only:
            self._tail("metrics").append(self._metrics.of(step.number, step.time, step.metrics))

    def _append_tensors(self, step: Step) -> bool:
        """Small tensors ride in a tail of their own. False when they are left to the thread."""
        if not step.table.tensors:
            return True
        if step.table.tensor_bytes > INLINE_BYTES:
            return False
        rows = [(step.number, *_raw(stored)) for stored in tensors_of(step)]
        columns = zip(zip(*rows, strict=True), TENSORS, strict=True)
        arrays = [pa.array(column, field.type) for column, field in columns]
        self._tail("tensors").append(pa.RecordBatch.from_arrays(arrays, schema=TENSORS))
        return True

    def _tail(self, what: str) -> Tail:
        tail = self._tails.get(what)
        if tail is None:
            path = self.files.staging() / self._folders[what] / layout.tail_name(layout.new_id())
            tail = self._tails[what] = Tail(path, _SCHEMAS[what], self._clock())
        return tail

    def _rotate(self, everything: bool = False) -> bool:
        """Close the tails that are long or old enough to be sealed. True when there are some to seal."""
        for what, tail in list(self._tails.items()):
            if everything or tail.rows >= SEAL_ROWS or self._clock() - tail.opened >= SEAL_SECONDS:
                tail.close()
                del self._tails[what]
                self._sealing.append((what, tail.path))
        return bool(self._sealing)

    def _seal(self) -> None:
        """Seal what is closed. What cannot be sealed now stays a tail, readable, and is tried again."""
        trouble: Exception | None = None
        for _ in range(len(self._sealing)):
            what, path = self._sealing.popleft()
            convert = seal.seal_tensors if what == "tensors" else seal.seal_records
            try:
                if path.exists():
                    convert(self.files, self._folders[what], path)
            except Exception as error:
                trouble = error
                self._sealing.append((what, path))
        if trouble is not None:
            raise trouble

    def _orphans(self) -> list[tuple[str, Path]]:
        """Tails that an earlier process of this rank left behind."""
        staging = self.files.staging()
        return [
            (what, path)
            for what, folder in self._folders.items()
            for path in sorted((staging / folder).glob("_tail-*.arrows"))
        ]

    def _abandon(self) -> None:
        """After a failed append: end every tail, and begin others when the disk or the folder is back."""
        self._retry_at = self._clock() + _RETRY_SECONDS
        for what, tail in self._tails.items():
            tail.close()
            self._sealing.append((what, tail.path))
        self._tails.clear()

    def _vanished(self) -> None:
        self.ledger.add("dropped_records", sum(tail.rows for what, tail in self._tails.items() if what == "records"))
        self._abandon()
        self._retry_at = 0.0
        self.describe()
        self.ledger.warn("vanished", f"the run folder {self} was deleted while it was written; writing goes on anew")

    def _save_state(self) -> None:
        state = {**self._state, "counts": self.ledger.counts(), "details": self.ledger.details()}
        self.files.write(f"{self._folders['records']}/{layout.RANK_JSON}", json.dumps(state, indent=1).encode())


def _raw(stored: Stored) -> tuple[str, str, str, tuple[int, ...], bytes]:
    name, entry, array = stored
    return name, entry, array.dtype.name, array.shape, array.tobytes()
