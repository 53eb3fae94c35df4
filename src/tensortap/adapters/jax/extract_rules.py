"""Rules by which extraction goes through equations that hold functions: calls, loops, branches, shard_map."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend import core, linear_util
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from tensortap.adapters.arrays import MOST_LOOPS
from tensortap.adapters.jax.extract import Extracted, ExtractedValue, Rule, TagExtractor
from tensortap.adapters.jax.jaxprs import debug_info, inner_closed_jaxprs, unspecified, without_consts


def _call(extractor: TagExtractor, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Extracted]:
    """Evaluate a call, or a function with a custom derivative, in place."""
    inner = next(iter(inner_closed_jaxprs(equation)))
    return extractor.run(inner.jaxpr, inner.consts, given)


def _jit(extractor: TagExtractor, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Extracted]:
    closed, found = _retraced(extractor, equation.params["jaxpr"], given)
    params = dict(equation.params)
    more = len(closed.jaxpr.outvars) - len(equation.outvars)
    params |= {
        "jaxpr": closed,
        "out_shardings": (*params["out_shardings"], *(unspecified(),) * more),
        "out_layouts": (*params["out_layouts"], *(None,) * more),
    }
    with equation.ctx.manager:
        gives = equation.primitive.bind(*given, **params)
    return _split_results(gives, equation, found)


def _remat(extractor: TagExtractor, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Extracted]:
    inner = replace(extractor, recomputing=extractor.recomputing or equation.params["differentiated"])
    closed, found = _retraced(inner, core.ClosedJaxpr(equation.params["jaxpr"], ()), given)
    with equation.ctx.manager:
        gives = equation.primitive.bind(*closed.consts, *given, **dict(equation.params, jaxpr=without_consts(closed)))
    return _split_results(gives, equation, found)


def _retraced(extractor: TagExtractor, closed: Any, given: Sequence[Any]) -> tuple[Any, Extracted]:
    """Return a function that also returns the tagged values in it, in the form that JAX's equations hold."""
    found = Extracted()

    def function(*args: Any) -> list[Any]:
        gives, seen = extractor.run(closed.jaxpr, closed.consts, args)
        found.values = seen.values
        return [*gives, *seen.arrays]

    wrapped = linear_util.wrap_init(function, debug_info=debug_info(closed.jaxpr))
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, [v.aval for v in closed.jaxpr.invars])
    return core.ClosedJaxpr(jaxpr, consts), found


def _split_results(gives: Sequence[Any], equation: Any, found: Extracted) -> tuple[Sequence[Any], Extracted]:
    own = len(equation.outvars)
    return gives[:own], Extracted(found.values, gives[own:])


def _scan(extractor: TagExtractor, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Extracted]:
    params = equation.params
    consts, carry_end = given[: params["num_consts"]], params["num_consts"] + params["num_carry"]
    found, closed = Extracted(), params["jaxpr"]

    def body(carry: Any, x: Any) -> Any:
        gives, seen = extractor.run(closed.jaxpr, closed.consts, [*consts, *carry, *x])
        found.values = seen.values
        return gives[: params["num_carry"]], (gives[params["num_carry"] :], seen.arrays)

    carry, (ys, arrays) = jax.lax.scan(
        body, given[params["num_consts"] : carry_end], given[carry_end:], length=params["length"],
        reverse=params["reverse"], unroll=params["unroll"],
    )  # fmt: skip
    return [*carry, *ys], found.looped(arrays)


def _cond(extractor: TagExtractor, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Extracted]:
    """Let each branch return the tagged values of all branches, with flags for those that were computed."""
    branches, index, operands = equation.params["branches"], given[0], given[1:]
    plans = [_retraced_flags(extractor, branch, operands) for branch in branches]
    found = Extracted([value for closed, seen in plans for value in seen.values])

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


def _retraced_flags(extractor: TagExtractor, closed: Any, given: Sequence[Any]) -> tuple[Any, Extracted]:
    return _retraced(_Flagging(**vars(extractor)), closed, given)


class _Flagging(TagExtractor):
    """Return a flag with every value."""

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], Extracted]:
        gives, seen = TagExtractor(**vars(self)).run(jaxpr, consts, args)
        return gives, seen.with_flags()


def _while(extractor: TagExtractor, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Extracted]:
    """Return the first iterations in arrays that the loop carries; the number of iterations is a value of its own."""
    p, closed = equation.params, equation.params["body_jaxpr"]
    ends, begins = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    ask, consts, state = p["cond_jaxpr"], given[ends:begins], given[begins:]
    if ask.out_avals[0].shape:  # mapped over a batch: JAX gives it its meaning only when it is compiled
        extractor.note_hidden(equation)
        return equation.primitive.bind(*given, **p), Extracted()
    inner = replace(extractor, looping=True)
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
    marks = tuple({mark.tap: mark for item in found.values for mark in item.marks}.values())
    result.add(ExtractedValue(marks, "iterations", (), "int32"), [count])
    return gives, result


def _shard_map(extractor: TagExtractor, equation: Any, given: list[Any]) -> tuple[Sequence[Any], Extracted]:
    """Return the part of each device as an entry of its own."""
    p, found = equation.params, Extracted()
    manual = p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]  # by the version of JAX
    axes = PartitionSpec(tuple(name for name in p["mesh"].axis_names if name in manual))

    def function(*args: Any) -> Any:
        gives, seen = extractor.run(p["jaxpr"], (), args)
        found.values = seen.values
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
