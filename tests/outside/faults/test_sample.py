"""A small sample of what `make faults` runs, and that the set itself is whole."""

from __future__ import annotations

import pytest

from outside.faults.case import is_scored
from outside.faults.score import ALL_PAIRS, OUTSIDE, PAIRS, STYLES, TRAININGS, findings_of
from tensortap.diagnose import REGISTRY

SAMPLE = ("zero_grad missing with SGD", "broadcast in a loss by hand", "optimizer for the backbone only")


def test_the_set_is_whole():
    """There are 60 pairs and 20 healthy trainings at least, in two parts, and every change applies."""
    assert len(OUTSIDE) >= 30
    assert len(STYLES) >= 50
    assert len(TRAININGS) == len({case.name for case in TRAININGS}) >= 70
    names = [pair.name for pair in PAIRS]
    assert len(names) == len(set(names)) >= 60
    assert min(sum(map(is_scored, names)), sum(not is_scored(name) for name in names)) >= 25
    for pair in ALL_PAIRS:
        assert pair.lines
        assert pair.bad != pair.good


def test_every_rule_of_the_context_has_a_fault():
    """Each cause that a rule names is the cause of a fault in the set."""
    rules = {name for name, rule in REGISTRY.items() if ".rules.context." in rule.function.__module__}
    assert rules <= {pair.cause for pair in ALL_PAIRS}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_cause_is_named(name):
    """The cause is named at its line or module, and the correct form raises nothing."""
    pair = next(pair for pair in PAIRS if pair.name == name)
    found, error = findings_of(pair.bad, "zero-edit")
    assert not error
    named = [f for f in found if f["rule"] == pair.cause and f["severity"] != "info"]
    assert named, found
    good, error = findings_of(pair.good, "zero-edit")
    assert not error
    assert [f for f in good if f["severity"] != "info"] == []
