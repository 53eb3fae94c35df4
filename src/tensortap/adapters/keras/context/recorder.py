"""Record the training context of one Keras model while it is watched."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable
from typing import Any, Final

import keras
import numpy as np

from tensortap.adapters.keras.context.data import batch_in, share_of_unseen
from tensortap.adapters.keras.context.describe import (
    describe_loss,
    describe_model,
    describe_optimizer,
    host_array,
    last_operations,
    learning_rate,
    linear_pairs,
    softmax_axes,
)
from tensortap.adapters.keras.layers import layers_of, variables_of
from tensortap.context.arrays import chance_of, describe_array, describe_labels
from tensortap.context.caller import frames_of_caller, line_of_user
from tensortap.context.events import EventLog, Sampling
from tensortap.reduce.summary import summarize

LINES: Final[weakref.WeakKeyDictionary[Any, str]] = weakref.WeakKeyDictionary()
"""The lines that made optimizers and compiled models, if they were noted."""

CONTEXTS: Final[weakref.WeakKeyDictionary[Any, KerasContext]] = weakref.WeakKeyDictionary()
"""The contexts of models that are watched."""

_BATCHES: Final = 6  # of the data that are described when a training begins
_MOST: Final = 65_536  # elements of a variable by which an update is measured


class KerasContext:
    """Add events to a tap's log; an error is reported there once, and ends the context."""

    def __init__(self, model: Any, log: EventLog) -> None:
        self._model = weakref.ref(model)
        self._log = log
        self._sampling = Sampling(first=4, then=16)
        self._steps = 0
        self._rate: float | None = None
        self._before: list[tuple[str, Any]] | None = None
        self._active = True
        self._described = False
        self._compiled: weakref.ref[Any] | None = None  # the optimizer that was last recorded
        self._losses = Sampling()
        self._given = Sampling()
        self.optimizer: Any = None  # of a loop of the script's own
        CONTEXTS[model] = self

    def loss_called(self, loss: Any, y_true: Any, y_pred: Any) -> None:
        """Describe a call of a loss in a loop of the script's own."""
        if self._losses.due():
            self._guarded("loss_called", lambda model: self._record_loss(model, loss, y_true, y_pred))

    def _record_loss(self, model: Any, loss: Any, y_true: Any, y_pred: Any) -> None:
        known = describe_loss(loss)
        if known is None:
            return
        data = _loss_event(model, known[1], _array(y_true))
        data["input"] = describe_array(_array(_detached(y_pred)))
        self._log.add("loss", known[0], line_of_user(4), data)

    def before_step(self, phase: str, args: tuple[Any, ...]) -> None:
        """Note what a training step begins with."""
        if phase == "train":
            self._guarded("before_step", lambda model: self._begin(model, args))

    def after_step(self, phase: str, result: Any) -> None:
        """Note what it has changed."""
        if phase == "train":
            self._guarded("after_step", lambda model: self._end(model, result))

    def close(self) -> None:
        """Add what is known at the end."""
        if self._steps:
            counts = {"steps": self._steps, "backwards": self._steps}
            self._guarded("close", lambda model: self._log.add("totals", "", "", counts))

    def _guarded(self, where: str, act: Callable[[Any], None]) -> None:
        model = self._model()
        if not self._active or model is None:
            return
        try:
            act(model)
        except Exception as error:
            self._active = False
            self._log.add("failed", type(error).__name__, "", {"message": str(error)[:500], "where": where})

    def _begin(self, model: Any, args: tuple[Any, ...]) -> None:
        if not self._described:
            self._described = True
            self._describe(model)
        elif (optimizer := self._optimizer_of(model)) is not None and not self._is_recorded(optimizer):
            self._record_optimizer(model, optimizer, line_of_user(2))
        if self._given.due():
            self._record_given(model, args)
        self._record_rate(model)
        self._before = _trainable(model, _state(args)) if self._sampling.due() else None

    def _end(self, model: Any, result: Any) -> None:
        self._steps += 1
        before, self._before = self._before, None
        if before is not None:
            self._record_updates(model, before, _trainable(model, _state_after(result)))

    def _describe(self, model: Any) -> None:
        line = line_of_user(2)
        self._log.add("model", "", line, describe_model(model))
        optimizer = self._optimizer_of(model)
        if optimizer is not None:
            self._record_optimizer(model, optimizer, line)
        self._log.add("backward", "", line, {"operations": [], "linear_pairs": linear_pairs(model)[:8]})
        self._describe_data(model, line)

    def _is_recorded(self, optimizer: Any) -> bool:
        return self._compiled is not None and self._compiled() is optimizer

    def _record_optimizer(self, model: Any, optimizer: Any, line: str) -> None:
        """Describe the optimizer, also a new one after the model was compiled again."""
        data = describe_optimizer(optimizer, len(model.trainable_variables))
        data |= {"same_parameters": self._compiled is not None, "steps_before": self._steps}
        self._compiled, self._rate = weakref.ref(optimizer), data["groups"][0]["lr"]
        made = LINES.get(optimizer) or LINES.get(model) or line
        self._log.add("optimizer", type(optimizer).__name__, made, data)

    def _record_given(self, model: Any, args: tuple[Any, ...]) -> None:
        """Describe a batch that a generator or a data set gave; arrays that `fit` was given are described at once."""
        call, (x, y) = _training_call(model), batch_in(args)
        if x is None or not call or _array(call.get("x")) is not None:
            return
        line, known = line_of_user(2), describe_loss(getattr(model, "loss", None))
        data: dict[str, Any] = {"mode": "train", "fingerprint": _fingerprint(x), "input": describe_array(x)}
        batches = getattr(call.get("epoch_iterator"), "num_batches", None)
        epoch = call.get("epoch")
        data |= {"batches": int(batches)} if isinstance(batches, int) else {}
        data |= {"epoch": int(epoch) + 1} if isinstance(epoch, int) else {}
        self._log.add("batch", "", line, data)
        if known is not None and y is not None:
            self._log.add("loss", known[0], LINES.get(model) or line, _loss_event(model, known[1], y))

    def _optimizer_of(self, model: Any) -> Any:
        return getattr(model, "optimizer", None) or self.optimizer

    def _describe_data(self, model: Any, line: str) -> None:
        known, call = describe_loss(getattr(model, "loss", None)), _training_call(model)
        x, y = _array(call.get("x")), _array(call.get("y"))
        size = call.get("batch_size") or 32
        for rows in _batches(y if y is not None else x, int(size), bool(call.get("shuffle", True))):
            if x is not None:
                data = {"mode": "train", "fingerprint": _fingerprint(x[rows]), "input": describe_array(x[rows])}
                self._log.add("batch", "", line, data)
            if known is not None and y is not None:
                self._log.add("loss", known[0], LINES.get(model) or line, _loss_event(model, known[1], y[rows]))
        self._describe_validation(call, y, int(size), line)
        if y is None and known is not None:
            self._log.add("loss", known[0], LINES.get(model) or line, _loss_event(model, known[1], None))

    def _describe_validation(self, call: dict[str, Any], y: Any, size: int, line: str) -> None:
        given = call.get("validation_data")
        if not isinstance(given, (tuple, list)) or len(given) < 2:
            return
        x, held_out = _array(given[0]), _array(given[1])
        for rows in _batches(x, size, True)[:3]:
            self._log.add("batch", "", line, {"mode": "eval", "input": describe_array(x[rows])})
        unseen = share_of_unseen(y, held_out)
        if unseen is not None:
            self._log.add("validation", "", line, {"samples": len(held_out), "unseen": unseen})

    def _record_rate(self, model: Any) -> None:
        optimizer = self._optimizer_of(model)
        if optimizer is None or self._rate is None or (self._steps > 64 and self._steps % 16):
            return
        rate = learning_rate(optimizer)
        if abs(rate - self._rate) > 0.01 * max(rate, self._rate):
            group = {"group": 0, "lr": rate, "before": self._rate, "momentum": None, "weight_decay": None}
            self._rate = rate
            self._log.add("rate", type(optimizer).__name__, LINES.get(optimizer, ""), {"number": 1, "groups": [group]})

    def _record_updates(self, model: Any, before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> None:
        weights, ratios = [], []
        for (_, old), (_, new) in zip(before, after, strict=True):
            found = summarize(old, histogram=False)
            finite = found.finite == found.numel
            weights.append([found.l2, found.mean, found.std, found.min, found.max, found.zeros / found.numel]
                           if finite else [math.nan] * 6)  # fmt: skip
            moved = summarize(new - old, histogram=False).l2
            ratios.append(moved / found.l2 if found.l2 else (0.0 if not moved else -1.0))
        optimizer = self._optimizer_of(model)
        self._log.add("parameters", type(optimizer).__name__, "", {
            "names": [name for name, _ in before], "shapes": [list(a.shape) for _, a in before], "weight": weights,
            "grad": [[math.nan] * 6] * len(before), "update": ratios, "number": 1,
        })  # fmt: skip


def _loss_event(model: Any, options: dict[str, Any], y: Any) -> dict[str, Any]:
    operations, layer = last_operations(model)
    shape = [None if n is None else int(n) for n in getattr(model, "output_shape", None) or ()]
    data: dict[str, Any] = {
        **options, "train": True, "requires_grad": True, "operations": operations,
        "softmax": softmax_axes(model) if "Softmax" in operations[:2] else [],
        "produced_by": f"{layer.name}.kernel" if layer is not None else None, "keras": True,
    }  # fmt: skip
    if shape:
        data["input"] = {"shape": [n if n is not None else 0 for n in shape], "dtype": "float32"}
    if y is not None:
        data["target"] = describe_labels(y)
        if data.get("input"):
            data["input"]["shape"][0] = int(y.shape[0])
        data["chance"] = chance_of(data["target"].get("counts", {}))
    return data


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


def _training_call(model: Any) -> dict[str, Any]:
    """Return the arguments of the `fit` or `train_on_batch` that is running on this model."""
    for frame in frames_of_caller(3):
        if frame.f_code.co_name in ("fit", "train_on_batch") and frame.f_locals.get("self") is model:
            return dict(frame.f_locals)
    return {}


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value if value.ndim and value.dtype.kind in "fiub" else None
    if keras.ops.is_tensor(value):
        return host_array(value)
    return None


def _batches(array: Any, size: int, shuffled: bool) -> list[Any]:
    """Return which rows to describe: as batches take them, or evenly spaced where `fit` shuffles."""
    if array is None or not len(array):
        return []
    count = min(_BATCHES, max(1, len(array) // size))
    if shuffled:
        return [np.arange(i, len(array), max(1, len(array) // size))[:size] for i in range(count)]
    starts = np.linspace(0, max(0, len(array) - size), count).astype(int) // size * size  # over the whole epoch
    return [np.arange(start, min(len(array), start + size)) for start in starts]


def _fingerprint(array: Any) -> str:
    flat = np.ascontiguousarray(array).reshape(-1)
    part = flat[:: max(1, flat.size // 256)]
    return hashlib.blake2b(repr((array.shape, str(array.dtype))).encode() + part.tobytes(), digest_size=8).hexdigest()


def _state(args: tuple[Any, ...]) -> Any:
    """Return the values of trainable variables in the state that JAX's steps are given."""
    if keras.backend.backend() != "jax":
        return None
    first = args[0] if args else None
    return first[0] if isinstance(first, (tuple, list)) and first and isinstance(first[0], (tuple, list)) else None


def _state_after(result: Any) -> Any:
    if keras.backend.backend() != "jax" or not isinstance(result, (tuple, list)) or len(result) < 2:
        return None
    return _state((result[1],))


def _trainable(model: Any, values: Any) -> list[tuple[str, Any]]:
    """Return copies of trainable variables, or of the values that stand for them."""
    paths = {id(v.value): v.path for v in variables_of(layers_of(model))}
    variables = list(model.trainable_variables)
    given = variables if values is None or len(values) != len(variables) else list(values)
    return [(paths.get(id(v), v.name), _part(now)) for v, now in zip(variables, given, strict=True)]


def _part(value: Any) -> Any:
    array = host_array(value)
    if array.size <= _MOST:
        return np.array(array, copy=True)
    return np.array(array.reshape(-1)[:: array.size // _MOST], copy=True)
