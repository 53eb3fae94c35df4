"""Watching from a Keras callback: `model.fit(x, y, callbacks=[Watch(to="runs/exp1")])`."""

from __future__ import annotations

from typing import Any

import keras

from tensortap.watch import Tap, watch


class KerasWatch(keras.callbacks.Callback):  # type: ignore[misc]
    """Watch the model while `fit`, `evaluate` or `predict` runs: `Watch(...)` takes what `tt.watch` takes.

    >>> import tensortap as tt
    >>> from tensortap.integrations.keras import Watch
    >>> watching = Watch("dense*", to=tt.Memory())
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
    >>> _ = model.predict(keras.ops.ones((4, 2)), verbose=0, callbacks=[watching])
    >>> [str(record.place) for record in watching.to.records]
    ['dense:output']

    A callback that is used again continues the run it has written. `tap` is the running tap, or the last one.
    """

    def __init__(self, *probes: Any, to: Any = None, **options: Any) -> None:
        super().__init__()
        self.to = to
        self.tap: Tap | None = None
        self._probes = probes
        self._options = options
        self._owner = ""
        self._again = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Put the taps on for `fit`."""
        self.close()  # a tap that an error left open
        self._begin("train")

    def on_test_begin(self, logs: Any = None) -> None:
        """Put the taps on for `evaluate`, unless `fit` has."""
        self._begin("test")

    def on_predict_begin(self, logs: Any = None) -> None:
        """Put the taps on for `predict`."""
        self._begin("predict")

    def on_train_end(self, logs: Any = None) -> None:
        """Take the taps off after `fit`."""
        self._end("train")

    def on_test_end(self, logs: Any = None) -> None:
        """Take the taps off after `evaluate`."""
        self._end("test")

    def on_predict_end(self, logs: Any = None) -> None:
        """Take the taps off after `predict`."""
        self._end("predict")

    def close(self) -> None:
        """Take the taps off. Needed only where an error has ended `fit`."""
        self._owner = ""
        if self.tap is not None:
            self.tap.close()

    def _begin(self, owner: str) -> None:
        if self._owner:
            return
        options = self._options | ({"resume": True} if self._again and self.tap and self.tap.path else {})
        to = self.tap.path if self._again and self.to is None and self.tap else self.to
        self.tap = watch(self.model, *self._probes, to=to, **options)
        self._owner, self._again = owner, True

    def _end(self, owner: str) -> None:
        if self._owner == owner:
            self.close()


Watch = KerasWatch
