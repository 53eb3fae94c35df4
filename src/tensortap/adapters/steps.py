"""Step detectors: find where steps begin and end by the calls of what is watched, and report each step that is over.

    hooks of a framework ──┐
    tap.step(), tap.span() ┴─► StepDetector ── (step, metrics) ─► the listener (the tap's `StepCloser`)

Events go one way. A detector forgets a step before it reports it, and the listener never calls back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from tensortap.record import serial
from tensortap.record.recorder import OpenStep, Recorder

NO_METRICS: Final[Mapping[str, float]] = MappingProxyType({})

StepListener = Callable[[OpenStep, Mapping[str, float]], None]
"""What is called when a step is over, with the step and the metrics that the user gave to `tap.step()`."""


class ThreadState:
    """What a detector knows of one thread. `step` is its own; the home thread has none, it uses the tap's."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.step: OpenStep | None = None
        self.depth = 0
        self.phase = ""  # of what is called now, where that is known before the step opens
        self.used = False  # the open step has seen a call of the root

    def follow(self, other: Any) -> None:
        """Go on where another thread left off."""
        self.used = other.used

    def reset(self) -> None:
        """Forget what was known of a step that is over."""
        self.used = False


S = TypeVar("S", bound=ThreadState)
Spans = tuple[tuple[Any, OpenStep], ...]

# The steps that `tap.span()` has begun, by detector. A context variable, for tasks of asyncio share a thread.
_SPANS: ContextVar[Spans] = ContextVar("tensortap spans", default=())


class StepDetector(Generic[S]):
    """Find steps by thread: a new call of the root ends the step before it.

    The thread that calls the root first is at home: its steps are the tap's. Other threads (a server's workers) have
    steps of their own. With `explicit` the user ends the tap's steps by `tap.step()`, and no call does. With
    `ends_with_call` a call that no backward can follow ends its step when it returns.
    """

    def __init__(self, recorder: Recorder, state: Callable[[], S]) -> None:
        self.explicit = False
        self.was_split = False  # calls that seem to belong to one step were taken for steps of their own
        self.ends_with_call = False  # so that a metrics server need not wait for the next call
        self.call_is_all = True  # nothing of a step comes after its call, such as gradients
        self.recorder = recorder
        self.between: Callable[[], None] | None = None  # called once, as soon as no call is going on
        self.called = False  # whether the root was ever seen to be called
        self.home: int | None = None  # the thread
        self._listener: StepListener = _ignore
        self._new_state = state
        self._local = threading.local()
        self._home_state = state()
        self._others: dict[int, S] = {}
        self._lock = threading.RLock()  # a signal handler may call the root
        self._owner: object = self  # of spans

    @property
    def busy(self) -> bool:
        """Whether the root is being called now, in any thread."""
        return any(state.depth for state in (self._home_state, *list(self._others.values())))

    @property
    def lost(self) -> bool:
        """Whether nothing has shown where steps begin and end."""
        return not (self.called or self.explicit)

    def listen(self, listener: StepListener) -> None:
        """Report every step that is over to this function."""
        self._listener = listener

    def follow(self, other: StepDetector[S]) -> None:
        """Go on where another detector left off, which this one takes the place of."""
        kept = ("recorder", "call_is_all", "between")
        self.recorder.per_thread |= other.recorder.per_thread
        vars(self).update({name: value for name, value in vars(other).items() if name not in kept})

    def current(self) -> OpenStep:
        """Return the step that what is seen now belongs to."""
        if not self.recorder.per_thread:
            return self.recorder.current
        span = self.span()
        if span is not None:
            return span
        state: S | None = getattr(self._local, "state", None)
        return self.recorder.current if state is None or state.step is None else state.step

    def span(self) -> OpenStep | None:
        """Return the step that `tap.span()` has begun in this context. A task that outlives it has none."""
        spans = _SPANS.get()
        if not spans:
            return None
        return next((step for owner, step in spans if owner is self._owner and not step.closed), None)

    def enter(self, own: OpenStep | None) -> OpenStep | None:
        """Give this context (a thread, a task) a step of its own, or take it away; return what it had before."""
        self.recorder.per_thread = True
        state = self._state()
        if state.step is not None:
            self._end(state)
        before = self.span()
        others = tuple(entry for entry in _SPANS.get() if entry[0] is not self._owner)
        _SPANS.set(others if own is None else ((self._owner, own), *others))
        return before

    def left_open(self) -> list[OpenStep]:
        """Return steps that had a call and are not over: other threads', and the tap's own, if it has such."""
        states = [state.step for state in list(self._others.values()) if state.step is not None]
        return [*states, self.recorder.current] if self._home_state.used else states

    def finish(self, step: OpenStep | None = None, metrics: Mapping[str, float] = NO_METRICS) -> None:
        """Report that a step is over: the tap's open one unless another is given.

        In a signal handler that interrupts the end of another step, this waits for that one.
        """
        serial.run(self.finish_now, step, metrics)

    def finish_now(self, step: OpenStep | None = None, metrics: Mapping[str, float] = NO_METRICS) -> None:
        """Report that a step is over, inside `serial.run`."""
        over = self.recorder.current if step is None else step
        self.forget(over)
        self._listener(over, metrics)

    def forget(self, step: OpenStep) -> None:
        """Reset what is known of a step."""
        if step is self.recorder.current:
            self._home_state.reset()
            return
        for state in list(self._others.values()):
            if state.step is step:
                state.step = None
                state.reset()

    def _state(self) -> S:
        state: S | None = getattr(self._local, "state", None)
        if state is None:
            state = self._local.state = self._new_state()
        return state

    def _begin(self, state: S) -> None:
        ident = threading.get_ident()
        with self._lock:
            if self.home is None:
                self.home = ident
        if ident == self.home:
            if state is not self._home_state:
                state.follow(self._home_state)  # of another thread, when it is gone and its number used again
                self._home_state = state
            if not self.recorder.muted:  # what is called now is no part of any step
                self._begin_home(state)
            return
        self._others_begin(state)
        self._next(state)
        if state.step is None:
            state.step = self.recorder.open(state.phase)

    def _begin_home(self, state: S) -> None:
        if not self.explicit:
            self._next(state)

    def _others_begin(self, state: S) -> None:
        """End the steps of threads that are gone: they will see no more."""
        self.recorder.per_thread = True
        ident = threading.get_ident()
        with self._lock:
            gone = [i for i, other in self._others.items() if other is not state and _is_gone(i, other, ident)]
            ended = [self._others.pop(i) for i in gone]
            self._others[ident] = state
        for other in ended:
            self._end(other)

    def _next(self, state: S) -> None:
        """End the step that was open before this call."""
        if state.used:
            self.finish(state.step)
        state.used = True

    def _end_home(self, state: S) -> None:
        """End the tap's step with a call, where that is asked for and nothing else will."""
        if self.ends_with_call and self.call_is_all and state.used and not self.explicit and not self.recorder.muted:
            self.finish()

    def _end(self, state: S) -> None:
        step, state.step = state.step, None
        state.reset()
        if step is not None:
            self.finish(step)


class CallStepDetector(StepDetector[ThreadState]):
    """For frameworks without a backward of their own: a step is a call of the root, and other threads' end with it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder, ThreadState)

    def begin(self) -> None:
        """Begin a step before a call of the root. Calls within a call belong to the step that is open."""
        state = self._state()
        state.depth += 1
        if state.depth > 1:
            return
        self.called = True
        if self.span() is None:
            self._begin(state)

    def end(self) -> None:
        """End the call, also when it failed."""
        state = self._state()
        state.depth = max(0, state.depth - 1)
        if state.depth or self.span() is not None:
            return
        if state is not self._home_state:
            self._end(state)
        else:
            self._end_home(state)
        if self.between is not None:
            run_between(self)


def run_between(detector: StepDetector[Any]) -> None:
    """Do what waits for a moment without a call, if this is one."""
    act = detector.between
    if act is not None and not detector.busy:
        detector.between = None
        serial.run(act)


def _ignore(step: OpenStep, metrics: Mapping[str, float]) -> None:
    """Ignore the end of a step: in a quick look at one call the user's `with` block is the step."""


def _is_gone(ident: int, state: ThreadState, own: int) -> bool:
    return ident == own or not state.thread.is_alive()
