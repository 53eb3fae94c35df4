"""Observe the operations of a function that is not a module, or of a block of code.

A function is observed while it runs by `tap.call(...)`, a block from its beginning to its end, in the thread that began
it. Modules that would run fused still do, and hide their operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.plan import Plan
from tensortap.adapters.protocol import DEFAULT_OPTIONS, Adapter, AdapterOptions
from tensortap.adapters.steps import StepDetector, ThreadState
from tensortap.adapters.torch.capabilities import CAPABILITIES
from tensortap.adapters.torch.compile.operators import CompileStatus
from tensortap.adapters.torch.modules.named_values import NamedValues
from tensortap.adapters.torch.modules.tensors import observer_for
from tensortap.adapters.torch.ops.names import known_operations
from tensortap.adapters.torch.ops.taps import OpTaps, op_patterns
from tensortap.errors import UnsupportedError
from tensortap.record.recorder import OpenStep, Recorder

NOT_CALLED: Final = "the watched function was never called through the tap: write tap.call(...)"


class FunctionStepDetector(StepDetector[ThreadState]):
    """A call of the function ends the step before it; threads have no steps of their own but `tap.span()`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder, ThreadState)
        self._used = False

    def begin(self) -> None:
        """Begin a call of the function."""
        if self._state().step is None and not self.recorder.muted:
            if self._used and not self.explicit:
                self.finish()
            self._used = True


class FusedModuleGuard:
    """Keep the mode off in modules that would run differently with it, whoever calls them."""

    def __init__(self, taps: OpTaps) -> None:
        self._taps = taps
        self._handles: list[RemovableHandle] = []

    def register(self) -> None:
        """Register global hooks on all modules."""
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Remove them."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        taps = self._taps
        if not torch.compiler.is_compiling() and not taps.idle() and not taps.visibility.allows(module):
            taps.enter(module, taps.parent() or "", module)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not self._taps.idle():
            self._taps.leave(module)


class FunctionAdapter(Adapter):
    """The adapter for a function, or without one for the block of code that follows."""

    capabilities = CAPABILITIES
    steps: FunctionStepDetector

    def __init__(self, function: Callable[..., Any] | None = None, options: AdapterOptions = DEFAULT_OPTIONS) -> None:
        self.function = function
        self.path = "" if function is None else getattr(function, "__name__", type(function).__name__).strip("<>")
        self._keep_fused = options.fast_path == "keep"
        self._called = False

    def default_sites(self) -> str:
        """Return every operation."""
        return "op:*"

    def describe(self) -> dict[str, Any]:
        """Return the function's name."""
        return {"framework": "torch", "class": self.path or "Operations", "modules": []}

    def operations(self) -> Collection[str]:
        """Return the names of operations that patterns may mean."""
        return known_operations()

    def attach(self, recorder: Recorder, plan: Plan) -> None:
        """Prepare for calls; in a block, begin."""
        self.steps = FunctionStepDetector(recorder)
        self._observer = observer_for(recorder)
        self._taps = OpTaps(self._observer, self.steps, plan, op_patterns(plan, [self.path]), self._keep_fused)
        self._names = NamedValues(self._observer, self.steps, plan, CompileStatus())
        self._guard = FusedModuleGuard(self._taps)
        self._thread = threading.get_ident()
        if self.function is None:
            self._guard.register()
            self._taps.stay_above_current_modes()
            self._enter_block()

    def arm(self) -> None:
        """Prepare for a new step: in a block, each step numbers its operations, and the mode is off in
        unwanted steps.
        """
        if self.function is None and threading.get_ident() == self._thread:
            self._taps.leave(self)
            self._enter_block()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and observe its operations."""
        if self.function is None:
            raise UnsupportedError("a block of code is not called: what runs inside `with tensortap.ops(...)` is seen")
        self._called = True
        if self._taps.idle():
            self.steps.begin()
            self._guard.register()
            try:
                return self._run(args, kwargs)
            finally:
                self._guard.remove()
        return self._run(args, kwargs)

    def detach(self) -> None:
        """Stop observing."""
        self._guard.remove()
        self._taps.close()
        for leaf in self._observer.leaves:
            leaf.remove()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own."""
        before = self.steps.enter(step)
        self.arm()
        return before

    def collect(self, step: OpenStep) -> None:
        """Remove the hooks on leaf tensors whose gradients have not come."""
        for leaf in [leaf for leaf in self._observer.leaves if leaf.step is step]:
            leaf.remove()
            self._observer.leaves.remove(leaf)

    def named(self, name: str, value: Any) -> bool:
        """Record a value the user named, and its gradient."""
        return self._names.record(name, value)

    def unseen(self) -> dict[str, str]:
        """Return the patterns for operations and names that recorded nothing."""
        seen, missing = self._taps.seen(), self._taps.unseen()
        if self.function is not None and not self._called:
            missing = dict.fromkeys(missing, NOT_CALLED)
        return {text: why for text, why in self._names.unseen().items() if text not in seen} | missing

    def _enter_block(self) -> None:
        self._taps.enter(self, "", counts=self.steps.current().calls.setdefault(self, {}))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.function is not None
        call = object()
        self._taps.enter(call, self.path)
        try:
            return self.function(*args, **kwargs)
        finally:
            self._taps.leave(call)
