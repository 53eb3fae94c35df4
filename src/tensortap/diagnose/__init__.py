"""Rules that read a run and say what is wrong with it, where, and what people do about it.

Holds: `RunHistory` (a run as arrays, for rules), the rules, and `findings`, which asks them. May import `store`,
`reduce`, `select` and what lies below; never `watch` or an adapter.
"""

from tensortap.diagnose.check import findings
from tensortap.diagnose.history import RunHistory, SiteHistogram, SiteHistory
from tensortap.diagnose.rule import REGISTRY, NoData, Rule, rule
from tensortap.diagnose.rules.activations import dead_units, saturated
from tensortap.diagnose.rules.drift import drift
from tensortap.diagnose.rules.finite import nonfinite
from tensortap.diagnose.rules.gradients import exploding_gradients, vanishing_gradients
from tensortap.diagnose.rules.inputs import inputs_not_normalised, never_ran
from tensortap.diagnose.rules.loss import loss_not_decreasing, loss_spike
from tensortap.diagnose.rules.parameters import poor_initialisation, unchanged, update_ratio
from tensortap.diagnose.rules.precision import low_precision
from tensortap.diagnose.rules.ranks import rank_outlier, replicas_differ
from tensortap.diagnose.rules.representation import attention_collapse, representation_collapse
from tensortap.diagnose.rules.values import all_zero, constant, outliers

__all__ = [
    "REGISTRY",
    "NoData",
    "Rule",
    "RunHistory",
    "SiteHistogram",
    "SiteHistory",
    "all_zero",
    "attention_collapse",
    "constant",
    "dead_units",
    "drift",
    "exploding_gradients",
    "findings",
    "inputs_not_normalised",
    "loss_not_decreasing",
    "loss_spike",
    "low_precision",
    "never_ran",
    "nonfinite",
    "outliers",
    "poor_initialisation",
    "rank_outlier",
    "replicas_differ",
    "representation_collapse",
    "rule",
    "saturated",
    "unchanged",
    "update_ratio",
    "vanishing_gradients",
]
