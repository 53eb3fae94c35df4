"""Keras as one object: its models are called eagerly, and a call can change their variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import keras
import numpy as np

from tensortap.adapters.array_framework import ArrayFramework, Restore
from tensortap.adapters.arrays import Array
from tensortap.adapters.keras.adapter import KerasAdapter
from tensortap.adapters.keras.capabilities import CAPABILITIES
from tensortap.adapters.keras.layers import layers_of
from tensortap.adapters.keras.observer import arrays_of
from tensortap.adapters.keras.state import build, names_of_arguments, preserved, training_step, variables_of_training
from tensortap.adapters.protocol import DEFAULT_OPTIONS, AdapterOptions
from tensortap.adapters.results import ModelIdentity
from tensortap.adapters.verification import VerificationSubject
from tensortap.errors import UnsupportedError


class KerasFramework(ArrayFramework):
    """Layers and models of Keras, on TensorFlow, PyTorch or JAX."""

    capabilities = CAPABILITIES

    def adapter(self, model: Any, options: AdapterOptions = DEFAULT_OPTIONS) -> KerasAdapter | None:
        """Return the adapter for a layer or model, with the training context where it is asked for."""
        return KerasAdapter(model, options.context) if isinstance(model, keras.Layer) else None

    def array_adapter(self, model: Any) -> KerasAdapter | None:
        """Return the adapter for a layer or model."""
        return KerasAdapter(model) if isinstance(model, keras.Layer) else None

    def call(self, model: Any, inputs: Any) -> Any:
        """Call a model. A dict holds arguments of `call` where it names them, else the model's inputs by name."""
        if isinstance(inputs, Mapping) and not set(inputs) <= set(names_of_arguments(model)):
            return model(dict(inputs))
        return super().call(model, inputs)

    def parameters_of_call(self, model: Any) -> frozenset[str] | None:
        """Return the names of the model's inputs, or of the arguments of `call` where it takes several."""
        inputs = getattr(model, "inputs", None)
        if inputs:
            struct = getattr(model, "input", None)  # a Sequential has none
            return frozenset(struct if isinstance(struct, Mapping) else (tensor.name for tensor in inputs))
        arguments = names_of_arguments(model)
        return frozenset(arguments) if len(arguments) > 1 else None

    @contextmanager
    def preserved(self, model: Any) -> Iterator[Restore]:
        """Put variables and random states back."""
        with preserved(model) as restore:
            yield restore

    def on_host(self, value: Any) -> Any:
        """Return the tensors of any backend as arrays."""
        return arrays_of(value)

    def state(self, model: Any) -> dict[str, Array]:
        """Return all variables, those of the optimizer and the metrics too."""
        return {f"variable {v.path}": np.array(v.numpy(), copy=True) for v in variables_of_training(model)}

    def identity(self, model: Any) -> ModelIdentity:
        """Return the weights in their order, and the class and the activation function of every layer.

        Paths are left out, as Keras counts up the names of models and layers in a process; so are seeds, which a model
        that is made again may draw anew, and what belongs to an optimizer or a metric.
        """
        arrays = {f"{number:06d} {v.name}": np.array(v.numpy(), copy=True) for number, v in enumerate(model.weights)}
        return ModelIdentity(arrays, "\n".join(_told_layer(layer.value) for layer in layers_of(model)))

    def traces(self, model: Any) -> dict[str, Any]:
        """Return every attribute of every layer."""
        return {
            f"{layer.path}.{name}": id(value) for layer in layers_of(model) for name, value in vars(layer.value).items()
        }

    @contextmanager
    def verification(self, model: Any, batch: Any) -> Iterator[VerificationSubject]:
        """Yield the subject: for a compiled model an eager training step. A first run makes the variables."""
        step = training_step(model, batch) or self.as_step(model, batch)
        build(model, step)
        with super().verification(model, step) as subject:
            yield subject

    @contextmanager
    def isolated(self, model: Any, backward: bool) -> Iterator[Callable[[Any], object]]:
        """Yield a function that calls the model; its gradients are compared by runs."""
        if backward:
            raise UnsupportedError(
                "gradients of Keras models are compared by runs: watch both while they train, then tensortap.diff(a, b)"
            )
        with super().isolated(model, backward) as run:
            yield run


def _told_layer(layer: Any) -> str:
    """Return a layer's class and its activation function: two models may differ in nothing else."""
    activation = getattr(layer, "activation", None)
    return f"{type(layer).__name__}({getattr(activation, '__name__', activation.__class__.__name__)})"


FRAMEWORK: Final = KerasFramework()
