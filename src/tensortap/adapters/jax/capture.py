"""One call of a model, and copies of the tensors at chosen sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tensortap.adapters import arrays
from tensortap.adapters.jax.adapter import JaxAdapter
from tensortap.adapters.jax.entry import call
from tensortap.adapters.results import Captured


def capture(model: Any, inputs: Any, patterns: Sequence[Any]) -> Captured:
    """Call the model once with taps on."""

    def wait() -> Any:
        output = call(model, inputs)
        jax.block_until_ready(output)
        jax.effects_barrier()
        return output

    return arrays.capture(JaxAdapter(model), wait, patterns)
