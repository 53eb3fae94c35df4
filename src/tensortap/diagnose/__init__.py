"""Rules that read a run and say what is wrong with it, where, and what people do about it.

Holds: `RunHistory` (a run as arrays, for rules), the rules, and `findings`, which asks them. May import `store`,
`reduce`, `select` and what lies below; never `watch` or an adapter.
"""

from tensortap.diagnose.check import findings
from tensortap.diagnose.history import RunHistory, SiteHistogram, SiteHistory
from tensortap.diagnose.rule import REGISTRY, NoData, Rule, rule
from tensortap.diagnose.rules.activations import dead_units, saturated
from tensortap.diagnose.rules.context.labels import (
    labels_imbalanced,
    labels_one_class,
    labels_out_of_range,
    labels_sorted,
    padding_in_loss,
)
from tensortap.diagnose.rules.context.loops import (
    accumulation_unscaled,
    backward_missing,
    batches_repeated,
    batchnorm_cannot_estimate,
    data_changed,
    eval_in_train_mode,
    gradients_not_reset,
    gradients_reset_early,
    graph_detached,
    linear_stack,
    step_missing,
    tie_broken,
    trained_in_eval_mode,
)
from tensortap.diagnose.rules.context.loss_calls import (
    activation_loss_mismatch,
    constant_output,
    log_of_zero,
    loss_at_chance,
    loss_broadcast,
    loss_negated,
    loss_summed,
    loss_unsuitable,
    output_bounded,
    softmax_axis,
    targets_not_normalised,
)
from tensortap.diagnose.rules.context.optimizers import (
    clipping_too_hard,
    dropout_high,
    eps_too_small,
    frozen,
    learning_rate_high,
    learning_rate_low,
    learning_rate_zero,
    momentum_absurd,
    optimizer_incomplete,
    optimizer_recreated,
    optimizer_stale,
    scheduler_per_batch,
    weight_decay_high,
)
from tensortap.diagnose.rules.context.structure import (
    dropout_in_evaluation,
    evaluation_inputs_differ,
    parameters_unregistered,
    softmax_hidden,
    worker_states_equal,
)
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
    "accumulation_unscaled",
    "activation_loss_mismatch",
    "all_zero",
    "attention_collapse",
    "backward_missing",
    "batches_repeated",
    "batchnorm_cannot_estimate",
    "clipping_too_hard",
    "constant",
    "constant_output",
    "data_changed",
    "dead_units",
    "drift",
    "dropout_high",
    "dropout_in_evaluation",
    "eps_too_small",
    "eval_in_train_mode",
    "evaluation_inputs_differ",
    "exploding_gradients",
    "findings",
    "frozen",
    "gradients_not_reset",
    "gradients_reset_early",
    "graph_detached",
    "inputs_not_normalised",
    "labels_imbalanced",
    "labels_one_class",
    "labels_out_of_range",
    "labels_sorted",
    "learning_rate_high",
    "learning_rate_low",
    "learning_rate_zero",
    "linear_stack",
    "log_of_zero",
    "loss_at_chance",
    "loss_broadcast",
    "loss_negated",
    "loss_not_decreasing",
    "loss_spike",
    "loss_summed",
    "loss_unsuitable",
    "low_precision",
    "momentum_absurd",
    "never_ran",
    "nonfinite",
    "optimizer_incomplete",
    "optimizer_recreated",
    "optimizer_stale",
    "outliers",
    "output_bounded",
    "padding_in_loss",
    "parameters_unregistered",
    "poor_initialisation",
    "rank_outlier",
    "replicas_differ",
    "representation_collapse",
    "rule",
    "saturated",
    "scheduler_per_batch",
    "softmax_axis",
    "softmax_hidden",
    "step_missing",
    "targets_not_normalised",
    "tie_broken",
    "trained_in_eval_mode",
    "unchanged",
    "update_ratio",
    "vanishing_gradients",
    "weight_decay_high",
    "worker_states_equal",
]
