"""Ask rules about a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Final

from tensortap.diagnose.attribution import one_for_each_cause
from tensortap.diagnose.code_lines import with_lines
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import Looks, NoData, Rule, as_rules
from tensortap.finding import Finding, Findings
from tensortap.store.files import retry_if_moved
from tensortap.store.run import Run, open_run

Rules = Iterable[Rule | Looks | str] | Rule | Looks | str | None
Given = Run | str | os.PathLike[str]
_OURS: Final = "tensortap.diagnose."
_DAMAGE: Final = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    ArithmeticError,
)  # of files from elsewhere


def findings(run: Given, rules: Rules = None, reference: Given | None = None) -> Findings:
    """Return the rules' findings about a run, the worst first; rules without data are in `skipped`.

    `rules` are names, rules or functions; none means all that are registered. `reference` is a run to compare this one
    with, for rules such as `drift`.
    """
    first, other, asked = _opened(run), None if reference is None else _opened(reference), as_rules(rules)

    def ask() -> Findings:
        return findings_in(RunHistory(first, None if other is None else RunHistory(other)), asked)

    return retry_if_moved(ask)  # once more when a run was compacted meanwhile


def findings_in(history: RunHistory, rules: Iterable[Rule]) -> Findings:
    """Return the rules' findings about one snapshot of a run."""
    found: list[Finding] = []
    looked: list[str] = []
    skipped: dict[str, str] = {}
    for rule in rules:
        try:
            found.extend(rule(history))
            looked.append(rule.name)
        except NoData as reason:
            skipped[rule.name] = str(reason)
        except FileNotFoundError:
            raise
        except Exception as error:
            if isinstance(error, _DAMAGE) and _is_ours(rule):
                skipped[rule.name] = f"the run holds something of another form than was written: {error!r}"
                continue
            error.add_note(f"in the rule {rule.name!r}")
            raise
    return Findings.of(one_for_each_cause(with_lines(found, history)), looked, skipped)


def _is_ours(rule: Rule) -> bool:
    """Return whether a rule is built in; errors in a user's rule are shown to its author."""
    function = rule.function.func if isinstance(rule.function, partial) else rule.function
    return str(getattr(function, "__module__", "")).startswith(_OURS)


def _opened(run: Given) -> Run:
    return run if isinstance(run, Run) else open_run(run)
