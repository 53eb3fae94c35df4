"""A step that is not compiled may use its Python numbers as such."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tensortap as tt

W, X = jnp.eye(3) * 0.5, jnp.ones((2, 3))


def repeated(w, x, times, scale=1.0):
    for _ in range(times):
        x = tt.tap(jnp.tanh(x @ w) * scale, "net/h")
    return x.sum()


def branching(w, x, training, rate):
    x = x * (1 - rate) if training and rate > 0.1 else x
    return tt.tap(x @ w, "net/h").sum()


@pytest.mark.parametrize("args", [(W, X, 2), (W, X, 2, 0.5), (W, X, True)])
def test_integers(memory, args):
    """`range(n)` of an argument: every pass is recorded, and the result is the function's own."""
    expected = repeated(*args)
    with tt.watch_step(repeated, to=memory) as step:
        assert step(*args) == pytest.approx(expected)
    assert [r.call for r in memory.records] == list(range(int(args[2]))) and step.tap.counts == {}


def test_floats_and_truth(memory):
    """What is asked in an `if` is part of the program; another value compiles another."""
    given = [(True, 0.5), (False, 0.5), (True, 0.0)]
    expected = [branching(W, X, *each) for each in given]
    with tt.watch_step(branching, to=memory) as step:
        assert [float(step(W, X, *each)) for each in given] == pytest.approx([float(each) for each in expected])
    assert [r.step for r in memory.records] == [0, 1, 2] and step.tap.counts == {}


def test_numbers_that_are_only_computed_with(memory):
    """A learning rate stays an argument: new values compile nothing anew."""
    traced = []

    def step(w, rate):
        traced.append(rate)
        return tt.tap(w * rate, "net/w")

    with tt.watch_step(step, to=memory) as watched:
        for rate in (0.1, 0.2, 0.3):
            watched(W, rate)
    assert len(traced) == 1 and len(memory.records) == 3


def test_a_step_that_cannot_be_compiled(memory):
    """Control flow on an array: it runs as written, and what to do is said without JAX's tracers."""

    def step(x):
        return x + 1 if x.sum() > 0 else x

    with (
        pytest.warns(tt.TensortapWarning, match=r"jax.jit cannot compile the step.*static_argnums"),
        tt.watch_step(step, "net/x", to=memory) as watched,
    ):
        assert (watched(X) == X + 1).all()
    assert watched.tap.counts["skipped_tensors"] == 1


def test_of_a_compiled_function_the_error_is_the_users_own(memory):
    """`jax.jit` of the same function fails without us too."""
    error = pytest.raises(jax.errors.TracerIntegerConversionError)
    with tt.watch_step(jax.jit(repeated), to=memory) as step, error:
        step(W, X, 2)
