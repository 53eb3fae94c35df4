"""The model that is checked: called again and again from one state, with this or that batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensortap.adapters.batches import copied
from tensortap.adapters.model_check import ModelQuestion
from tensortap.adapters.nested import call_with
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.state import copied_batch
from tensortap.context.caller import in_library, shortened_path

Named = dict[str, Tensor]
_LOSS: Final = ("loss", "losses")


class NotApplicableError(Exception):
    """A check does not apply to this model or batch; the message says why."""


class CheckedModel:
    """A model with its batch, target and loss."""

    def __init__(self, question: ModelQuestion, restore: Callable[[], None]) -> None:
        self.question = question
        self.model: nn.Module = question.model
        self.batch = question.batch
        self.restore = restore
        self.axis = question.batch_axis or 0
        self.given: Named = dict(tensors_in(question.batch))
        self.names = {id(module): path for path, module in self.model.named_modules()}

    @property
    def size(self) -> int:
        """The number of samples in the batch."""
        sizes = [t.shape[self.axis] for t in self.given.values() if t.dim() > self.axis]
        target = next((t for _, t in tensors_in(self.question.target) if t.dim()), None)
        if target is not None and target.shape[0] in sizes:
            return int(target.shape[0])
        if not sizes:
            raise NotApplicableError("the batch has no tensor with an axis of samples")
        return int(sizes[0])

    def output(self, batch: Any = None, training: bool = False, gradients: bool = False) -> Any:
        """Call the model from its first state, and return its output."""
        self.restore()
        self.model.train(training)
        with torch.set_grad_enabled(gradients):
            return self.call(batch)

    def call(self, batch: Any = None) -> Any:
        """Call the model as it is, with a copy of a batch."""
        return call_with(self.model, copied_batch(self.batch if batch is None else batch))

    def outputs(self, batch: Any = None, training: bool = False) -> Named:
        """Return the floating-point tensors of an output that are not single numbers."""
        return floats(self.output(batch, training))

    def replaced(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return the batch with other tensors in the named slots."""
        other = {id(self.given[slot]): tensor for slot, tensor in tensors.items()}
        return copied(self.batch, lambda leaf: other.get(id(leaf), leaf) if isinstance(leaf, Tensor) else None)

    @property
    def has_loss(self) -> bool:
        """Whether the question names a loss; else the model may have one of its own."""
        return self.question.loss is not None

    def loss(self, output: Any, target: Any = None) -> Tensor:
        """Return the loss of an output: the user's, or the one that the model returns."""
        if self.question.loss is not None:
            wanted = copied_batch(self.question.target if target is None else target)
            function = _current(self.question.loss)
            return as_scalar(function(output) if wanted is None else function(output, wanted))
        own = own_loss(output)
        if own is None:
            raise NotApplicableError("no loss is known: give loss= and target=, or labels in the batch")
        return own


def _current(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of PyTorch as its module has it now: somebody may listen to its calls."""
    if getattr(loss, "__module__", "") == functional.__name__:
        return getattr(functional, loss.__name__, loss)
    return loss


def own_loss(output: Any) -> Tensor | None:
    """Return the loss that a model returns itself: a scalar, or what is called `loss`."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 and output.is_floating_point() else None
    for name in _LOSS:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.reshape(())
    first = output[0] if isinstance(output, (tuple, list)) and len(output) else None
    return first if isinstance(first, Tensor) and first.dim() == 0 and first.requires_grad else None


def as_scalar(value: Any) -> Tensor:
    """Return a loss as one number: the mean of one that is not reduced."""
    tensor = value if isinstance(value, Tensor) else tensors_in(value)[0][1]
    return tensor if tensor.dim() == 0 else tensor.mean()


def floats(value: Any) -> Named:
    """Return the floating-point tensors in a value that have more than one element."""
    return {slot: t.detach() for slot, t in tensors_in(value) if t.is_floating_point() and t.numel() > 1}


def main_output(output: Any) -> Tensor:
    """Return the tensor from which a loss is computed: the logits, or the first floating-point tensor."""
    found = {slot: t for slot, t in tensors_in(output) if t.is_floating_point() and t.numel() > 1}
    named = next((t for slot, t in found.items() if slot.endswith("logits")), None)
    if named is None:
        named = next(iter(found.values()), None)
    if named is None:
        raise NotApplicableError("the model returns no floating-point tensor")
    return named


def code_of(module: nn.Module) -> str:
    """Return `file:line` of the forward of a module of the user's own, or of its class; empty for a library's."""
    kind = type(module)
    for defined in (inspect.unwrap(kind.forward), kind):
        try:
            file, line = inspect.getsourcefile(defined), inspect.getsourcelines(defined)[1]
        except (TypeError, OSError):
            continue
        if file is not None and not in_library(file):
            return f"{shortened_path(file)}:{line}"
    return ""


def user_code(model: nn.Module, path: str) -> str:
    """Return the line of the innermost module of the user's own on the way to a path."""
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):
        try:
            code = code_of(model.get_submodule(".".join(parts[:count])))
        except AttributeError:
            continue
        if code:
            return code
    return ""


@contextmanager
def cuda_states(model: nn.Module) -> Iterator[None]:
    """Restore the random states of the devices that a model is on."""
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        yield
