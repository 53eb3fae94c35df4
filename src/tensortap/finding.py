"""Findings: the conclusions of rules about a run, as plain values for commands and views."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal, overload

from tensortap import markup

Severity = Literal["info", "warning", "error"]
SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "error")
_COLOURS: Final = {"info": markup.CALM, "warning": markup.WARN, "error": markup.ALARM}


@dataclass(frozen=True, slots=True)
class Steps:
    """The first and the last step of a finding, and the number of steps that have it."""

    first: int
    last: int
    count: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"step {self.first}"
        whole = self.count == self.last - self.first + 1
        return f"steps {self.first}–{self.last}" + ("" if whole else f" ({self.count} of them)")


@dataclass(frozen=True, slots=True)
class Finding:
    """One conclusion of a rule: severity, site, steps, the numbers it rests on, and what to do about it.

    A rule may leave its own name and severity empty; they are filled in.

    >>> print(Finding("all_zero", "warning", "fc:output", Steps(0, 9, 10), {}, "All 640 elements are zero."))
    warning all_zero at fc:output, steps 0–9: All 640 elements are zero.
    """

    rule: str
    severity: Severity | Literal[""]
    site: str
    steps: Steps | None
    evidence: Mapping[str, Any]
    message: str
    advice: str = ""
    code: str = ""  # `file:line` of the user's code that is to be changed
    places: tuple[str, ...] = ()  # other places with the same finding
    consequences: tuple[Finding, ...] = ()  # findings of other rules that this one explains

    def __str__(self) -> str:
        where = f" at {self.site}" if self.site else ""
        code = f" ({self.code})" if self.code else ""
        when = f", {self.steps}" if self.steps else ""
        more = f" Also at {_few(self.places)}." if self.places else ""
        return f"{self.severity} {self.rule}{where}{code}{when}: {self.message}{more}"

    def _repr_html_(self) -> str:
        return markup.page(_html(self))

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; what is not finite is null."""
        follows = [other.as_json() for other in self.consequences]
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        steps = None if self.steps is None else asdict(self.steps)
        places = list(self.places)
        return said | {
            "steps": steps, "evidence": _plain(self.evidence), "places": places, "consequences": follows
        }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Findings(Sequence[Finding]):
    """Findings, the worst first. `rules` are those that ran, `skipped` those that could not, with the reason.

    >>> found = Findings.of([], rules=["nonfinite"], skipped={"drift": "no reference run was given"})
    >>> print(found)
    nothing found by 1 rule; 1 had no data
    """

    found: tuple[Finding, ...]
    rules: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, found: Iterable[Finding], rules: Iterable[str], skipped: Mapping[str, str]) -> Findings:
        """Sort by severity, worst first; equals stay in the order in which they were found."""
        ranked = sorted(found, key=lambda finding: -_rank(finding))
        return cls(tuple(ranked), tuple(rules), MappingProxyType(dict(skipped)))

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, index: int | slice) -> Finding | tuple[Finding, ...]:
        return self.found[index]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def at_least(self, severity: Severity) -> list[Finding]:
        """Return the findings of at least this severity."""
        least = SEVERITIES.index(severity)
        return [finding for finding in self.found if _rank(finding) >= least]

    def count(self, value: Any) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity == value for finding in self.found)

    def summary(self) -> str:
        """Return the counts in a line: `1 error, 2 warnings found by 18 rules; 3 had no data`."""
        parts = [_many(n, name) for name in reversed(SEVERITIES) if (n := self.count(name))]
        idle = f"; {len(self.skipped)} had no data" if self.skipped else ""
        return f"{', '.join(parts) or 'nothing'} found by {_many(len(self.rules), 'rule')}{idle}"

    def why_idle(self) -> str:
        """Return the most frequent reason why rules had no data, and their number; empty if most rules had data."""
        for reason, count in Counter(self.skipped.values()).most_common(1):
            if 2 * count > len(self.rules) + len(self.skipped):
                return f"{_many(count, 'rule')}: {reason}"
        return ""

    def __str__(self) -> str:
        found = (line for finding in self.found for line in _lines(finding))
        return "\n".join([self.summary(), *found, *filter(None, [self.why_idle()])])

    def __repr__(self) -> str:
        return f"<Findings: {self.summary()}>"

    def _repr_html_(self) -> str:
        title, idle = markup.line(markup.element("b", self.summary())), self.why_idle()
        return markup.page(title, *map(_html, self.found), *([markup.line(idle)] if idle else []))

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        counts = {name: self.count(name) for name in SEVERITIES}
        findings = [finding.as_json() for finding in self.found]
        return {"counts": counts, "findings": findings, "rules": list(self.rules), "skipped": dict(self.skipped)}


def _lines(finding: Finding) -> list[str]:
    advice = [f"    {finding.advice}"] if finding.advice else []
    return [str(finding), *advice, *(f"    follows: {other}" for other in finding.consequences)]


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _html(finding: Finding) -> str:
    """Return a finding as HTML: rule, site and steps, message, advice, numbers."""
    where = " ".join(filter(None, [finding.site, finding.code, str(finding.steps or "")]))
    title = [markup.coloured(f"{finding.severity} {finding.rule}", _COLOURS.get(finding.severity, "")), f" {where}"]
    follows = [f"follows: {other}" for other in finding.consequences]
    also = f"Also at {', '.join(finding.places)}." if finding.places else ""
    lines = [line for line in (finding.message, also, finding.advice, *follows) if line]
    shown = ", ".join(f"{name} {value}" for name, value in _plain(finding.evidence).items())
    inside = [markup.line(line) for line in lines] + [markup.element("small", shown, style="opacity:.65")]
    return markup.element("div", markup.line(*title), markup.element("div", *inside, style="margin:0 0 6px 16px"))


def _rank(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity or "warning")


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 or noun == 'info' else 's'}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool, type(None))) else json.loads(json.dumps(value, default=str))
