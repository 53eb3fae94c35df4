"""Replace a session's `run`, once for all taps on it; the last tap to leave restores it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from tensortap.record.counters import Counters

UNSEEN_RUNS: Final = ("run_async", "run_with_ort_values", "run_with_iobinding", "run_with_ortvaluevector")
_LOCK: Final = threading.RLock()


class RunObserver(Protocol):
    """Observe the runs of a session for one tap."""

    counters: Counters

    def begin(self) -> None:
        """Act when a run begins."""

    def observe(self, names: Sequence[str], feed: Mapping[str, Any], options: Any) -> Any:
        """Run with more outputs if a probe wants them; otherwise return None."""

    def trusted(self, found: Any) -> Sequence[Any] | None:
        """Return the user's outputs from the result of `observe`, if they are known to equal the session's own."""

    def record(self, found: Any, outputs: Sequence[Any]) -> None:
        """Record the result of `observe`; `outputs` are those that the user gets."""

    def end(self) -> None:
        """Act when the run is over, also when it failed."""


class _Run:
    """Take the place of `session.run`."""

    def __init__(self, session: Any) -> None:
        self.original = session.run
        self.observers: tuple[RunObserver, ...] = ()
        self.outputs = [output.name for output in session.get_outputs()]
        functools.update_wrapper(self, self.original)

    def __call__(self, output_names: Any, input_feed: Mapping[str, Any], run_options: Any = None) -> Any:
        observers, names = self.observers, list(output_names or self.outputs)
        begun = []
        try:
            for observer in observers:
                begun.append(observer)
                observer.begin()
            seen = [(w, found) for w in observers if (found := w.observe(names, input_feed, run_options)) is not None]
            outputs = next((known for w, found in seen if (known := w.trusted(found)) is not None), None)
            if outputs is None:
                outputs = self.original(output_names, input_feed, run_options)
            for observer, found in seen:
                observer.record(found, outputs)
            return outputs
        finally:
            for observer in begun:
                observer.end()


class _Unseen:
    """Take the place of the other ways to run a session, which are counted but not observed."""

    def __init__(self, run: _Run, original: Callable[..., Any], name: str) -> None:
        self.run = run
        self.original = original
        self.name = name
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for observer in self.run.observers:
            observer.counters.add("unseen_runs")
            observer.counters.warn(
                self.name, f"session.{self.name}() is not seen (counted as unseen_runs); use session.run()"
            )
        return self.original(*args, **kwargs)


def add_observer(session: Any, observer: RunObserver) -> None:
    """Let an observer see the runs of a session."""
    with _LOCK:
        own = vars(session)
        if not isinstance(own.get("run"), _Run):
            run = _Run(session)
            others = {
                name: _Unseen(run, getattr(session, name), name) for name in UNSEEN_RUNS if hasattr(session, name)
            }
            own.update({"run": run, **others})
        own["run"].observers = (*own["run"].observers, observer)


def remove_observer(session: Any, observer: RunObserver) -> None:
    """Remove an observer; the last one gives the session its own methods back."""
    with _LOCK:
        own = vars(session)
        run = own.get("run")
        if not isinstance(run, _Run):  # another library has wrapped it meanwhile: its wrapper stays
            return
        run.observers = tuple(other for other in run.observers if other is not observer)
        if not run.observers:
            for name in ("run", *UNSEEN_RUNS):
                if isinstance(own.get(name), (_Run, _Unseen)):
                    del own[name]
