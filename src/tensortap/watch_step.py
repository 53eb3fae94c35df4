"""`watch_step`: for frameworks that compile a whole step, whose statistics leave it as further results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensortap.select.probes import Probe
from tensortap.select.sites import Candidate, Pattern
from tensortap.watch import watch


def watch_step(
    step: Callable[..., Any],
    model: Any = None,
    *probes: Probe | str | Pattern | Callable[[Candidate], bool],
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | tuple[str, ...] = (),
    donate_argnums: int | tuple[int, ...] = (),
    **options: Any,
) -> Any:
    """Observe a function of JAX that runs a step: call what this gives instead of it. Its `tap` is the tap.

    >>> import jax, jax.numpy as jnp, tensortap as tt
    >>> def loss(w, x):
    ...     return tt.tap(jnp.tanh(x @ w), "net/hidden").sum()
    >>> memory = tt.Memory()
    >>> with tt.watch_step(jax.jit(jax.value_and_grad(loss)), to=memory) as step:
    ...     value, gradient = step(jnp.ones((3, 2)), jnp.ones((4, 3)))
    ...     step.tap.step(loss=value)
    >>> [(str(record.place), record["shape"]) for record in memory.records]
    [('net/hidden:output', (4, 2))]

    `model` is a module of Flax or Equinox, nested parameters, or nothing. `options` are those of `watch`, except
    `context`: `tensortap run SCRIPT` records that of compiled steps. Static and donated arguments are taken from your
    own `jax.jit`; for a function that is not compiled yet, name them here. A step that no trigger wants runs your own
    function. One that is wanted is compiled as by `jax.jit`: what the function reads besides its arguments is read
    once.
    """
    from tensortap.adapters.jax import adapter  # `import tensortap` loads no framework
    from tensortap.adapters.jax import step as jax_step

    if isinstance(model, (str, Probe, Pattern)):
        model, probes = None, (model, *probes)
    adapter.refuse_model(model, probes)
    arguments = {
        "static_argnums": static_argnums, "static_argnames": static_argnames, "donate_argnums": donate_argnums
    }  # fmt: skip
    return jax_step.watched(step, model, probes, watch, options, arguments)
