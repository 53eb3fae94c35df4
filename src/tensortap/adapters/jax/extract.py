"""Extract the tagged values from a traced step: run the same operations and return the tagged values as well.

The step has been traced as a whole, its gradients included, so the result here is never differentiated: looking into
functions with custom derivatives cannot make a gradient wrong. An equation without a rule runs unchanged, and nothing
in it is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core, source_info_util

from tensortap.adapters.jax.jaxprs import bind_params, has_scopes, has_tags, inner_jaxprs, marks_in
from tensortap.adapters.jax.operations import JaxOperations
from tensortap.adapters.jax.scopes import NameScopes, used_forwards
from tensortap.adapters.jax.tag import Mark, tag_p, watchable
from tensortap.select.ports import FORWARD_PORTS


class ExtractedValue(NamedTuple):
    """One tagged value as it leaves the step: its arrays have a leading axis for every loop around it."""

    marks: tuple[Mark, ...]
    kind: str  # how its value was exported
    shape: tuple[int, ...]
    dtype: str
    recomputed: bool = False
    loops: int = 0
    arrays: int = 1  # how many it has
    flagged: bool = False  # the last array says which of its entries were computed
    operation: str = ""


class ExportedArrays(NamedTuple):
    """A value as it leaves the step: the kind of export, and its arrays."""

    kind: str
    arrays: tuple[Any, ...]


Rule = Callable[["TagExtractor", Any, list[Any]], tuple[Sequence[Any], "Extracted"]]


@dataclass(frozen=True)
class TagExtractor:
    """Evaluate a traced step. `export` says how a value leaves it; `operations` which operations are wanted."""

    export: Callable[[Any, tuple[Mark, ...], bool], ExportedArrays]
    rules: Mapping[str, Rule]
    operations: JaxOperations | None = None
    scopes: NameScopes | None = None
    opaque: dict[str, str] = field(default_factory=dict)  # paths that were tagged and cannot be seen, with the reason
    scope: str = ""
    used: frozenset[int] | None = None
    inside: frozenset[int] | None = None
    recomputing: bool = False
    looping: bool = False

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], Extracted]:
        """Return the results, and the values that were tagged."""
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        seen = Extracted()
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

    def _within(self, jaxpr: Any, equation: Any) -> TagExtractor:
        """Find which results of an equation the forward pass uses; name scopes need it."""
        if self.scopes is None or not inner_jaxprs(equation):
            return self
        return replace(self, inside=used_forwards(jaxpr, equation, self.used))

    def _equation(self, equation: Any, given: list[Any], seen: Extracted) -> Sequence[Any]:
        if equation.primitive is tag_p:
            self._take(seen, given[0], equation.params["marks"])
            return given
        rule = self.rules.get(equation.primitive.name)
        if self._has_wanted(equation):
            if rule is not None:
                inner = replace(self, scope=f"{self.scope}/{equation.source_info.name_stack}", used=self.inside)
                gives, found = rule(inner, equation, given)
                seen.extend(found)
                return gives
            self.note_hidden(equation)
        with source_info_util.user_context(None, name_stack=equation.source_info.name_stack), equation.ctx.manager:
            functions, params = bind_params(equation)
            gives = equation.primitive.bind(*functions, *given, **params)
        gives = gives if equation.primitive.multiple_results else [gives]
        if self.operations is not None:
            for value, mark, operation in self.operations.of(equation, self.scope, given, gives):
                self._take(seen, value, (mark,), operation)
        return gives

    def _take(self, seen: Extracted, value: Any, marks: tuple[Mark, ...], operation: str = "") -> None:
        """Add one value. A tag in a recomputed forward is told from the first one."""
        if not marks:
            return
        kind, arrays = self.export(value, marks, self.looping)
        again = self.recomputing and marks[0].port in FORWARD_PORTS
        shape, dtype = tuple(value.shape), str(value.dtype)
        seen.add(ExtractedValue(marks, kind, shape, dtype, again, arrays=len(arrays), operation=operation), arrays)

    def _has_wanted(self, equation: Any) -> bool:
        """Return whether a probe wants anything inside an equation."""
        return any(map(self._is_wanted, inner_jaxprs(equation)))

    def _is_wanted(self, jaxpr: Any) -> bool:
        if self.operations is not None and jaxpr.eqns:
            return True
        return has_tags(jaxpr) or (self.scopes is not None and has_scopes(jaxpr))

    def note_hidden(self, equation: Any) -> None:
        """Note the tagged values that an equation without a rule hides."""
        for jaxpr in inner_jaxprs(equation):
            for mark in marks_in(jaxpr):
                self.opaque.setdefault(f"{mark.path}:{mark.port}", f"runs inside {equation.primitive.name}")


class Extracted:
    """The values extracted so far, and their arrays one after the other."""

    def __init__(self, values: Sequence[ExtractedValue] = (), arrays: Sequence[Any] = ()) -> None:
        self.values = list(values)
        self.arrays = list(arrays)

    def add(self, item: ExtractedValue, arrays: Sequence[Any]) -> None:
        """Add one value."""
        self.values.append(item)
        self.arrays.extend(arrays)

    def extend(self, other: Extracted) -> None:
        """Add all values of another."""
        self.values.extend(other.values)
        self.arrays.extend(other.arrays)

    def looped(self, arrays: Sequence[Any]) -> Extracted:
        """Return the same values; every array has one more leading axis."""
        return Extracted([item._replace(loops=item.loops + 1) for item in self.values], arrays)

    def with_flags(self) -> Extracted:
        """Return the same values, each with a flag that says whether it was computed."""
        done, at = Extracted(), 0
        for item in self.values:
            arrays = self.arrays[at : at + item.arrays]
            at += item.arrays
            if item.flagged:
                done.add(item, arrays)
            else:
                flags = jnp.ones(arrays[0].shape[: item.loops], bool)
                done.add(item._replace(flagged=True, arrays=len(arrays) + 1), [*arrays, flags])
        return done
