"""Functions of PyTorch that are replaced while there are listeners, and restored afterwards.

Each replacement calls the original with what it was given and returns what it returned. The compiler traces through
them and finds nothing of ours. If another library has replaced a replacement in turn, its function stays and calls
ours, which then only calls the original.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tensortap.adapters.torch.context.definitions import INITIALISERS
from tensortap.adapters.torch.context.losses import NAMES


class LossListener(Protocol):
    """Listen to losses and gradients. No method may raise."""

    def loss_called(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Called after a loss function."""

    def backward_begins(self, tensors: Any) -> None:
        """Called before gradients are computed."""

    def backward_ended(self) -> None:
        """Called after gradients have been computed."""

    def dropout_called(self, p: float) -> None:
        """Called before a dropout that is active although no gradients are recorded."""


class OptimizerListener(Protocol):
    """Listen to optimizers and schedulers. No method may raise."""

    def optimizer_made(self, optimizer: Any) -> None:
        """Called after an optimizer's `__init__`."""

    def scheduler_made(self, scheduler: Any) -> None:
        """Called after a scheduler's `__init__`."""

    def scheduler_stepped(self, scheduler: Any) -> None:
        """Called after a scheduler's `step`."""

    def gradients_reset(self, optimizer: Any) -> None:
        """Called after an optimizer's `zero_grad`."""


class LoaderListener(Protocol):
    """Listen to data loaders. No method may raise."""

    def loader_made(self, loader: Any) -> None:
        """Called after a loader's `__init__`."""

    def loader_started(self, loader: Any) -> None:
        """Called when an iteration over a loader begins."""

    def workers_start(self, loader: Any) -> AbstractContextManager[None]:
        """Return a context in which the loader's iterator is made."""
        return nullcontext()

    def indices_drawn(self, iterator: Any, indices: Any) -> None:
        """Called when a loader's sampler has given the indices of a batch."""

    def batch_given(self, iterator: Any, batch: Any) -> None:
        """Called when a loader has given a batch."""


class CheckpointListener(Protocol):
    """Listen to checkpoints. The method may not raise."""

    def saved(self, content: Any, target: Any) -> None:
        """Called after `torch.save`."""


class DefinitionListener(Protocol):
    """Listen to new modules and to functions that set their weights. No method may raise."""

    def module_made(self, module: nn.Module) -> None:
        """Called after `nn.Module.__init__`."""

    def initialised(self, function: str, tensor: Any) -> None:
        """Called after a function of `torch.nn.init`."""


class _LossDepth(threading.local):
    depth = 0


class Patches:
    """The replacements."""

    def __init__(
        self, losses: LossListener, optimizers: OptimizerListener, loaders: LoaderListener,
        checkpoints: CheckpointListener, definitions: DefinitionListener,
    ) -> None:  # fmt: skip
        self._definitions = definitions
        self._losses = losses
        self._checkpoints = checkpoints
        self._loaders = loaders
        self._on = True
        self._inside = _LossDepth()
        self._made: list[tuple[Any, str, Any, Any]] = []
        for name in NAMES:
            self._replace(functional, name, self._loss)
        self._replace(functional, "dropout", self._dropout)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch, "save", self._saving)
        self._replace(nn.Module, "__init__", functools.partial(self._after, definitions.module_made))
        for name in INITIALISERS:
            self._replace(nn.init, name, self._initialiser)
        self._replace(Optimizer, "__init__", functools.partial(self._after, optimizers.optimizer_made))
        self._replace(LRScheduler, "__init__", functools.partial(self._after, optimizers.scheduler_made))
        self._replace(LRScheduler, "step", functools.partial(self._after, optimizers.scheduler_stepped))
        self._replace(Optimizer, "zero_grad", functools.partial(self._after, optimizers.gradients_reset))
        self._replace(DataLoader, "__init__", functools.partial(self._after, loaders.loader_made))
        self._replace(DataLoader, "__iter__", self._iteration)
        self._replace(_BaseDataLoaderIter, "_next_index", self._indices)
        self._replace(_BaseDataLoaderIter, "__next__", self._batches)

    def remove(self) -> None:
        """Put the originals back."""
        self._on = False
        for owner, name, original, ours in reversed(self._made):
            if getattr(owner, name, None) is ours:
                setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            ours = functools.wraps(original)(wrap(original))
            self._made.append((owner, name, original, ours))
            setattr(owner, name, ours)

    def _loss(self, original: Any) -> Any:

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._on or self._inside.depth:
                return original(*args, **kwargs)
            self._inside.depth += 1  # a loss that calls another is one loss
            try:
                output = original(*args, **kwargs)
            finally:
                self._inside.depth -= 1
            self._losses.loss_called(original, args, kwargs, output)
            return output

        return call

    def _dropout(self, original: Any) -> Any:
        def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if training and p and not torch.is_grad_enabled() and self._on and not torch.compiler.is_compiling():
                self._losses.dropout_called(p)
            return original(input, p, training, inplace)

        return dropout

    def _backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._on:
                return original(tensors, *args, **kwargs)
            self._losses.backward_begins(tensors)
            result = original(tensors, *args, **kwargs)
            self._losses.backward_ended()
            return result

        return backward

    def _after(self, tell: Callable[[Any], None], original: Any) -> Any:
        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            if self._on and not torch.compiler.is_compiling():
                tell(this)
            return result

        return method

    def _initialiser(self, original: Any) -> Any:
        def initialise(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            if self._on and not torch.compiler.is_compiling():
                self._definitions.initialised(original.__name__, tensor)
            return result

        return initialise

    def _saving(self, original: Any) -> Any:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(obj, f, *args, **kwargs)
            if self._on:
                self._checkpoints.saved(obj, f)
            return result

        return save

    def _iteration(self, original: Any) -> Any:
        def iterate(this: Any) -> Any:
            if not self._on:
                return original(this)
            self._loaders.loader_started(this)
            with self._loaders.workers_start(this):
                return original(this)

        return iterate

    def _indices(self, original: Any) -> Any:
        def next_index(this: Any) -> Any:
            indices = original(this)
            if self._on:
                self._loaders.indices_drawn(this, indices)
            return indices

        return next_index

    def _batches(self, original: Any) -> Any:
        def give(this: Any) -> Any:
            batch = original(this)
            if self._on:
                self._loaders.batch_given(this, batch)
            return batch

        return give


def scalar_of(tensors: Any) -> Tensor | None:
    """Return the loss among the tensors that backward was called on."""
    for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            return tensor
    return None
