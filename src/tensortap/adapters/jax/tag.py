"""The tag: an identity operation that says which site a value belongs to. Every transformation of JAX keeps it.

A tag has marks for the value itself and marks for its cotangent. Differentiation keeps the first and turns the second
into a tag of the cotangent; `vmap` gives it the whole batch. `extract` takes tags out of a traced step. Tags that are
still there when something runs are live: they hand their value to a listener, by a callback in compiled code.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import jax
import jax.extend.core
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tensortap.types import DTYPE_CODE


class Mark(NamedTuple):
    """The number of a tap that wants a value, and the value's site."""

    tap: int
    path: str
    port: str
    slot: str = ""


class TagListener(Protocol):
    """Receive the values of live tags."""

    def receive(self, mark: Mark, value: Any) -> None:
        """Receive a value, on the host."""


LISTENERS: Final[weakref.WeakValueDictionary[int, TagListener]] = weakref.WeakValueDictionary()
tag_p: Final = Primitive("tensortap_tag")
_carry_p: Final = Primitive("tensortap_carry")


def tag(value: Any, marks: Sequence[Mark], back: Sequence[Mark] = (), *, live: bool = False) -> Any:
    """Return the tagged value; `back` are the marks of its cotangent."""
    if not marks and not back:
        return value
    return tag_p.bind(value, marks=tuple(marks), back=tuple(back) if _differentiable(value) else (), live=live)


def watchable(value: Any) -> bool:
    """Return whether a value is an array whose elements can be reduced: not random keys, not 4-bit numbers."""
    return isinstance(value, (jax.Array, np.ndarray)) and str(value.dtype) in DTYPE_CODE


def _differentiable(value: Any) -> bool:
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.inexact))


def _notify(marks: tuple[Mark, ...], value: Any) -> None:
    for mark in marks:
        listener = LISTENERS.get(mark.tap)
        if listener is not None:
            listener.receive(mark, value)


def _run(value: Any, *, marks: tuple[Mark, ...], back: tuple[Mark, ...], live: bool) -> Any:
    if live:
        _notify(marks, np.asarray(value))
    return value


def _jvp(primals: Any, tangents: Any, *, marks: tuple[Mark, ...], back: tuple[Mark, ...], live: bool) -> Any:
    (value,), (tangent,) = primals, tangents
    out = tag_p.bind(value, marks=marks, back=back, live=live)
    if back and type(tangent) is not ad.Zero:
        tangent = _carry_p.bind(tangent, back=back, live=live)
    return out, tangent


def _transpose(cotangent: Any, value: Any, *, back: tuple[Mark, ...], live: bool) -> Any:
    if type(cotangent) is ad.Zero:
        return [cotangent]
    return [tag_p.bind(cotangent, marks=back, back=(), live=live)]


def _transpose_tag(cotangent: Any, value: Any, **params: Any) -> Any:
    """Transpose a tag of a tangent, whose value has no other name: the cotangent passes."""
    return [cotangent]


def _batch(primitive: Primitive) -> Callable[..., Any]:
    def rule(values: Any, axes: Any, **params: Any) -> Any:
        return primitive.bind(jax.numpy.moveaxis(values[0], axes[0], 0), **params), 0

    return rule


def _lower(value: Any, *, marks: tuple[Mark, ...], back: tuple[Mark, ...], live: bool) -> Any:
    """Compile a live tag to a callback, any other to nothing."""
    if live and marks:
        jax.debug.callback(_callback(marks), value)
    return value


def _abstract(aval: Any, *, marks: tuple[Mark, ...], back: tuple[Mark, ...], live: bool) -> tuple[Any, Any]:
    """Give a live tag the effect of a callback, so that it is kept and can be waited for."""
    return aval, _effects() if live and marks else jax.extend.core.no_effects


@functools.cache
def _effects() -> Any:
    return jax.make_jaxpr(lambda x: jax.debug.callback(print, x))(0.0).effects


def _callback(marks: tuple[Mark, ...]) -> Callable[[Any], None]:
    return lambda value: _notify(marks, np.asarray(value))


def _define() -> None:
    tag_p.def_impl(_run)
    tag_p.def_effectful_abstract_eval(_abstract)
    ad.primitive_jvps[tag_p] = _jvp
    ad.primitive_transposes[tag_p] = _transpose_tag
    batching.primitive_batchers[tag_p] = _batch(tag_p)
    mlir.register_lowering(tag_p, mlir.lower_fun(_lower, multiple_results=False))
    _carry_p.def_impl(lambda tangent, **params: tangent)
    _carry_p.def_abstract_eval(lambda aval, **params: aval)
    ad.deflinear2(_carry_p, _transpose)
    batching.primitive_batchers[_carry_p] = _batch(_carry_p)
    mlir.register_lowering(_carry_p, lambda ctx, tangent, **params: [tangent])


_define()
