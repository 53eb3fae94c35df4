"""Findings of the rules on the terminal, the worst first."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import IO, Any, Final, NamedTuple

from rich.text import Text

from tensortap.diagnose.check import Rules, findings_in
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import NO_CONTEXT, REGISTRY, as_rules
from tensortap.errors import ProbeError, names_listed
from tensortap.finding import Finding, Findings
from tensortap.store.run import Run
from tensortap.store.snapshot import Snapshot, phase_steps
from tensortap.text import counted, printable
from tensortap.view.terminal import formats
from tensortap.view.terminal.overview import about, site_names
from tensortap.view.terminal.screen import Screen, title
from tensortap.view.terminal.site_names import SiteNames

_STYLES: Final = {"error": formats.ALARM, "warning": formats.WARN, "info": "cyan"}
_INDENT: Final = "  "
_WIDEST: Final = 100  # lines of prose are no wider, however wide the terminal is
_ALL_PORTS: Final = "'**', '**:{grad_output,grad,param,update}'"  # what `tensortap run --watch recommended` observes
_AT_ONCE: Final = 3  # findings of one rule that are shown one by one; the others are only named by site


def load_rules(names: Sequence[str]) -> list[Any] | None:
    """Return the rules named: built-in ones by name, the user's as `module:name`; None (all) for no names."""
    return [_imported(name) if ":" in name else name for name in names] or None


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ProbeError(
            f"--rule {name}: {error}; write --rule module:name, or one of:{names_listed(name, REGISTRY)}"
        ) from error
    finally:
        sys.path.remove(str(Path.cwd()))


class CheckedRun(NamedTuple):
    """The findings about a run, and the facts that are shown beside them, all from one snapshot."""

    findings: Findings
    about: dict[str, Any]
    title: Text
    sites: list[str]

    def as_json(self, failed: bool) -> dict[str, Any]:
        """Return everything the terminal shows, and more, as plain values."""
        return {**self.about, "failed": failed, **self.findings.as_json()}


def check_run(run: Run, rules: Rules = None, reference: Run | None = None) -> CheckedRun:
    """Ask the rules about a run; `reference` is a run to compare it with."""
    asked = as_rules(rules)

    def read(snapshot: Snapshot) -> CheckedRun:
        history = RunHistory(run, None if reference is None else RunHistory(reference), snapshot=snapshot)
        known, sites = about(snapshot), site_names(snapshot)
        head = title(known, _steps(snapshot), len(sites), snapshot.record_count)
        return CheckedRun(findings_in(history, asked), known, head, sites)

    return run.snapshots.read(read, whole=True)


def draw_findings(checked: CheckedRun, every: bool = False, stream: IO[str] | None = None) -> None:
    """Draw the findings, the worst first, then the run's title line and the rules that had no data."""
    _draw(Screen(stream), checked.findings, checked.title, every, checked.sites)


def _steps(snapshot: Snapshot) -> str:
    """Return how many steps there are, and of each phase where there are several."""
    by_phase = {phase: len(found) for phase, found in phase_steps(snapshot).items()}
    if len(by_phase) < 2:
        return counted(len(snapshot.steps), "step")
    phases = sorted(by_phase, key=lambda phase: (phase != "train", phase))
    said = ", ".join(f"{by_phase[phase]} {phase or 'other'}" for phase in phases)
    return f"{counted(sum(by_phase.values()), 'step')} ({said})"


def draw_model_findings(name: str, found: Findings, every: bool = False, stream: IO[str] | None = None) -> None:
    """Draw what was found about a model that was checked without a run."""
    _draw(Screen(stream), found, Text(printable(name), style="bold"), every)


def _draw(screen: Screen, found: Findings, head: Text, every: bool, sites: Sequence[str] = ()) -> None:
    names = SiteNames(sites)
    for group in by_rule(found):
        _draw_group(screen, group, every, names)
    screen.draw(head)
    screen.draw(Text(found.summary(), style="bold" if found else "green"))
    if found.skipped:
        screen.draw(*_skipped(found, every))


def by_rule(found: Iterable[Finding]) -> list[list[Finding]]:
    """Return the findings of each severity and rule together, in the order in which they were found."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        groups.setdefault((finding.severity, finding.rule), []).append(finding)
    return list(groups.values())


def _draw_group(screen: Screen, group: list[Finding], every: bool, names: SiteNames) -> None:
    shown = group if every else group[:_AT_ONCE]
    for finding, after in zip(shown, [*shown[1:], None], strict=True):
        screen.draw(_head(finding, screen.width, names), _prose(finding.message, screen))
        if finding.advice and (after is None or after.advice != finding.advice):
            screen.draw(_prose(f"→ {finding.advice}", screen, "dim"))
        if finding.code:
            screen.draw(_prose(f"in {printable(finding.code)}", screen, "bold"))
        for other in finding.consequences if every else finding.consequences[:_AT_ONCE]:
            where = f" at {printable(other.site)}" if other.site else ""
            screen.draw(_prose(f"follows: {other.rule}{where}", screen, "dim"))
    if hidden := group[len(shown) :]:
        others = ", ".join(printable(f.site) for f in hidden[:_AT_ONCE])
        more = f" and {len(hidden) - _AT_ONCE} more" if len(hidden) > _AT_ONCE else ""
        screen.draw(_prose(f"also {others}{more}; --all shows them", screen, "dim"))
    screen.draw(Text())


def _head(finding: Finding, width: int, names: SiteNames) -> Text:
    when = f"  {finding.steps}" if finding.steps else ""
    taken = len(finding.severity) + len(finding.rule) + len(when) + 4
    site = names.fit(printable(finding.site), max(width - taken, 12))
    style = _STYLES[finding.severity or "warning"]
    return Text.assemble((finding.severity, style), "  ", (site, "bold"), f"  {finding.rule}", (when, "dim"))


def _prose(said: str, screen: Screen, style: str = "") -> Text:
    hanging = _INDENT * 2 if said.startswith("→") else _INDENT
    lines = wrap(
        printable(said), max(min(screen.width, _WIDEST), 30), initial_indent=_INDENT, subsequent_indent=hanging
    )
    return Text("\n".join(lines), style=style)


def _skipped(found: Findings, every: bool) -> Iterator[Text]:
    few = len(found.skipped) <= _AT_ONCE
    if not every:
        which = ", ".join(found.skipped) if few else counted(len(found.skipped), "rule")
        yield Text(f"no data: {which}; --all {'says why' if few else 'names them, and says why'}", style="dim")
    for name, reason in found.skipped.items() if every else ():
        yield Text(f"no data: {name}: {printable(reason)}", style="dim")
    if not every and (call := _recording_call(found)):
        yield Text(f"give them data: {call}", style="dim")


def _recording_call(found: Findings) -> str:
    """Return what to write to give the rules what this run lacks; empty where it lacks neither ports nor context."""
    ports = any(name in REGISTRY and reason == REGISTRY[name].missing for name, reason in found.skipped.items())
    context = NO_CONTEXT in found.skipped.values()
    if not (ports or context):
        return ""
    arguments = ["model", *([_ALL_PORTS] if ports else []), *(["context=True"] if context else [])]
    option = " --watch recommended" if ports else ""
    return f"tt.watch({', '.join(arguments)}), or tensortap run{option} SCRIPT"
