"""How the harvest goes through what holds functions: calls, loops, branches, and what runs on several devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend import core, linear_util
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from tensortap.adapters.jax.harvest import Harvester, Item, Rule, Yield
from tensortap.adapters.jax.jaxprs import debug_info, parts_closed, unspecified, without_consts
from tensortap.adapters.protocol import MOST_LOOPS


def _call(harvester: Harvester, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Yield]:
    """A function with a derivative of its own, or a call: evaluated in place."""
    inner = next(iter(parts_closed(equation)))
    return harvester.run(inner.jaxpr, inner.consts, given)


def _jit(harvester: Harvester, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Yield]:
    closed, found = _retraced(harvester, equation.params["jaxpr"], given)
    params = dict(equation.params)
    more = len(closed.jaxpr.outvars) - len(equation.outvars)
    params |= {
        "jaxpr": closed,
        "out_shardings": (*params["out_shardings"], *(unspecified(),) * more),
        "out_layouts": (*params["out_layouts"], *(None,) * more),
    }
    with equation.ctx.manager:
        gives = equation.primitive.bind(*given, **params)
    return _parted(gives, equation, found)


def _remat(harvester: Harvester, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Yield]:
    inner = replace(harvester, recomputing=harvester.recomputing or equation.params["differentiated"])
    closed, found = _retraced(inner, core.ClosedJaxpr(equation.params["jaxpr"], ()), given)
    with equation.ctx.manager:
        gives = equation.primitive.bind(*closed.consts, *given, **dict(equation.params, jaxpr=without_consts(closed)))
    return _parted(gives, equation, found)


def _retraced(harvester: Harvester, closed: Any, given: Sequence[Any]) -> tuple[Any, Yield]:
    """A function that also gives what is marked in it, as JAX's own equations hold functions."""
    found = Yield()

    def function(*args: Any) -> list[Any]:
        gives, seen = harvester.run(closed.jaxpr, closed.consts, args)
        found.items = seen.items
        return [*gives, *seen.arrays]

    wrapped = linear_util.wrap_init(function, debug_info=debug_info(closed.jaxpr))
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
        harvester.cannot(equation)
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


RULES: Final[Mapping[str, Rule]] = {
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
