"""Run a user's model for a quick look: one step on a copy of the batch; afterwards the model is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from tensortap.adapters.batches import copied
from tensortap.adapters.nested import call_with
from tensortap.adapters.rng import preserve_rng_state
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.snapshot import ModelSnapshot
from tensortap.errors import UnsupportedError

_FREED: Final = "backward through the graph a second time"


def copied_batch(batch: Any) -> Any:
    """Return a copy of a batch, for a model that may work in place."""
    return copied(batch, _copy_tensor)


def as_step(model: nn.Module, batch: Any) -> Callable[[], Any]:
    """Return the user's own function of a step, or one that calls the model and differentiates what it returns."""
    if callable(batch) and not isinstance(batch, (nn.Module, Tensor)):
        return batch  # type: ignore[no-any-return]
    return lambda: _step(model, batch)


def _step(model: nn.Module, batch: Any) -> Any:
    output = call_with(model, copied_batch(batch))
    parts = [t.float().mean() for _, t in tensors_in(output) if t.requires_grad and not t.is_complex()]
    if parts:
        try:
            torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if _FREED in str(error) and (names := _graphs_kept(model)):
                raise UnsupportedError(_KEPT_GRAPH.format(names[0], names[0].rpartition(".")[2])) from error
            raise
    return output


_KEPT_GRAPH: Final = (
    "the model keeps the graph of an earlier step in {0!r}, and backward cannot go through it again: detach it where "
    "it is kept, self.{1} = self.{1}.detach(), or give verify a function that runs a step from the beginning"
)


def _graphs_kept(model: nn.Module) -> list[str]:
    """Return the attributes that hold tensors with a graph."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and any(t.grad_fn is not None for _, t in tensors_in(value))
    ]


def _copy_tensor(value: Any) -> Any:
    """Return a copy that is a leaf: backward neither reaches the user's graph nor adds to the user's gradients."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.copy() if isinstance(value, np.ndarray) else value if isinstance(value, nn.Module) else None


@contextmanager
def preserved(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yield a function that puts a model, its gradients, modes and random states back; call it at the end."""
    snapshot = ModelSnapshot(model)
    seed, restore_rng_state = torch.get_rng_state(), preserve_rng_state()

    def restore() -> None:
        try:
            snapshot.restore()
        finally:
            torch.set_rng_state(seed)
            restore_rng_state()

    try:
        yield restore
    except BaseException:
        with suppress(Exception):  # the user's error is the one to see
            restore()
        raise
    restore()
