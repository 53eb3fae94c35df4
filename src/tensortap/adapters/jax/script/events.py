"""The training context of a JAX script, as far as it can be seen: parameters, updates, batches, optax's optimizers."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final

import numpy as np

from tensortap.adapters.jax.script.adapter import host
from tensortap.context.arrays import describe_array
from tensortap.context.caller import line_of_user
from tensortap.context.events import EventLog, Sampling
from tensortap.reduce.summary import summarize

OPTIMIZERS: Final = (
    "sgd", "adam", "adamw", "rmsprop", "adagrad", "lion", "lamb", "lars", "nadam", "nadamw", "radam", "adabelief",
    "adamax", "adadelta", "adafactor", "noisy_sgd", "novograd", "yogi", "fromage", "sm3",
)  # fmt: skip
_OPTIONS: Final = ("momentum", "weight_decay", "eps", "b1", "b2", "nesterov")
_PROBES: Final = 256


class JaxScriptEvents:
    """Add events to a run's log; optimizers that are made before there is a run wait for it."""

    def __init__(self) -> None:
        self._optimizers: list[tuple[str, str, dict[str, Any]]] = []
        self._batches = Sampling(first=16, then=32)
        self._updates = 0
        self.steps = 0

    def optimizer(self, name: str, options: dict[str, Any]) -> None:
        """Note an optimizer of optax that the script makes."""
        rate = options.get("learning_rate")
        first: Any = rate(0) if callable(rate) else rate
        group: dict[str, Any] = {"lr": None if first is None else float(first)}
        group |= {k: options[k] for k in _OPTIONS if isinstance(options.get(k), (int, float))}
        data = {"number": len(self._optimizers) + 1, "groups": [group], "steps_before": 0, "same_parameters": False}
        self._optimizers.append((name, line_of_user(3), data | {"scheduled": callable(rate)}))

    def model(self, log: EventLog, name: str, parameters: Any) -> None:
        """Add an event about what is trained, and by which optimizers."""
        dtypes = sorted({str(leaf.value.dtype) for leaf in parameters})
        log.add("model", "", line_of_user(4), {
            "class": name, "parameters": len(parameters), "frozen": [], "frozen_count": 0, "modules": [], "ties": [],
            "has_modes": False, "dtypes": dtypes, "unseen": ["loss", "modules"],  # they are inside what is compiled
        })  # fmt: skip
        for kind, code, data in self._optimizers:
            log.add("optimizer", kind, code, data)

    def parameters(self, log: EventLog, before: Any, changes: Any) -> None:
        """Add an event about the size of the parameters and of their updates."""
        self.steps += 1
        if not changes:
            return
        weights = [summarize(np.asarray(leaf.value), histogram=False) for leaf in before]
        moved = [summarize(leaf.value, histogram=False).l2 for leaf in changes]
        log.add("parameters", "", "", {
            "names": [leaf.name for leaf in before], "shapes": [list(leaf.value.shape) for leaf in before],
            "weight": [[w.l2, w.mean, w.std, w.min, w.max, w.zeros / max(w.numel, 1)] for w in weights],
            "grad": [[math.nan] * 6] * len(before),
            "update": [m / w.l2 if w.l2 else (0.0 if not m else -1.0) for m, w in zip(moved, weights, strict=True)],
            "number": 1,
        })  # fmt: skip

    def batch(self, log: EventLog, named: list[tuple[str, Any]]) -> None:
        """Add an event about the data of some steps; the first array under the name of its argument."""
        if not named or not self._batches.due():
            return
        arrays = [array for _, array in named]
        first = host(arrays[0])
        digest = hashlib.blake2b(digest_size=8)
        for array in map(host, arrays[:4]):
            flat = np.ascontiguousarray(array).reshape(-1)
            digest.update(repr((array.shape, str(array.dtype))).encode())
            digest.update(flat[:: max(1, flat.size // _PROBES)].tobytes())
        said = {"input": describe_array(first), "slot": f".{named[0][0]}"}
        data = {"mode": "train", "fingerprint": digest.hexdigest(), **said}
        log.add("batch", "", "", data)

    def end(self, log: EventLog) -> None:
        """Add an event with the totals."""
        log.add("totals", "", "", {"steps": self.steps, "backwards": self.steps})
