"""What each framework can show: plain values, from which the table in the docs, `doctor` and refusals are made.

Nothing here imports a framework, so the table can be printed where none is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tensortap.errors import UnsupportedError
from tensortap.select.ports import PORT_INFO, PORTS
from tensortap.select.sites import Pattern

# The features that an adapter may offer, with their titles in the table. The ports come first.
FEATURES: Final[Mapping[str, str]] = {
    **{port: f"`:{port}`" for port in PORTS},
    "op": "single operations (`op:…`)",
    "nested": "tensors inside nested values",
    "reused": "each call of a layer that is used twice",
    "shared": "a layer under every name it has",
    "steps": "steps are found automatically",
    "threads": "steps of threads, `tap.span()`",
    "functions": "functions as reducers",
    "capture": "`tt.capture`",
    "verify": "`tt.verify`",
    "compare": "`tt.compare`",
    "check_model": "`tt.check_model`, `tt.rank_samples`",
    "origin": "`tt.locate_nonfinite`",
    "exact": "bit for bit the same outputs",
    "context": "training context (`context=True`)",
    "blocks": "operations of plain functions, `tt.ops`",
    "compiled": "`tt.tap` in compiled code where no model is watched",
    "global_stats": "`global_stats=True` on several ranks",
}


@dataclass(frozen=True)
class Capabilities:
    """One framework's column of the table: what it lacks, each with the alternative, and conditions on the rest.

    Optional ports (see `select/ports.py`) are lacking unless `optional` names them. The registry has an alternative for
    them; a framework for which that is wrong has its own in `lacks`.
    """

    name: str
    title: str
    lacks: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        absent = {
            name: port.optional
            for name, port in PORT_INFO.items()
            if port.optional and name not in self.optional and name not in self.lacks
        }
        object.__setattr__(self, "lacks", {**self.lacks, **absent})

    def gives(self, feature: str) -> bool:
        """Return whether the framework supports a feature.

        >>> Capabilities("numpy", "NumPy", lacks={"grad": "keep it in an attribute"}).gives("grad")
        False
        """
        return feature not in self.lacks

    def refusal(self, feature: str) -> str:
        """Return the error message for a missing feature: framework, feature and alternative."""
        port = f"there is no port {feature!r} in {self.title}"
        other = f"{self.title} does not support {FEATURES[feature]}".replace("`", "")
        return f"{port if feature in PORTS else other}: {self.lacks[feature]}"

    def refusals(self) -> dict[str, list[str]]:
        """Return every alternative with the features that it replaces."""
        grouped: dict[str, list[str]] = {}
        for feature, instead in self.lacks.items():
            grouped.setdefault(instead, []).append(f":{feature}" if feature in PORTS else FEATURES[feature])
        return grouped


def refuse(capabilities: Capabilities, pattern: Pattern) -> None:
    """Raise if everything that a pattern can match is missing in the framework."""
    missing = [port for port in PORTS if port in pattern.ports and not capabilities.gives(port)]
    if missing and len(missing) == len(pattern.ports):
        raise UnsupportedError(f"{pattern.text!r}: {capabilities.refusal(missing[0])}")
    if pattern.kind == "op" and not capabilities.gives("op"):
        raise UnsupportedError(f"{pattern.text!r}: {capabilities.refusal('op')}")
