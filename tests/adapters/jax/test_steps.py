"""Watched steps behave as the functions they watch: static and donated arguments, auxiliary results, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src import callback, debugging
from rounding import assert_same_to_rounding

import tensortap as tt
from tensortap.adapters.jax import selection
from tensortap.adapters.jax.step import StepFunction


def test_unwanted_steps_run_the_function_itself(memory):
    """Where no trigger wants a step, the user's own compiled function is called, and nothing else."""
    traced = []

    @jax.jit
    def step(x):
        traced.append(len(traced))
        return tt.tap(x + 1, "x/x")

    step(jnp.ones(2))
    with tt.watch_step(step, tt.probe("**", when=tt.every(3)), to=memory) as watched:
        for _ in range(6):
            watched(jnp.ones(2))
            watched.tap.step()
    step(jnp.ones(2))
    assert sorted({r.step for r in memory.records}) == [0, 3]
    assert len(traced) == 2  # once by the user, once with taps


def test_inner_functions_that_were_traced_before(memory):
    """A function inside the step that JAX has in its cache is traced anew for the tap, and as before afterwards."""
    traced = []

    @jax.jit
    def inner(x):
        traced.append("x")
        return tt.tap(x * 2, "inner/x")

    inner(jnp.ones(2))
    with tt.watch_step(lambda x: inner(x) + 1, to=memory) as watched:
        watched(jnp.ones(2))
    inner(jnp.ones(2))
    assert [str(r.place) for r in memory.records] == ["inner/x:output"]
    assert len(traced) == 2


def test_static_and_donated_arguments(memory):
    """What the user's own `jit` says of its arguments holds for the watched one too."""

    @functools.partial(jax.jit, static_argnums=1, static_argnames="mode", donate_argnums=0)
    def step(x, n, *, mode):
        for _ in range(n):
            x = tt.tap(x + 1, f"loop/{mode}")
        return x

    with tt.watch_step(step, to=memory) as watched:
        given = jnp.zeros(3)
        assert watched(given, 2, mode="up").tolist() == [2, 2, 2]
        assert given.is_deleted()
        watched.tap.step()
        assert watched(jnp.zeros(3), 3, mode="down").tolist() == [3, 3, 3]
    assert [(r.step, r.place.site, r.call) for r in memory.records] == [
        *((0, "loop/up", i) for i in range(2)), *((1, "loop/down", i) for i in range(3))
    ]  # fmt: skip


def test_arguments_of_a_plain_function(memory):
    """Of a function that is not compiled, `watch_step` is told."""

    def step(x, n):
        return x + tt.tap(jnp.ones(n), "n/ones").sum()

    with tt.watch_step(step, static_argnames="n", donate_argnums=(0,), to=memory) as watched:
        given = jnp.ones(2)
        assert watched(given, n=3).tolist() == [4, 4] and given.is_deleted()
    assert memory.records[0]["shape"] == (3,)


def test_training_with_optax(memory):
    """A network trained with auxiliary results has the same weights, to rounding, with and without taps."""
    optimizer = optax.adam(1e-2)

    def loss(params, x):
        h = tt.tap(jnp.tanh(x @ params["a"]), "net/h")
        y = h @ params["b"]
        return jnp.square(y).mean(), {"largest": abs(y).max()}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(params, x)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value, aux

    def trained(step, after=lambda **metrics: None):
        key = jax.random.key(0)
        params = {"a": jax.random.normal(key, (3, 8)), "b": jax.random.normal(key, (8, 2))}
        state = optimizer.init(params)
        for i in range(5):
            params, state, value, aux = step(params, state, jax.random.normal(jax.random.key(i), (4, 3)))
            after(loss=value, **aux)
        return jax.tree.map(np.asarray, params)

    bare = trained(step)
    shapes = {"a": jnp.zeros((3, 8)), "b": jnp.zeros((8, 2))}
    with tt.watch_step(step, shapes, "net/h:*", "**:param", to=memory) as watched:
        tapped = trained(watched, watched.tap.step)
    jax.tree.map(assert_same_to_rounding, bare, tapped)
    assert {str(r.place) for r in memory.records} == {"net/h:output", "net/h:grad_output", "a:param", "b:param"}
    assert sorted({r.step for r in memory.records}) == [0, 1, 2, 3, 4]


def test_a_step_that_cannot_be_compiled(memory):
    """Where the step fails with taps and runs without, it runs, and that is counted and said."""

    def step(x):
        return tt.tap(x, "x/x") * float(x.sum())  # a number that only exists outside `jit`

    watched = tt.watch_step(step, to=memory)
    with watched, pytest.warns(tt.TensortapWarning, match="running the step with taps"):
        assert watched(jnp.ones(2)).tolist() == [2, 2]
    assert watched.tap.counts["skipped_tensors"] == 1


def test_an_error_of_the_users_own(memory):
    """It comes out as it is, with nothing of ours around it, and the next step is recorded."""

    @jax.jit
    def step(x, y):
        return tt.tap(x @ y, "x/y")

    with tt.watch_step(step, to=memory) as watched:
        with pytest.raises(TypeError) as raised:
            watched(jnp.ones((2, 3)), jnp.ones((2, 3)))
        watched(jnp.ones((2, 3)), jnp.ones((3, 2)))
    assert raised.value.__context__ is None or "tensortap" not in str(raised.value.__context__)
    assert [r["mean"] for r in memory.records] == [3.0] and "skipped_tensors" not in watched.tap.counts


def test_a_model_that_is_no_argument(memory):
    """A model of NNX that the step reads from outside is not compiled in: the step runs as it is, which is said."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    watched = tt.watch_step(lambda x: model(x), model, to=memory)
    with watched, pytest.warns(tt.TensortapWarning, match="make it an argument"):
        for factor in (1.0, 2.0):
            model.bias[...] = jnp.full(2, factor)
            assert watched(jnp.zeros((1, 2))).tolist() == [[factor, factor]]


def test_types_of_every_kind(memory):
    """Half-precision floats, integers, flags and keys go in and out; what has elements to reduce is recorded."""
    given = {
        "half": jnp.ones((2, 3), jnp.bfloat16), "small": jnp.ones(4, jnp.float8_e4m3fn), "whole": jnp.arange(3),
        "flag": jnp.array([True, False]), "key": jax.random.key(0), "tiny": jnp.ones(2, jnp.int4),
    }  # fmt: skip
    with tt.watch_step(lambda given: tt.tap(given, "all/of"), to=memory) as watched:
        back = watched(given)
    assert {str(r.place): (r["dtype"], r["mean"]) for r in memory.records} == {
        "all/of:output.half": ("bfloat16", 1.0), "all/of:output.small": ("float8_e4m3fn", 1.0),
        "all/of:output.whole": ("int32", 1.0), "all/of:output.flag": ("bool", 0.5),
    }  # fmt: skip
    assert {name: value.dtype for name, value in back.items()} == {name: value.dtype for name, value in given.items()}


def test_large_tensors_leave_as_statistics(memory, monkeypatch):
    """A tensor that is too large to leave a step as it is leaves as a row, elements or not."""
    monkeypatch.setattr(selection, "MOST_BYTES", 1000)
    with tt.watch_step(lambda x: tt.tap(x, "x/x"), tt.probe("**", keep=tt.full()), to=memory) as watched:
        watched(jnp.ones(100))
        watched(jnp.ones(1000))
    assert [r["numel"] for r in memory.records] == [100, 1000]
    assert [tensor.array.size for tensor in memory.tensors] == [100]
    assert watched.tap.counts["large_tensors"] == 1


def test_two_functions_of_one_tap(memory):
    """An evaluation goes into the same run as the training."""
    with tt.watch_step(lambda x: tt.tap(x, "train/x"), to=memory) as watched:
        evaluate = watched.also(lambda x: tt.tap(x, "eval/x"))
        watched(jnp.ones(1))
        evaluate(jnp.ones(1))
    assert [(r.step, r.place.site) for r in memory.records] == [(0, "train/x"), (1, "eval/x")]


def test_results_that_are_no_arrays(memory):
    """Texts, functions and nothing at all come back as they are."""
    with tt.watch_step(lambda x: (tt.tap(x, "x/x"), None, {"name": "net"}), to=memory) as watched:
        found = watched(jnp.ones(1))
    assert found[1:] == (None, {"name": "net"})


@pytest.mark.parametrize("model", [3, object(), nnx.Linear, lambda site: True])
def test_no_model(model):
    """What is neither a model nor parameters is refused with the right call."""
    with pytest.raises(tt.TensortapError, match=r"watch_step\(step, model, 'pattern'\)"):
        tt.watch_step(lambda x: x, model, to=tt.Memory())


def test_a_model_in_the_wrong_place():
    """A module can be called, and is no pattern for that; what `watch` cannot take has the other call named."""
    with pytest.raises(tt.TensortapError, match="got an object of type Linear; the model comes second"):
        tt.watch_step(lambda x: x, "a/b", nnx.Linear(2, 2, rngs=nnx.Rngs(0)), to=tt.Memory())
    with pytest.raises(tt.TensortapError, match=r"tensortap.watch_step\(step, params\)"):
        tt.watch({"w": jnp.ones(2)}, to=tt.Memory())


def test_a_name_that_is_a_group():
    """`op:matmul` is no operation of JAX, but `op:@matmul` is what was meant."""
    with pytest.raises(tt.TensortapError, match="Did you mean 'op:@matmul'"):
        tt.watch_step(lambda x: x, "op:matmul", to=tt.Memory())


def test_state_and_gradient_accumulation(memory):
    """Batch statistics, dropout's keys and an optimizer that waits for two steps end as they do without taps."""

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.norm, self.drop = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
            self.head = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.head(self.drop(self.norm(x)))

    @nnx.jit
    def step(model, optimizer, x):
        gradient = nnx.grad(lambda m: jnp.square(m(x)).mean())(model)
        optimizer.update(model, gradient)

    def trained(run, model):
        optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.adam(0.1), 2), wrt=nnx.Param)
        for i in range(3):
            run(model, optimizer, jax.random.normal(jax.random.key(i), (4, 3)))
        return jax.tree.leaves(nnx.to_pure_dict(nnx.state((model, optimizer), nnx.Not(nnx.RngKey))))

    bare, model = trained(step, Net()), Net()
    with tt.watch_step(step, model, "**:{output,grad_output,param,grad}", to=memory) as watched:
        tapped = trained(watched, model)
    for a, b in zip(bare, tapped, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert {r.step for r in memory.records} == {0, 1, 2} and watched.tap.counts == {}


def test_no_callbacks(memory, monkeypatch):
    """What is tapped leaves the compiled step as further results: none of JAX's callbacks is in it."""
    bound = []
    for primitive in (callback.pure_callback_p, callback.io_callback_p, debugging.debug_callback_p):
        monkeypatch.setattr(primitive, "bind", lambda *args, **options: bound.append(args))
    step = jax.jit(jax.grad(lambda x: jnp.square(tt.tap(x * 2, "a/b")).sum()))
    jax.make_jaxpr(lambda x: jax.debug.callback(print, x))(1)
    assert bound  # so it would be noticed
    bound.clear()
    with tt.watch_step(step, tt.probe("a/b:{output,grad_output}", keep=[tt.stats(), tt.full()]), to=memory) as watched:
        watched(jnp.ones(2))
    assert not bound and len(memory.records) == 2


def test_no_function():
    """What cannot be called is refused with the right call."""
    with pytest.raises(tt.TensortapError, match="watch_step\\(step_fn, model\\)"):
        tt.watch_step({"w": jnp.ones(1)}, to=tt.Memory())


def test_a_watched_step_says_in_a_line_what_it_is(memory):
    """Its repr names the function, the model, and what the tap does."""

    @jax.jit
    def train(params, x):
        return params["w"] * x

    params = {"w": jnp.ones(2)}
    with tt.watch_step(train, params, "**:param", to=memory) as step:
        step(params, jnp.ones(2))
        step.tap.step()
        assert repr(step) == "<StepFunction train on dict: open, 1 probe, 1 step, to Memory>"
    with tt.watch_step(functools.partial(train, params), to=memory) as step:
        assert repr(step) == "<StepFunction partial: open, 1 probe, 0 steps, to Memory>"


def test_a_watched_step_has_the_attributes_of_its_function(memory):
    """`lower`, `trace`, `eval_shape` and `clear_cache` are those of the user's own jitted function, without taps."""

    @jax.jit
    def train(x):
        return tt.tap(x + 1, "x/x")

    x = jnp.ones(2)
    with tt.watch_step(train, to=memory) as step:
        assert step.eval_shape(x).shape == (2,)
        assert step.lower(x).as_text() == train.lower(x).as_text()
        assert str(step.trace(x).jaxpr) == str(train.trace(x).jaxpr)
        step(x)
        step.clear_cache()
        assert not hasattr(step, "no_such_thing")
        with pytest.raises(AttributeError, match=r"neither a watched step nor its function .* has 'lowre'"):
            step.lowre(x)
    assert [r.step for r in memory.records] == [0]


def test_a_watched_step_without_its_function_has_no_attributes():
    """One that is being made, as `copy` does, asks for attributes without end nowhere."""
    empty = object.__new__(StepFunction)
    assert not hasattr(empty, "lower") and not hasattr(empty, "__deepcopy__")
