"""Takes the tagged values out of a traced step: the same operations, with what was marked as further results.

The step has been traced as a whole, its gradients included, so nobody differentiates what comes out here: looking into
functions with derivatives of their own cannot make a gradient wrong. What has no rule runs as it is, unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core, source_info_util

from tensortap.adapters.jax.jaxprs import bind_params, marks, parts, scoped, tagged
from tensortap.adapters.jax.operations import Operations
from tensortap.adapters.jax.scopes import Scopes, used_forwards
from tensortap.adapters.jax.tag import Mark, tag_p, watchable
from tensortap.select.ports import FORWARD_PORTS


class Item(NamedTuple):
    """One tagged place, as it leaves the step: its arrays have a leading axis for every loop around it."""

    marks: tuple[Mark, ...]
    kind: str  # how its value was exported
    shape: tuple[int, ...]
    dtype: str
    recomputed: bool = False
    loops: int = 0
    arrays: int = 1  # how many it has
    flagged: bool = False  # the last array says which of its entries have come to be
    operation: str = ""


class Export(NamedTuple):
    """A value as it shall leave: the kind of export, and its arrays."""

    kind: str
    arrays: tuple[Any, ...]


Rule = Callable[["Harvester", Any, list[Any]], tuple[Sequence[Any], "Yield"]]


@dataclass(frozen=True)
class Harvester:
    """Evaluates a traced step. `export` says how a value leaves; `operations` which operations are wanted."""

    export: Callable[[Any, tuple[Mark, ...], bool], Export]
    rules: Mapping[str, Rule]
    operations: Operations | None = None
    scopes: Scopes | None = None
    opaque: dict[str, str] = field(default_factory=dict)  # paths that were tagged and cannot be seen, with the reason
    scope: str = ""
    used: frozenset[int] | None = None
    inside: frozenset[int] | None = None
    recomputing: bool = False
    looping: bool = False

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], Yield]:
        """The results, and what was marked on the way."""
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        seen = Yield()
        leaving = self.scopes.of(jaxpr, self.scope, self.used) if self.scopes is not None else {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            gives = self._within(jaxpr, equation)._equation(equation, given, seen)
            values.update(zip(equation.outvars, gives, strict=True))
            for variable in equation.outvars if leaving else ():
                if variable in leaving and watchable(values[variable]):
                    self._take(seen, values[variable], tuple(leaving[variable]))
        return [read(atom) for atom in jaxpr.outvars], seen

    def _within(self, jaxpr: Any, equation: Any) -> Harvester:
        """For scopes, which of an equation's results the forward uses."""
        if self.scopes is None or not parts(equation):
            return self
        return replace(self, inside=used_forwards(jaxpr, equation, self.used))

    def _equation(self, equation: Any, given: list[Any], seen: Yield) -> Sequence[Any]:
        if equation.primitive is tag_p:
            self._take(seen, given[0], equation.params["marks"])
            return given
        rule = self.rules.get(equation.primitive.name)
        if self._holds(equation):
            if rule is not None:
                inner = replace(self, scope=f"{self.scope}/{equation.source_info.name_stack}", used=self.inside)
                gives, found = rule(inner, equation, given)
                seen.extend(found)
                return gives
            self.cannot(equation)
        with source_info_util.user_context(None, name_stack=equation.source_info.name_stack), equation.ctx.manager:
            functions, params = bind_params(equation)
            gives = equation.primitive.bind(*functions, *given, **params)
        gives = gives if equation.primitive.multiple_results else [gives]
        if self.operations is not None:
            for value, mark, operation in self.operations.of(equation, self.scope, given, gives):
                self._take(seen, value, (mark,), operation)
        return gives

    def _take(self, seen: Yield, value: Any, marks: tuple[Mark, ...], operation: str = "") -> None:
        """One value; a tag of a recomputed forward is told from the first."""
        if not marks:
            return
        kind, arrays = self.export(value, marks, self.looping)
        again = self.recomputing and marks[0].port in FORWARD_PORTS
        shape, dtype = tuple(value.shape), str(value.dtype)
        seen.add(Item(marks, kind, shape, dtype, again, arrays=len(arrays), operation=operation), arrays)

    def _holds(self, equation: Any) -> bool:
        """Whether anything inside an equation is wanted."""
        return any(map(self._plan, parts(equation)))

    def _plan(self, jaxpr: Any) -> bool:
        if self.operations is not None and jaxpr.eqns:
            return True
        return tagged(jaxpr) or (self.scopes is not None and scoped(jaxpr))

    def cannot(self, equation: Any) -> None:
        """Note what an equation hides."""
        for jaxpr in parts(equation):
            for mark in marks(jaxpr):
                self.opaque.setdefault(f"{mark.path}:{mark.port}", f"runs inside {equation.primitive.name}")


class Yield:
    """What was found so far: items, and their arrays one after the other."""

    def __init__(self, items: Sequence[Item] = (), arrays: Sequence[Any] = ()) -> None:
        self.items = list(items)
        self.arrays = list(arrays)

    def add(self, item: Item, arrays: Sequence[Any]) -> None:
        """One more."""
        self.items.append(item)
        self.arrays.extend(arrays)

    def extend(self, other: Yield) -> None:
        """All of another."""
        self.items.extend(other.items)
        self.arrays.extend(other.arrays)

    def looped(self, arrays: Sequence[Any]) -> Yield:
        """The same items, each of whose arrays has one leading axis more."""
        return Yield([item._replace(loops=item.loops + 1) for item in self.items], arrays)

    def flags(self) -> Yield:
        """The same with a flag for every item: it has come to be."""
        done, at = Yield(), 0
        for item in self.items:
            arrays = self.arrays[at : at + item.arrays]
            at += item.arrays
            if item.flagged:
                done.add(item, arrays)
            else:
                flags = jnp.ones(arrays[0].shape[: item.loops], bool)
                done.add(item._replace(flagged=True, arrays=len(arrays) + 1), [*arrays, flags])
        return done
