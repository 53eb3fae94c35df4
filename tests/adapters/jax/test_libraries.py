"""Layers of every library are seen, by the paths that the library gives them, with their gradients."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rounding import assert_same_to_rounding

import tensortap as tt


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(5, name="first")(x))
        return nn.Dense(2, name="second")(x)


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    inner: list
    activation: object = jax.nn.relu

    def __init__(self, key):
        self.first = eqx.nn.Linear(3, 5, key=key)
        self.inner = [eqx.nn.Linear(5, 2, key=key), eqx.nn.LayerNorm(2)]

    def __call__(self, x):
        x = self.activation(self.first(x))
        for layer in self.inner:
            x = layer(x)
        return x


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(self.drop(jax.nn.relu(self.first(x))))


def haiku_net(x):
    return hk.nets.MLP([5, 2], name="mlp")(x)


def summary(record, array):
    expected = tt.summarize(np.ascontiguousarray(array))
    assert {k: record[k] for k in ("numel", "zeros", "min", "max", "mean", "std")} == pytest.approx(
        {k: expected[k] for k in ("numel", "zeros", "min", "max", "mean", "std")}, rel=1e-4, abs=1e-6
    )


@pytest.fixture(scope="module")
def linen():
    """A model of Linen and its parameters, from one program instead of one for each operation."""
    model = LinenNet()
    return model, jax.jit(model.init)(jax.random.key(0), np.zeros((4, 3), np.float32))


def test_linen(memory, seen, x, linen):
    """Modules of Linen go by their names, and the gradient of an output is seen too."""
    model, params = linen

    @jax.jit
    def step(params, x):
        return jax.grad(lambda p: jnp.square(model.apply(p, x)).sum())(params)

    plain = step(params, x)
    with tt.watch_step(step, model, "first", "second:{input,grad_output}", ":output", to=memory) as watched:
        tapped = watched(params, x)
    kernel, bias = (np.asarray(params["params"]["first"][name]) for name in ("kernel", "bias"))
    summary(seen()["first:output"], x @ kernel + bias)
    summary(seen()["second:input"], np.maximum(x @ kernel + bias, 0))
    summary(seen()["second:grad_output"], 2 * np.asarray(jax.jit(model.apply)(params, x)))
    assert ":output" in seen()
    jax.tree.map(assert_same_to_rounding, plain, tapped)


def test_linen_by_default(memory, seen, x, linen):
    """Without patterns the layers that call no others are watched."""
    model, params = linen
    with tt.watch_step(jax.jit(model.apply), model, to=memory) as watched:
        watched(params, x)
    assert set(seen()) == {"first:output", "second:output"}


def test_a_misspelt_layer_of_linen(memory, x, linen):
    """Where layers are known only when they run, the first step says what a pattern may have meant."""
    model, params = linen
    watched = tt.watch_step(jax.jit(model.apply), model, "frist", to=memory)
    with watched, pytest.warns(tt.TensortapWarning, match="'first'"):
        watched(params, x)
    assert watched.tap.counts["unseen"] == 1


def test_linen_scan_and_remat(memory, x):
    """Iterations of a scanned, rematerialised layer are calls, forwards and backwards."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(3, name="dense")(x)), None

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
            return block(name="blocks")(x, None)[0]

    model = Deep()
    params = jax.jit(model.init)(jax.random.key(0), x)
    step = jax.jit(jax.grad(lambda p, x: model.apply(p, x).sum()))
    with tt.watch_step(step, model, "blocks.dense:{output,grad_output}", to=memory) as watched:
        tapped = watched(params, x)
    calls = [(r.place.port, r.call) for r in memory.records if not r.recomputed]
    assert sorted(calls) == [(port, i) for port in ("grad_output", "output") for i in range(4)]
    h = x
    for i, record in enumerate(r for r in memory.records if r.place.port == "output" and not r.recomputed):
        dense = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], params["params"]["blocks"]["dense"])
        summary(record, h @ dense["kernel"] + dense["bias"])
        h = np.tanh(h @ dense["kernel"] + dense["bias"])
    jax.tree.map(assert_same_to_rounding, step(params, x), tapped)


def test_equinox(memory, seen, x):
    """Modules of Equinox go by their attributes, through filter_jit, filter_grad and vmap."""
    model = EquinoxNet(jax.random.key(0))

    @eqx.filter_jit
    def step(model, x):
        return eqx.filter_value_and_grad(lambda m: jnp.square(jax.vmap(m)(x)).sum())(model)

    probes = ("first", "inner.1:{input,grad_output}", "first.weight:{param,grad}")
    with tt.watch_step(step, model, *probes, to=memory) as watched:
        value, gradient = watched(model, x)
    bare = step(model, x)
    summary(seen()["first:output"], x @ np.asarray(model.first.weight).T + np.asarray(model.first.bias))
    summary(seen()["inner.1:grad_output"], 2 * np.asarray(jax.jit(lambda x: jax.vmap(model)(x))(x)))
    summary(seen()["first.weight:grad"], gradient.first.weight)
    summary(seen()["first.weight:param"], model.first.weight)
    assert_same_to_rounding([bare[0], bare[1].first.weight], [value, gradient.first.weight])
    assert gradient.activation is bare[1].activation


def test_equinox_in_eager_mode(x):
    """`capture` and `sites` work on a module as it is."""
    model = EquinoxNet(jax.random.key(0))
    found = tt.capture(model, x[0], "first", "inner.*:input")
    assert list(found) == ["first", "inner.0:input", "inner.1:input"]
    assert found["first"] == pytest.approx(np.asarray(model.first(x[0])))
    assert "inner.1" in str(tt.sites(model))


@pytest.mark.thorough  # test_rebuilt.py has Haiku
def test_haiku(memory, seen, x):
    """Modules of Haiku go by their names."""
    net = hk.without_apply_rng(hk.transform(haiku_net))
    params = net.init(jax.random.key(0), x)
    step = jax.jit(lambda params, x: jax.grad(lambda p: net.apply(p, x).sum())(params))
    with tt.watch_step(step, params, "mlp.linear_0:{output,grad_output}", "**:param", to=memory) as watched:
        watched(params, x)
    first = params["mlp/~/linear_0"]
    summary(seen()["mlp.linear_0:output"], x @ first["w"] + first["b"])
    assert "mlp.linear_0:grad_output" in seen()
    summary(seen()["mlp.linear_0.w:param"], first["w"])


def test_gradients_of_nested_parameters():
    """Where no model holds the parameters their gradients are refused, with the way to see them."""
    with pytest.raises(tt.TensortapError, match=r"tensortap.tap\(params, 'net/params'\)"):
        tt.watch_step(lambda params: params, {"w": jnp.ones(2)}, "w:grad", to=tt.Memory())


def test_operations_of_layers(memory, seen, x):
    """Operations belong to the layer that runs them, forwards and backwards, each call with numbers of its own."""
    model = NnxNet(nnx.Rngs(0))
    step = nnx.jit(nnx.grad(lambda model, x: (model(x) + model(x)).sum()))
    with tt.watch_step(step, model, "second/dot_general", "second/dot_general:grad_input", to=memory) as watched:
        watched(model, x)
    outputs = [r for r in memory.records if r.place.port == "output"]
    assert [(str(r.place), r.call) for r in outputs] == [("second/dot_general#0:output", i) for i in range(2)]
    backwards = [(r.place.site, r.call, r["shape"]) for r in memory.records if r.place.port == "grad_input"]
    assert sorted(backwards) == [
        (f"second/dot_general#{number}", call, shape)
        for number, shape in enumerate([(2, 5), (4, 5)])
        for call in range(2)
    ]


def test_training_nnx(memory):
    """A model of NNX trains to the same weights with and without taps, dropout and optimizer included."""

    def trained(watch):
        model = NnxNet(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            value, gradient = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
            optimizer.update(model, gradient)
            return value

        rng = np.random.default_rng(0)
        with watch(step, model) as run:
            for _ in range(4):
                value = run(model, optimizer, jnp.asarray(rng.normal(size=(4, 3)), jnp.float32))
                run.tap.step(loss=value) if hasattr(run, "tap") else None
        return jax.tree.leaves(nnx.state((model, optimizer)))

    class Bare:
        def __init__(self, step, model):
            self.step = step

        def __enter__(self):
            return self.step

        def __exit__(self, *error):
            pass

    bare = trained(Bare)
    tapped = trained(lambda step, model: tt.watch_step(step, model, "**:{output,grad_output,param,grad}", to=memory))
    assert sorted({r.step for r in memory.records}) == [0, 1, 2, 3]
    assert {r.place.port for r in memory.records} == {"output", "grad_output", "param", "grad"}
    for a, b in zip(bare, tapped, strict=True):
        data = [jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (a, b)]
        np.testing.assert_allclose(*map(np.asarray, data), rtol=1e-6, atol=1e-7)


class Normalised(nnx.Module):
    """Names the state of its layer, as the refusal of `:buffer` says."""

    def __init__(self, rngs):
        self.bn = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        y = self.bn(x)
        tt.tap(self.bn.mean[...], "bn/mean")
        return y


def test_the_state_of_a_layer_is_named_where_it_runs():
    """`:buffer` is refused with what to write, and that records the running mean after the step."""
    model, memory = Normalised(nnx.Rngs(0)), tt.Memory()
    with pytest.raises(tt.TensortapError, match=r"'buffer' in JAX: .*tensortap\.tap\(self\.bn\.mean"):
        tt.watch(model, "**:buffer", to=memory)
    with tt.watch_step(nnx.jit(lambda model, x: model(x)), model, "bn/mean", to=memory) as step:
        step(model, np.full((4, 3), 2.0, np.float32))
        step.tap.step()
    assert memory.records[0]["mean"] == pytest.approx(float(model.bn.mean[...].mean())) != 0
