"""The layers of a NumPy-style object: callables in attributes, lists, dicts and tuples, under every name they have."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np

from tensortap.adapters.numpy.function_wrapper import FunctionWrapper
from tensortap.adapters.numpy.method_sites import public_methods
from tensortap.adapters.numpy.references import AttributeReference, ItemReference, Reference, TupleItemReference

# The methods that call a layer. Of calls within calls on one object (`__call__` → `forward`) the outermost counts.
CALL_METHODS: Final = (
    "__call__", "forward", "predict", "predict_proba", "predict_log_proba", "decision_function", "score_samples",
    "transform", "fit_transform", "inverse_transform", "feedforward", "feed_forward", "forward_pass",
    "forward_propagation",
)  # fmt: skip
# Methods that may call layers and are a step of the root, but return no array of their own.
STEP_METHODS: Final = ("fit", "partial_fit", "fit_predict", "score")
_DEPTH: Final = 12
_IMMUTABLE, _HEAP = 1 << 8, 1 << 9  # flags of CPython's types
_MANY: Final = 4096  # entries: a longer list or dict holds data, not layers
_PLAIN: Final = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, ModuleType, np.generic, np.dtype, weakref.ref
)  # fmt: skip
# Whose objects are data, though some have methods that are called like a layer's (`DataFrame.transform`).
_DATA: Final = frozenset(("pandas", "polars", "pyarrow", "scipy", "xarray", "h5py", "PIL", "matplotlib", "tensortap"))
_LEARN: Final = frozenset(("sklearn",))
# What a perceptron keeps from fitting: averages of gradients, and copies of its weights.
_OF_FITTING: Final = frozenset(("_optimizer", "_best_coefs", "_best_intercepts"))
# Attributes that scikit-learn fills with copies of an estimator when it fits. The estimator itself never runs then.
_MADE_FROM: Final = {
    "estimator": ("estimators_", "best_estimator_", "calibrated_classifiers_"), "estimator_": ("estimators_",),
    "scorer_": ("best_estimator_",),
}  # fmt: skip
# Whose objects are models of their own, with or without an adapter.
FOREIGN: Final = frozenset(
    (
        "torch",
        "keras",
        "tensorflow",
        "jax",
        "jaxlib",
        "flax",
        "equinox",
        "haiku",
        "onnx",
        "onnxruntime",
        "mlx",
        "paddle",
    )
)


class NumpyMember(NamedTuple):
    """A layer, a function or an array under one of its names."""

    path: str
    value: Any
    holder: Reference | None = None
    leaf: bool = True


class NumpyMembers(NamedTuple):
    """The layers, functions and arrays of an object, in order of definition."""

    layers: list[NumpyMember]
    functions: list[NumpyMember]
    arrays: list[NumpyMember]
    foreign: list[str]
    methods: list[str]  # of an object that holds no layers: its public methods, which are its layers
    other_methods: list[str]  # of one that does


def layers_of(root: Any) -> NumpyMembers:
    """Return the layers, functions and arrays of an object.

    >>> net = SimpleNamespace(weight=np.ones(2), steps=[np.tanh, {"scale": lambda x: 2 * x}])
    >>> [found.path for found in layers_of(net).functions]
    ['steps.0', 'steps.1.scale']
    """
    found = NumpyMembers([], [], [], [], [], [])
    _visit(found, "", root, None, ())
    if (
        (found.arrays or found.layers)
        and is_patchable(type(root))
        and not _comes_from(type(root), FOREIGN | _DATA | _LEARN)
    ):
        alone = not found.functions and all(layer.value is root for layer in found.layers)
        (found.methods if alone else found.other_methods).extend(_public_methods(root))
    return found


def _public_methods(root: Any) -> list[str]:
    calls = {*CALL_METHODS, *STEP_METHODS, *getattr(root, "__dict__", {})}
    names = public_methods(type(root), lambda cls: is_patchable(cls) and _has_own_attributes(cls))
    return [name for name in names if name not in calls]


def has_layers(value: Any) -> bool:
    """Return whether an object can be watched at all. A function or a class alone cannot."""
    if isinstance(value, (*_PLAIN, np.ndarray)) or is_function(value):
        return False
    found = layers_of(value)
    return bool(found.layers or found.functions or found.methods)


def methods_of(value: Any) -> list[str]:
    """Return the methods by which a layer is called."""
    return [name for name in (*CALL_METHODS, *STEP_METHODS) if _definer(type(value), name) is not None]


def is_layer(value: Any) -> bool:
    """Return whether an object has a call method that can be observed through its class."""
    cls = type(value)
    return is_patchable(cls) and any(_definer(cls, name) is not None for name in CALL_METHODS)


def is_function(value: Any) -> bool:
    """Return whether a value is callable but not a layer: a function, a ufunc, a partial, a bound method."""
    return callable(value) and not isinstance(value, type) and not is_patchable(type(value))


def is_patchable(cls: type) -> bool:
    """Return whether attributes of a class can be set: not those of classes made in C."""
    return bool(cls.__flags__ & _HEAP) and not cls.__flags__ & _IMMUTABLE


def _definer(cls: type, name: str) -> type | None:
    """Return the class that defines a method, if it can be replaced there."""
    for base in cls.__mro__:
        if name in vars(base):
            return base if is_patchable(base) and vars(base)[name] is not None else None
    return None


def definer_of(value: Any, name: str) -> type:
    """Return the class that defines a layer's method."""
    found = _definer(type(value), name)
    assert found is not None
    return found


def _visit(found: NumpyMembers, path: str, value: Any, holder: Reference | None, above: tuple[int, ...]) -> bool:
    """Note a value and its members; return whether it is, or contains, anything callable."""
    if isinstance(value, FunctionWrapper):
        value = value.original
    if id(value) in above or len(above) > _DEPTH or isinstance(value, _PLAIN) or _comes_from(type(value), _DATA):
        return False
    if isinstance(value, np.ndarray):
        if path and value.dtype.kind in "fcV":
            found.arrays.append(NumpyMember(path, value, holder))
        return False
    if _comes_from(type(value), FOREIGN):
        found.foreign.append(path)
        return False
    if path and is_function(value):
        found.functions.append(NumpyMember(path, value, holder))
        return True
    return _visit_inside(found, path, value, holder, above)


def _visit_inside(found: NumpyMembers, path: str, value: Any, holder: Reference | None, above: tuple[int, ...]) -> bool:
    layer = is_layer(value)
    at = len(found.layers)
    inside = [
        _visit(found, _joined(path, name), item, place, (*above, id(value)))
        for name, item, place in _parts(value, holder)
    ]
    if layer:  # a parent comes before its parts
        found.layers.insert(at, NumpyMember(path, value, holder, leaf=not any(inside)))
    return layer or any(inside)


def _parts(value: Any, holder: Reference | None) -> Iterator[tuple[str, Any, Reference]]:
    """Return the direct members of a value: name, value, and a reference to the place."""
    if isinstance(value, (dict, list, tuple)) and len(value) > _MANY:
        return
    if isinstance(value, dict):
        for key in list(value):
            yield str(key), value[key], ItemReference(value, key)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield str(i), item, ItemReference(value, i)
    elif isinstance(value, tuple) and holder is not None:
        for i, item in enumerate(value):
            yield getattr(value, "_fields", range(len(value)))[i], item, TupleItemReference(holder, i)  # type: ignore[misc]
    if _has_own_attributes(type(value)):
        for name in _attributes(value):
            place = AttributeReference(value, name)
            yield from _named(name, place.get(), place)


def _named(name: str, value: Any, place: AttributeReference) -> Iterator[tuple[str, Any, Reference]]:
    """Return an attribute; the (name, layer) pairs of scikit-learn's pipelines and unions by their own names."""
    if isinstance(value, list) and value and all(_is_pair(item) for item in value):
        for i, item in enumerate(value):
            yield item[0], item[1], TupleItemReference(ItemReference(value, i), 1)
    else:
        yield name, value, place


def _is_pair(item: Any) -> bool:
    named = isinstance(item, tuple) and len(item) >= 2 and isinstance(item[0], str)
    return named and (item[1] in ("drop", "passthrough") if isinstance(item[1], str) else is_layer(item[1]))


def _has_own_attributes(cls: type) -> bool:
    """Return whether to look at an object's attributes: not at those of the standard library and of NumPy."""
    module = cls.__module__.partition(".")[0]
    ours = module == "__main__" or cls is SimpleNamespace
    return ours or (module not in sys.stdlib_module_names and module != "numpy")


def _attributes(value: Any) -> list[str]:
    names = [name for cls in reversed(type(value).__mro__) for name in _slots(cls) if hasattr(value, name)]
    names += getattr(value, "__dict__", {})
    if not _comes_from(type(value), _LEARN):
        return names
    names = [name for name in names if name not in _OF_FITTING]
    return [name for name in names if not any(made in names for made in (f"{name}_", *_MADE_FROM.get(name, ())))]


def _slots(cls: type) -> list[str]:
    own = vars(cls).get("__slots__", ())
    return [name for name in ([own] if isinstance(own, str) else own) if name not in ("__dict__", "__weakref__")]


def _comes_from(cls: type, modules: frozenset[str]) -> bool:
    return any(base.__module__.partition(".")[0] in modules for base in cls.__mro__)


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
