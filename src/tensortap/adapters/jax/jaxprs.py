"""Helpers for traced functions (jaxprs)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from tensortap.adapters.jax.tag import Mark, tag_p


def bind_params(equation: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the functions and parameters with which an equation is bound again."""
    found = equation.primitive.get_bind_params(equation.params)
    return found if isinstance(found, tuple) else ((), found)


def inner_closed_jaxprs(equation: Any) -> list[Any]:
    """Return the functions inside an equation, with their constants."""
    found = []
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                found.append(part)
            elif isinstance(part, core.Jaxpr):
                found.append(core.ClosedJaxpr(part, ()))
    return found


def inner_jaxprs(equation: Any) -> list[Any]:
    """Return the functions inside an equation."""
    return [closed.jaxpr for closed in inner_closed_jaxprs(equation)]


@functools.lru_cache(maxsize=512)
def has_tags(jaxpr: Any) -> bool:
    """Return whether anything inside a function is tagged."""
    return any(e.primitive is tag_p or any(map(has_tags, inner_jaxprs(e))) for e in jaxpr.eqns)


@functools.lru_cache(maxsize=512)
def has_scopes(jaxpr: Any) -> bool:
    """Return whether anything inside a function has a name scope of its own."""
    return any(str(e.source_info.name_stack) or any(map(has_scopes, inner_jaxprs(e))) for e in jaxpr.eqns)


def marks_in(jaxpr: Any) -> list[Mark]:
    """Return the marks inside a function."""
    own = [mark for e in jaxpr.eqns if e.primitive is tag_p for mark in e.params["marks"]]
    return own + [mark for e in jaxpr.eqns for part in inner_jaxprs(e) for mark in marks_in(part)]


def without_consts(closed: Any) -> Any:
    """Return a function whose constants are its first arguments."""
    jaxpr = closed.jaxpr
    if not jaxpr.constvars:
        return jaxpr
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=debug_info(jaxpr, len(invars)))


def debug_info(jaxpr: Any, arguments: int | None = None) -> Any:
    """Return names for error messages: those of arguments and results no longer fit."""
    count = len(jaxpr.invars) if arguments is None else arguments
    return jaxpr.debug_info._replace(arg_names=("",) * count, result_paths=None)


@functools.cache
def unspecified() -> Any:
    """Return JAX's value for an unspecified sharding."""
    traced = jax.make_jaxpr(jax.jit(lambda x: x))(0.0)
    return traced.jaxpr.eqns[0].params["out_shardings"][0]
