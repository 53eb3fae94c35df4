"""What to do about an object that cannot be watched, where that is known. Nothing here imports a framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_STEP: Final = "step = tensortap.watch_step(step, params)"
PARAMETERS: Final = (
    "these are parameters, not a model: their sites are known only when a step uses them. Watch the function of the "
    f"step, {_STEP}, call it, and look at step.tap.run.sites; name values inside it with tensortap.tap(x, 'net/name')"
)
STATE_DICT: Final = "these are tensors without a model: watch the model that holds them, tensortap.watch(model)"
OPTIMIZER: Final = (
    "this is an optimizer: watch the model whose parameters it holds, tensortap.watch(model, '**', '**:update'), and "
    "what it does is recorded with context=True"
)
TRANSFORMED: Final = (
    "a {name} of Haiku is a pair of functions, init and apply. Watch the step that calls apply with its parameters: "
    f"{_STEP}; then its modules are sites"
)
SAVED_MODEL: Final = (
    "a loaded SavedModel is a graph without layers. Load the Keras model it was saved from, "
    "keras.saving.load_model('model.keras'), or see its inputs and outputs as a layer: "
    "keras.Sequential([keras.layers.TFSMLayer('saved', call_endpoint='serve')])"
)
TENSORFLOW: Final = (
    "of TensorFlow's own objects only Keras models are watched. Name values where you compute them: "
    "with tensortap.watch(): tensortap.tap(x, 'name')"
)
ORT_MODEL: Final = (
    "an ONNX model is watched as it runs: session = onnxruntime.InferenceSession(model.SerializeToString()), "
    "then tensortap.watch(session)"
)
_ARRAYS: Final = ("jax", "jaxlib", "numpy")
_DEPTH: Final = 6


def advice_for(value: Any) -> str:
    """Return advice about an object that cannot be watched; an empty text if there is none.

    >>> advice_for({"w": 3})
    ''
    """
    if hasattr(value, "param_groups") and hasattr(value, "zero_grad"):
        return OPTIMIZER
    homes = [cls.__module__ for cls in type(value).__mro__]
    if _holds_arrays(value, _DEPTH, _ARRAYS):
        return PARAMETERS
    if _holds_arrays(value, _DEPTH, ("torch",)):
        return STATE_DICT
    if homes[0].startswith("haiku.") and hasattr(value, "apply"):
        return TRANSFORMED.format(name=type(value).__name__)
    if homes[0].startswith("onnx."):
        return ORT_MODEL
    if any(home.startswith("tensorflow.python.saved_model") for home in homes):
        return SAVED_MODEL
    return TENSORFLOW if any(home.partition(".")[0] == "tensorflow" for home in homes) else ""


def _holds_arrays(value: Any, depth: int, homes: tuple[str, ...]) -> bool:
    """Return whether a nested container holds arrays of these packages and nothing callable."""
    if not isinstance(value, (Mapping, list, tuple)) or not depth or hasattr(value, "apply"):
        return False
    parts = list(value.values()) if isinstance(value, Mapping) else list(value)
    return any(_is_array(part, homes) or _holds_arrays(part, depth - 1, homes) for part in parts[:1000])


def _is_array(value: Any, homes: tuple[str, ...]) -> bool:
    return type(value).__module__.partition(".")[0] in homes and hasattr(value, "dtype")
