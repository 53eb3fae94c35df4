"""Write a run folder: every step is appended to a tail before the step returns, and sealed in the background."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from tensortap.context.events import Event
from tensortap.errors import RunError
from tensortap.record.counters import Counters
from tensortap.record.step import Step
from tensortap.store import names as layout
from tensortap.store.claim import Lock, claim, last_resumption, launch_id, write_info
from tensortap.store.files import Files
from tensortap.store.rank_state import RankState
from tensortap.store.schema import (
    EVENTS,
    METRICS,
    RECORDS,
    Batches,
    MetricBatches,
    event_batch,
)
from tensortap.store.sealing import Sealer
from tensortap.store.tail import Tail
from tensortap.store.tensor_tail import TensorLayout, TensorTail, room_for
from tensortap.store.tensors import tensors_of, write_tensors

SEAL_ROWS: Final = 50_000
SEAL_BYTES: Final = 64 << 20  # sealing reads a tail into memory
SEAL_SECONDS: Final = 30.0
SYNC_SECONDS: Final = 5.0
INLINE_BYTES: Final = 1 << 20  # raw tensors up to this many bytes a step are as durable as the rows
_RETRY_SECONDS: Final = 1.0

_SCHEMAS: Final = {"records": RECORDS, "metrics": METRICS, "events": EVENTS}


class OpenTails:
    """The tails that are appended to, by what they hold. Long and old ones are handed to the sealer."""

    def __init__(self, files: Files, folders: Mapping[str, str], sealer: Sealer, clock: Callable[[], float]) -> None:
        self._files = files
        self._folders = folders
        self._sealer = sealer
        self._clock = clock
        self._tails: dict[str, Tail] = {}

        self.get = self._tails.get
        self._room = 0  # for the header of tensors

    def __iter__(self) -> Iterator[Tail]:
        return iter(list(self._tails.values()))

    @property
    def tensors(self) -> TensorTail | None:
        """The tail of tensors, where there is one."""
        tail = self._tails.get("tensors")
        return tail if isinstance(tail, TensorTail) else None

    def begin(self, what: str) -> Tail:
        """Begin a tail for rows, metrics or events."""
        tail = self._tails[what] = Tail(self._path(what), _SCHEMAS[what], self._clock())
        return tail

    def append_to_another(self, step: Step, layout: TensorLayout) -> None:
        """Append the tensors of a step to a new tail: there is none yet, or it has no room left."""
        full = self.tensors
        if full is not None:
            self._room = full.more_room()
            self._sealer.add_tail("tensors", self._tails.pop("tensors"))
        room = max(self._room, room_for(layout))
        tail = self._tails["tensors"] = TensorTail(self._path("tensors"), self._clock(), room)
        tail.append_tensors(step, layout)

    def _path(self, what: str) -> Path:
        folder = self._files.staging() / self._folders[what]
        self._files.make_folder(folder)
        return folder / layout.tail_name(layout.new_id())

    def rotate(self, everything: bool = False) -> None:
        """Append no more to the tails that are old enough to be sealed."""
        old = self._clock() - SEAL_SECONDS
        for what in [what for what, tail in self._tails.items() if everything or tail.opened <= old]:
            self._sealer.add_tail(what, self._tails.pop(what))

    def rotate_long(self) -> None:
        """Append no more to a tail that is long enough to be sealed. In every step: so it looks at no clock."""
        for what, tail in self._tails.items():
            if tail.rows >= SEAL_ROWS or tail.size >= SEAL_BYTES:
                self._sealer.add_tail(what, self._tails.pop(what))
                return  # if there is another one, it has its turn in the next step

    def drop_deleted(self) -> list[tuple[str, int]]:
        """Close the tails whose files somebody deleted; return what they held and how many rows."""
        gone = [(what, tail) for what, tail in self._tails.items() if tail.gone()]
        for what, tail in gone:
            del self._tails[what]
            tail.close()
        return [(what, tail.rows) for what, tail in gone]


class RunFolder:
    """Write one rank's part of a run.

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
        after: Callable[[], int] = lambda: 0,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = Files(path)
        self.rank = rank
        self.counters = counters or Counters()
        self._clock = clock
        self._folders = dict(zip(("records", "metrics", "events", "tensors"), layout.rank_folders(rank), strict=True))
        self._lock = threading.RLock()
        self._batches: Batches | None = None
        self._metrics = MetricBatches()
        self._retry_at = 0.0
        self._synced_at = self._saved_at = clock()
        self._closed = False
        self._info, self._held = claim(
            self.files, rank, about or {}, resume=resume, overwrite=overwrite, launch=launch or launch_id(),
            after=after,
        )  # fmt: skip
        self._state = RankState(self.files, f"{self._folders['records']}/{layout.RANK_JSON}", self.counters)
        if self._info.get("model") != (about or {}).get("model", self._info.get("model")):
            # A stage of a pipeline: every rank has a model of its own.
            self._state.content["model"] = (about or {})["model"]
        self._sealer = Sealer(self.files, self._folders, self._lost, self._state.count_sealed)
        self._tails = OpenTails(self.files, self._folders, self._sealer, clock)
        try:
            self._sealer.add_orphans(rank)
            self._save_state()
        except (IsADirectoryError, NotADirectoryError) as error:
            self._held.close()
            raise RunError(
                f"{self} cannot be written: {error}; remove what is in the way, or use another path"
            ) from error
        except BaseException:
            self._held.close()
            raise

    def __str__(self) -> str:
        return str(self.files)

    @property
    def info(self) -> Mapping[str, Any]:
        """The content of `run.json`."""
        return self._info

    @property
    def start(self) -> int:
        """The step that this launch begins with: 0, or where a resumed run goes on."""
        return int(last_resumption(self._info).get("start", 0))

    def describe(self, **more: Any) -> None:
        """Add to `run.json` what is true of the whole run: the model's tree, the probes."""
        self._info = {**self._info, **more}
        write_info(self.files, self._info)

    def note(self, **more: Any) -> None:
        """Add to `_rank.json` what is true of this rank: what it has not seen, and which parts it holds."""
        with self._lock:
            self._state.note(**more)

    def append(self, step: Step) -> bool:
        """Put a step's rows, metrics and small tensors into the tails. True when large tensors are left to `write`."""
        with self._lock:
            if self._retry_at and self._clock() < self._retry_at:
                raise OSError(f"{self} could not be written a moment ago; trying again shortly")
            try:
                inline = not step.table.tensors or self._append_tensors(step)
                if step.metrics or step.labels:
                    self._append_metrics(step)
                self._append_rows(step)
            except (OSError, pa.ArrowException):
                self._abandon()
                raise
            self._tails.rotate_long()
            return not inline

    def append_events(self, events: Sequence[Event]) -> None:
        """Put what happened in the training into its tail, as durably as a step's rows."""
        with self._lock:
            if self._closed or self._clock() < self._retry_at:
                self.counters.add("dropped_events", len(events))
                return
            try:
                (self._tails.get("events") or self._begin("events")).append(event_batch(events))
            except (OSError, pa.ArrowException):
                self._abandon()
                raise
            self._tails.rotate_long()

    def write(self, step: Step) -> None:
        """Write a step's large tensors to a file of their own, on the writer's thread."""
        name = f"{self._folders['tensors']}/{layout.tensors_name(step.number, step.number, layout.new_id())}"
        try:
            with self.files.replacing(name) as hidden:
                write_tensors(hidden, tensors_of(step), name)
        except Exception:
            self.counters.add("dropped_tensors", len(step.table.tensors))
            raise

    def tick(self) -> None:
        """Seal, sync and save the counts now and then, on the writer's thread, and notice when the folder is gone."""
        with self._lock:
            self._look_after()
            self._tails.rotate()
            tails = list(self._tails)
        for tail in tails:
            tail.write_checks()
        self._sealer.seal()
        if self._clock() - self._synced_at >= SYNC_SECONDS:
            self._synced_at = self._clock()
            for tail in tails:
                tail.sync()
        if self.files.local is not None or self._clock() - self._saved_at >= SEAL_SECONDS:  # an upload costs
            self._save_state()

    def close(self) -> None:
        """Seal everything and say that the run is finished. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._look_after()
                self._tails.rotate(everything=True)
                self._sealer.seal()
                self._state.content["state"] = "finished"
                self._save_state()
            finally:
                self._held.close()

    def _append_rows(self, step: Step) -> None:
        state, rows = self._state, 0 if step.tensors_only else step.table.rows
        if rows:
            if self._batches is None:
                self._batches = Batches(step.names)
                state.lines = step.names.lines
            if len(step.names.parts) != state.parts or step.numbered_by_phase:
                state.note_layout(step.names.parts, step.phase if step.numbered_by_phase else None)
            self._batches.append(self._tails.get("records") or self._begin("records"), step, rows)
        state.count_step(step.number, rows)

    def _append_metrics(self, step: Step) -> None:
        if step.metrics and not step.tensors_only:
            self._metrics.append(self._tails.get("metrics") or self._begin("metrics"), step)
        if step.labels and not step.tensors_only:
            tail = self._tails.get("metrics") or self._begin("metrics")
            tail.append(self._metrics.of_labels(step.number, step.time, step.labels, step.phase))

    def _append_tensors(self, step: Step) -> bool:
        """Append small tensors to a tail of their own. Return False when they are left to the writer's thread."""
        layout = TensorLayout.of(step)
        if layout.size > INLINE_BYTES:
            return False
        tail = self._tails.tensors
        if tail is None or not tail.append_tensors(step, layout):
            self._look_after()
            self._tails.append_to_another(step, layout)
        return True

    def _begin(self, what: str) -> Tail:
        self._look_after()
        return self._tails.begin(what)

    def _abandon(self) -> None:
        """End every tail after a failed append, and begin others when the disk or the folder is back."""
        self._retry_at = self._clock() + _RETRY_SECONDS
        self._tails.rotate(everything=True)

    def _look_after(self) -> None:
        """Make the folder a run again where somebody deleted it, and go on: the rows in it are lost and counted."""
        if self.files.local is None or (self.files.local / layout.RUN_JSON).exists():
            return
        for what, rows in self._tails.drop_deleted():
            self._lost(what, rows)
        self._state.forget_files()
        self.files.make_folder(self.files.local / self._folders["records"])
        self._held.close()
        self._held = Lock(self.files.local / self._folders["records"] / layout.LOCK)
        self.describe()
        self.counters.add("vanished_folders")
        self.counters.warn("vanished", f"the run folder {self} was deleted while it was written; writing goes on anew")

    def _lost(self, what: str, rows: int) -> None:
        names = {"records": "dropped_records", "tensors": "dropped_tensors", "events": "dropped_events"}
        self.counters.add(names.get(what, "dropped_metrics"), rows)
        if what == "records":
            self._state.lose_records(rows)

    def _save_state(self) -> None:
        self._saved_at = self._clock()
        self._state.save()
