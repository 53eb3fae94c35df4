"""Compiled functions of a script: which arguments are parameters, and that calls stay what they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensortap as tt
from tensortap.adapters.jax.script.functions import WatchedFunction
from tensortap.adapters.jax.script.steps import ScriptSteps
from tensortap.adapters.jax.script.trees import loss_in, matches, parameters_of
from tensortap.select.probes import probe

PARAMETERS = {"a": {"w": jnp.ones((3, 2))}, "b": jnp.zeros(2)}


class Listening:
    """Steps that write to memory."""

    def __init__(self):
        self.memory = tt.Memory()
        self.steps = ScriptSteps(self._begin)

    def _begin(self, adapter):
        every = probe("**:{param,grad,update,output,input}", ":{input,output}")
        self.tap = tt.watch(adapter, every, to=self.memory)
        return self.tap

    def close(self):
        """Return the places that were recorded."""
        self.steps.finish()
        self.tap.close()
        assert not self.steps.failure
        return {str(record.place) for record in self.memory.records}


def test_what_comes_back_is_the_state():
    """Arguments are matched with results by structure and shapes; a batch of another shape is none."""
    arguments = {"batch": jnp.ones((4, 3)), "params": PARAMETERS, "opt_state": (jnp.ones(()), PARAMETERS)}
    found = matches(arguments, (PARAMETERS, (jnp.ones(()), PARAMETERS), jnp.ones(())))
    assert [(match.argument, match.result) for match in found] == [("params", (0,)), ("opt_state", (1,))]


def test_names_below_params():
    """Of a state that has parameters among other things those are taken, by their names."""
    assert [leaf.name for leaf in parameters_of({"params": PARAMETERS, "step": 3, "ema": jnp.ones(2)})] == ["a.w", "b"]


def test_the_loss_is_found_by_name_or_shape():
    """A result called loss is the loss, or else the first float that is alone."""
    assert float(loss_in({"accuracy": jnp.ones(()), "loss": jnp.zeros(())})) == 0
    assert float(loss_in((jnp.ones(3), jnp.full((), 2.0)))) == 2


def test_gradients_are_told_from_parameters():
    """A result of the parameters' structure that the next call is not given is a gradient."""
    listening = Listening()
    function = WatchedFunction(
        jax.jit(jax.value_and_grad(lambda params, x: ((x @ params["a"]["w"]) ** 2).sum())), listening.steps
    )
    params = PARAMETERS
    for _ in range(3):
        _, gradients = function(params, jnp.ones((4, 3)))
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients)
    assert {"a.w:param", "a.w:grad", "b:grad"} <= listening.close()


def test_one_array_that_is_given_back():
    """A single array is a parameter when what a call returns is given to the next one."""
    listening = Listening()
    function = WatchedFunction(jax.jit(lambda w: w * 0.9), listening.steps)
    w = jnp.ones(4)
    for _ in range(3):
        w = function(w)
    assert np.allclose(w, 0.729)
    assert len(listening.close()) == 2  # the array and its update


def test_a_function_inside_others_is_left_alone():
    """A watched function under grad, vmap or jit, as a method, and by its own attributes is the function."""
    listening = Listening()

    class Holder:
        double = WatchedFunction(jax.jit(lambda self, x: 2 * x, static_argnums=0), listening.steps)

    function = WatchedFunction(jax.jit(lambda x: x**2), listening.steps)
    assert float(jax.grad(function)(3.0)) == 6 and jax.vmap(function)(jnp.arange(3.0)).tolist() == [0, 1, 4]
    assert jax.jit(function)(4.0) == 16 and function.calls == 0
    assert Holder().double(2.0) == 4 and function.lower(1.0) is not None
    with pytest.raises(AttributeError):
        function.nothing  # noqa: B018
