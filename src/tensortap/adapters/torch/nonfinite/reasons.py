"""Explain why an operation made a NaN or an infinity of finite inputs, where that can be known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from tensortap import text

_LOGARITHMS: Final = frozenset(("log", "log2", "log10"))
_QUOTIENTS: Final = frozenset(("div", "true_divide", "divide", "truediv", "rtruediv", "rdiv"))
_INVERSES: Final = frozenset(("reciprocal", "rsqrt"))
_EXPONENTIALS: Final = frozenset(("exp", "exp2", "expm1", "sinh", "cosh", "pow", "rpow", "square"))
_ROOTS: Final = frozenset(("sqrt", "rsqrt"))
_PRODUCTS: Final = frozenset(
    ("mul", "multiply", "rmul", "matmul", "rmatmul", "mm", "bmm", "mv", "dot", "inner", "linear")
)
_ALREADY_LARGE: Final = 4096.0  # in float16, whose square root of the limit is an ordinary activation


def operation_name(function: Callable[..., Any]) -> str:
    """Return an operation's plain name: `add_` and `__add__` are `add`."""
    return str(getattr(function, "__name__", function)).strip("_")


def why(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> str:
    """Return the reason in one sentence; empty when it is not known."""
    name = operation_name(function)
    tensors = [t for t in args if isinstance(t, Tensor) and t.is_floating_point()]
    if name in _LOGARITHMS and tensors:
        return _of_logarithm(name, tensors[0])
    if name in _QUOTIENTS:
        return _of_quotient(name, args)
    if name in _EXPONENTIALS and tensors and torch.isinf(output).any():
        return f"{name} of {text.number(float(tensors[0].max()))} exceeds the range of {_short(output.dtype)}"
    if name in _INVERSES and tensors and (tensors[0] == 0).any():
        return "division by 0" if name == "reciprocal" else "1/sqrt of 0"
    if name in _ROOTS and tensors and (tensors[0] < 0).any():
        return f"square root of a negative number (smallest input {_low(tensors[0])})"
    if name == "softmax" and any(torch.isneginf(t).all(-1).any() for t in tensors):
        return "softmax over a row of only −inf: everything is masked"
    if name in _PRODUCTS and torch.isnan(output).any() and _zero_times_infinity(function, args):
        return "0 times infinity"
    return _of_overflow(function, args, kwargs, output, name)


def _zero_times_infinity(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether a zero met an infinity, by the product of ones at the zeros of one and infinities of the other."""
    if len(args) < 2 or any(isinstance(value, Tensor) and value.is_complex() for value in args[:2]):
        return False
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in args[:2])
    with torch.no_grad():
        met = [function(*((x == 0).double(), torch.isinf(y).double())[::way]) for x, y, way in ((a, b, 1), (b, a, -1))]
    return any(bool(terms.any()) for terms in met)


def _of_logarithm(name: str, given: Tensor) -> str:
    if (given < 0).any():
        return f"{name} of a negative number (smallest input {_low(given)})"
    return f"{name} of 0" if (given == 0).any() else ""


def _of_quotient(name: str, args: Sequence[Any]) -> str:
    if len(args) < 2:
        return ""
    above, below = (args[1], args[0]) if name.startswith("r") else (args[0], args[1])
    zero = torch.as_tensor(below) == 0
    if not zero.any():
        return ""
    both = zero & (torch.as_tensor(above) == 0)
    return "0 divided by 0" if both.any() else "division by 0"


def _of_overflow(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], output: Tensor, name: str
) -> str:
    """Compute the operation in float64: if the result is finite, the dtype was too narrow."""
    if not output.is_floating_point() or output.dtype is torch.float64:
        return f"{name} overflows {_short(output.dtype)}" if torch.isinf(output).any() else ""
    try:
        with torch.no_grad():
            wide = function(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})
    except (RuntimeError, TypeError, ValueError):
        return ""
    largest = float(wide.abs().max()) if isinstance(wide, Tensor) and wide.numel() else float("nan")
    limit = torch.finfo(output.dtype).max
    if largest == float("inf"):
        return f"overflow in {_short(output.dtype)}, and in float64 too"
    if largest > limit:
        value = f"the value {text.number(largest)} exceeds {text.number(limit)}"
        return f"overflow in {_short(output.dtype)}: {value}{_upstream([*args, *kwargs.values()], limit)}"
    return ""


def _upstream(given: Sequence[Any], limit: float) -> str:
    """Say that the fault is earlier, where the inputs were already too large to be multiplied with each other."""
    tensors = [t for t in given if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    largest = max((float(t.abs().max()) for t in tensors), default=0.0)
    if largest < max(limit**0.5, _ALREADY_LARGE):
        return ""
    return f"; what it was given was already as large as {text.number(largest)}: look upstream"


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _low(tensor: Tensor) -> str:
    return text.number(float(tensor[torch.isfinite(tensor)].min()))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
