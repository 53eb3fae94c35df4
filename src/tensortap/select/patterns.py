"""Patterns: texts, classes and functions that choose sites. The language is described in `select/sites.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple

from tensortap.errors import PatternError, nearest, suggest
from tensortap.select.globs import alternatives, fits, literal_paths, path_regex, slot_regex, word_regex
from tensortap.select.names import OPERATION, PORT_AND_SLOT, find_op, operation_number, ports_meant, split_port
from tensortap.select.ports import OP_PORTS, PORTS

_NO_GROUPS: Final[Mapping[str, frozenset[str]]] = {}


class Candidate(NamedTuple):
    """One module, parameter or named value that an adapter offers at set-up; class names most derived first."""

    path: str
    types: tuple[str, ...]
    ports: tuple[str, ...]
    leaf: bool = True
    default: bool | None = None  # watched when no probe is given; None: leaves are


class OperationPattern(NamedTuple):
    """The `/op#n` part of a pattern."""

    path: re.Pattern[str]
    text: str
    names: re.Pattern[str]
    groups: frozenset[str]
    number: int | None
    paths: frozenset[str] | None  # the only modules' paths it can mean, where that part has no wildcard

    def means(self, op: str, groups: Mapping[str, frozenset[str]]) -> bool:
        """Return whether it means operations of this kind, wherever they are."""
        return self.names.fullmatch(op) is not None or any(op in groups.get(group, ()) for group in self.groups)

    def lies_in(self, path: str) -> bool:
        """Return whether it means operations of the module at `path`, whatever they are."""
        return fits(self.path, path)

    def matches(self, path: str, op: str, number: int, groups: Mapping[str, frozenset[str]]) -> bool:
        """Return whether it means operation `number` of kind `op` under the module `path`."""
        return self.number in (None, number) and self.means(op, groups) and self.lies_in(path)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Pattern:
    """Choose sites; parsed once, immutable.

    >>> mlps = Pattern.parse("blocks.*.mlp:{input,output}")
    >>> mlps.matches(Candidate("blocks.3.mlp", ("MLP", "Module"), ("input", "output")), "input")
    True
    >>> Pattern.parse("blocks.**/softmax").matches_op("blocks.3.attn", "softmax", 0, "output")
    True
    """

    text: str
    head: str  # the text without port and slot
    ports: frozenset[str]
    finds: Callable[[Candidate], bool]
    slots: re.Pattern[str] | None = None
    operation: OperationPattern | None = None
    kind: Literal["path", "type", "op", "re", "function"] = "path"
    paths: frozenset[str] | None = None  # the only paths it can find, where it has no wildcard

    @staticmethod
    def parse(pattern: PatternLike) -> Pattern:
        """Parse a pattern. A function is given each candidate and chooses outputs; a class means `type:` its name."""
        if isinstance(pattern, Pattern):
            return pattern
        if isinstance(pattern, type):
            pattern = f"type:{pattern.__name__}"
        if isinstance(pattern, str):
            return _parse(pattern)
        if not callable(pattern):
            raise PatternError(f"a pattern must be text, a class or a function, got {pattern!r}: {_advice(pattern)}")
        name = getattr(pattern, "__name__", type(pattern).__name__)
        return Pattern(name, name, frozenset(["output"]), partial(_asks, pattern, name), kind="function")

    @property
    def is_op(self) -> bool:
        """Whether it can match operations, whose names are known only while the model runs."""
        return self.operation is not None

    @property
    def op(self) -> str:
        """The operation as written, `matmul` or `@matmul`; empty when there is none."""
        return self.operation.text if self.operation else ""

    @property
    def groups(self) -> frozenset[str]:
        """The groups of operations it names, without the `@`."""
        return self.operation.groups if self.operation else frozenset()

    def matches(self, candidate: Candidate, port: str) -> bool:
        """Return whether it chooses this port of the candidate."""
        return port in self.ports and port in candidate.ports and self.finds(candidate)

    def matches_slot(self, slot: str) -> bool:
        """Return whether it chooses this slot: always when it names none, else the named one and what lies below it."""
        return self.slots is None or self.slots.fullmatch(slot) is not None

    def matches_op(
        self, path: str, op: str, number: int, port: str, groups: Mapping[str, frozenset[str]] = _NO_GROUPS
    ) -> bool:
        """Return whether it chooses operation `number` of kind `op` in module `path`; `groups` resolve `@name`."""
        return self.operation is not None and port in self.ports and self.operation.matches(path, op, number, groups)

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"


PatternLike = Pattern | str | type | Callable[[Candidate], bool]


# Reading a pattern


def _advice(given: object) -> str:
    several = list(given) if isinstance(given, (list, tuple, set, frozenset)) else []
    if several and all(isinstance(each, str) for each in several):
        return f"write the patterns one by one, {', '.join(map(repr, several))}"
    return "write 'blocks.*.mlp:output'"


def _parse(text: str) -> Pattern:
    kind, colon, rest = text.partition(":")
    # `op:output` is the output of a module named op: no operation and no class is called like a port.
    read = _KINDS.get(kind) if colon and rest not in PORTS else None
    return read(text, rest) if read else _parse_path(text)


def _parse_path(text: str) -> Pattern:
    head, port, slot = split_port(text)
    found = find_op(head, port)
    operation = _operation(found["path"], found) if found else None
    # A path may itself contain a slash (a named value, a Keras layer), so the whole head is tried on candidates too.
    finds = partial(_has_path, path_regex(head))
    return Pattern(text, head, ports_meant(port), finds, slot_regex(slot), operation, paths=literal_paths(head))


def _parse_type(text: str, rest: str) -> Pattern:
    name, port, slot = split_port(rest)
    if not name or ":" in name:
        raise PatternError(no_port(text) if name else f"{text!r} must name a class: write 'type:Linear'")
    finds = partial(_has_type, word_regex([name]))
    return Pattern(text, f"type:{name}", ports_meant(port), finds, slot_regex(slot), kind="type")


def _parse_op(text: str, rest: str) -> Pattern:
    head, port, slot = split_port(rest)
    found = OPERATION.fullmatch(f"/{head}")
    if not found or found["path"]:
        fix = f"write {head!r}" if "/" in head else "write 'op:matmul', 'op:matmul#1' or 'op:@matmul'"
        raise PatternError(no_port(text) if ":" in head else f"{text!r} must name an operation: {fix}")
    if not find_op(f"/{head}", port):
        raise PatternError(f"{text!r}: an operation has no {port}; it has {', '.join(OP_PORTS)}")
    return Pattern(text, f"op:{head}", ports_meant(port), _never, slot_regex(slot), _operation("**", found), "op")


def _parse_regex(text: str, rest: str) -> Pattern:
    head, colon, port = rest.rpartition(":")
    if not colon or port not in PORTS:
        head, port = rest, "output"
    try:
        regex = re.compile(head)
    except re.error as error:
        raise PatternError(
            f"{text!r} must be a regular expression: {error.msg} at position {error.pos} of {head!r}"
        ) from error
    return Pattern(text, f"re:{head}", frozenset([port]), partial(_has_regex, regex), kind="re")


_KINDS: Final = {"type": _parse_type, "op": _parse_op, "re": _parse_regex}


def _operation(path: str, found: re.Match[str]) -> OperationPattern:
    words = alternatives(found["op"])
    groups = frozenset(word[1:] for word in words if word.startswith("@"))
    names = [word for word in words if not word.startswith("@")]
    return OperationPattern(
        path_regex(path), found["op"], word_regex(names), groups, operation_number(found), literal_paths(path)
    )


# What a pattern asks of a candidate: plain functions, so that a pattern can be pickled


def _has_path(regex: re.Pattern[str], candidate: Candidate) -> bool:
    return fits(regex, candidate.path)


def _has_regex(regex: re.Pattern[str], candidate: Candidate) -> bool:
    return regex.fullmatch(candidate.path) is not None


def _has_type(regex: re.Pattern[str], candidate: Candidate) -> bool:
    return any(map(regex.fullmatch, candidate.types))


def _never(candidate: Candidate) -> bool:
    return False


def _asks(function: Callable[[Candidate], bool], name: str, candidate: Candidate) -> bool:
    try:
        return bool(function(candidate))
    except Exception as error:
        raise PatternError(
            f"the pattern {name} must be a function (site) -> bool, but for {candidate.path!r} it raised {error!r}"
        ) from error


def no_port(text: str) -> str:
    """Return the message for a pattern that ends in something other than a port."""
    found = PORT_AND_SLOT.fullmatch(text)
    path, word = (found["path"], found["port"]) if found else text.rsplit(":", 1)
    kind, _, rest = text.partition(":")
    meant = [f"{path}:{port}" for port in nearest(word, PORTS, 1)]
    meant += [f"{known}:{rest}" for known in nearest(kind, _KINDS, 1) if known != kind]
    return f"{text!r}: there is no port {word!r}, only {', '.join(PORTS)}.{suggest(text, meant)}"
