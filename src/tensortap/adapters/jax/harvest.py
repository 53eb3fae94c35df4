"""Takes the tagged values out of a traced step: the same operations, with what was marked as further results.

The step has been traced as a whole, its gradients included, so nobody differentiates what comes out here: looking into
functions with derivatives of their own cannot make a gradient wrong. What has no rule here runs as it is, unseen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core, linear_util, source_info_util
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from tensortap.adapters.jax.operations import Operations
from tensortap.adapters.jax.tag import Mark, tag_p

# The length of a while loop is not known before: so many of its iterations are kept, and the rest counted.
MOST_LOOPS: Final = 64


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


@dataclass(frozen=True)
class Harvester:
    """Evaluates a traced step. `export` says how a value leaves; `operations` which operations are wanted."""

    export: Callable[[Any, tuple[Mark, ...], bool], Export]
    operations: Operations | None = None
    opaque: dict[str, str] = field(default_factory=dict)  # paths that were tagged and cannot be seen, with the reason
    scope: str = ""
    recomputing: bool = False
    looping: bool = False

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], Yield]:
        """The results, and what was marked on the way."""
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        seen = Yield()

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            gives = self._equation(equation, given, seen)
            values.update(zip(equation.outvars, gives, strict=True))
        return [read(atom) for atom in jaxpr.outvars], seen

    def _equation(self, equation: Any, given: list[Any], seen: Yield) -> Sequence[Any]:
        if equation.primitive is tag_p:
            self._take(seen, given[0], equation.params["marks"])
            return given
        rule = RULES.get(equation.primitive.name)
        if self._holds(equation):
            if rule is not None:
                inner = replace(self, scope=f"{self.scope}/{equation.source_info.name_stack}")
                gives, found = rule(inner, equation, given)
                seen.extend(found)
                return gives
            self._cannot(equation)
        with source_info_util.user_context(None, name_stack=equation.source_info.name_stack), equation.ctx.manager:
            functions, params = _bind_params(equation)
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
        again = self.recomputing and marks[0].port in ("output", "input")
        shape, dtype = tuple(value.shape), str(value.dtype)
        seen.add(Item(marks, kind, shape, dtype, again, arrays=len(arrays), operation=operation), arrays)

    def _holds(self, equation: Any) -> bool:
        """Whether anything inside an equation is wanted."""
        return any(map(self._wanted, _parts(equation)))

    def _wanted(self, jaxpr: Any) -> bool:
        return (self.operations is not None and bool(jaxpr.eqns)) or _tagged(jaxpr)

    def _cannot(self, equation: Any) -> None:
        for jaxpr in _parts(equation):
            for mark in _marks(jaxpr):
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


def _call(harvester: Harvester, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Yield]:
    """A function with a derivative of its own, or a call: evaluated in place."""
    inner = next(iter(_parts_closed(equation)))
    return harvester.run(inner.jaxpr, inner.consts, given)


def _jit(harvester: Harvester, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Yield]:
    closed, found = _retraced(harvester, equation.params["jaxpr"], given)
    params = dict(equation.params)
    more = len(closed.jaxpr.outvars) - len(equation.outvars)
    params |= {
        "jaxpr": closed,
        "out_shardings": (*params["out_shardings"], *(_unspecified(),) * more),
        "out_layouts": (*params["out_layouts"], *(None,) * more),
    }
    with equation.ctx.manager:
        gives = equation.primitive.bind(*given, **params)
    return _parted(gives, equation, found)


def _remat(harvester: Harvester, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Yield]:
    inner = replace(harvester, recomputing=harvester.recomputing or equation.params["differentiated"])
    closed, found = _retraced(inner, core.ClosedJaxpr(equation.params["jaxpr"], ()), given)
    with equation.ctx.manager:
        gives = equation.primitive.bind(*closed.consts, *given, **dict(equation.params, jaxpr=_without_consts(closed)))
    return _parted(gives, equation, found)


def _retraced(harvester: Harvester, closed: Any, given: Sequence[Any]) -> tuple[Any, Yield]:
    """A function that also gives what is marked in it, as JAX's own equations hold functions."""
    found = Yield()

    def function(*args: Any) -> list[Any]:
        gives, seen = harvester.run(closed.jaxpr, closed.consts, args)
        found.items = seen.items
        return [*gives, *seen.arrays]

    wrapped = linear_util.wrap_init(function, debug_info=_debug_info(closed.jaxpr))
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, [v.aval for v in closed.jaxpr.invars])
    return core.ClosedJaxpr(jaxpr, consts), found


def _parted(gives: Sequence[Any], equation: Any, found: Yield) -> tuple[Sequence[Any], Yield]:
    own = len(equation.outvars)
    return gives[:own], Yield(found.items, gives[own:])


def _scan(harvester: Harvester, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Yield]:
    params = equation.params
    consts, carried = given[: params["num_consts"]], params["num_consts"] + params["num_carry"]
    found, closed = Yield(), params["jaxpr"]

    def body(carry: Any, x: Any) -> Any:
        gives, seen = harvester.run(closed.jaxpr, closed.consts, [*consts, *carry, *x])
        found.items = seen.items
        return gives[: params["num_carry"]], (gives[params["num_carry"] :], seen.arrays)

    carry, (ys, arrays) = jax.lax.scan(
        body, given[params["num_consts"] : carried], given[carried:], length=params["length"],
        reverse=params["reverse"], unroll=params["unroll"],
    )  # fmt: skip
    return [*carry, *ys], found.looped(arrays)


def _cond(harvester: Harvester, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Yield]:
    """Each branch gives what is marked in all of them, and says which came to be."""
    branches, index, operands = equation.params["branches"], given[0], given[1:]
    plans = [_retraced_flags(harvester, branch, operands) for branch in branches]
    found = Yield([item for closed, seen in plans for item in seen.items])

    def branch(number: int) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            gives = core.jaxpr_as_fun(plans[number][0])(*args)
            own = len(equation.outvars)
            rest = [[jnp.zeros(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars[own:]] for closed, _ in plans]
            rest[number] = gives[own:]
            return gives[:own], [array for arrays in rest for array in arrays]

        return function

    gives, found.arrays = jax.lax.switch(index, [branch(i) for i in range(len(branches))], *operands)
    return gives, found


def _retraced_flags(harvester: Harvester, closed: Any, given: Sequence[Any]) -> tuple[Any, Yield]:
    return _retraced(_Flagging(**vars(harvester)), closed, given)


class _Flagging(Harvester):
    """Gives a flag with everything."""

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], Yield]:
        gives, seen = Harvester(**vars(self)).run(jaxpr, consts, args)
        return gives, seen.flags()


def _while(harvester: Harvester, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Yield]:
    """The first iterations, in arrays that are carried along; how many there were comes as an item of its own."""
    p, closed = equation.params, equation.params["body_jaxpr"]
    ends, begins = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    ask, consts, state = p["cond_jaxpr"], given[ends:begins], given[begins:]
    if ask.out_avals[0].shape:  # mapped over a batch: JAX gives it its meaning only when it is compiled
        harvester._cannot(equation)
        return equation.primitive.bind(*given, **p), Yield()
    inner = replace(harvester, looping=True)
    planned, found = _retraced_flags(inner, closed, [*consts, *state])
    more = [v.aval for v in planned.jaxpr.outvars[len(equation.outvars) :]]
    room = [jnp.zeros((MOST_LOOPS, *aval.shape), aval.dtype) for aval in more]

    def goes_on(carry: Any) -> Any:
        return core.jaxpr_as_fun(ask)(*given[:ends], *carry[0])[0]

    def body(carry: Any) -> Any:
        gives = core.jaxpr_as_fun(planned)(*consts, *carry[0])
        new = zip(carry[1], gives[len(equation.outvars) :], strict=True)
        return gives[: len(equation.outvars)], [a.at[carry[2]].set(x, mode="drop") for a, x in new], carry[2] + 1

    gives, arrays, count = jax.lax.while_loop(goes_on, body, (list(state), room, jnp.int32(0)))
    result = found.looped(arrays)
    marks = tuple({mark.listener: mark for item in found.items for mark in item.marks}.values())
    result.add(Item(marks, "iterations", (), "int32"), [count])
    return gives, result


def _shard_map(harvester: Harvester, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Yield]:
    """What each device holds is an entry of its own."""
    p, found = equation.params, Yield()
    manual = p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]  # by the version of JAX
    axes = PartitionSpec(tuple(name for name in p["mesh"].axis_names if name in manual))

    def function(*args: Any) -> Any:
        gives, seen = harvester.run(p["jaxpr"], (), args)
        found.items = seen.items
        return gives, [array[None] for array in seen.arrays]

    mapped = jax.shard_map(
        function, mesh=p["mesh"], in_specs=tuple(p["in_specs"]), out_specs=(list(p["out_specs"]), axes),
        axis_names=set(manual), check_vma=p["check_vma"],
    )  # fmt: skip
    gives, arrays = mapped(*given)
    return gives, found.looped(arrays)


RULES: Final[dict[str, Callable[[Harvester, Any, list[Any]], tuple[Sequence[Any], Yield]]]] = {
    "jit": _jit,
    "pjit": _jit,
    "remat2": _remat,
    "checkpoint": _remat,
    "scan": _scan,
    "cond": _cond,
    "while": _while,
    "shard_map": _shard_map,
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call"), _call),
}


def _bind_params(equation: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    found = equation.primitive.get_bind_params(equation.params)
    return found if isinstance(found, tuple) else ((), found)


def _parts_closed(equation: Any) -> list[Any]:
    found = []
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                found.append(part)
            elif isinstance(part, core.Jaxpr):
                found.append(core.ClosedJaxpr(part, ()))
    return found


def _parts(equation: Any) -> list[Any]:
    return [closed.jaxpr for closed in _parts_closed(equation)]


@functools.lru_cache(maxsize=4096)
def _tagged(jaxpr: Any) -> bool:
    return any(e.primitive is tag_p or any(map(_tagged, _parts(e))) for e in jaxpr.eqns)


def _marks(jaxpr: Any) -> list[Mark]:
    own = [mark for e in jaxpr.eqns if e.primitive is tag_p for mark in e.params["marks"]]
    return own + [mark for e in jaxpr.eqns for part in _parts(e) for mark in _marks(part)]


def _without_consts(closed: Any) -> Any:
    """With its constants as arguments, the first ones."""
    jaxpr = closed.jaxpr
    if not jaxpr.constvars:
        return jaxpr
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=_debug_info(jaxpr, len(invars)))


def _debug_info(jaxpr: Any, arguments: int | None = None) -> Any:
    """Names for an error message: those of arguments and results no longer fit."""
    count = len(jaxpr.invars) if arguments is None else arguments
    return jaxpr.debug_info._replace(arg_names=("",) * count, result_paths=None)


@functools.cache
def _unspecified() -> Any:
    """JAX's word for a sharding that nobody has chosen."""
    traced = jax.make_jaxpr(jax.jit(lambda x: x))(0.0)
    return traced.jaxpr.eqns[0].params["out_shardings"][0]
