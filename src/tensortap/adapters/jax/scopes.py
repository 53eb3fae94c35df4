"""Outputs of the user's own name scopes: values made inside `jax.named_scope("hidden")` and used outside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax.extend import core

from tensortap.adapters.jax.operations import place_of
from tensortap.adapters.jax.tag import Mark


class NameScopes:
    """The name scopes of one traced step. `wants(path)` returns the numbers of the taps that want one of them.

    Only the forward has outputs; a value that only a backward uses is not one.
    """

    def __init__(self, wants: Callable[[str], list[int]]) -> None:
        self._wants = wants

    def of(self, jaxpr: Any, scope: str, used: frozenset[int] | None) -> dict[Any, list[Mark]]:
        """Return the variables of a function that leave a scope, each with its marks.

        `used` are the results that are used for more than a backward; None means all of them.
        """
        outer = place_of(scope)[0]
        found: dict[Any, list[Mark]] = {}
        for variable, path in _leaving(jaxpr, used):
            whole = f"{outer}.{path}" if outer else path
            found.setdefault(variable, []).extend(Mark(number, whole, "output") for number in self._wants(whole))
        return {variable: marks for variable, marks in found.items() if marks}


def used_forwards(jaxpr: Any, equation: Any, used: frozenset[int] | None) -> frozenset[int]:
    """Return the results of an equation that are used for more than a backward."""
    users = {v for e in jaxpr.eqns if not _backward(e) for v in e.invars if not isinstance(v, core.Literal)}
    users.update(_results(jaxpr, used))
    return frozenset(i for i, variable in enumerate(equation.outvars) if variable in users)


def _results(jaxpr: Any, used: frozenset[int] | None) -> list[Any]:
    chosen = [v for i, v in enumerate(jaxpr.outvars) if used is None or i in used]
    return [variable for variable in chosen if not isinstance(variable, core.Literal)]


def _backward(equation: Any) -> bool:
    return "transpose(" in str(equation.source_info.name_stack)


def _leaving(jaxpr: Any, used: frozenset[int] | None) -> Iterator[tuple[Any, str]]:
    """Return each variable that is made in a scope and used outside it, for every enclosing scope."""
    users: dict[Any, set[str]] = {variable: {""} for variable in _results(jaxpr, used)}
    forward = [(e, place_of(str(e.source_info.name_stack))[0]) for e in jaxpr.eqns if not _backward(e)]
    for equation, path in forward:
        for variable in equation.invars:
            if not isinstance(variable, core.Literal):
                users.setdefault(variable, set()).add(path)
    for equation, path in forward:
        for variable in equation.outvars:
            for above in _around(path):
                if any(not f"{user}.".startswith(f"{above}.") for user in users.get(variable, ())):
                    yield variable, above


def _around(path: str) -> Iterator[str]:
    names = path.split(".") if path else []
    return (".".join(names[:n]) for n in range(1, len(names) + 1))
