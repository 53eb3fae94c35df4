"""Finding the models, the steps and the losses of a script that says nothing about them."""

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
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.torch.modules.hooks import Hook
from tensortap.adapters.torch.script.losses import Losses, Measured
from tensortap.adapters.torch.script.models import Model, Models
from tensortap.adapters.torch.script.naming import has_parameters, name_of, several
from tensortap.adapters.torch.script.step_detector import ScriptStepDetector
from tensortap.errors import PatternError, UnsupportedError
from tensortap.record.recorder import Recorder
from tensortap.select.sites import Pattern, select

MOST_MODELS: Final = 32
_OTHER, _PART, _MODEL = range(3)  # what a module is: of no interest, inside a model, called from outside
_ADDED: Final = "not registered in the model that calls it, or added to it later"


class Tap(Protocol):
    """What is needed of a tap."""

    recorder: Recorder

    def step(self, **metrics: Any) -> None:
        """Close the step."""


class ScriptWatcher:
    """Sees every call of every module, and watches those that are models.

    A module with parameters that is called while no model's call is going on is a model. `begin` is called with the
    first one and gives the tap. Nothing here raises into the script: what goes wrong is told to `say`, once.
    """

    def __init__(self, patterns: Sequence[Pattern], begin: Callable[[Models], Tap], say: Callable[[str], None]) -> None:
        self.models = Models(patterns)
        self.tap: Tap | None = None
        self.left_out: dict[str, str] = {}  # what was called and is not watched, and why
        self.unmatched: dict[str, str] = {}  # patterns that chose nothing, and what there was to choose
        self._matched: set[str] = set()
        self._begin = begin
        self._say = say
        self._steps = ScriptStepDetector()
        self._losses = Losses()
        self._kinds: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[nn.Module]] = {}
        self._wholes: dict[int, int] = {}  # for each part the model it is in
        self._late: dict[int, list[int]] = {}  # the pre-hooks that each model got while it was being called
        self._local = _Local()
        self._lock = threading.RLock()
        self._home: int | None = None  # the thread whose calls make the steps; others have steps of their own
        self._on = True
        self._shared = False  # more threads than the first one call models
        self._ear = register_module_forward_pre_hook(self._before)
        self._handles: list[RemovableHandle] = [self._ear, register_optimizer_step_post_hook(self._after_optimizer)]
        # PyTorch warns of what does not concern us: we tell a compiled model from the module it was made of.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._wrapped(self._backward)

    def stop(self) -> None:
        """Take everything off, and close the step that is open."""
        self._on = False
        self._listen(True)
        for handle in self._handles:
            handle.remove()
        torch.autograd.backward = self._backward
        if self.tap is not None and self._steps.used:
            self._close(self.tap)

    def forget(self) -> None:
        """In a forked child: see nothing."""
        self._on = False

    # Called by PyTorch

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        kind = self._kinds.get(id(module))
        if kind == _OTHER or (kind == _PART and self._local.depth) or not self._on:
            return  # nearly every call
        try:
            for key in self._called(module):
                _run_late(module, key, args)
        except Exception as error:
            self._give_up(error)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._on and self._at_home():
            self._local.depth = 0  # nothing is being called now, whatever an interrupt may have left
            self._listen(True)
            self._steps.optimizer_stepped()

    def _wrapped(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._on and self._at_home() and not torch.compiler.is_compiling():
                self._steps.backward_ran()
                self._losses.backward_of(tensors)
            backward(tensors, *args, **kwargs)

        return wrapper

    # What a call means

    def _called(self, module: nn.Module) -> list[int]:
        """The keys of pre-hooks that the module got only now: PyTorch would run them from the next call on."""
        outside = self._local.depth == 0
        late = [] if id(module) in self._kinds else self._meet(module, outside)
        if self._kinds.get(id(module), _OTHER) == _OTHER:
            return late
        if outside and torch._C._current_graph_task_id() == -1:  # not a checkpoint that computes again
            self._track(module)
            if self._at_home():
                self._count(module)
        if self._kinds[id(module)] == _MODEL:
            self._local.depth += 1
            self._shared |= not self._at_home()
            # What a known model calls is known: let it run as if nobody watched. A new one is listened to once, unless
            # it may be compiled just now: the code would be compiled again when the hook is gone.
            if not late or "torch._dynamo" in sys.modules:
                self._listen(self._shared)
        return late

    def _left(self) -> None:
        """A model's call is over."""
        self._local.depth = max(0, self._local.depth - 1)
        if self._on and not self._local.depth:
            self._listen(True)

    def _listen(self, on: bool) -> None:
        hooks = self._ear.hooks_dict_ref()
        if hooks is None or (self._ear.id in hooks) == on:
            return
        if on:
            hooks[self._ear.id] = self._before
        else:
            del hooks[self._ear.id]

    def _meet(self, module: nn.Module, outside: bool) -> list[int]:
        with self._lock:
            if id(module) in self._kinds:  # another thread was first, but this call began before it
                return self._late.get(id(module), [])
            if not has_parameters(module):
                if isinstance(module, _Loss) and outside:
                    self._handles.append(module.register_forward_hook(Measured(self._losses)))
                return self._pass_by(module)
            if getattr(module, "_is_replica", False):  # DataParallel's copies run inside the call of the original
                return self._pass_by(module)
            if not outside:
                return self._pass_by(module, _ADDED)
            if len(self.models.members) >= MOST_MODELS:
                return self._pass_by(module, f"there are {MOST_MODELS} models already")
            before = set(module._forward_pre_hooks)
            try:
                self._watch(module)
            except UnsupportedError as error:
                return self._pass_by(module, str(error))
            self._late[id(module)] = [key for key in module._forward_pre_hooks if key not in before]
            for each in module.children():
                for part in each.modules():
                    self._note(part, _PART)
                    self._wholes[id(part)] = id(module)
            self._track(module)  # the last: until it is known, other threads that call it wait for the lock
            return self._late[id(module)]

    def _watch(self, module: nn.Module) -> None:
        self._home = threading.get_ident() if self._home is None else self._home
        name = name_of(module, sys._getframe())
        prefix = self._free(name) if self.models.members or several(module) else ""
        model = Model(module, name, prefix, self._home)
        if not self._wants(model):
            self.left_out[model.name] = "it has none of the sites asked for"
            return
        self.models.join(model)
        if self.tap is None:
            self.tap = self._begin(self.models)

    def _wants(self, model: Model) -> bool:
        """Whether any pattern chooses something of it; those that do not are spoken of, if only at the end."""
        wanted = False
        for pattern in self.models.patterns:
            if model.has(pattern):
                wanted = True
                self._matched.add(pattern.text)
                self.unmatched.pop(pattern.text, None)
            elif pattern.text not in self._matched:
                self.unmatched[pattern.text] = _explain(pattern, model)
                if not model.prefix:
                    self._say(self.unmatched[pattern.text])
        return wanted

    def _free(self, name: str) -> str:
        taken = {model.prefix for model in self.models.members}
        return next(n for n in (name, *(f"{name}-{i}" for i in range(2, MOST_MODELS + 2))) if n not in taken)

    def _pass_by(self, module: nn.Module, why: str = "") -> list[int]:
        self._note(module, _OTHER)
        if why:
            self.left_out[type(module).__name__] = why
        return []

    def _track(self, module: nn.Module) -> None:
        """From now on know when a call of it, from outside any model, is over."""
        if self._kinds.get(id(module)) != _MODEL:
            self._handles.append(_put_after(module, _Left(self._left)))
            self._note(module, _MODEL)

    def _note(self, module: nn.Module, kind: int) -> None:
        key = id(module)
        if self._kinds.get(key, _OTHER) == _OTHER:
            self._refs[key] = weakref.ref(module, lambda _: self._gone(key))
        self._kinds[key] = max(kind, self._kinds.get(key, _OTHER))

    def _gone(self, key: int) -> None:
        for table in (self._refs, self._kinds, self._wholes, self._late):
            table.pop(key, None)

    # Steps

    def _at_home(self) -> bool:
        return threading.get_ident() == self._home

    def _count(self, module: nn.Module) -> None:
        if self.tap is not None:
            if self._steps.over(module, self._wholes.get(id(module), 0)):
                self._close(self.tap)
            self._steps.called(module)

    def _close(self, tap: Tap) -> None:
        tap.recorder.current.phase = "train" if self._steps.train else "eval"
        self._steps.closed()
        tap.step(**self._losses.take())

    def _give_up(self, error: Exception) -> None:
        self._on = False
        self._say(f"observing ends here, the script goes on: {type(error).__name__}: {error}")


class _Local(threading.local):
    depth = 0  # how many models' calls the thread is in


class _Left(Hook):
    """Sits after a model's forward, also when it failed."""

    __slots__ = ("tell",)

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell = tell

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.tell()


def _put_after(module: nn.Module, hook: _Left) -> RemovableHandle:
    if not isinstance(module, nn.TransformerEncoderLayer):
        return module.register_forward_hook(hook, always_call=True)
    this = weakref.ref(module)  # a hook on the layer itself would switch its fused path off

    def only(called: nn.Module, args: Any, output: Any) -> None:
        if called is this():
            hook(called, args, output)

    return register_module_forward_hook(only, always_call=True)


def _run_late(module: nn.Module, key: int, args: Any) -> None:
    hook = module._forward_pre_hooks[key]
    if key not in module._forward_pre_hooks_with_kwargs:
        hook(module, args)
        return
    caller = sys._getframe(2)  # PyTorch's own, which alone knows the keyword arguments
    hook(module, args, caller.f_locals.get("kwargs", {}))


def _explain(pattern: Pattern, model: Model) -> str:
    try:
        select([pattern], [plain for plain, _ in model.candidates()])
    except PatternError as error:
        return str(error)
    return f"{pattern.text!r} can not be observed in a script"
