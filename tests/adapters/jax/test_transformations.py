"""Values that are named inside a step come out of every transformation, and change none of its results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from rounding import assert_same_to_rounding

import tensortap as tt


def observed(memory, step, *args, probes=("**",), **options):
    """Run a step once with and once without taps: the results are the same to rounding, and the records are given."""
    bare = jax.jit(step)(*args)
    with tt.watch_step(jax.jit(step), *probes, to=memory, **options) as watched:
        tapped = watched(*args)
    jax.tree.map(assert_same_to_rounding, bare, tapped)
    return sorted(memory.records, key=lambda r: r.seq)


def places(records):
    return [(str(r.place), r.call, round(r["mean"], 4)) for r in records]


def test_scan(memory):
    """Each iteration is a call; cotangents have the number of the iteration they belong to."""

    def step(c):
        def body(c, t):
            return tt.tap(c * t, "loop/c"), None

        return jax.value_and_grad(lambda c: jax.lax.scan(body, c, jnp.arange(1.0, 4.0))[0].sum())(c)

    records = observed(memory, step, jnp.ones(2), probes=("loop/c:{output,grad_output}",))
    assert places(records) == [
        *(("loop/c:output", i, mean) for i, mean in enumerate((1.0, 2.0, 6.0))),
        *(("loop/c:grad_output", i, mean) for i, mean in enumerate((6.0, 3.0, 1.0))),
    ]


def test_nested_scans(memory):
    """Of loops in loops the inner one counts faster."""

    def inner(c, t):
        return c, tt.tap(t, "in/t")

    def outer(c, ts):
        return jax.lax.scan(inner, c, ts)

    records = observed(memory, lambda x: jax.lax.scan(outer, 0.0, x), jnp.arange(6.0).reshape(2, 3))
    assert [r["mean"] for r in records] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("x", "taken"), [(1.0, "yes/y"), (-1.0, "no/y")])
def test_cond(memory, x, taken):
    """Only the branch that was taken is recorded, and its cotangent."""

    def step(x):
        def positive(x):
            return tt.tap(x * 2, "yes/y")

        def negative(x):
            return tt.tap(x * 3, "no/y")

        return jax.grad(lambda x: jax.lax.cond(x.sum() > 0, positive, negative, x).sum())(x)

    records = observed(memory, step, jnp.full(3, x), probes=("**:{output,grad_output}",))
    assert [str(r.place) for r in records] == [f"{taken}:output", f"{taken}:grad_output"]


@pytest.mark.parametrize("rounds", [0, 5, 70])
def test_while(memory, rounds):
    """The first iterations of a loop are calls, and the rest is counted."""

    def step(x, n):
        return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, tt.tap(s[1] + 1, "loop/x")), (0, x))[1]

    with tt.watch_step(jax.jit(step), to=memory) as watched:
        assert watched(jnp.zeros(2), rounds) == pytest.approx(rounds)
    assert [r["mean"] for r in memory.records] == list(range(1, min(rounds, 64) + 1))
    assert watched.tap.counts.get("unseen_iterations", 0) == max(0, rounds - 64)


def test_while_in_a_batch(memory):
    """A loop whose length differs within a batch runs as it is, and says that it was not seen."""

    def one(n):
        return jax.lax.while_loop(lambda s: s < n, lambda s: tt.tap(s + 1, "loop/s"), 0)

    records = observed(memory, jax.vmap(one), jnp.array([2, 3]), probes=("loop/s",))
    assert records == []


def test_remat(memory):
    """What is computed a second time is marked as such."""

    def step(x):
        @jax.checkpoint
        def block(x):
            return jnp.sin(tt.tap(jnp.sin(x), "block/x"))

        return jax.grad(lambda x: block(x).sum())(x)

    records = observed(memory, step, jnp.ones(3), probes=("block/x:{output,grad_output}",))
    assert [(r.place.port, r.call, r.recomputed) for r in records] == [
        ("output", 0, False), ("output", 0, True), ("grad_output", 0, False)
    ]  # fmt: skip


def test_policies_of_remat(memory):
    """A policy that saves by name sees the user's names alone."""
    policy = jax.checkpoint_policies.save_only_these_names("mine")

    def step(x):
        def block(x):
            return jnp.sin(checkpoint_name(tt.tap(jnp.sin(x), "block/x"), "mine"))

        return jax.grad(lambda x: jax.checkpoint(block, policy=policy)(x).sum())(x)

    records = observed(memory, step, jnp.ones(3), probes=("block/x:output",))
    assert [r.recomputed for r in records] == [False]


def test_vmap(memory):
    """A mapped function shows the whole batch at once, the batch as the first axis."""
    records = observed(memory, jax.vmap(lambda x: tt.tap(x * 2, "y/y"), in_axes=1), jnp.ones((3, 5)))
    assert [r["shape"] for r in records] == [(5, 3)]


def test_custom_vjp(memory):
    """A derivative of the user's own is used, and can be looked into, since the step is traced as a whole."""

    @jax.custom_vjp
    def odd(x):
        return tt.tap(jnp.sin(x), "odd/sin")

    odd.defvjp(lambda x: (odd(x), x), lambda x, g: (tt.tap(g * 7.0, "odd/back"),))
    records = observed(memory, jax.value_and_grad(lambda x: odd(x).sum()), jnp.ones(2))
    assert [str(r.place) for r in records] == ["odd/sin:output", "odd/back:output"]
    assert records[1]["mean"] == 7.0


def test_gradients_of_a_watched_step(memory):
    """Differentiated from outside, a watched step runs as the user wrote it: its derivative is the user's own."""

    @jax.custom_vjp
    def odd(x):
        return tt.tap(jnp.sin(x), "odd/sin")

    odd.defvjp(lambda x: (odd(x), x), lambda x, g: (g * 7.0,))
    watched = tt.watch_step(lambda x: odd(x).sum(), to=memory)
    with watched, pytest.warns(tt.TensortapWarning, match="outermost"):
        gradient = jax.grad(watched)(jnp.ones(2))
    assert gradient.tolist() == [7.0, 7.0]
    assert watched.tap.counts["unseen_steps"] == 1


def test_forward_mode(memory):
    """Tags do not stand in the way of forward-mode derivatives and of second ones."""

    def step(x):
        def f(x):
            return tt.tap(x**3, "f/y").sum()

        return jax.jvp(f, (x,), (x,)), jax.hessian(f)(x)

    assert len(observed(memory, step, jnp.arange(3.0))) >= 1


def test_operations(memory):
    """Single operations are chosen by name, in the user's own scopes, forwards and backwards."""

    def loss(w, x):
        with jax.named_scope("first"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("second"):
            return (h @ w).sum()

    probes = ("op:dot_general", "first/tanh:{input,output}", "op:@matmul:grad_input")
    records = observed(memory, jax.value_and_grad(loss), jnp.ones((2, 2)), jnp.ones((3, 2)), probes=probes)
    found = [str(r.place) for r in records]
    assert found[:4] == [
        "first/dot_general#0:output", "first/tanh#0:input", "first/tanh#0:output", "second/dot_general#0:output"
    ]  # fmt: skip
    assert {place.partition("#")[0] for place in found[4:]} == {"second/dot_general", "first/dot_general"}
    assert all(place.endswith(":grad_input") for place in found[4:])
    assert records[0].place.op == "dot_general"


def test_name_scopes(memory):
    """A scope's output is what is made inside and used outside it, in jit and scan too, not of the backward."""

    def loss(w, x):
        with jax.named_scope("outer"):
            with jax.named_scope("first"):
                h = jnp.sin(x @ w)
            h = jax.jit(lambda h: jax.named_scope("inner")(jnp.cos)(h))(h) * 2

        def body(c, _):
            with jax.named_scope("loop"):
                c = c + 1
            return c, None

        return jax.lax.scan(body, h, None, length=2)[0].sum()

    w, x = jnp.ones((2, 2)), jnp.ones((3, 2))
    records = observed(memory, jax.value_and_grad(loss), w, x, probes=("outer", "**.{first,inner}", "loop"))
    h = np.sin(2.0)
    assert places(records) == [
        ("outer.first:output", 0, round(h, 4)), ("outer.inner:output", 0, round(np.cos(h), 4)),
        ("outer:output", 0, round(2 * np.cos(h), 4)),
        *(("loop:output", i, round(2 * np.cos(h) + i + 1, 4)) for i in range(2)),
    ]  # fmt: skip


def test_a_misspelt_operation():
    """An operation that JAX does not have is refused, and the nearest one named."""
    with pytest.raises(tt.TensortapError, match="dot_general"):
        tt.watch_step(lambda x: x, "op:dot_genral", to=tt.Memory())


def test_operations_in_loops(memory):
    """Operations inside scan and jit are seen too."""

    def step(x):
        return jax.lax.scan(lambda c, _: (jax.jit(jnp.sin)(c), None), x, None, length=3)[0]

    records = observed(memory, step, jnp.ones(2), probes=("op:sin",))
    assert [(r.place.op, r.call) for r in records] == [("sin", 0), ("sin", 1), ("sin", 2)]


def test_nested_parameters(memory):
    """Parameters that are named inside the loss show their gradients under the same name."""

    def loss(params, x):
        params = tt.tap(params, "net/params")
        return (x @ params["w"] + params["b"]).sum()

    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    records = observed(memory, jax.grad(loss), params, jnp.ones((4, 3)), probes=("net/params:grad_output",))
    assert {str(r.place): r["mean"] for r in records} == {
        "net/params:grad_output.w": 4.0, "net/params:grad_output.b": 4.0
    }  # fmt: skip
