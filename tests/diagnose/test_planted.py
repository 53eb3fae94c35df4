"""Every planted fault is found where it was planted, and healthy trainings are left alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tensortap as tt
from tensortap.diagnose import REGISTRY

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "findings.md"


def hits(findings: tt.Findings, expected: Any) -> list[tt.Finding]:
    """The findings that name the planted fault."""
    wanted = (expected.rule, expected.site, expected.severity)
    told = [other for f in findings for other in (f, *f.consequences)]
    return [f for f in told if (f.rule, f.site, f.severity) == wanted]


def alarms(findings: tt.Findings, expected: Any) -> list[tt.Finding]:
    """What is raised at warning or above beside the fault itself, its cause and the rules its consequences set off."""
    allowed = (expected.rule, *expected.follows) if expected else ()
    found = [f for f in findings.at_least("warning") if f.rule not in allowed]
    return [f for f in found if not expected or all(other.rule != expected.rule for other in f.consequences)]


def test_fault_is_found(zoo: Any, fault: str) -> None:
    """The rule that is meant fires at the site that is meant, and no rule fires that the fault does not explain."""
    findings, expected = zoo.findings(fault), zoo.expected(fault)
    assert hits(findings, expected), f"{expected}\n{findings}"
    assert alarms(findings, expected) == [], str(findings)


def test_finding_is_complete(zoo: Any, fault: str) -> None:
    """A finding says when, by which numbers and what to do; its message names numbers, and is one sentence or two."""
    for finding in hits(zoo.findings(fault), zoo.expected(fault)):
        assert finding.evidence
        assert finding.advice.endswith((".", "?"))
        assert finding.message.endswith(".")
        assert "\n" not in finding.message + finding.advice
        if finding.rule != "never_ran":
            assert finding.steps is not None
            assert finding.steps.first <= finding.steps.last
            assert re.search(r"\d", finding.message)


def test_healthy_training_is_left_alone(zoo: Any, healthy: str) -> None:
    """With the recommended probes a healthy training raises nothing at warning or above."""
    assert zoo.findings(healthy).at_least("warning") == []


def test_every_rule_is_planted(zoo: Any) -> None:
    """There is a planted fault for every rule there is.

    Those on several ranks are in test_rules_on_ranks.py, the one on samples in adapters/torch/samples/test_samples.py.
    """
    context = "tensortap.diagnose.rules.context"  # these have faults of their own: tests/outside/faults
    modules = {name: rule.function.__module__ for name, rule in REGISTRY.items()}
    ours = {
        name for name, module in modules.items() if module.startswith("tensortap.") and not module.startswith(context)
    }
    elsewhere = {"replicas_differ", "rank_outlier", "sample_out_of_size"}
    assert {zoo.expected(name).rule for name in zoo.faulty} == ours - elsewhere


class Score(NamedTuple):
    faults: int
    found: int
    alarms: int
    explained: int
    named: int

    @property
    def recall(self) -> float:
        return self.found / self.faults

    @property
    def precision(self) -> float:
        """The share of findings that the planted faults explain."""
        return self.explained / self.alarms

    @property
    def strict(self) -> float:
        """The share of findings that name a fault itself, by rule and site."""
        return self.named / self.alarms


def score(zoo: Any) -> Score:
    """Findings at warning or above (or at the severity a fault is expected at) over all trainings, healthy ones too."""
    found = alarm = explained = named = 0
    for name in zoo.names:
        findings, expected = zoo.findings(name), zoo.expected(name)
        raised = findings.at_least("warning")
        hit = hits(findings, expected) if expected else []
        raised += [f for f in hit if f not in raised]
        found += bool(hit)
        named += len(hit)
        alarm += len(raised)
        explained += len(raised) - len(alarms(findings, expected))
    return Score(len(zoo.faulty), found, alarm, explained, named)


def test_precision_and_recall(zoo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Over the planted set both are 1, and the document states what is measured here."""
    got = score(zoo)
    said = (
        f"recall {got.found}/{got.faults} = {got.recall:.2f}, precision {got.explained}/{got.alarms} = "
        f"{got.precision:.2f}, strict {got.named}/{got.alarms} = {got.strict:.2f}"
    )
    with capsys.disabled():
        print(f"\nplanted faults: {said}")
    assert (got.recall, got.precision) == (1.0, 1.0)
    assert f"{len(zoo.faulty)} faults and {len(zoo.healthy)} healthy" in DOCUMENT.read_text(encoding="utf-8")
    assert f"{got.found}/{got.faults}" in DOCUMENT.read_text(encoding="utf-8")
