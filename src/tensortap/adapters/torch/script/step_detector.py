"""Where the steps of a script end, and whether they train, judged by its calls of models, backward and optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

TRAIN: Final = "train"
EVAL: Final = "eval"
_PATIENCE: Final = 1000


class ScriptStepDetector:
    """Tell before each call of a model whether the call begins a new step.

    Training: a step lasts until an optimizer has stepped, however many models are called however often before that
    (micro-batches, a generator and a discriminator, a teacher, a cell called for each word). Without an optimizer it
    lasts until backward has run and its gradients were used or dropped. Otherwise a second call of the same model
    begins a new step, and so does a model that begins to learn after another was evaluated: the next fold. A step is
    training when a model was called in training mode and with gradients, or when an optimizer used what backward
    computed in it, whatever mode the model is in.
    """

    def __init__(self) -> None:
        self._ever_stepped = False
        self._ever_learnt: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # in training mode with gradients
        self._learnt_in_eval_mode: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # trained, but in evaluation mode
        self._ever_joined: set[int] = set()  # models that were called in a step of training
        self._learners: set[int] = set()  # models that learnt in the last step of training, and what they are parts of
        self._helpers: set[int] = set()  # models that were called in a step in which only others learnt
        self._in_optimizer = False
        self.called_by_optimizer = False  # the closure of the optimizer that steps, or stepped last, called a model
        self._by_hand = False  # the script updates parameters itself
        self._last = ""  # the phase of the step before
        self._begin()

    def _begin(self) -> None:
        self.used = False
        self._calls = 0
        self._called: set[int] = set()
        self._involved: set[int] = set()  # what was called, and what it is a part of
        self._learning: set[int] = set()  # called in training mode and with gradients
        self._differentiated: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # called with gradients, in any mode
        self._in_training_mode = False  # some model, with gradients or without
        self._gradients: _Gradients | None = None
        self._updates = 0  # of parameters, without an optimizer
        self._backward = False
        self._stepped = False

    @property
    def phase(self) -> str:
        """Return whether the open step has trained so far."""
        return TRAIN if self._learning or self._trained else EVAL

    @property
    def _trained(self) -> bool:
        """Return whether an optimizer has used what backward computed in the open step."""
        return self._backward and self._stepped

    @property
    def holds_old_gradients(self) -> bool:
        """Return whether the current gradients are not from the open step, which evaluates."""
        return not (self._learning or self._backward)

    def expected_phase(self, module: nn.Module) -> str:
        """Return the phase of a step that begins with this call.

        A model that was never trained may be a teacher, which a step of training calls first: such a step is taken
        for what the step before was. What it was in truth is known when it ends.
        """
        if self._learns(module) or self._in_optimizer:
            return TRAIN
        return EVAL if module in self._ever_learnt else self._last or EVAL

    def over(self, module: nn.Module, whole: int) -> bool:
        """Return whether a call of this module, part of the model with id `whole`, begins a new step."""
        if not self.used:
            return False
        again = not self._called.isdisjoint((id(module), whole))
        if self._stepped:
            return True
        if self._in_optimizer and self.called_by_optimizer:
            return False  # a closure, which an optimizer such as LBFGS calls several times
        if not self._learning:
            return again or self._was_evaluated(module)
        if self._in_optimizer:
            return False
        if not self._learns(module) and (id(module) in self._learning or self._is_new_copy(module)):
            return True  # from training to evaluation
        if self._optimizer_expected():
            return self._updated_by_hand()
        return again or self._backward

    def _was_evaluated(self, module: nn.Module) -> bool:
        """Return whether a model that has just been trained was evaluated, and the training of another begins now.

        Others that are called before the one that learns belong to its step: a teacher and a frozen network, which do
        not learn themselves, a generator in training mode, and models that give each other targets.
        """
        trained = self._involved & self._learners
        if not trained or not self._learns(module) or id(module) in self._learners:
            return False
        if not self._helpers.isdisjoint({*trained, id(module)}):
            return False
        return not self._in_training_mode or module not in self._ever_learnt

    def _is_new_copy(self, module: nn.Module) -> bool:
        """Return whether a model that no step of training has called, such as an EMA, is called after backward."""
        return self._backward and id(module) not in self._ever_joined

    def _updated_by_hand(self) -> bool:
        """Return whether the script updates parameters itself, although it has an optimizer.

        One such update may be half of an optimizer's step (SAM); a second one, and those after it, are steps.
        """
        if not self._backward or self._gradients is None or not self._gradients.used():
            return False
        self._updates += 1
        self._by_hand |= self._updates > 1
        return self._by_hand

    def called(self, module: nn.Module, whole: int) -> None:
        """Note a call of a model, or of a part of the model with id `whole`, in the open step."""
        self.used = True
        self._calls += 1
        self.called_by_optimizer |= self._in_optimizer
        self._called.add(id(module))
        self._involved |= {id(module), whole} - {0}
        self._in_training_mode |= module.training
        if torch.is_grad_enabled():
            self._differentiated.add(module)
        if self._learns(module):
            self._learning.add(id(module))
            self._ever_learnt.add(module)
            self._gradients = _Gradients(module)
        if self._learning:
            self._ever_joined |= self._called

    def backward_ran(self) -> None:
        """Note that gradients were computed."""
        self._backward = True
        if self._gradients is not None:
            self._gradients.note()

    def closure_begins(self, trained: Collection[int]) -> bool:
        """Note that an optimizer's step begins which calls models by a closure; return whether that is a new step.

        `trained` are the ids of the models whose parameters it holds: an evaluation of theirs is over.
        """
        self._in_optimizer, self.called_by_optimizer = True, False
        evaluated = not self._learning and not self._involved.isdisjoint(trained)
        return self.used and (self._stepped or evaluated)

    def optimizer_stepped(self) -> None:
        """Note that an optimizer used them."""
        self._stepped = self._ever_stepped = True
        self._in_optimizer = self._by_hand = False

    def closed(self) -> None:
        """Begin a new step."""
        self._last = self.phase
        if self._trained and not self._learning:
            self._learnt_in_eval_mode |= self._differentiated
            self._learning = {id(module) for module in self._differentiated}
        if self._learning:
            self._helpers |= self._called - self._learning
            self._learners = self._involved - (self._called - self._learning)
        self._begin()

    def _learns(self, module: nn.Module) -> bool:
        """Return whether a call trains a module: in training mode, or in the mode that it was trained in before."""
        return torch.is_grad_enabled() and (module.training or module in self._learnt_in_eval_mode)

    def _optimizer_expected(self) -> bool:
        return self._ever_stepped or (self._calls < _PATIENCE and _any_optimizer())


class _Versions(NamedTuple):
    parameter: Tensor
    version: int
    gradient: Tensor
    gradient_version: int


class _Gradients:
    """Tell whether a script has used or dropped a model's gradients since backward, without an optimizer.

    It compares the version counters of one parameter and its gradient: micro-batches leave both alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: _Versions | None = None

    def note(self) -> None:
        """Remember the versions, right after backward."""
        for parameter in self._module.parameters():
            gradient = parameter.grad
            if gradient is not None and not parameter.is_inference():
                self._known = _Versions(parameter, parameter._version, gradient, gradient._version)
                return

    def used(self) -> bool:
        """Return whether the parameter or its gradient is another now."""
        if self._known is None:
            return False
        parameter, version, gradient, gradient_version = self._known
        changed = parameter._version != version or parameter.grad is not gradient
        if changed or gradient._version != gradient_version:
            self._known = None  # each update counts once
            return True
        return False


def _any_optimizer() -> bool:
    """Return whether an optimizer was ever made: PyTorch then wraps the `step` of its class."""
    return any(getattr(kind.step, "hooked", False) for kind in _kinds(torch.optim.Optimizer))


def _kinds(kind: type[torch.optim.Optimizer]) -> Iterator[type[torch.optim.Optimizer]]:
    for child in kind.__subclasses__():
        yield child
        yield from _kinds(child)
