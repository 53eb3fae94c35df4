"""Values inside shard_map, over two devices, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, tensortap as tt
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

def local(w, x):
    h = tt.tap(jnp.tanh(x @ w), "net/h")
    return jax.lax.psum(h.sum(), "data")

mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
step = jax.jit(jax.value_and_grad(mapped))
w, x = jnp.ones((3, 2)) * 0.1, jnp.arange(12.0).reshape(4, 3)
bare, memory = step(w, x), tt.Memory()
with tt.watch_step(step, "net/h:{output,grad_output}", to=memory) as watched:
    tapped = watched(w, x)
jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6), bare, tapped)
outputs = [r for r in memory.records if r.place.port == "output"]
halves = np.tanh(np.asarray(x) @ np.asarray(w)).reshape(2, 2, 2)
assert [r.call for r in outputs] == [0, 1], outputs
np.testing.assert_allclose([r["mean"] for r in outputs], halves.mean((1, 2)), rtol=1e-5)
assert len(memory.records) == 4, memory.records

placed = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
whole = tt.Memory()
with tt.watch_step(jax.jit(lambda x: tt.tap(x * 3, "net/x")), to=whole) as watched:
    assert watched(placed).sharding.spec == P("data")
(record,), expected = whole.records, tt.summarize(np.asarray(x) * 3)
for name in ("numel", "mean", "std", "min", "max", "l2"):
    assert record[name] == expected[name], name
print("seen")
"""


def test_shard_map():
    """Inside, what each device holds is a record of its own, with its cotangent; outside, an array is one tensor."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "seen\n", done.stderr
