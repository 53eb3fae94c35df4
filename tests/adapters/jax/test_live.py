"""`watch(model)` without touching the step: values as they are made, by callbacks where the step is compiled."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rounding import assert_same_to_rounding

import tensortap as tt


class Net(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


@nnx.jit
def train(model, x):
    return nnx.value_and_grad(lambda m: jnp.square(m(x)).sum())(model)


def recorded(memory):
    return sorted((r.step, str(r.place)) for r in memory.records)


def test_eager_calls(memory, x):
    """A call of the model is a step, and the rows are the kernel's own."""
    model = Net()
    with tt.watch(model, to=memory):
        model(x)
        model(x + 1)
    assert recorded(memory) == [(s, f"{layer}:output") for s in range(2) for layer in ("first", "second")]
    assert memory.records[0]["mean"] == tt.summarize(np.asarray(model.first(x)))["mean"]


def test_a_compiled_step(memory, x):
    """A step that was compiled before is traced anew with callbacks, gradients too, and is itself again afterwards."""
    model = Net()
    bare = train(model, x)
    with tt.watch(model, "**:{output,grad_output}", "first.kernel:grad", to=memory) as tap:
        for _ in range(2):
            value, gradient = train(model, x)
            tap.step(loss=value)
    seen = len(memory.records)
    train(model, x)
    jax.effects_barrier()
    assert len(memory.records) == seen == 2 * (3 * 2 + 1)
    assert {step for step, _ in recorded(memory)} == {0, 1}
    assert value == pytest.approx(bare[0])
    assert np.asarray(gradient["first"]["kernel"][...]) == pytest.approx(np.asarray(bare[1]["first"]["kernel"][...]))


def test_linen(memory, x):
    """Linen's modules are seen wherever they are applied."""
    model = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
    params = model.init(jax.random.key(0), x)
    with tt.watch(model, to=memory) as tap:
        jax.jit(model.apply)(params, x).block_until_ready()
        tap.step()
    assert recorded(memory) == [(0, "layers_0:output"), (0, "layers_2:output")]


def test_operations():
    """Single operations are refused, with the call that shows them."""
    with pytest.raises(tt.TensortapError, match=r"watch_step\(step, model, 'op:dot_general'\)"):
        tt.watch(Net(), "op:dot_general", to=tt.Memory())


def test_two_taps(memory, x):
    """Two live taps see the same step; closing the first leaves the second."""
    model, other = Net(), tt.Memory()
    first, second = tt.watch(model, "first", to=memory), tt.watch(model, "second", to=other)
    jax.block_until_ready(train(model, x)[0])
    first.step()
    second.step()
    first.close()
    jax.block_until_ready(train(model, x)[0])
    second.close()
    assert recorded(memory) == [(0, "first:output")]
    assert recorded(other) == [(0, "second:output"), (1, "second:output")]


def test_inside_transformations(memory):
    """Callbacks come once for each value, in loops, branches, batches and where values are computed again."""
    model = Net()

    @jax.jit
    def step(x):
        @jax.checkpoint
        def body(c, _):
            c = jnp.pad(jax.vmap(model)(c), ((0, 0), (0, 1)))
            return jax.lax.cond(c.sum() > 1e9, lambda c: c, jnp.sin, c), None

        return jax.grad(lambda x: jax.lax.scan(body, x, None, length=3)[0].sum())(x)

    x = jnp.ones((5, 3))
    bare = step(x)
    with tt.watch(model, "first:{output,grad_output}", to=memory) as tap:
        tapped = step(x)
        tap.step()
    assert_same_to_rounding(bare, tapped)
    outputs = [r for r in memory.records if r.place.port == "output"]
    assert len(outputs) in (3, 6) and {r["shape"] for r in memory.records} == {(5, 4)}
    assert len(memory.records) - len(outputs) == 3
