"""Small questions about traced functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from tensortap.adapters.jax.tag import Mark, tag_p


def bind_params(equation: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """The functions and parameters with which an equation is bound again."""
    found = equation.primitive.get_bind_params(equation.params)
    return found if isinstance(found, tuple) else ((), found)


def parts_closed(equation: Any) -> list[Any]:
    """The functions inside an equation, with their constants."""
    found = []
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                found.append(part)
            elif isinstance(part, core.Jaxpr):
                found.append(core.ClosedJaxpr(part, ()))
    return found


def parts(equation: Any) -> list[Any]:
    """The functions inside an equation."""
    return [closed.jaxpr for closed in parts_closed(equation)]


@functools.lru_cache(maxsize=512)
def tagged(jaxpr: Any) -> bool:
    """Whether anything inside a function is tagged."""
    return any(e.primitive is tag_p or any(map(tagged, parts(e))) for e in jaxpr.eqns)


@functools.lru_cache(maxsize=512)
def scoped(jaxpr: Any) -> bool:
    """Whether anything inside a function has a name scope of its own."""
    return any(str(e.source_info.name_stack) or any(map(scoped, parts(e))) for e in jaxpr.eqns)


def marks(jaxpr: Any) -> list[Mark]:
    """The marks inside a function."""
    own = [mark for e in jaxpr.eqns if e.primitive is tag_p for mark in e.params["marks"]]
    return own + [mark for e in jaxpr.eqns for part in parts(e) for mark in marks(part)]


def without_consts(closed: Any) -> Any:
    """With its constants as arguments, the first ones."""
    jaxpr = closed.jaxpr
    if not jaxpr.constvars:
        return jaxpr
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=debug_info(jaxpr, len(invars)))


def debug_info(jaxpr: Any, arguments: int | None = None) -> Any:
    """Names for an error message: those of arguments and results no longer fit."""
    count = len(jaxpr.invars) if arguments is None else arguments
    return jaxpr.debug_info._replace(arg_names=("",) * count, result_paths=None)


@functools.cache
def unspecified() -> Any:
    """JAX's word for a sharding that nobody has chosen."""
    traced = jax.make_jaxpr(jax.jit(lambda x: x))(0.0)
    return traced.jaxpr.eqns[0].params["out_shardings"][0]
