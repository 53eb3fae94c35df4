"""Find the tensors inside what a module takes or returns, each with a host_buffer slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from tensortap.adapters.nested import arguments_by, arguments_in, values_in


def tensors_in(value: Any, slot: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in tuples, lists, dicts, named tuples and dataclasses.

    >>> import torch
    >>> [slot for slot, _ in tensors_in((torch.ones(1), {"hidden": [torch.ones(2)]}))]
    ['[0]', '[1].hidden[0]']
    """
    return values_in(value, Tensor, slot)


def inputs_in(forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the tensors a module was called with."""
    return arguments_in(forward, args, kwargs, Tensor)


def inputs_by(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the same where the parameter names are known."""
    return arguments_by(names, args, kwargs, Tensor)
