"""A row computed inside the step is the kernel's row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_arrays import ARRAYS

import tensortap as tt
from tensortap.adapters.jax import rows

EXACT = ("numel", "nan", "posinf", "neginf", "zeros", "min", "max")
ROUNDED = ("mean", "std", "l1", "l2", "skewness", "kurtosis")
# Standardized moments are sums whose terms cancel: float32 rounds terms of order 1, however near 0 their sum is.
NEAR_ZERO = {"skewness": 1e-6, "kurtosis": 1e-6}


@pytest.fixture(autouse=True)
def in_the_step(monkeypatch):
    monkeypatch.setattr(rows, "ON_HOST", False)


@pytest.mark.parametrize("name", ARRAYS)
def test_the_row(name, memory):
    """Counts, ends and buckets are exact, moments good to float32's rounding, for every type and value."""
    array = ARRAYS[name]
    with tt.watch_step(lambda x: tt.tap(x, "x/x"), to=memory) as watched:
        watched(array)
    (record,), expected = memory.records, tt.summarize(array)
    exact = EXACT if name != "complex" else EXACT[:-2]
    assert {k: record[k] for k in exact} == pytest.approx({k: expected[k] for k in exact}, rel=0, nan_ok=True)
    for key in ROUNDED:
        assert record[key] == pytest.approx(expected[key], rel=1e-5, abs=NEAR_ZERO.get(key), nan_ok=True), key
    assert (record["dtype"], record["shape"]) == (expected["dtype"], expected["shape"])
    if name != "complex":
        assert record["hist_offset"] == expected["hist_offset"]
        assert np.array_equal(record["hist_counts"], expected["hist_counts"])


def test_elements_are_kept(memory):
    """What is kept of the elements is the same as elsewhere."""
    keep = [tt.full(), tt.rows([1]), tt.sample(2)]
    with tt.watch_step(lambda x: tt.tap(x * 2, "x/x"), tt.probe("**", keep=keep), to=memory) as watched:
        watched(jnp.arange(6.0).reshape(3, 2))
    kept = {tensor.kind: tensor.array for tensor in memory.tensors}
    assert kept["full"].tolist() == [[0, 2], [4, 6], [8, 10]] and kept["rows"].tolist() == [[4, 6]]


def test_in_loops(memory):
    """Rows come out of loops, branches and gradients as tensors do."""

    def step(x):
        def body(c, _):
            c = jax.lax.cond(c.sum() > 3, lambda c: tt.tap(c, "big/c"), lambda c: c, tt.tap(c * 2, "loop/c"))
            return c, None

        return jax.grad(lambda x: jax.lax.scan(body, x, None, length=3)[0].sum())(x)

    with tt.watch_step(step, tt.probe("**:{output,grad_output}", keep=tt.stats()), to=memory) as watched:
        watched(jnp.ones(2))
    found = [(str(r.place), r.call, r["mean"]) for r in memory.records]
    assert [f for f in found if f[0] == "loop/c:output"] == [("loop/c:output", i, 2.0 ** (i + 1)) for i in range(3)]
    assert [f[2] for f in found if f[0] == "big/c:output"] == [4, 8]
    assert [f[2] for f in found if f[0] == "loop/c:grad_output"] == [4, 2, 1]


def test_the_nonfinite_trigger(memory):
    """A step whose rows show a NaN is the one that is kept."""
    with tt.watch_step(
        lambda x: tt.tap(jnp.log(x), "x/log"), tt.probe("**", when=tt.nonfinite()), to=memory
    ) as watched:
        for value in (1.0, -1.0, 2.0):
            watched(jnp.full(2, value))
            watched.tap.step()
    assert [(r.step, r["nan"]) for r in memory.records] == [(1, 2)]


@pytest.mark.parametrize("scale", [1.0, *(pytest.param(s, marks=pytest.mark.thorough) for s in (1e300, 1e-300))])
def test_doubles(scale, memory):
    """Where x64 is on, doubles keep their range and their digits, and buckets are those of the kernel."""
    array = np.append(np.random.default_rng(0).normal(size=50) * scale, [0.0, np.nan])
    with jax.enable_x64(True), tt.watch_step(lambda x: tt.tap(x, "x/x"), to=memory) as watched:
        watched(array)
    (record,), expected = memory.records, tt.summarize(array)
    for key in (*EXACT, *ROUNDED):
        assert record[key] == pytest.approx(expected[key], rel=1e-12), key
    assert record["dtype"] == "float64" and np.array_equal(record["hist_counts"], expected["hist_counts"])
