"""Finding steps where the user does not mark them: by the root module's calls, backward, and the optimizer."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch
from torch import nn

from tensortap.adapters.base import Clock
from tensortap.adapters.torch.hooks import Hook
from tensortap.adapters.torch.walk import tensors_in
from tensortap.recorder import OpenStep, Recorder

_MANY: Final = 64


class StepFinder:
    """A new call of the root closes the step before it, unless that one is still collecting gradients.

    Threads other than the one that attached (a server's workers) have steps of their own: one call, one step.
    """

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self._recorder = recorder
        self._clock = clock
        self._home = threading.get_ident()
        self._local = threading.local()
        self._used = False  # the open step has seen a call of the root
        self._backward = False
        self._stepped = False
        self._micro = 0
        self.spread = False  # other threads have been seen, so each lookup must ask whose step it is

    def current(self) -> OpenStep:
        """The step that what is seen now belongs to."""
        if self.spread:
            own: OpenStep | None = getattr(self._local, "step", None)
            if own is not None:
                return own
        return self._recorder.current

    def enter(self, own: OpenStep | None) -> OpenStep | None:
        """Give this thread a step of its own (or take it away); what it had before."""
        self.spread = True
        before: OpenStep | None = getattr(self._local, "step", None)
        self._local.step = own
        return before

    def root_called(self, root: nn.Module) -> None:
        """Before the root's forward. Calls within a call, and recomputation, belong to the step that is open."""
        depth = self._local.depth = getattr(self._local, "depth", 0) + 1
        if depth > 1 or torch._C._current_graph_task_id() != -1:
            return
        if getattr(self._local, "step", None) is None:
            if threading.get_ident() != self._home:
                self._local.alone = self._recorder.open()
                self.enter(self._local.alone)
            elif not self._clock.explicit:
                self._next()
        self.current().phase = "train" if root.training else "eval"

    def root_returned(self, output: Any) -> None:
        """After the root's forward, also when it failed."""
        self._local.depth = depth = getattr(self._local, "depth", 1) - 1
        alone: OpenStep | None = getattr(self._local, "alone", None)
        if depth:
            return
        if alone is not None:
            self._local.alone = None
            self.enter(None)
            self._clock.advance(alone)
        elif torch.is_grad_enabled():
            self._mark(output)

    def _mark(self, output: Any) -> None:
        for _, tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(_Mark(self))
                return

    def backward_ran(self) -> None:
        """A gradient has come back to what the root returned."""
        self._backward = True

    def optimizer_stepped(self) -> None:
        """The optimizer has used the gradients."""
        self._stepped = True

    def closed(self) -> None:
        """A step was closed, by whomever."""
        self._used = self._backward = self._stepped = False
        self._micro = 0

    def _next(self) -> None:
        collecting = self._backward and not self._stepped
        if self._used and not collecting:
            self._clock.advance()
        elif collecting:
            self._backward = False
            self._micro += 1
            if self._micro == _MANY:
                self._recorder.ledger.warn(
                    "micro-batches",
                    f"{_MANY} calls with a backward but no optimizer step were taken as micro-batches of one step; if "
                    "they are steps of their own, close each with tap.step()",
                )
        self._used = True


class _Mark(Hook):
    """Notes that backward reached the root's output."""

    __slots__ = ("finder",)

    def __init__(self, finder: StepFinder) -> None:
        self.finder = finder

    def __call__(self, gradient: Any) -> None:
        self.finder.backward_ran()


class RootBefore(Hook):
    """Sits before the root's forward."""

    __slots__ = ("finder", "prepare")

    def __init__(self, finder: StepFinder, prepare: Any) -> None:
        self.finder = finder
        self.prepare = prepare

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.finder.root_called(module)
            self.prepare()


class RootAfter(Hook):
    """Sits after the root's forward."""

    __slots__ = ("finder",)

    def __init__(self, finder: StepFinder) -> None:
        self.finder = finder

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.finder.root_returned(output)
