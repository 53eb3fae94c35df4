"""Checks of what triggers are made with. Each error shows the corrected call."""

from __future__ import annotations

import numbers

from tensortap.errors import ProbeError


def is_whole(value: object) -> bool:
    """An integer of any library, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """A real number of any library, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole(value: int, least: int, what: str, corrected: str) -> int:
    """A whole number of at least `least`."""
    if not is_whole(value) or value < least:
        raise ProbeError(f"{what} must be a whole number, at least {least}, not {value!r}: write {corrected}")
    return int(value)


def metric_name(name: str, what: str) -> str:
    """The name of a metric."""
    if not isinstance(name, str) or not name:
        raise ProbeError(f"{what}() needs a metric's name, not {name!r}: write {what}('loss')")
    return name
