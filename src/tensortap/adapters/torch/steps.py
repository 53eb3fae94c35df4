"""Finding steps where the user does not mark them: by the root module's calls, backward, and the optimizer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from tensortap.adapters.base import Clock
from tensortap.adapters.torch.gradients import backward_task
from tensortap.adapters.torch.walk import tensors_in
from tensortap.recorder import OpenStep, Recorder

_MANY: Final = 64
MOST_MARKS: Final = 8
_CALL: Final = nn.Module._call_impl.__code__


class Lane:
    """One thread's place in the steps. `step` is its own one; the home thread has none, it uses the tap's."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.step: OpenStep | None = None
        self.span = False  # the user has said where the step begins and ends
        self.depth = 0
        self.stepping = False  # inside an optimizer's step, which calls the root by a closure
        self.used = False  # the open step has seen a call of the root
        self.backward = False
        self.stepped = False
        self.micro = 0
        self.optimizers: set[int] = set()  # those that have stepped in the open step

    def follow(self, other: Lane) -> None:
        """Go on where another left off."""
        self.used, self.backward, self.stepped, self.micro = other.used, other.backward, other.stepped, other.micro

    def reset(self) -> None:
        """A step was closed."""
        self.used = self.backward = self.stepped = False
        self.micro = 0
        self.optimizers.clear()


class StepFinder:
    """A new call of the root closes the step before it, unless that one is still collecting gradients.

    The thread that calls the root first is at home: its steps are the tap's. Other threads (a server's workers) have
    steps of their own, which end with the call unless a backward may follow.
    """

    def __init__(self, recorder: Recorder, clock: Clock, collecting: Callable[[], bool] = lambda: True) -> None:
        self.spread = False  # some thread has a step of its own, so each lookup must ask whose it is
        self.called = False  # whether the root was ever seen to be called
        self._by_optimizer = False
        self.recorder = recorder
        self._clock = clock
        self._collecting = collecting
        self._local = threading.local()
        self._home: int | None = None  # the thread
        self._home_lane = Lane()
        self._others: dict[int, Lane] = {}
        self._lock = threading.Lock()

    @property
    def lost(self) -> bool:
        """Whether nothing has shown where steps begin and end."""
        return not (self.called or self._by_optimizer or self._clock.explicit)

    def current(self) -> OpenStep:
        """The step that what is seen now belongs to."""
        lane: Lane | None = getattr(self._local, "lane", None) if self.spread else None
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
        """Steps of other threads that still wait for a backward."""
        return [lane.step for lane in list(self._others.values()) if lane.step is not None and not lane.span]

    def root_called(self, root: nn.Module) -> None:
        """Before the root's forward. Calls within a call, and recomputation, belong to the step that is open."""
        lane = self._lane()
        lane.depth += 1
        if (lane.depth > 1 and _running_twice(root)) or backward_task() != -1:
            return
        lane.depth = 1
        self.called = True
        if not lane.span:
            self._begin(lane)
        step = self.current()
        if root.training:
            step.phase = "train"
        elif not step.phase:
            step.phase = "eval"

    def root_returned(self, output: Any, awaits: bool | None = None) -> None:
        """After the root's forward, also when it failed. In a compiled graph, `awaits` says if backward may come."""
        lane = self._lane()
        lane.depth = max(0, lane.depth - 1)
        if lane.depth or lane.span:
            return
        if awaits is None:
            awaits = torch.is_grad_enabled() and self._mark(output, lane)
        if lane is not self._home_lane and not awaits and backward_task() == -1:
            self._end(lane)

    def backward_came(self) -> None:
        """A gradient reached what the root returned, inside a compiled graph."""
        self._lane().backward = True

    def optimizer_starts(self, optimizer: Any, closure: Any) -> None:
        """A closure calls the root inside the optimizer's step, and that is where the next step begins.

        Where the root is never seen to be called (it is compiled), a second step of the same optimizer tells.
        """
        lane = self._lane()
        unseen = not self.called and id(optimizer) in lane.optimizers
        again = closure is not None and lane is self._home_lane and (lane.stepped or lane.stepping)
        if (unseen or again) and not self._clock.explicit:
            self._by_optimizer |= unseen
            self._clock.advance()
        lane.stepping = closure is not None
        if not self.called:
            self.recorder.current.phase = "train"

    def optimizer_stepped(self, optimizer: Any) -> None:
        """The optimizer has used the gradients."""
        lane = self._lane()
        lane.stepped, lane.stepping = True, False
        lane.optimizers.add(id(optimizer))

    def closed(self, step: OpenStep) -> None:
        """A step was closed, by whomever."""
        if step is self.recorder.current:
            self._home_lane.reset()
            self._lane().optimizers.clear()
            return
        for lane in list(self._others.values()):
            if lane.step is step and not lane.span:
                lane.step = None
                lane.reset()

    def _lane(self) -> Lane:
        lane: Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = Lane()
        return lane

    def _begin(self, lane: Lane) -> None:
        ident = threading.get_ident()
        with self._lock:
            if self._home is None:
                self._home = ident
        if ident == self._home:
            lane.follow(self._home_lane)  # of another thread, when it is gone and its number used again
            self._home_lane = lane
            if not self._clock.explicit:
                self._next(lane)
            return
        self._others_begin(lane)
        self._next(lane)
        if lane.step is None:
            lane.step = self.recorder.open()

    def _others_begin(self, lane: Lane) -> None:
        """Steps of threads that are gone will see no more."""
        self.spread = True
        ident = threading.get_ident()
        with self._lock:
            gone = [i for i, other in self._others.items() if other is not lane and _is_gone(i, other, ident)]
            ended = [self._others.pop(i) for i in gone]
            self._others[ident] = lane
        for other in ended:
            self._end(other)

    def _next(self, lane: Lane) -> None:
        collecting = lane.backward and not lane.stepped and (lane.stepping or self._collecting())
        if lane.used and not collecting:
            self._clock.advance(lane.step)
        elif collecting:
            lane.backward = False
            lane.micro += 1
            if lane.micro == _MANY:
                self.recorder.ledger.warn(
                    "micro-batches",
                    f"{_MANY} calls with a backward but no optimizer step were taken as micro-batches of one step; if "
                    "they are steps of their own, close each with tap.step()",
                )
        lane.used = True

    def _end(self, lane: Lane) -> None:
        step, lane.step = lane.step, None
        lane.reset()
        if step is not None:
            self._clock.advance(step)

    def _mark(self, output: Any, lane: Lane) -> bool:
        """Ask to be told when backward reaches what the root returned; False when it never will."""
        nodes = {tensor.grad_fn: None for _, tensor in tensors_in(output) if tensor.grad_fn is not None}
        for node in list(nodes)[:MOST_MARKS]:
            node.register_prehook(_Mark(lane))
        return bool(nodes)


def _is_gone(ident: int, lane: Lane, own: int) -> bool:
    return ident == own or not lane.thread.is_alive()


def _running_twice(root: nn.Module) -> bool:
    """Whether a call of the root is running inside another. Ctrl-C in a notebook ends calls without telling hooks."""
    frame: FrameType | None = sys._getframe(1)
    running = 0
    while frame is not None:
        running += frame.f_code is _CALL and frame.f_locals.get("self") is root
        frame = frame.f_back
    return running > 1


class _Mark:
    """Notes that backward reached the root's output."""

    __slots__ = ("lane",)

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def __call__(self, gradients: Any) -> None:
        self.lane.backward = True
