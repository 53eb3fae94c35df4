"""A session's `run`, seen: on the session itself, shared by all taps on it, gone when the last of them goes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from tensortap.record.counters import Counters

UNSEEN_RUNS: Final = ("run_async", "run_with_ort_values", "run_with_iobinding", "run_with_ortvaluevector")
_LOCK: Final = threading.RLock()


class Watcher(Protocol):
    """One tap on a session."""

    counters: Counters

    def begin(self) -> None:
        """A run begins."""

    def observe(self, names: Sequence[str], feed: Mapping[str, Any], options: Any) -> Any:
        """Run with more outputs, where that is wanted; None where it is not, or fails."""

    def trusted(self, found: Any) -> Sequence[Any] | None:
        """Of what `observe` gave: the user's outputs, if they are known to be the session's own."""

    def record(self, found: Any, outputs: Sequence[Any]) -> None:
        """Take what was seen; `outputs` are what the user gets."""

    def end(self) -> None:
        """The run is over, also when it failed."""


class _Run:
    """Stands in for `session.run`."""

    def __init__(self, session: Any) -> None:
        self.original = session.run
        self.watchers: tuple[Watcher, ...] = ()
        self.outputs = [output.name for output in session.get_outputs()]
        functools.update_wrapper(self, self.original)

    def __call__(self, output_names: Any, input_feed: Mapping[str, Any], run_options: Any = None) -> Any:
        watchers, names = self.watchers, list(output_names or self.outputs)
        begun = []
        try:
            for watcher in watchers:
                begun.append(watcher)
                watcher.begin()
            seen = [(w, found) for w in watchers if (found := w.observe(names, input_feed, run_options)) is not None]
            outputs = next((known for w, found in seen if (known := w.trusted(found)) is not None), None)
            if outputs is None:
                outputs = self.original(output_names, input_feed, run_options)
            for watcher, found in seen:
                watcher.record(found, outputs)
            return outputs
        finally:
            for watcher in begun:
                watcher.end()


class _Unseen:
    """Stands in for the other ways to run a session, which go on unseen."""

    def __init__(self, run: _Run, original: Callable[..., Any], name: str) -> None:
        self.run = run
        self.original = original
        self.name = name
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for watcher in self.run.watchers:
            watcher.counters.add("unseen_runs")
            watcher.counters.warn(
                self.name, f"session.{self.name}() is not seen (counted as unseen_runs); use session.run()"
            )
        return self.original(*args, **kwargs)


def join(session: Any, watcher: Watcher) -> None:
    """Let a watcher see the runs of a session."""
    with _LOCK:
        own = vars(session)
        if not isinstance(own.get("run"), _Run):
            run = _Run(session)
            others = {
                name: _Unseen(run, getattr(session, name), name) for name in UNSEEN_RUNS if hasattr(session, name)
            }
            own.update({"run": run, **others})
        own["run"].watchers = (*own["run"].watchers, watcher)


def leave(session: Any, watcher: Watcher) -> None:
    """Take it away; with the last one the session has its own methods back."""
    with _LOCK:
        own = vars(session)
        run = own.get("run")
        if not isinstance(run, _Run):  # somebody has wrapped it meanwhile, and keeps their wrapper
            return
        run.watchers = tuple(other for other in run.watchers if other is not watcher)
        if not run.watchers:
            for name in ("run", *UNSEEN_RUNS):
                if isinstance(own.get(name), (_Run, _Unseen)):
                    del own[name]
