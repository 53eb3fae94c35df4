"""`watch` for a model that Accelerate has prepared."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from tensortap.errors import UnsupportedError
from tensortap.watch import Tap
from tensortap.watch import watch as watch_model


def watch(accelerator: Accelerator, model: Any, *probes: Any, **options: Any) -> Tap:
    """Observe a model, prepared or not, in every process: as `tt.watch`, with the accelerator before the model.

    >>> from tensortap.integrations.accelerate import watch
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)     # doctest: +SKIP
    >>> with watch(accelerator, model, "**", to="runs/exp1", context=True):        # doctest: +SKIP
    ...     for batch in loader:
    ...         with accelerator.accumulate(model):
    ...             ...

    Steps are found automatically: one for each step that the optimizer really makes, micro-batches included. To give
    metrics, close them yourself: `if accelerator.sync_gradients: tap.step(loss=loss)`.
    """
    if not isinstance(accelerator, Accelerator):
        raise UnsupportedError(
            f"the first argument must be the Accelerator, got a {type(accelerator).__name__}: "
            "watch(accelerator, model, …)"
        )
    return watch_model(accelerator.unwrap_model(model), *probes, **{"rank": accelerator.process_index, **options})
