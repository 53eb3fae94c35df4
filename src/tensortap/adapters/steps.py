"""Finding steps where the user does not mark them, by the calls of what is watched; threads have lanes of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tensortap.adapters.protocol import Clock
from tensortap.record.recorder import OpenStep, Recorder


class Lane:
    """One thread's place in the steps. `step` is its own one; the home thread has none, it uses the tap's."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.step: OpenStep | None = None
        self.span = False  # the user has said where the step begins and ends
        self.depth = 0
        self.used = False  # the open step has seen a call of the root

    def follow(self, other: Any) -> None:
        """Go on where another left off."""
        self.used = other.used

    def reset(self) -> None:
        """A step was closed."""
        self.used = False


L = TypeVar("L", bound=Lane)


class StepDetector(Generic[L]):
    """Steps by lane: a new call of the root closes the step before it.

    The thread that calls the root first is at home: its steps are the tap's. Other threads (a server's workers) have
    steps of their own.
    """

    def __init__(self, recorder: Recorder, clock: Clock, lane: Callable[[], L]) -> None:
        self.spread = False  # some thread has a step of its own, so each lookup must ask whose it is
        self.recorder = recorder
        self.called = False  # whether the root was ever seen to be called
        self._clock = clock
        self._new_lane = lane
        self._local = threading.local()
        self._home: int | None = None  # the thread
        self._home_lane = lane()
        self._others: dict[int, L] = {}
        self._lock = threading.Lock()

    @property
    def lost(self) -> bool:
        """Whether nothing has shown where steps begin and end."""
        return not (self.called or self._clock.explicit)

    def current(self) -> OpenStep:
        """The step that what is seen now belongs to."""
        lane: L | None = getattr(self._local, "lane", None) if self.spread else None
        return self.recorder.current if lane is None or lane.step is None else lane.step

    def enter(self, own: OpenStep | None) -> OpenStep | None:
        """Give this thread a step of its own (or take it away); what it had before."""
        self.spread = True
        lane = self._lane()
        if lane.step is not None and not lane.span:
            self._end(lane)
        before = lane.step
        lane.step, lane.span = own, own is not None
        return before

    def left_open(self) -> list[OpenStep]:
        """Steps that had a call and that nothing has closed yet: other threads', and the tap's own, if it has such."""
        lanes = [lane.step for lane in list(self._others.values()) if lane.step is not None and not lane.span]
        return [*lanes, self.recorder.current] if self._home_lane.used else lanes

    def closed(self, step: OpenStep) -> None:
        """A step was closed, by whomever."""
        if step is self.recorder.current:
            self._home_lane.reset()
            return
        for lane in list(self._others.values()):
            if lane.step is step and not lane.span:
                lane.step = None
                lane.reset()

    def _lane(self) -> L:
        lane: L | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = self._new_lane()
        return lane

    def _begin(self, lane: L) -> None:
        ident = threading.get_ident()
        with self._lock:
            if self._home is None:
                self._home = ident
        if ident == self._home:
            lane.follow(self._home_lane)  # of another thread, when it is gone and its number used again
            self._home_lane = lane
            if not self.recorder.muted:  # what is called now is no part of any step
                self._begin_home(lane)
            return
        self._others_begin(lane)
        self._next(lane)
        if lane.step is None:
            lane.step = self.recorder.open()

    def _begin_home(self, lane: L) -> None:
        if not self._clock.explicit:
            self._next(lane)

    def _others_begin(self, lane: L) -> None:
        """Steps of threads that are gone will see no more."""
        self.spread = True
        ident = threading.get_ident()
        with self._lock:
            gone = [i for i, other in self._others.items() if other is not lane and _is_gone(i, other, ident)]
            ended = [self._others.pop(i) for i in gone]
            self._others[ident] = lane
        for other in ended:
            self._end(other)

    def _next(self, lane: L) -> None:
        """A call begins: what was open before it is over."""
        if lane.used:
            self._clock.advance(lane.step)
        lane.used = True

    def _end(self, lane: L) -> None:
        step, lane.step = lane.step, None
        lane.reset()
        if step is not None:
            self._clock.advance(step)


class CallStepDetector(StepDetector[Lane]):
    """For frameworks without a backward of their own: a step is a call of the root, and other threads' end with it."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        super().__init__(recorder, clock, Lane)

    def begin(self) -> None:
        """Before a call of the root. Calls within a call belong to the step that is open."""
        lane = self._lane()
        lane.depth += 1
        if lane.depth > 1:
            return
        self.called = True
        if not lane.span:
            self._begin(lane)

    def end(self) -> None:
        """After it, also when it failed."""
        lane = self._lane()
        lane.depth = max(0, lane.depth - 1)
        if not lane.depth and not lane.span and lane is not self._home_lane:
            self._end(lane)


def _is_gone(ident: int, lane: Lane, own: int) -> bool:
    return ident == own or not lane.thread.is_alive()
