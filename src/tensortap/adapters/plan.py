"""The sites of a model that the probes chose: a plan of ports, each with a point for every slot that is seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tensortap.errors import PatternError, nearest
from tensortap.record.recorder import Point, Recorder
from tensortap.select.operations import GROUPS
from tensortap.select.probes import Probe
from tensortap.select.sites import Candidate, IndexedCandidates, Pattern, select
from tensortap.types import Place

Wanted = tuple[Pattern, int]  # a pattern, and the probe that has it as a bit


class Port:
    """One port of one module: the probes that want it, and a point for every slot that is seen in it.

    `note` is the reason why nothing was seen, if known; `op` is the operation, if the port belongs to one.
    """

    __slots__ = ("bits", "note", "op", "path", "patterns", "points", "port", "recorder")

    def __init__(
        self, recorder: Recorder, path: str, port: str, patterns: Sequence[tuple[Pattern, int]], op: str = ""
    ) -> None:
        self.recorder = recorder
        self.path = path
        self.port = port
        self.op = op
        self.patterns = tuple(patterns)
        self.bits = 0
        for _, bit in patterns:
            self.bits |= bit
        self.points: dict[str, Point] = {}
        self.note = ""

    @property
    def seen(self) -> bool:
        """Whether anything that a probe wants was seen."""
        return any(point.probes for point in self.points.values())

    def point(self, slot: str) -> Point:
        """Return the point of a slot. The first call makes it and decides which probes want it."""
        known = self.points.get(slot)
        if known is None:
            wanted = 0
            for pattern, bit in self.patterns:
                wanted |= bit if pattern.matches_slot(slot) else 0
            known = self.points[slot] = self.recorder.point(Place(self.path, self.port, slot, self.op), wanted)
        return known


def bits_of(ports: Iterable[Port]) -> int:
    """Return the probes that want any of these ports."""
    bits = 0
    for port in ports:
        bits |= port.bits
    return bits


class OpName(NamedTuple):
    """One operation of a module: the module's path, what it does, and its number in one call of the module."""

    path: str
    op: str
    number: int

    def __str__(self) -> str:
        return f"/{self.op}#{self.number}"


class PatternIndex:
    """Patterns with their probes as bits, those without a wildcard by the paths they can find.

    A thousand patterns for one module each are common, and each of a thousand modules asks which ones want it.
    """

    def __init__(self, probes: Iterable[Probe], paths_of: Callable[[Pattern], frozenset[str] | None]) -> None:
        self._anywhere: dict[int, Wanted] = {}
        self._by_path: dict[str, dict[int, Wanted]] = {}
        each = ((pattern, 1 << i) for i, probe in enumerate(probes) for pattern in probe.patterns)
        for number, wanted in enumerate(each):
            paths = paths_of(wanted[0])
            groups = [self._anywhere] if paths is None else [self._by_path.setdefault(path, {}) for path in paths]
            for group in groups:
                group[number] = wanted

    def possible(self, *paths: str) -> Iterable[Wanted]:
        """Return the patterns that may find one of these paths, in the order of the probes."""
        named = [group for path in paths if (group := self._by_path.get(path))]
        if not named:
            return self._anywhere.values()
        found = dict(self._anywhere)
        for group in named:
            found.update(group)
        return [found[number] for number in sorted(found)]


def _paths(pattern: Pattern) -> frozenset[str] | None:
    return pattern.paths


def _operation_paths(pattern: Pattern) -> frozenset[str] | None:
    return pattern.operation.paths if pattern.operation else frozenset()


def _indexes(probes: Sequence[Probe]) -> tuple[PatternIndex, PatternIndex]:
    return PatternIndex(probes, _paths), PatternIndex(probes, _operation_paths)


class Plan(NamedTuple):
    """The sites of a model that the probes chose: the patterns for every path and port, with their probes as bits."""

    ports: dict[tuple[str, str], list[Wanted]]
    probes: tuple[Probe, ...] = ()
    indexes: tuple[PatternIndex, PatternIndex] | None = None  # by the paths of modules and of operations

    def of(self, recorder: Recorder, path: str, port: str) -> Port | None:
        """Return the port of a module, if any probe wants it."""
        patterns = self.ports.get((path, port))
        return Port(recorder, path, port, patterns) if patterns else None

    def kinds(self, ports: Iterable[str]) -> tuple[str, ...]:
        """Return the ports that any probe wants at any site, so that the others need not be looked up for
        each module.
        """
        wanted = {port for _, port in self.ports}
        return tuple(port for port in ports if port in wanted)

    def port_for_named_value(self, recorder: Recorder, candidate: Candidate, port: str) -> Port | None:
        """Return the port of a value that the user named, which was not known at set-up. A pattern for it needs a
        slash.
        """
        possible = self._index(0).possible(candidate.path)
        patterns = [wanted for wanted in possible if _chooses(wanted[0], candidate, port)]
        return Port(recorder, candidate.path, port, patterns) if patterns else None

    def site(self, path: str) -> str:
        """Return the name of a path of this model in the run."""
        return path

    def port_for_operation(self, recorder: Recorder, call: OpName, port: str, mask: int = -1) -> Port | None:
        """Return the port of an operation, which is known only while it runs; `mask` leaves probes out."""
        possible = self._index(1).possible(*{call.path, self.site(call.path)})
        patterns = [wanted for wanted in possible if wanted[1] & mask and self._means(wanted[0], call, port)]
        return Port(recorder, f"{self.site(call.path)}{call}", port, patterns, call.op) if patterns else None

    def _index(self, position: int) -> PatternIndex:
        return (self.indexes or _indexes(self.probes))[position]

    def _means(self, pattern: Pattern, call: OpName, port: str) -> bool:
        paths = {call.path, self.site(call.path)}
        return any(pattern.matches_op(path, call.op, call.number, port, GROUPS) for path in paths)

    def waiting(self, names: Iterable[str], ports: Sequence[str]) -> list[Pattern]:
        """Return the patterns that can only match values the user names, and match none of these names."""
        seen = [Candidate(name, (), tuple(ports)) for name in names]
        late = [pattern for probe in self.probes for pattern in probe.patterns if _only_late(pattern)]
        return [p for p in late if not any(p.matches(candidate, port) for candidate in seen for port in ports)]


def _only_late(pattern: Pattern) -> bool:
    return pattern.is_op and pattern.kind == "path"


def _chooses(pattern: Pattern, candidate: Candidate, port: str) -> bool:
    """Return what `pattern.matches` does; False where a user's function expects a module and gets something else."""
    try:
        return pattern.matches(candidate, port)
    except PatternError:
        return False


def choose(probes: Sequence[Probe], candidates: Sequence[Candidate], *, late: bool = False) -> Plan:
    """Decide once which probes want which places. A pattern that matches nothing raises, unless more come late."""
    ports: dict[tuple[str, str], list[Wanted]] = {}
    indexed = IndexedCandidates(candidates)
    for i, probe in enumerate(probes):
        for pattern, matches in zip(probe.patterns, select(probe.patterns, indexed, late=late), strict=True):
            wanted = pattern, 1 << i  # one object for all places
            for match in matches:
                ports.setdefault((match.candidate.path, match.port), []).append(wanted)
    return Plan(ports, tuple(probes), _indexes(probes))


Groups = Mapping[str, frozenset[str]]


def check_operation(pattern: Pattern, known: Collection[str], groups: Groups = GROUPS) -> None:
    """Raise for a pattern `op:name` that matches no operation of the framework, with the names nearest to it."""
    operation = pattern.operation if pattern.kind == "op" else None
    if operation is None:
        return
    if not known:
        raise PatternError(f"{pattern.text!r}: single operations are not seen in this framework")
    if unknown := [group for group in operation.groups if group not in groups]:
        near = _or([f"op:@{name}" for name in nearest(unknown[0], groups, 1)])
        raise PatternError(f"{pattern.text!r}: the group must be one of {', '.join(groups)}, got {unknown[0]!r}.{near}")
    if not any(operation.means(name, groups) for name in known):
        group = [f"op:@{operation.text}"] if operation.text in groups else []
        near = _or([*group, *(f"op:{name}" for name in nearest(operation.text, sorted(known)))])
        raise PatternError(f"{pattern.text!r}: there is no operation {operation.text!r} among {len(known)}.{near}")


def _or(offers: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(map(repr, offers))}?" if offers else ""
