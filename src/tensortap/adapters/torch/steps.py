"""Finding steps where the user does not mark them: by the root module's calls, backward, and the optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from tensortap.adapters import steps
from tensortap.adapters.torch.autograd.gradients import backward_task
from tensortap.adapters.torch.distributed.pipeline import SHAPE_INFERENCE, microbatch
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.modules.tensors import without_torch_function
from tensortap.record.recorder import OpenStep, Recorder

_MANY: Final = 64
MOST_MARKS: Final = 8
_CALL: Final = nn.Module._call_impl.__code__


class TorchThreadState(steps.ThreadState):
    """What is known of one thread, and of backward and the optimizer in its open step."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = False  # inside an optimizer's step, which calls the root by a closure
        self.backward = False
        self.awaits = False  # a backward may follow the last call
        self.stepped = False
        self.micro = 0
        self.inferring_shapes = False  # all that the open step has seen is a pipeline inferring shapes
        self.begun_early = False  # the call that is beginning has been reported already
        self.optimizers: set[int] = set()  # those that have stepped in the open step

    def follow(self, other: TorchThreadState) -> None:
        """Go on where another thread left off."""
        super().follow(other)
        self.backward, self.stepped, self.micro = other.backward, other.stepped, other.micro

    def reset(self) -> None:
        """Forget what was known of a closed step."""
        self.used = self.backward = self.awaits = self.stepped = False
        self.micro = 0
        self.optimizers.clear()


class TorchStepDetector(steps.StepDetector[TorchThreadState]):
    """End the step before each new call of the root, unless that step is still collecting gradients.

    Other threads' steps end with the call unless a backward may follow.
    """

    def __init__(self, recorder: Recorder, collecting: Callable[[], bool] = lambda: True) -> None:
        super().__init__(recorder, TorchThreadState)
        self._by_optimizer = False
        self._left_waiting = False  # a call ended the step of one before whose gradients never came
        self._collecting = collecting

    @property
    def lost(self) -> bool:
        """Return whether nothing has shown where steps begin and end."""
        return super().lost and not self._by_optimizer

    def root_called(self, root: nn.Module) -> None:
        """Begin a step before the root's forward. Calls within a call, and recomputation, belong to the open step."""
        state = self._state()
        if state.begun_early:
            state.begun_early = False
            return
        state.depth += 1
        if (state.depth > 1 and running_twice(root)) or backward_task() != -1:
            return
        state.depth = 1
        self.called = True
        state.phase = "train" if root.training else "eval"
        if self.span() is None:
            self._begin(state)
        step = self.current()
        if root.training:
            step.phase = "train"
        elif not step.phase:
            step.phase = "eval"

    def root_called_early(self, root: nn.Module) -> None:
        """Begin a step where the root's own hook may have come too late for this call; if it has not, it is ignored."""
        self.root_called(root)
        self._state().begun_early = True

    def root_returned(self, output: Any, awaits: bool | None = None) -> None:
        """End the root's call, also a failed one. In a compiled graph, `awaits` says whether backward may come."""
        state = self._state()
        state.begun_early = False
        state.depth = max(0, state.depth - 1)
        if state.depth or self.span() is not None:
            return
        if state is self._home_state and self.explicit:  # nobody will ask whether a backward came
            return
        if awaits is None:
            awaits = torch.is_grad_enabled() and self._mark(output, state)
        state.awaits = awaits
        if awaits or backward_task() != -1:
            return
        if state is not self._home_state:
            self._end(state)
        elif not torch.is_grad_enabled():
            self._end_home(state)
        if self.between is not None and not torch.is_grad_enabled():
            steps.run_between(self)

    def stage_called(self, module: nn.Module, args: Any) -> None:
        """Act before the forward of one of several pipeline stages, whose container is never called itself."""
        if not torch.compiler.is_compiling():
            self._skip_shape_inference(self._state(), microbatch())

    def backward_came(self) -> None:
        """Note that a gradient reached what the root returned, inside a compiled graph."""
        self._state().backward = True

    def optimizer_starts(self, optimizer: Any, closure: Any) -> None:
        """Begin an optimizer's step. With a closure, which calls the root inside it, the next step of ours begins here.

        Where the root is never seen to be called (it is compiled), a second step of the same optimizer tells.
        """
        state = self._state()
        unseen = not self.called and id(optimizer) in state.optimizers
        again = closure is not None and state is self._home_state and (state.stepped or state.stepping)
        if (unseen or again) and not self.explicit:
            self._by_optimizer |= unseen
            self.finish()
        state.stepping = closure is not None
        if not self.called:
            self.recorder.current.phase = "train"

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Note that the optimizer has used the gradients."""
        state = self._state()
        self.was_split |= self._left_waiting and state.backward  # calls before had no backward, this one has
        state.stepped, state.stepping = True, False
        state.optimizers.add(id(optimizer))
        if self.between is not None:
            steps.run_between(self)

    def forget(self, step: OpenStep) -> None:
        """Reset what is known of a step."""
        if step is self.recorder.current:
            home = self._home_state
            home.reset()
            state: TorchThreadState | None = getattr(self._local, "state", None)
            if state is not None and state is not home:
                state.optimizers.clear()
        else:
            super().forget(step)

    def _begin_home(self, state: TorchThreadState) -> None:
        chunk = microbatch()
        if not self.explicit and self._first_of(state, chunk):
            self._next(state)
        if state.inferring_shapes or chunk is not None:
            self._skip_shape_inference(state, chunk)

    def _first_of(self, state: TorchThreadState, chunk: int | None) -> bool:
        """Return whether a call can be the first of a step: later microbatches of a pipeline are not."""
        return chunk is None or chunk == SHAPE_INFERENCE or (chunk == 0 and not state.inferring_shapes)

    def _skip_shape_inference(self, state: TorchThreadState, chunk: int | None) -> None:
        """Forget what a pipeline ran to infer shapes, as soon as the first true microbatch comes."""
        if state.inferring_shapes and chunk != SHAPE_INFERENCE:
            self.recorder.restart(self.current())
            state.reset()
            state.used = True
        state.inferring_shapes = chunk == SHAPE_INFERENCE

    def _next(self, state: TorchThreadState) -> None:
        collecting = state.backward and not state.stepped and (state.stepping or self._collecting())
        if state.used and not collecting:
            self._left_waiting |= state.awaits and not state.backward
            self.finish(state.step)
        elif collecting:
            state.backward = False
            state.micro += 1
            if state.micro == _MANY:
                self.recorder.counters.warn(
                    "micro-batches",
                    f"{_MANY} calls with a backward but no optimizer step were taken as micro-batches of one step; if "
                    "they are steps of their own, close each with tap.step()",
                )
        state.used = True

    def _mark(self, output: Any, state: TorchThreadState) -> bool:
        """Put hooks where backward reaches what the root returned; return False when it never will."""
        with without_torch_function():
            nodes = {tensor.grad_fn: None for _, tensor in tensors_in(output) if tensor.grad_fn is not None}
        for node in list(nodes)[:MOST_MARKS]:
            node.register_prehook(_Mark(state))
        return bool(nodes)


def running_twice(root: nn.Module) -> bool:
    """Return whether a call of the root runs inside another. Ctrl-C in a notebook ends calls without calling hooks."""
    frame: FrameType | None = sys._getframe(1)
    running = 0
    while frame is not None:
        running += frame.f_code is _CALL and frame.f_locals.get("self") is root
        frame = frame.f_back
    return running > 1


class _Mark:
    """Note that backward reached the root's output."""

    __slots__ = ("state",)

    def __init__(self, state: TorchThreadState) -> None:
        self.state = state

    def __call__(self, gradients: Any) -> None:
        self.state.backward = True
