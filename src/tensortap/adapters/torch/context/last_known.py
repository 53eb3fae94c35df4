"""The last known state of the parameters of each model, also of models that are deleted before the end.

A model that lives in a function dies when the function returns, before the end of the script. So the facts for the
final report are noted now and then while it lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from tensortap.adapters.torch.context.models import ModelRecord
from tensortap.adapters.torch.context.optimizers import shortened

_MOST_SHAPES: Final = 12


@dataclass
class _Known:
    """One model as it was when it was last looked at; parameters by their id."""

    names: dict[int, str] = field(default_factory=dict)  # the trainable ones
    of_model: set[int] = field(default_factory=set)
    with_gradient: set[int] = field(default_factory=set)  # in any check
    broken_ties: list[list[str]] = field(default_factory=list)
    batch_norms: list[dict[str, Any]] = field(default_factory=list)


class LastKnown:
    """The last known state of every model, and of parameters that belong to none."""

    def __init__(self, models: Callable[[], Iterable[ModelRecord]]) -> None:
        self._models = models
        self._known: dict[int, tuple[ModelRecord, _Known]] = {}
        self._met: dict[int, weakref.ref[Any]] = {}  # parameters of no model that a loss depended on
        self._strangers: dict[int, list[int]] = {}  # the shapes of those that a later loss depended on too

    def look(self) -> None:
        """Note the facts for the final report, for every model that lives."""
        for record in self._models():
            if record.root() is not None:
                self._look_at(record)

    def _look_at(self, record: ModelRecord) -> None:
        parameters = list(record.parameters())
        _, known = self._known.setdefault(id(record), (record, _Known()))
        known.names = {id(p): name for name, p in parameters if p.requires_grad and p.dtype.is_floating_point}
        known.of_model = {id(p) for _, p in parameters}
        known.with_gradient |= {id(p) for _, p in parameters if p.grad is not None}
        known.broken_ties, known.batch_norms = record.broken_ties(), record.batch_norms()

    def reached_without_model(self, parameters: Iterable[Any]) -> None:
        """Note parameters that a loss depends on and no model has; tensors made again for each loss do not count."""
        for parameter in parameters:
            key, shape, known = id(parameter), list(parameter.shape), self._met.get(id(parameter))
            if known is not None and known() is parameter:
                self._strangers[key] = shape
            else:
                self._met[key] = weakref.ref(parameter)

    def trained(self, held: Collection[int]) -> set[str]:
        """Return the names of the models whose parameters an optimizer holds that has stepped."""
        return {record.prefix for record, known in self._known.values() if any(key in held for key in known.of_model)}

    def totals(self, held: Collection[int], reached: Collection[int]) -> dict[str, Any]:
        """Return the parameters that no optimizer holds, those that no loss depends on, and those in no model."""
        known = [each for _, each in self._known.values()]
        names = {key: name for each in known for key, name in each.names.items()}
        taught = set(reached) | {key for each in known for key in each.with_gradient}
        untrained = [name for key, name in names.items() if key not in held and key in taught]
        unreached = [name for key, name in names.items() if key in held and key not in taught]
        of_models = {key for each in known for key in each.of_model}
        alive = {key: list(p.shape) for key, met in self._met.items() if (p := met()) is not None}
        shapes = [shape for key, shape in (alive | self._strangers).items() if key not in held and key not in of_models]
        return {
            "trainable": len(names), "untrained": shortened(untrained), "untrained_count": len(untrained),
            "unreached": shortened(unreached), "unreached_count": len(unreached),
            "unregistered": shapes[:_MOST_SHAPES], "held": sum(key in held for key in names),
            "broken_ties": [tie for each in known for tie in each.broken_ties],
            "batch_norms": [norm for each in known for norm in each.batch_norms],
        }  # fmt: skip
