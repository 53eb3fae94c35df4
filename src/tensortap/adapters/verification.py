"""The contract of `tt.verify` with a framework: it runs a model with and without taps and compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

OUTPUT: Final = "output"  # prefix of the names of outputs
GRADIENT: Final = "grad "  # prefix of the names of gradients


class VerificationSubject:
    """One model with one batch, run again and again from the same state."""

    def observe(self) -> Mapping[str, Any]:
        """Run once from the same state, and return all results and changed state, by name."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Put the state back."""

    def run(self) -> None:
        """Run once, for the time it takes."""
        raise NotImplementedError

    def traces(self) -> Mapping[str, Any]:
        """Return everything a careless tap could leave behind."""
        return {}

    def unrestored(self) -> list[str]:
        """Return the state that a run changes and `prepare` does not restore; used if runs differ without taps."""
        return []

    def same(self, a: Any, b: Any) -> bool:
        """Return whether two values are equal bit for bit."""
        raise NotImplementedError

    def apart(self, a: Any, b: Any) -> Any:
        """Return by how much two values differ."""
        raise NotImplementedError
