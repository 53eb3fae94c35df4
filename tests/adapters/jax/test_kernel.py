"""The C kernel inside a compiled step: the very rows of the host, from every type, place and thread."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_arrays import ARRAYS, assert_same_row

import tensortap as tt
from tensortap.adapters.jax import kernel, rows
from tensortap.adapters.jax.extract import TagExtractor
from tensortap.adapters.jax.results import PendingResults
from tensortap.record.counters import TensortapWarning
from tensortap.reduce import graph_rows
from tensortap.types import DTYPES

KINDS: list[str] = []


@pytest.fixture(autouse=True)
def exported(monkeypatch):
    """What left the steps of a test, by kind."""
    KINDS.clear()
    take = TagExtractor._take

    def noted(self, seen, value, marks, operation=""):
        take(self, seen, value, marks, operation)
        KINDS.append(seen.values[-1].kind)

    monkeypatch.setattr(TagExtractor, "_take", noted)
    return KINDS


@pytest.mark.parametrize("name", ARRAYS)
def test_the_row_is_the_hosts(name, memory):
    """Every statistic and every bucket, bit for bit."""
    with tt.watch_step(lambda x: tt.tap(x, "x/x"), to=memory) as watched:
        watched(ARRAYS[name])
    assert_same_row(memory.records[0], tt.summarize(ARRAYS[name]))
    assert KINDS == ["kernel and histogram"]


@pytest.mark.parametrize("on_host", [True, False])
def test_hashes(on_host, memory, monkeypatch):
    """The content hash is taken inside the step, by the kernel and by XLA, where a probe keeps it."""
    monkeypatch.setattr(rows, "ON_HOST", on_host)
    probes = [tt.probe(f"x/{name}", keep=keep) for name, keep in (("a", [tt.hash(), tt.histogram()]), ("b", tt.hash()))]
    with tt.watch_step(lambda a, b: tt.tap(a, "x/a").sum() + tt.tap(b.T, "x/b").sum(), *probes, to=memory) as watched:
        given = jnp.linspace(-1, 1, 999), jnp.asarray(ARRAYS["bfloat16"] if "bfloat16" in ARRAYS else np.ones((3, 4)))
        watched(*given)
    found = {record["site"]: record for record in memory.records}
    assert found["x/a"]["hash"] == tt.summarize(np.asarray(given[0]), hash=True).hash
    assert found["x/b"]["hash"] == tt.summarize(np.asarray(given[1].T), hash=True).hash
    assert found["x/b"]["hist_counts"] is None is not found["x/a"]["hist_counts"]


@pytest.mark.parametrize("name", [d.name for d in DTYPES])
def test_every_type(name, memory):
    """All types that JAX has."""
    with jax.enable_x64(True):
        array = jnp.asarray(np.arange(-3, 4).astype(jnp.dtype(name)))
        with tt.watch_step(lambda x: tt.tap(x, "x/x"), to=memory) as watched:
            watched(array)
    assert_same_row(memory.records[0], tt.summarize(np.asarray(array)))


def test_large_tensors_and_many_at_once(memory):
    """Tensors of several chunks, which XLA's threads reduce at the same time."""
    arrays = [np.random.default_rng(i).normal(size=(600, 500 + i)).astype(np.float32) for i in range(6)]

    def step(arrays):
        return [tt.tap(jnp.maximum(a, 0), f"x/{i}") for i, a in enumerate(arrays)]

    with tt.watch_step(step, to=memory) as watched:
        for _ in range(5):
            watched(arrays)
            watched.tap.step()
    assert len(memory.records) == 30
    for record in memory.records:
        assert_same_row(record, tt.summarize(np.maximum(arrays[int(record.place.site[2:])], 0)))


def test_without_a_histogram(memory):
    """Nobody pays for buckets that nobody wants."""
    with tt.watch_step(lambda x: tt.tap(x, "x/x"), tt.probe("**", keep=tt.stats()), to=memory) as watched:
        watched(ARRAYS["normal"])
    assert memory.records[0]["hist_counts"] is None
    assert memory.records[0]["std"] == tt.summarize(ARRAYS["normal"])["std"] and KINDS == ["kernel"]


def test_elements_leave_only_where_they_are_kept(memory):
    """A tensor leaves the step where a probe keeps of it, and nowhere else."""

    def step(x):
        return tt.tap(tt.tap(x, "x/kept") * 2, "x/reduced")

    with tt.watch_step(step, tt.probe("x/kept", keep=tt.full()), "x/reduced", to=memory) as watched:
        watched(jnp.ones(3))
    assert KINDS == ["raw", "kernel and histogram"]


def test_loops_branches_and_gradients(memory):
    """Each iteration's row is the host's."""
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(5, 5)), jnp.float32)

    def step(x):
        def body(c, _):
            c = tt.tap(jnp.tanh(matrix @ c), "c/c")
            return jax.lax.cond(c.sum() > 0, lambda c: tt.tap(c, "positive/c"), lambda c: c, c), c

        def loss(x):
            last, all_ = jax.lax.scan(jax.checkpoint(body), x, None, length=4)
            return last.sum(), all_

        return jax.grad(loss, has_aux=True)(x)

    with tt.watch_step(jax.jit(step), "**:{output,grad_output}", to=memory) as watched:
        _, values = watched(jnp.ones((5, 5)))
    seen = [r for r in memory.records if str(r.place) == "c/c:output" and not r.recomputed]
    assert [r.call for r in seen] == [0, 1, 2, 3]
    for record, value in zip(seen, values, strict=True):
        assert_same_row(record, tt.summarize(np.asarray(value)))
    assert len([r for r in memory.records if str(r.place) == "c/c:grad_output"]) == 4
    assert set(KINDS) == {"kernel and histogram"}


def test_a_while_loop(memory):
    """The iterations of a loop whose end nobody knows."""

    def step(x):
        return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, tt.tap(c[1] * 2, "c/c")), (0, x))

    with tt.watch_step(step, to=memory) as watched:
        watched(jnp.arange(3.0))
    assert [r["max"] for r in memory.records] == [4.0, 8.0, 16.0, 32.0, 64.0]


def test_where_xla_does_not_take_it(memory, monkeypatch):
    """Where the kernel cannot be registered XLA computes the rows."""

    def refuse(*args, **kwargs):
        raise ValueError("unsupported version")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    monkeypatch.setattr(kernel, "available", kernel.available.__wrapped__)
    with tt.watch_step(lambda x: tt.tap(x, "x/x"), to=memory) as watched:
        watched(ARRAYS["normal"])
    assert KINDS == ["row"] and len(memory.records) == 1


def test_without_the_extension(memory, monkeypatch):
    """Where there is no C kernel XLA computes the rows."""
    monkeypatch.setattr(kernel, "available", lambda: False)
    with tt.watch_step(lambda x: tt.tap(x, "x/x"), to=memory) as watched:
        watched(ARRAYS["normal"])
    assert KINDS == ["row"] and rows.ON_HOST
    assert memory.records[0]["mean"] == pytest.approx(tt.summarize(ARRAYS["normal"])["mean"], rel=1e-5)


def test_no_memory_is_counted():
    """A row that could not be computed is an error, which is counted where rows are read."""
    none = np.zeros(graph_rows.HEAD, np.uint32)
    none[:2] = 0xFFFFFFFF
    with pytest.raises(MemoryError, match="reduce"):
        graph_rows.read(none, 1, ())


def test_a_row_that_could_not_be_made_takes_no_other_with_it(monkeypatch, memory):
    """A tensor for which there was no memory is counted, and all others are recorded."""
    add = PendingResults.add

    def short_of_memory(self, step, values, arrays):
        rows = np.array(arrays[0])
        rows[:2].view(np.int64)[0] = -1  # as the kernel leaves the first of them
        add(self, step, values, [rows, *arrays[1:]])

    monkeypatch.setattr(PendingResults, "add", short_of_memory)
    watched = tt.watch_step(lambda x: tt.tap(tt.tap(x, "x/a") + 1, "x/b"), to=memory)
    with pytest.warns(TensortapWarning, match="no memory"), watched:
        watched(jnp.arange(3.0))
    assert [record["site"] for record in memory.records] == ["x/b"]
    assert watched.tap.counts == {"skipped_tensors": 1}
