"""Steps of a Keras model: eager calls of it, and calls of the functions behind `fit`, `evaluate` and `predict`."""

from __future__ import annotations

from tensortap.adapters.steps import CallStepDetector


class KerasStepDetector(CallStepDetector):
    """A step is a call of the root, or a training, test or prediction step with the root's call inside it."""

    def cancel(self) -> None:
        """The call that began found no more data, so it was none."""
        self._lane().reset()
