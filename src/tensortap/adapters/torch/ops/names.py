"""Name operations, and tell which of the functions that a mode intercepts are operations.

An operation has the name of its function: `torch.matmul`, `Tensor.matmul` and `@` are `matmul`, `F.softmax` is
`softmax`, `add_` stays `add_`, `torch.linalg.norm` is `linalg_norm`. A function that returns no tensor, such as reading
an attribute or a shape, is not an operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import get_overridable_functions

from tensortap.adapters.torch.modules.hidden import HiddenEntry

# Python operators by the operation that they perform; those with a leading `i` work in place.
_OPERATORS: Final = {
    "truediv": "div", "div": "div", "floordiv": "floor_divide", "mod": "remainder", "matmul": "matmul", "pow": "pow",
    "add": "add", "sub": "sub", "mul": "mul",
}  # fmt: skip
# The dispatcher's names of operations whose Python function has another name.
_INTERNAL: Final = {"safe_softmax": "softmax", "native_dropout": "dropout", "native_layer_norm": "layer_norm"}
_ATTENTION: Final = "scaled_dot_product_"
# Python functions without a schema that would say that they return no tensor.
_NO_TENSOR: Final = frozenset((
    "get", "set", "delete", "backward", "grad", "register_hook", "register_post_accumulate_grad_hook",
    "retain_grad", "requires_grad_", "data_ptr", "numpy", "tolist", "item", "len", "bool", "int", "float", "index",
    "complex", "repr", "format", "hash", "str", "contains", "reversed", "iter", "array", "dir", "setstate",
    "reduce_ex", "reduce", "deepcopy", "dlpack", "dlpack_device", "storage", "untyped_storage", "typed_storage",
    "storage_offset", "storage_type", "element_size", "nbytes", "ndimension", "is_shared", "share_memory_", "type",
    "names", "rename_", "refine_names", "is_same_size", "cuda_array_interface", "get_device", "broadcast_shapes",
    "is_nonzero", "allclose", "equal", "result_type", "can_cast", "setitem",
))  # fmt: skip


# The operations that PyTorch's own modules do in their forward, besides their children, where these are few and fixed.
_OPERATIONS_OF: Final[dict[type[nn.Module], tuple[str, ...]]] = {
    nn.ReLU: ("relu", "relu_"), nn.GELU: ("gelu",), nn.SiLU: ("silu", "silu_"), nn.Sigmoid: ("sigmoid",),
    nn.Tanh: ("tanh",), nn.LeakyReLU: ("leaky_relu", "leaky_relu_"), nn.ELU: ("elu", "elu_"), nn.Identity: (),
    nn.Softmax: ("softmax",), nn.LogSoftmax: ("log_softmax",), nn.Dropout: ("dropout", "dropout_"),
    nn.LayerNorm: ("layer_norm",), nn.RMSNorm: ("rms_norm",), nn.GroupNorm: ("group_norm",),
    nn.BatchNorm1d: ("batch_norm", "add_"), nn.BatchNorm2d: ("batch_norm", "add_"), nn.Embedding: ("embedding",),
    nn.MaxPool2d: ("max_pool2d", "max_pool2d_with_indices"), nn.AvgPool2d: ("avg_pool2d",), nn.Flatten: ("flatten",),
    nn.AdaptiveAvgPool2d: ("adaptive_avg_pool2d",), nn.Sequential: (),
}  # fmt: skip


def operations_of(module: nn.Module) -> tuple[str, ...] | None:
    """Return all operations that a call of the module does, where that is known; None where it is not."""
    if "forward" in vars(module) or any(not isinstance(hook, HiddenEntry) for hook in _hooks(module)):
        return None
    return _OPERATIONS_OF.get(type(module))


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def op_name(function: Callable[..., Any]) -> str:
    """Return the name of the operation that a PyTorch function performs.

    >>> [op_name(f) for f in (torch.matmul, torch.Tensor.__rsub__, torch.Tensor.add_, torch.ops.aten._softmax.default)]
    ['matmul', 'sub', 'add_', 'softmax']
    """
    return _named(str(getattr(function, "__name__", "")))


def _named(text: str) -> str:
    text = text.partition(".")[0]  # of an overload: `mm.default`
    plain = text.strip("_")
    if text.startswith("__"):
        return _operator(plain)
    if plain.startswith(_ATTENTION):
        return f"{_ATTENTION}attention"
    name = text.lstrip("_")
    return _INTERNAL.get(name, name)


def _operator(plain: str) -> str:
    if plain[:1] == "r" and plain[1:] in _OPERATORS:
        return _OPERATORS[plain[1:]]
    if plain[:1] == "i" and plain[1:] in _OPERATORS:
        return f"{_OPERATORS[plain[1:]]}_"
    return _OPERATORS.get(plain, plain)


@cache
def returns_no_tensor(name: str) -> bool:
    """Return whether a function of this name returns no tensor, so that there is nothing to record."""
    if not name or name in _NO_TENSOR or name.startswith(("is_", "sym_")):
        return True
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return bool(schemas) and not any("Tensor" in str(r.type) for schema in schemas for r in schema.returns)


def known_operations() -> frozenset[str]:
    """Return the names of all functions that a mode can intercept, and of all registered operators."""
    registered = frozenset(_named(text.rpartition("::")[2]) for text in torch._C._dispatch_get_all_op_names())
    return (registered | _overridable()) - _NO_TENSOR - {""}


@cache
def _overridable() -> frozenset[str]:
    return frozenset(op_name(function) for group in get_overridable_functions().values() for function in group)
