"""Layers that a transformation inside the step builds anew are known by their names, and so are those in methods."""

from __future__ import annotations

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tensortap as tt

BOTH = "**:{output,grad_output}"
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


class Net(nnx.Module):
    """Has no `__call__`: steps reach its layers as they like."""

    def __init__(self):
        self.a = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(3, 3, rngs=nnx.Rngs(1))


def tall(a, x):
    return jnp.tanh(a(x))


WAYS = {
    "directly": lambda m, x: tall(m.a, x),
    "remat": lambda m, x: nnx.remat(tall)(m.a, x),
    "vmap": lambda m, x: nnx.vmap(tall, in_axes=(None, 0))(m.a, x),
    "cond": lambda m, x: nnx.cond(x.sum() < 1e9, tall, lambda a, x: x, m.a, x),
    "scan": lambda m, x: nnx.scan(tall, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=1)(m.a, x),
    "jit": lambda m, x: nnx.jit(tall)(m.a, x),
}


@pytest.mark.parametrize("way", WAYS)
def test_nnx(memory, seen, way):
    """Output and cotangent of a layer come out of every transformation of NNX, and the gradients are the same."""
    model = Net()
    step = nnx.jit(nnx.value_and_grad(lambda m, x: jnp.square(m.b(WAYS[way](m, x))).sum()))
    bare = step(model, X)
    with tt.watch_step(step, model, BOTH, to=memory) as watched:
        tapped = watched(model, X)
    assert set(seen()) == {f"{layer}:{port}" for layer in "ab" for port in ("output", "grad_output")}
    assert seen()["a:output"]["l2"] == pytest.approx(float(jnp.linalg.norm(model.a(X))), rel=1e-5)
    assert seen()["a:output"]["shape"] == seen()["a:grad_output"]["shape"] == (4, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), bare, tapped)
    assert watched.tap.counts == {} and not [name for name in vars(model.a) if "tensortap" in name]


def test_nnx_while(memory, seen):
    """Each pass of a loop over a model is a call."""

    def step(model, x):
        return nnx.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1], c[1].a(c[2])), (0, model, x))[2]

    model = Net()
    with tt.watch_step(nnx.jit(step), model, "a", to=memory) as watched:
        watched(model, X)
    assert list(seen()) == ["a:output", "a:output#1", "a:output#2"]


def test_nnx_layers_in_a_stack(memory, seen):
    """Layers whose parameters are stacked, and which a scan goes through, are calls of one layer."""

    class Deep(nnx.Module):
        def __init__(self):
            keys = jax.random.split(jax.random.key(0), 3)
            self.blocks = nnx.vmap(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)))(keys)

        def __call__(self, x):
            return nnx.scan(tall, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)

    model = Deep()
    step = nnx.jit(nnx.grad(lambda m, x: m(x).sum()))
    with tt.watch_step(step, model, "blocks:{output,grad_output}", to=memory) as watched:
        watched(model, X)
    h = np.asarray(X)
    for call in ("", "#1", "#2"):
        kernel = np.asarray(model.blocks.kernel[...])[int(call[1:] or 0)]
        assert seen()[f"blocks:output{call}"]["mean"] == pytest.approx(float((h @ kernel).mean()), rel=1e-4, abs=1e-6)
        h = np.tanh(h @ kernel)
        assert f"blocks:grad_output{call}" in seen()


def test_nnx_taken_apart_by_the_user(memory, seen):
    """A model that the user splits and merges in a step of `jax.jit` is seen, in its methods too."""

    class Coder(Net):
        def encode(self, x):
            return self.b(nnx.remat(tall)(self.a, x))

    model = Coder()
    definition, state = nnx.split(model)
    methods = dict(vars(Coder))
    with tt.watch_step(jax.jit(lambda s, x: nnx.merge(definition, s).encode(x)), model, to=memory) as watched:
        watched(state, X)
    assert set(seen()) == {"a:output", "b:output"}
    assert dict(vars(Coder)) == methods


class Stack(eqx.Module):
    blocks: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 3)
        self.blocks = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 3, key=key))(keys)
        self.head = eqx.nn.Linear(3, 2, key=keys[0])

    def features(self, x):
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        return jax.lax.scan(lambda x, block: (jnp.tanh(eqx.combine(block, rest)(x)), None), x, arrays)[0]

    def __call__(self, x):
        return eqx.filter_checkpoint(self.head)(self.features(x))


@pytest.mark.thorough  # test_libraries.py has Equinox
def test_equinox(memory, seen):
    """A stack of layers in a scan, and a layer that is computed again, are seen; classes of results are the user's."""
    model = Stack()
    step = eqx.filter_jit(eqx.filter_value_and_grad(lambda m, x: jnp.square(jax.vmap(m)(x)).sum()))
    bare = step(model, X)
    with tt.watch_step(step, model, BOTH, "head.weight:grad", to=memory) as watched:
        tapped = watched(model, X)
    for port in ("output", "grad_output"):
        assert {f"head:{port}", f"blocks:{port}", f"blocks:{port}#1", f"blocks:{port}#2"} <= set(seen())
    assert "head.weight:grad" in seen() and watched.tap.counts == {}
    assert jax.tree.structure(bare) == jax.tree.structure(tapped)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), bare, tapped)


def test_methods_of_equinox(memory, seen):
    """Layers are seen in every method of the model, and in a model that one returns they are of their own class."""

    class Coder(eqx.Module):
        a: eqx.nn.Linear
        b: eqx.nn.Linear

        def encode(self, x):
            return self.a(x)

        def parts(self, x):
            return self.b(x), self, [self.a]

    keys = jax.random.split(jax.random.key(0))
    model = Coder(*(eqx.nn.Linear(3, 3, key=key) for key in keys))
    with tt.watch_step(eqx.filter_jit(lambda m, x: m.parts(m.encode(x))), model, to=memory) as watched:
        _, back, (first,) = watched(model, X[0])
    assert set(seen()) == {"a:output", "b:output"}
    assert [type(each) for each in (back, back.a, first)] == [Coder, eqx.nn.Linear, eqx.nn.Linear]


def test_layers_that_are_stacked_in_the_call(memory):
    """Where layers must be of one class, the first step is lost, which is said; the others are seen."""

    class Stacking(eqx.Module):
        layers: list
        head: eqx.nn.Linear

        def __call__(self, x):
            stacked = jax.tree.map(
                lambda *leaves: jnp.stack(leaves), *(eqx.filter(la, eqx.is_array) for la in self.layers)
            )
            return self.head(x + stacked.weight.sum(0) @ x)

    keys = jax.random.split(jax.random.key(0), 3)
    model = Stacking([eqx.nn.Linear(3, 3, key=key) for key in keys[:2]], eqx.nn.Linear(3, 2, key=keys[2]))
    step = eqx.filter_jit(lambda m, x: m(x))
    watched = tt.watch_step(step, model, "head", to=memory)
    with watched, pytest.warns(tt.TensortapWarning, match="different types"):
        for _ in range(2):
            np.testing.assert_allclose(watched(model, X[0]), step(model, X[0]), rtol=1e-6)
    assert [(r.step, str(r.place)) for r in memory.records] == [(1, "head:output")]


def test_two_taps_on_gradients_of_equinox():
    """Both know the layers, though each has put tags on the parameters."""
    model, memories = Stack(), (tt.Memory(), tt.Memory())
    step = eqx.filter_jit(eqx.filter_grad(lambda m, x: jax.vmap(m)(x).sum()))
    first = tt.watch_step(step, model, "**:{output,grad}", to=memories[0])
    second = tt.watch_step(first, model, "**:{output,grad}", to=memories[1])
    second(model, X)
    second.close()
    first.close()
    places = [sorted((str(r.place), r.call) for r in memory.records) for memory in memories]
    assert places[0] == places[1] and {("head:output", 0), ("blocks.weight:grad", 0)} <= set(places[0])


@pytest.mark.thorough  # test_libraries.py has Haiku
def test_haiku(memory, seen):
    """Haiku's own loops over layers, and what it computes again, with the cotangents' values."""

    def net(x):
        x = hk.remat(hk.Linear(3, name="first"))(x)
        x = hk.experimental.layer_stack(2)(lambda x: jnp.tanh(hk.Linear(3, name="inner")(x)))(x)
        return hk.Linear(2, name="last")(x)

    apply = hk.without_apply_rng(hk.transform(net))
    params = apply.init(jax.random.key(0), X)
    step = jax.jit(jax.grad(lambda p, x: jnp.square(apply.apply(p, x)).sum()))
    with tt.watch_step(step, params, BOTH, to=memory) as watched:
        tapped = watched(params, X)
    inner = [name for name in seen() if "inner:" in name]
    assert sorted(name.partition(":")[2] for name in inner) == ["grad_output", "grad_output#1", "output", "output#1"]
    expected = tt.summarize(np.ascontiguousarray(2 * np.asarray(apply.apply(params, X))))
    assert seen()["last:grad_output"]["mean"] == pytest.approx(expected["mean"], rel=1e-4)
    assert {"first:output", "first:grad_output"} <= set(seen())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), step(params, X), tapped)
