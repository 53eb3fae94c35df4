"""The requests to a running tap: one JSON object on one line, checked before it is used."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from tensortap.errors import ControlError, suggest

LONGEST: Final = 64 << 10  # bytes of a request
MOST_STEPS: Final = 1_000_000
LONGEST_WAIT: Final = 60.0  # seconds that an answer may wait for the end of a step
ACTIONS: Final = {
    "status": "say which step it is at, whether it is paused, and what its probes are",
    "capture": "keep more of some sites for a few steps",
    "pause": "record nothing until `resume`",
    "resume": "record again",
    "probe add": "observe more sites, from now on",
    "probe remove": "stop observing the sites of a probe",
    "note": "put a sentence into the run's events",
    "snapshot": "keep the whole tensors of everything that is watched, and all parameters, of one step",
}
NEED_SITES: Final = ("capture", "probe add")


@dataclass(frozen=True, kw_only=True)
class ControlRequest:
    """One request.

    >>> parse(b'{"action": "capture", "sites": ["blocks.3.*"], "keep": ["full"], "steps": 3}').steps
    3
    """

    action: str
    sites: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    steps: int = 1
    every: int = 1
    probe: int | None = None  # its number, as `status` gives it
    text: str = ""
    start: int = 0  # the first step to act at; ranks that are to act together agree on one
    wait: float = 10.0

    def encoded(self) -> bytes:
        """Return the line to send."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def asked(self) -> dict[str, Any]:
        """Return the values that are not defaults, for the run's events."""
        given = {name: getattr(self, name) for name in _DEFAULTS if name not in ("action", "wait")}
        return {name: value for name, value in given.items() if value != _DEFAULTS[name]}


_DEFAULTS: Final = {field.name: field.default for field in fields(ControlRequest)}


def parse(line: bytes) -> ControlRequest:
    """Return the request in a line; raise ControlError for anything else."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise ControlError(f"a request must be one line of JSON, got {line[:60]!r}") from None
    if not isinstance(given, dict):
        raise ControlError(f"a request must be a JSON object, got a {type(given).__name__}")
    if unknown := [name for name in given if name not in _DEFAULTS]:
        raise ControlError(f"a request must have the names {', '.join(_DEFAULTS)}, got {unknown[0]!r}")
    return checked(ControlRequest(**{"action": "", **_as_tuples(given)}))


def checked(request: ControlRequest) -> ControlRequest:
    """Return a request whose values have the right types and sizes; raise ControlError for another one."""
    action = request.action
    if action not in ACTIONS:
        known = ", ".join(ACTIONS)
        raise ControlError(f"action must be one of {known}, got {action!r}.{suggest(str(action), ACTIONS)}")
    for name, value in (("sites", request.sites), ("keep", request.keep)):
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise ControlError(f"{name} must be a list of texts, got {value!r}")
    for name in ("steps", "every"):
        _whole(name, getattr(request, name), 1, MOST_STEPS)
    _whole("start", request.start, 0, 1 << 62)
    if request.probe is not None:
        _whole("probe", request.probe, 0, 62)
    if not isinstance(request.text, str):
        raise ControlError(f"text must be a text, got {request.text!r}")
    if isinstance(request.wait, bool) or not isinstance(request.wait, (int, float)) or not request.wait >= 0:
        raise ControlError(f"wait must be a number of seconds, got {request.wait!r}")
    return _complete(request)


def _complete(request: ControlRequest) -> ControlRequest:
    action = request.action
    if action in NEED_SITES and not request.sites:
        raise ControlError(f'{action} must be given sites, got none: {action} "blocks.3.*"')
    if action == "probe remove" and request.probe is None and not request.sites:
        raise ControlError("probe remove must be given a probe's number or one of its patterns, got neither")
    if action == "note" and not request.text.strip():
        raise ControlError('note must be given a text, got none: note "learning rate halved"')
    return request


def _whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ControlError(f"{name} must be a whole number from {least} to {most}, got {value!r}")


def _as_tuples(given: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
