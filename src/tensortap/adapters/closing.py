"""The end of a step, in order: what is only known then, global statistics, the decision, the writer, the next step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

from tensortap.adapters.lookup import framework_named
from tensortap.adapters.nonfinite import NonFiniteMonitor
from tensortap.adapters.plan import Plan
from tensortap.adapters.protocol import Adapter
from tensortap.adapters.results import Origin
from tensortap.distributed.hash_board import HashBoard
from tensortap.distributed.ranks import World
from tensortap.record.counters import Counters
from tensortap.record.global_stats import GlobalStats, Sharing
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.record.replicas import ReplicaMonitor
from tensortap.record.writer import Writer
from tensortap.store.folder import RunFolder
from tensortap.store.names import HASHES, rank_folder


class StepCloser:
    """Listen to a step detector: close each step that it reports as over, and arm the next one."""

    def __init__(
        self, adapter: Adapter, recorder: Recorder, writer: Writer, monitor: NonFiniteMonitor,
        sharing: Sharing | None = None, folder: RunFolder | None = None,
    ) -> None:  # fmt: skip
        self.alone = False  # other ranks may have gone: share no more
        self.requested: Callable[[], None] | None = None  # called once, when a step ends and before the next one opens
        self._adapter = adapter
        self._recorder = recorder
        self._writer = writer
        self._monitor = monitor
        self._sharing = sharing
        self._folder = folder
        self._last = time.perf_counter()
        self.asks_every_step = sharing is not None or monitor.action is not None

    @property
    def global_stats_shared(self) -> bool:
        """Whether ranks share their statistics, so that all must have the same probes."""
        return self._sharing is not None

    @property
    def global_stats(self) -> GlobalStats | None:
        """What all ranks together saw in the last step that was shared."""
        return None if self._sharing is None else self._sharing.latest

    def __call__(self, step: OpenStep, metrics: Mapping[str, float]) -> None:
        """Close a step. An origin of a NaN is told when the step is safe: that may raise."""
        begin, recorder = time.perf_counter(), self._recorder
        self._adapter.collect(step)
        if self._sharing is not None and step is recorder.current and not self.alone:
            self._sharing.share(step, recorder.names)
        account = recorder.account
        observed = account.budget is not None and step.table.rows > 0  # only a budget asks
        origin = None if self._monitor.action is None else self._look(step)
        if self.requested is not None:
            self._do_requested()
        for finished in recorder.close(metrics, step=step):
            self._writer.put(finished)
        if recorder.events.waiting:
            self.write_events()
        self._adapter.arm()
        now = time.perf_counter()
        account.closed(now - begin, now - self._last, observed)
        self._last = now
        if origin is not None:
            self._monitor.tell(origin, step.number)

    def _look(self, step: OpenStep) -> Origin | None:
        return self._monitor.look(step, self._recorder.names, self._adapter.locates_backward)

    def write_events(self) -> None:
        """Write what happened in the training besides tensors."""
        events, folder = self._recorder.events.take(), self._folder
        if events and folder is not None:
            self._writer.guarded.call(f"writing to {folder}", lambda: folder.append_events(events))

    def _do_requested(self) -> None:
        """Do what was asked for meanwhile. An error is counted: it is none of the step's."""
        act, self.requested = self.requested, None
        try:
            if act is not None:
                act()
        except Exception as error:
            with contextlib.suppress(Warning):
                self._recorder.counters.note("control_errors", "what was asked of the running tap", error)

    def restart_clock(self) -> None:
        """Leave the time that has passed since the last step out of account."""
        self._last = time.perf_counter()


def sharing_over_ranks(adapter: Adapter, plan: Plan, world: World, recorder: Recorder) -> Sharing:
    """Return what combines a step's rows over all ranks, by the framework's all-reduce."""
    framework = framework_named(adapter.capabilities.name)
    total = framework.summed if world.size > 1 else lambda own: own
    return Sharing(recorder.probes, plan.ports, world, total, recorder.counters, recorder.replicas)


def replicas_over_ranks(world: World, folder: RunFolder | None, counters: Counters) -> ReplicaMonitor:
    """Return what compares replicas by the hashes that ranks post beside their rows."""
    if folder is None:
        return ReplicaMonitor(world, None, counters)
    files, launch = folder.files, str(folder.info.get("launch", ""))
    board = HashBoard(lambda rank: files.staging() / rank_folder(rank) / HASHES, world.rank, launch)
    return ReplicaMonitor(world, board, counters)


def note_end(recorder: Recorder, unseen: dict[str, str], folder: RunFolder | None, writer: Writer) -> None:
    """Count what was wanted and never seen; list it, and the cost, in `run.json`."""
    recorder.triggers.warn_of_missing_metrics()
    if unseen:
        recorder.counters.add("unseen", len(unseen))
    if folder is not None:
        cost = recorder.account.report(recorder.names)._asdict()
        notes = {"cost": cost, **({"unseen": unseen} if unseen else {})}
        writer.guarded.call(f"writing to {folder}", lambda: folder.note(**notes))
