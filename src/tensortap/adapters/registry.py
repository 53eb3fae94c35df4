"""The list of frameworks: one line each. Reading it, or the capabilities in it, imports none of them."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final, NamedTuple

from tensortap.adapters.capabilities import Capabilities


class Registered(NamedTuple):
    """A framework: its package here, and the top-level modules that the classes of its models come from."""

    name: str
    modules: tuple[str, ...]
    plain_objects: bool = False  # asked last whether it recognizes an object whose module names no framework

    @property
    def capabilities(self) -> Capabilities:
        """Its capabilities; reading them does not import the framework."""
        found: Capabilities = importlib.import_module(f"{__package__}.{self.name}.capabilities").CAPABILITIES
        return found

    @property
    def in_use(self) -> bool:
        """Whether the user's program has imported it."""
        return any(module in sys.modules for module in self.modules)


# In the order of the documents' table.
FRAMEWORKS: Final = (
    Registered("torch", ("torch",)),
    Registered("keras", ("keras",)),
    Registered("jax", ("flax", "equinox", "haiku")),
    Registered("numpy", ("sklearn",), plain_objects=True),
    Registered("onnx", ("onnxruntime",)),
)
BY_NAME: Final = {each.name: each for each in FRAMEWORKS}
BY_MODULE: Final = {module: each for each in FRAMEWORKS for module in each.modules}


def registered_for(value: Any) -> Registered | None:
    """Return the framework that one of a value's classes comes from."""
    return next(filter(None, (BY_MODULE.get(cls.__module__.partition(".")[0]) for cls in type(value).__mro__)), None)


def capabilities_of(name: str) -> Capabilities:
    """Return what a framework can show, by the name of its package.

    >>> capabilities_of("torch").gives("grad_output")
    True
    """
    return BY_NAME[name].capabilities


def table() -> list[Capabilities]:
    """Return what each framework can show."""
    return [each.capabilities for each in FRAMEWORKS]
