"""ONNX Runtime as one object: a session is run with a feed, and a run changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from tensortap.adapters.array_framework import ArrayFramework
from tensortap.adapters.onnx.adapter import OnnxAdapter
from tensortap.adapters.onnx.capabilities import CAPABILITIES
from tensortap.adapters.results import ModelIdentity


class OnnxFramework(ArrayFramework):
    """Sessions of ONNX Runtime."""

    capabilities = CAPABILITIES

    def array_adapter(self, model: Any) -> OnnxAdapter | None:
        """Return the adapter for a session, or None for other objects of ONNX Runtime."""
        return OnnxAdapter(model) if isinstance(model, onnxruntime.InferenceSession) else None

    def call(self, model: Any, inputs: Any) -> list[Any]:
        """Run a session with a feed, a tuple of values in the order of its inputs, or one value."""
        if not isinstance(inputs, Mapping):
            values = inputs if isinstance(inputs, tuple) else (inputs,)
            inputs = dict(zip((given.name for given in model.get_inputs()), values, strict=True))
        return model.run(None, dict(inputs))  # type: ignore[no-any-return]

    def identity(self, model: Any) -> ModelIdentity:
        """Return the bytes of the model, as the session was given them."""
        data = model._model_bytes or Path(model._model_path).read_bytes()
        return ModelIdentity({"model": np.frombuffer(data, np.uint8)})

    def parameters_of_call(self, model: Any) -> frozenset[str]:
        """Return the names of the session's inputs."""
        return frozenset(given.name for given in model.get_inputs())

    def traces(self, model: Any) -> dict[str, Any]:
        """Return every attribute of the session."""
        return {name: id(value) for name, value in vars(model).items()}


FRAMEWORK: Final = OnnxFramework()
