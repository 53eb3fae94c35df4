"""Hooks on the root module that find steps by its calls, in eager mode and inside a compiled graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from tensortap.adapters.torch.compile.backward import await_gradients
from tensortap.adapters.torch.compile.code import compiler_callback, skip_compiling
from tensortap.adapters.torch.compile.operators import CALLED, CompileStatus, Found, GraphReceiver, is_exporting, notify
from tensortap.adapters.torch.context.recorder import CONTEXT
from tensortap.adapters.torch.modules.hooks import Hook, is_tracing
from tensortap.adapters.torch.modules.nested import tensors_in_containers
from tensortap.adapters.torch.steps import MOST_MARKS, TorchStepDetector
from tensortap.errors import NonFiniteError


class RootReceiver(GraphReceiver):
    """Begin and end steps, also where the compiler took the root's hooks into a graph."""

    __slots__ = ("detector", "prepare", "root")

    def __init__(
        self, detector: TorchStepDetector, prepare: Callable[[], None], root: nn.Module, compile_status: CompileStatus
    ) -> None:
        super().__init__(compile_status)
        self.detector = detector
        self.prepare = prepare
        self.root = weakref.ref(root)

    def observe(self, tensor: Tensor, slot: str) -> None:
        """Note that backward has reached the output."""
        self.detector.backward_came()

    def notified(self, note: str, slots: list[str]) -> None:
        """Begin the step when the root is called; end it when it has returned."""
        root = self.root()
        if note == CALLED and root is not None:
            self.begin(root)
        else:
            self.end(None, bool(slots))

    def await_gradients(self, found: Found) -> None:
        """End the step: the root has returned these, where autograd runs while the graph runs."""
        self.end([tensor for _, tensor in found])

    def begin(self, root: nn.Module, compiled: bool = False, early: bool = False) -> None:
        """Begin a step before the root's forward, which the compiler may be about to trace."""
        self.compile_status.due |= compiled
        try:
            (self.detector.root_called_early if early else self.detector.root_called)(root)
            self.prepare()
        except NonFiniteError:  # the user asked for it
            raise
        except Exception as error:
            self.detector.recorder.counters.failed("step_errors", "beginning a step", error)

    def end(self, output: Any, awaits: bool | None = None) -> None:
        """End it after the forward, also after a failed one."""
        try:
            self.detector.root_returned(output, awaits)
        except NonFiniteError:
            raise
        except Exception as error:
            self.detector.recorder.counters.failed("step_errors", "ending a step", error)


class RootForwardPreHook(Hook):
    """Runs before the root's forward."""

    __slots__ = ("handle", "receiver")

    def __init__(self, receiver: RootReceiver) -> None:
        self.receiver = receiver
        self.handle = receiver.handle

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Begin a step."""
        if is_compiling():
            if not is_exporting():
                notify(self.handle, CALLED)
            return
        if not is_tracing():
            self.receiver.begin(module, callable(compiler_callback()))
            CONTEXT.model_called(module, args)


# It must be able to ask whether the compiler is active, and `begin` must not be compiled.
skip_compiling(RootForwardPreHook.__call__, inside=False)
skip_compiling(RootReceiver.begin)
skip_compiling(type(CONTEXT).model_called)


class RootForwardHook(Hook):
    """Runs after the root's forward."""

    __slots__ = ("handle", "receiver")

    def __init__(self, receiver: RootReceiver) -> None:
        self.receiver = receiver
        self.handle = receiver.handle

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the step, also after a failed forward."""
        if is_compiling():
            if not is_exporting():
                await_gradients(self.handle, list(tensors_in_containers(output))[:MOST_MARKS])
            return
        if not is_tracing():
            self.receiver.end(output)
