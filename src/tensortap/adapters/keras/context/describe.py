"""Describe a compiled Keras model: its layers, its last activation, its loss and its optimizer."""

from __future__ import annotations

from typing import Any, Final

import keras
import numpy as np

from tensortap.adapters.keras.layers import layers_of, variables_of

# The names that rules know losses by, where PyTorch has the same one.
_SAME: Final = {
    "mean_squared_error": "mse_loss", "mse": "mse_loss", "mean_absolute_error": "l1_loss", "mae": "l1_loss",
    "huber": "huber_loss", "huber_loss": "huber_loss", "log_cosh": "smooth_l1_loss",
}  # fmt: skip
_NODES: Final = {
    "softmax": "Softmax",
    "sigmoid": "Sigmoid",
    "relu": "Relu",
    "tanh": "Tanh",
    "log_softmax": "LogSoftmax",
}
_OPTIONS: Final = ("momentum", "weight_decay", "epsilon", "clipnorm", "clipvalue", "global_clipnorm")
_WEIGHTED: Final = ("Dense", "Conv1D", "Conv2D", "Conv3D", "EinsumDense")
_TRANSPARENT: Final = (
    "Dropout",
    "Flatten",
    "Reshape",
    "InputLayer",
    "Identity",
    "GaussianNoise",
    "ActivityRegularization",
)


def describe_model(model: Any) -> dict[str, Any]:
    """Return modules with options that matter, and what is frozen."""
    layers = layers_of(model)
    variables = [v for v in variables_of(layers) if _can_train(v.value)]
    frozen = [v.path for v in variables if not v.trainable]
    modules = [
        {"path": layer.path, "type": type(layer.value).__name__, **_options(layer.value)}
        for layer in layers
        if layer.leaf
    ]
    return {
        "class": type(model).__name__, "parameters": len(variables), "frozen": frozen[:40],
        "frozen_count": len(frozen), "modules": modules[:400], "ties": [], "dtypes": _dtypes(variables),
        "has_modes": any("Dropout" in m["type"] or "BatchNorm" in m["type"] for m in modules),
    }  # fmt: skip


def _can_train(variable: Any) -> bool:
    """Return whether a variable is a weight, not a statistic or a seed: layers freeze by their own flag."""
    name = variable.name
    return not any(part in name for part in ("moving_", "seed", "normalization_mean")) and "float" in str(
        variable.dtype
    )


def _dtypes(variables: list[Any]) -> list[str]:
    return sorted({str(keras.backend.standardize_dtype(v.value.dtype)) for v in variables})


def _options(layer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "Dropout" in type(layer).__name__ and isinstance(getattr(layer, "rate", None), (int, float)):
        found["p"] = float(layer.rate)
    if "BatchNorm" in type(layer).__name__:
        found["momentum"] = round(1 - float(layer.momentum), 9)  # as PyTorch has it: the weight of the new batch
        found["eps"] = float(layer.epsilon)
    if isinstance(getattr(layer, "mask_zero", None), bool) and layer.mask_zero:
        found["padding_idx"] = 0
    return found


def last_operations(model: Any) -> tuple[list[str], Any]:
    """Return the operations that produce the output, the nearest first, and the layer with the last weights.

    Nothing is known of a model that has no list of layers in order.
    """
    found: list[str] = []
    for layer in reversed(_in_order(model)):
        kind = type(layer).__name__
        if kind in _TRANSPARENT:
            continue
        name = _activation(layer)
        if name:
            found.append(_NODES.get(name, name.capitalize()))
        if kind in _WEIGHTED or getattr(layer, "weights", None):
            return [*found, "Addmm"], layer
        if not name:
            return found, layer
    return found, None


def softmax_axes(model: Any) -> list[tuple[str, int, int, int]]:
    """Return name, axis, number of axes and length of the last softmax, whose output may be reshaped afterwards."""
    layer = next((layer for layer in reversed(_in_order(model)) if _activation(layer) == "softmax"), None)
    shape = tuple(getattr(getattr(layer, "output", None), "shape", None) or ())
    axis = getattr(layer, "axis", -1)  # of the layer Softmax; an activation's is the last
    axis = axis % len(shape) if shape and isinstance(axis, int) else len(shape) - 1
    return [("Softmax", axis, len(shape), int(shape[axis] or 0))] if shape else []


def _activation(layer: Any) -> str:
    kind = type(layer).__name__
    if kind in ("Softmax", "ReLU", "LeakyReLU", "PReLU", "ELU"):
        return kind.lower()
    name = getattr(getattr(layer, "activation", None), "__name__", "")
    return "" if name == "linear" else str(name)


def _in_order(model: Any) -> list[Any]:
    if isinstance(model, keras.Sequential):
        layers = list(model.layers)
        return [*layers[:-1], *_in_order(layers[-1])] if layers and isinstance(layers[-1], keras.Sequential) else layers
    outputs = getattr(model, "outputs", None)
    history = getattr(outputs[0], "_keras_history", None) if outputs and len(outputs) == 1 else None
    found: list[Any] = []
    while history is not None and len(found) < 200:
        found.append(history.operation)
        nodes: list[Any] = list(getattr(history.operation, "_inbound_nodes", ()))
        inputs: Any = nodes[history.node_index].input_tensors if nodes and not _is_input(history.operation) else ()
        history = getattr(inputs[0], "_keras_history", None) if len(inputs) == 1 else None
    return found[::-1]


def _is_input(operation: Any) -> bool:
    return isinstance(operation, keras.layers.InputLayer)


def linear_pairs(model: Any) -> list[tuple[str, str]]:
    """Return Dense layers that follow each other with no activation between."""
    pairs: list[tuple[str, str]] = []
    before: Any = None
    for layer in _in_order(model):
        kind = type(layer).__name__
        if kind in ("Dropout", "InputLayer", "Flatten", "Reshape"):
            continue
        dense = kind == "Dense"
        if dense and before is not None and before.units >= min(before.kernel.shape[0], layer.units):
            pairs.append((f"{before.name}.kernel", f"{layer.name}.kernel"))
        before = layer if dense and not _activation(layer) else None
    return pairs


def describe_loss(given: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name of a loss and its options; None where there are several, or none."""
    if given is None or isinstance(given, (list, tuple, dict)):
        return None
    loss = keras.losses.get(given) if isinstance(given, str) else given
    name = str(getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__))
    options = loss.get_config() if hasattr(loss, "get_config") else {}
    kept = {k: options[k] for k in ("from_logits", "label_smoothing", "reduction") if k in options}
    kept["reduction"] = {"sum_over_batch_size": "mean", "sum": "sum"}.get(str(kept.get("reduction", "mean")), "mean")
    return _SAME.get(name, name), {"from_logits": False, **kept}


def describe_optimizer(optimizer: Any, variables: int) -> dict[str, Any]:
    """Return the optimizer's options, in the form of a parameter group."""
    options = {k: getattr(optimizer, k, None) for k in _OPTIONS}
    known = {name: value for name, value in options.items() if isinstance(value, (int, float))}
    found = {"lr": learning_rate(optimizer), "eps": known.pop("epsilon", None), "parameters": variables}
    return {"number": 1, "groups": [found | known], "steps_before": 0, "same_parameters": False}


def learning_rate(optimizer: Any) -> float:
    """Return the current learning rate, also of a schedule."""
    return float(host_array(optimizer.learning_rate))


def host_array(value: Any) -> Any:
    """Return the elements of a variable or of a tensor of any backend."""
    tensor = value.value if isinstance(value, keras.Variable) else value
    if keras.backend.backend() == "torch":
        return keras.ops.convert_to_numpy(tensor)
    return np.asarray(tensor)  # Keras's own conversion copies, and NumPy warns about it
