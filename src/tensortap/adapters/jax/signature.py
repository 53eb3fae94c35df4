"""Flatten the arguments and results of a step for `jax.jit`: arrays, static values, donated arrays.

Static and donated arguments are those of the user's own `jax.jit`. Objects of NNX are split into definition and state;
the step may change the state, and the objects are updated afterwards, as `nnx.jit` does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from tensortap.adapters.jax import layer_names
from tensortap.errors import TensortapError

_DYNAMIC: Final = (jax.Array, np.ndarray, np.generic, int, float, complex)


class _Static(NamedTuple):
    """An argument that is part of the program."""

    value: Any


class _LeafSource(NamedTuple):
    """Where a leaf of the arguments comes from: `donated`, `kept`, `static` or `object`, and its number there."""

    source: str
    number: int


class Signature:
    """How a function takes its arguments."""

    def __init__(
        self,
        function: Any,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        donate_argnums: int | Sequence[int] = (),
    ) -> None:
        own = _own(function)
        self._static = {*_many(static_argnums), *_many(static_argnames), *own["static"]}
        self._donated = {*_many(donate_argnums), *own["donated"]}
        self._compiled = own["compiled"]
        self._numbers: tuple[type, ...] = (int, float, complex) if own["numbers"] else ()  # those that are traced

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CallLayout, list[Any], list[Any]]:
        """Return the layout, the arrays that are donated, and the others."""
        named = [*enumerate(args), *kwargs.items()]
        values = [_Static(value) if key in self._static else value for key, value in named]
        slots: list[_LeafSource] = []
        sources: dict[str, list[Any]] = {"donated": [], "kept": [], "static": [], "object": []}
        structures = []
        for (key, _), value in zip(named, values, strict=True):
            leaves, structure = jax.tree.flatten(value, is_leaf=_whole)
            structures.append(structure)
            for leaf in leaves:
                source = self._source(leaf, key in self._donated)
                slots.append(_LeafSource(source, len(sources[source])))
                sources[source].append(leaf)
        objects = tuple(sources["object"])
        definition, state = _split(objects)
        sources["kept"].append(state)
        layout = CallLayout(
            tuple(slots), tuple(structures), tuple(kwargs), tuple(sources["static"]), definition, objects
        )
        return layout, sources["donated"], sources["kept"]

    def fix_numbers(self) -> bool:
        """Make Python's integers static, then its other numbers; False if there are none left to try.

        A plain function may use them as Python values: `range(n)`, `if training`. A compiled function has traced them.
        """
        if self._compiled or not self._numbers:
            return False
        self._numbers = (float, complex) if int in self._numbers else ()
        return True

    def _source(self, leaf: Any, donated: bool) -> str:
        if _is_object(leaf):
            return "object"
        traced = isinstance(leaf, self._numbers) or not isinstance(leaf, (int, float, complex))
        if isinstance(leaf, _DYNAMIC) and traced:
            return "donated" if donated and isinstance(leaf, jax.Array) else "kept"
        return "static"


class CallLayout:
    """Everything of a call except its arrays. Equal layouts share a compiled program."""

    def __init__(
        self,
        slots: tuple[_LeafSource, ...],
        structures: tuple[Any, ...],
        keywords: tuple[str, ...],
        static: tuple[Any, ...],
        definition: Any,
        objects: tuple[Any, ...],
    ) -> None:
        self._slots = slots
        self._structures = structures
        self._keywords = keywords
        self._static = static
        self._definition = definition
        self._objects = objects
        self._key = (slots, structures, keywords, tuple(map(_key, static)), definition)
        self._hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self._key)
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CallLayout) and self._key == other._key)

    def unflatten(self, donated: Sequence[Any], kept: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with these arrays."""
        objects = _merge(self._definition, kept[-1])
        sources = {"donated": donated, "kept": kept, "static": self._static, "object": objects}
        leaves = iter([sources[slot.source][slot.number] for slot in self._slots])
        values = [jax.tree.unflatten(s, [next(leaves) for _ in range(s.num_leaves)]) for s in self._structures]
        values = [value.value if isinstance(value, _Static) else value for value in values]
        own = len(values) - len(self._keywords)
        return tuple(values[:own]), dict(zip(self._keywords, values[own:], strict=True))

    def restorer(self) -> ResultsRestorer:
        """Return what flattens and restores the results of one trace."""
        return ResultsRestorer(self._definition)

    def update(self, restore: ResultsRestorer, state: Any) -> None:
        """Update the user's NNX objects with the state that the step has left."""
        if self._objects:
            sys.modules["flax.nnx"].update(self._objects, jax.tree.unflatten(restore.state, state))


class ResultsRestorer:
    """Flatten the results of a traced step: arrays leave it, anything else is remembered."""

    def __init__(self, definition: Any) -> None:
        self._definition = definition
        self._structure: Any = None
        self._static: dict[int, Any] = {}
        self.state: Any = None

    def flatten(self, results: Any, arguments: Any) -> tuple[list[Any], list[Any]]:
        """Return the arrays among the results, and the state of NNX objects."""
        leaves, self._structure = jax.tree.flatten(results)
        self._static = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, _DYNAMIC)}
        objects = tuple(leaf for leaf in jax.tree.leaves(arguments, is_leaf=_whole) if _is_object(leaf))
        layer_names.remove_names(objects)
        definition, state = _split(objects)
        if definition != self._definition:
            raise TensortapError("the step must not add variables to an object of NNX, or remove some")
        values, self.state = jax.tree.flatten(state)
        return [leaf for i, leaf in enumerate(leaves) if i not in self._static], values

    def __call__(self, arrays: Iterable[Any]) -> Any:
        """Return the results, with these arrays."""
        rest = iter(arrays)
        count = self._structure.num_leaves
        leaves = [self._static[i] if i in self._static else next(rest) for i in range(count)]
        return jax.tree.unflatten(self._structure, leaves)


def _own(function: Any) -> dict[str, Any]:
    """Return what a compiled function says of its arguments."""
    if _is_from(function, "equinox"):  # `filter_jit`: whatever is not an array is static
        return {"static": (), "donated": (), "numbers": False, "compiled": True}
    jitted = getattr(function, "jitted_fn", function)  # of `nnx.jit`
    state = jitted.__getstate__() if type(jitted).__name__ == "PjitFunction" else None
    if not isinstance(state, dict):
        return {"static": (), "donated": (), "numbers": True, "compiled": False}
    key = state["global_cache_key"]
    static = (*state["static_argnums"], *state["static_argnames"])
    return {"static": static, "donated": (*key.donate_argnums, *key.donate_argnames), "numbers": True, "compiled": True}


def _is_from(value: Any, home: str) -> bool:
    return type(value).__module__.partition(".")[0] == home


def _is_object(value: Any) -> bool:
    """Return whether a value is an object of NNX: a module, an optimizer, a generator, a variable."""
    return any(
        cls.__module__.startswith("flax.nnx") and cls.__name__ in ("Pytree", "Object", "Variable")
        for cls in type(value).__mro__
    )


def _whole(value: Any) -> bool:
    return isinstance(value, _Static) or _is_object(value)


def _split(objects: tuple[Any, ...]) -> tuple[Any, Any]:
    return sys.modules["flax.nnx"].split(objects) if objects else (None, ())


def _merge(definition: Any, state: Any) -> tuple[Any, ...]:
    return sys.modules["flax.nnx"].merge(definition, state) if definition is not None else ()


def _many(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, (int, str)) else tuple(given)


def _key(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)
