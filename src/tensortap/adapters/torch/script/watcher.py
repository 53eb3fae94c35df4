"""Find the models, the steps and the losses of a script that says nothing about them."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.torch.autograd.optimizers import closure_of
from tensortap.adapters.torch.autograd.parameters import ids_of
from tensortap.adapters.torch.context.recorder import CONTEXT
from tensortap.adapters.torch.script.hooks import AfterCall, GlobalPreHook, begin_early, register_after, run_pre_hook
from tensortap.adapters.torch.script.losses import Losses, LossModuleHook
from tensortap.adapters.torch.script.models import ScriptModel, ScriptModels
from tensortap.adapters.torch.script.modules import KnownModules, ModuleRole
from tensortap.adapters.torch.script.naming import has_other_models, has_parameters, name_of
from tensortap.adapters.torch.script.owners import LossOwners
from tensortap.adapters.torch.script.step_detector import EVAL, TRAIN, ScriptStepDetector
from tensortap.context.events import EventLog
from tensortap.errors import UnsupportedError
from tensortap.record.recorder import Recorder
from tensortap.select.probes import Probe

MOST_MODELS: Final = 32
_ADDED: Final = "not registered in the model that calls it, or added to it later"


class ScriptTap(Protocol):
    """The tap that the watcher closes steps of."""

    recorder: Recorder

    def step(self, **metrics: Any) -> None:
        """Close the step."""


class ScriptWatcher:
    """Observe every call of every module, and watch those modules that are models.

    A module with parameters that is called while no model's call is going on is a model. `begin` is called with the
    first one and returns the tap. Nothing here raises into the script: errors are passed to `say`, once.
    """

    def __init__(
        self, probes: Sequence[Probe], begin: Callable[[ScriptModels], ScriptTap], say: Callable[[str], None]
    ) -> None:
        self.models = ScriptModels(probes)
        self.tap: ScriptTap | None = None
        self.left_out: dict[str, str] = {}  # what was called and is not watched, and why
        self._begin = begin
        self._say = say
        self._steps = ScriptStepDetector()
        self._losses = Losses()
        self._owners = LossOwners()
        self._known = KnownModules()
        self._local = _CallDepth()
        self._lock = threading.RLock()
        self._home: int | None = None  # the thread whose calls make the steps; others have steps of their own
        self._on = True
        self._shared = False  # more threads than the first one call models
        self._closures = _Closures()
        self._every_call = GlobalPreHook(self._before)
        self._handles: list[RemovableHandle] = [
            self._every_call.handle,
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        # The warning does not concern us: we tell a compiled model from the module that it wraps.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        CONTEXT.join(EventLog(), self, pending=True)  # what is made before the first model is called counts too
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._wrapped(self._backward)

    def stop(self) -> None:
        """Remove everything, and close the step that is open."""
        self._on = False
        self._every_call.switch(True)
        for handle in self._handles:
            handle.remove()
        torch.autograd.backward = self._backward
        CONTEXT.leave(self)
        if self.tap is not None and self._steps.used:
            self._close(self.tap)

    def forget(self) -> None:
        """Record nothing, in a forked child."""
        self._on = False

    # Called by PyTorch

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        role = self._known.role(module)
        if role == ModuleRole.OTHER or (role == ModuleRole.PART and self._local.depth) or not self._on:
            return  # nearly every call
        try:
            for key in self._called(module):
                run_pre_hook(module, key, args)
        except Exception as error:
            self._give_up(error)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._on or not (self._home is None or self._at_home()):  # before the first call too
            return
        self._closures.stepping = None
        if closure_of(args, kwargs) is not None:
            try:
                self._begin_closure(optimizer)
            except Exception as error:
                self._give_up(error)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._on and self._at_home():
            self._closures.stepping = None
            if closure_of(args, kwargs) is not None:
                self._closures.note(optimizer, called=self._steps.called_by_optimizer)
            self._local.depth = 0  # nothing is being called now, whatever an interrupt may have left
            self._every_call.switch(True)
            self._steps.optimizer_stepped()
            self._losses.optimizer_stepped()
            self._owners.stepped(optimizer, self.models.members)

    def _wrapped(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not self._on or not self._at_home() or torch.compiler.is_compiling():
                backward(tensors, *args, **kwargs)
                return
            self._losses.backward_of(tensors)
            backward(tensors, *args, **kwargs)
            self._steps.backward_ran()

        return wrapper

    # What a call means

    def _called(self, module: nn.Module) -> list[int]:
        """Return the keys of pre-hooks that the module got only now: PyTorch would run them from the next call on."""
        outside = self._local.depth == 0
        new_hooks = [] if self._known.role(module) is not None else self._meet(module, outside)
        if outside and not new_hooks and module not in self._local.called:
            begin_early(module, self._known.new_hooks(module))
        if not self._known.role(module):
            return new_hooks
        if outside and not _computes_again():
            self._track(module)
            if self._at_home():
                self._count(module)
        if self._known.role(module) == ModuleRole.MODEL:
            self._local.called.add(module)
            self._local.depth += 1
            self._shared |= not self._at_home()
            # The parts of a known model are known: it runs without our hooks. A new one is observed once, unless
            # it may be compiled just now: the code would be compiled again when the hook is gone.
            if not new_hooks or "torch._dynamo" in sys.modules:
                self._every_call.switch(self._shared)
        return new_hooks

    def _left(self) -> None:
        """Note that a model's call is over."""
        self._local.depth = max(0, self._local.depth - 1)
        if self._on and not self._local.depth:
            self._every_call.switch(True)

    def _meet(self, module: nn.Module, outside: bool) -> list[int]:
        with self._lock:
            if self._known.role(module) is not None:  # another thread was first
                return []
            if not has_parameters(module):
                if isinstance(module, _Loss) and outside:
                    self._handles.append(module.register_forward_hook(LossModuleHook(self._losses)))
                return self._known.pass_by(module)
            if (keras := sys.modules.get("keras")) is not None and isinstance(module, keras.Layer):
                return self._known.pass_by(module)  # its layers are modules; Keras is asked for models
            if getattr(module, "_is_replica", False):  # DataParallel's copies run inside the call of the original
                return self._known.pass_by(module)
            if not outside:
                self.left_out[type(module).__name__] = _ADDED
                return self._known.pass_by(module)
            if len(self.models.members) >= MOST_MODELS:
                self.left_out[type(module).__name__] = f"there are {MOST_MODELS} models already"
                self._known.note_model(module, [])
                self._track(module)  # its steps and losses are still its own
                return []
            if self._at_home() and not _computes_again():
                self._end_before(module)  # the finished step does not belong to a model that joins only now
            before = set(module._forward_pre_hooks)
            try:
                self._watch(module)
            except UnsupportedError as error:
                self.left_out[type(module).__name__] = str(error)
                return self._known.pass_by(module)
            self._known.note_model(module, [key for key in module._forward_pre_hooks if key not in before])
            self._track(module)  # done last: until the module is known, other threads that call it wait for the lock
            return self._known.new_hooks(module)

    def _watch(self, module: nn.Module) -> None:
        self._home = threading.get_ident() if self._home is None else self._home
        name = name_of(module, sys._getframe())
        prefix = self.models.free_prefix(name) if self.models.members or has_other_models(module) else ""
        model = ScriptModel(module, name, prefix, self._home)
        if not self.models.wants(model, self._say):
            self.left_out[model.name] = "it has none of the sites asked for"
            return
        self.models.join(model)
        if self.tap is None:
            self.tap = self._begin(self.models)
        if self._closures.stepping is not None and (optimizer := self._closures.stepping()) is not None:
            self._enter(TRAIN)
            model.adapter.optimizer_started(optimizer)

    def _track(self, module: nn.Module) -> None:
        """Note from now on when a call of the module, from outside any model, is over."""
        if self._known.role(module) != ModuleRole.MODEL:
            self._handles.append(register_after(module, AfterCall(self._left)))
            self._known.note(module, ModuleRole.MODEL)

    # Steps

    def _at_home(self) -> bool:
        return threading.get_ident() == self._home

    def _end_before(self, module: nn.Module) -> None:
        if self.tap is not None and self._steps.over(module, self._known.model_of(module)):
            self._close(self.tap)

    def _begin_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """End the step before that of an optimizer with a closure, which calls models only inside it.

        What the optimizer is about to change is recorded before that.
        """
        held = ids_of(optimizer)
        over = self._steps.closure_begins({model.key for model in self.models.members if model.owns(held)})
        if self.tap is not None and over and self._closures.may_call(optimizer):
            self._close(self.tap)
        self._enter(TRAIN)
        self._losses.optimizer_begins()
        self._closures.stepping = weakref.ref(optimizer)

    def _enter(self, phase: str) -> None:
        """Number the open step in a phase, unless models were called in it already."""
        if self.tap is not None and not self._steps.used and self.tap.recorder.enter_phase(phase):
            self.models.arm()

    def _count(self, module: nn.Module) -> None:
        self._end_before(module)
        if self.tap is not None:
            self._enter(self._steps.expected_phase(module))
            self._losses.model_called()
            self._steps.called(module, self._known.model_of(module))

    def _close(self, tap: ScriptTap) -> None:
        phase = self._steps.phase
        tap.recorder.enter_phase(phase)
        tap.recorder.current.phase = phase
        tap.recorder.current.old_gradients = self._steps.holds_old_gradients
        self._steps.closed()
        owner = tap.recorder.current.owner = self._owners.take()
        name = "eval/loss" if phase == EVAL else f"loss/{owner}" if owner else "loss"
        loss = self._losses.take()
        tap.step(**({} if loss is None else {name: loss}))

    def _give_up(self, error: Exception) -> None:
        self._on = False
        self._say(f"observing ends here, the script goes on: {type(error).__name__}: {error}")


def _computes_again() -> bool:
    """Return whether a checkpoint computes again what a call has computed."""
    return torch._C._current_graph_task_id() != -1


class _Closures:
    """Optimizers whose steps are given a function that calls the model and runs backward."""

    def __init__(self) -> None:
        self.stepping: weakref.ref[torch.optim.Optimizer] | None = None  # the one that is in such a step now
        self._without_calls: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def note(self, optimizer: torch.optim.Optimizer, called: bool) -> None:
        """Note whether the function has called a model."""
        (self._without_calls.discard if called else self._without_calls.add)(optimizer)

    def may_call(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the function may call a model: unless it did not in the last step."""
        return optimizer not in self._without_calls


class _CallDepth(threading.local):
    depth = 0  # how many models' calls the thread is in

    def __init__(self) -> None:
        self.called: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that the thread has called
