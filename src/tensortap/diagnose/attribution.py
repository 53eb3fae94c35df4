"""Group findings: one for each cause, with its places and consequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from tensortap.diagnose.rule import ORDER
from tensortap.finding import SEVERITIES, Finding

_STUCK: Final = frozenset(("loss_not_decreasing", "loss_at_chance"))
_WILD: Final = frozenset(
    ("loss_spike", "exploding_gradients", "outliers", "update_ratio", "learning_rate_high", "saturated")
)
_IDLE: Final = frozenset(("unchanged", "update_ratio", "all_zero", "learning_rate_low", "vanishing_gradients"))
_DULL: Final = frozenset(("dead_units", "saturated", "constant", "vanishing_gradients", "representation_collapse"))
_ALL: Final = _STUCK | _WILD | _IDLE | _DULL | {"low_precision", "poor_initialisation", "attention_collapse"}
FOLLOWS: Final[dict[str, frozenset[str]]] = {  # the findings that each cause explains
    "activation_loss_mismatch": _STUCK | _DULL | _IDLE | _WILD | {"nonfinite", "log_of_zero"},
    "softmax_axis": _STUCK | _DULL | _IDLE | {"nonfinite", "log_of_zero"},
    "constant_output": _STUCK | _DULL | _IDLE | {"labels_one_class"},
    "output_bounded": _STUCK | _DULL | _IDLE | {"outliers"} | {"nonfinite", "log_of_zero"},
    "loss_broadcast": _STUCK,
    "labels_out_of_range": _STUCK | _WILD,
    "loss_unsuitable": _STUCK | _IDLE,
    "parameters_unregistered": _STUCK | _IDLE,
    "softmax_hidden": _STUCK | _IDLE | _DULL,
    "log_of_zero": _ALL | {"nonfinite"},
    "loss_negated": _ALL | {"nonfinite"},
    "gradients_not_reset": _ALL | {"nonfinite"},
    "gradients_reset_early": _STUCK | _IDLE,
    "step_missing": _STUCK | _IDLE | {"gradients_reset_early"},
    "backward_missing": _STUCK | _IDLE | {"gradients_reset_early", "graph_detached"},
    "graph_detached": _STUCK | _IDLE | {"never_ran", "gradients_reset_early"},
    "optimizer_stale": _STUCK | _IDLE | {"gradients_reset_early"},
    "optimizer_incomplete": _STUCK | _IDLE,
    "frozen": _STUCK | _IDLE,
    "labels_one_class": _STUCK | _DULL | _IDLE,
    "labels_sorted": _STUCK | {"loss_spike"},
    "batch_axis_mixed": _STUCK,
    "padding_attended": _STUCK,
    "positions_constant": _STUCK,
    "data_changed": _ALL | {"inputs_not_normalised"},
    "momentum_absurd": _ALL | {"nonfinite"},
    "weight_decay_high": _STUCK | _IDLE | _DULL,
    "eps_too_small": _ALL | {"nonfinite"},
    "scheduler_per_batch": _STUCK | _IDLE | {"learning_rate_zero"},
    "learning_rate_zero": _STUCK | _IDLE | {"gradients_reset_early"},
    "updates_lost": _STUCK | _IDLE,
    "clipping_too_hard": _STUCK | _IDLE,
    "loss_summed": _ALL | {"nonfinite"},
    "targets_not_normalised": _ALL | {"nonfinite"},
    "batchnorm_cannot_estimate": _STUCK | {"loss_spike"},
    "dropout_high": _STUCK,
    "nonfinite": _ALL,
    "inputs_not_normalised": _STUCK | _WILD,
    "poor_initialisation": (_ALL | {"nonfinite"}) - {"poor_initialisation"},
    "learning_rate_high": (_ALL | {"nonfinite"}) - {"learning_rate_high", "poor_initialisation"},
    "learning_rate_low": _STUCK | (_IDLE - {"learning_rate_low"}),
    "dead_units": _STUCK | _IDLE,
    "vanishing_gradients": _STUCK | {"saturated"},
    "exploding_gradients": _STUCK | {"loss_spike"},
}


def one_for_each_cause(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with their places joined, and consequences under their cause."""
    found = _joined(findings)
    kept: list[Finding] = []
    for finding in sorted(found, key=_depth):
        cause = next((i for i, known in enumerate(kept) if _explains(known, finding)), None)
        if cause is None:
            kept.append(finding)
        else:
            kept[cause] = _with_consequence(kept[cause], finding)
    return kept


def _with_consequence(cause: Finding, finding: Finding) -> Finding:
    """Add the consequences of a cause, which must be at least as severe: an error must not be listed under a
    warning.
    """
    severity = max(cause.severity or "warning", finding.severity or "warning", key=SEVERITIES.index)
    return replace(cause, severity=severity, consequences=(*cause.consequences, finding))


def _depth(finding: Finding) -> int:
    return ORDER.index(finding.rule) if finding.rule in ORDER else len(ORDER)


def _explains(cause: Finding, other: Finding) -> bool:
    if cause.severity == "info" or other.rule not in FOLLOWS.get(cause.rule, ()):
        return False
    # A fault that begins at a step explains nothing that was there before.
    return cause.rule != "nonfinite" or not (cause.steps and other.steps) or cause.steps.first <= other.steps.first


def _joined(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings of one rule and one severity into one, at the first place; the other places are listed."""
    first: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.rule, str(finding.severity), finding.code)
        known = first.get(key)
        if known is None or finding.rule not in ORDER:
            first[key if known is None else (*key[:2], f"{len(first)}")] = finding
            continue
        places = (*known.places, *(p for p in (finding.site, *finding.places) if p and p not in known.places))
        first[key] = replace(known, places=tuple(p for p in places if p != known.site))
    return sorted(first.values(), key=lambda f: -SEVERITIES.index(f.severity or "warning"))
