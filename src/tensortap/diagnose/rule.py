"""Define rules: functions from a run's history to findings, with a name, a severity and thresholds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, overload

from tensortap.diagnose.history import RunHistory
from tensortap.errors import ProbeError, names_listed, suggest
from tensortap.finding import SEVERITIES, Finding, Severity

Looks = Callable[..., Iterable[Finding] | None]
REGISTRY: Final[dict[str, Rule]] = {}
ORDER: Final = (  # in which they are asked: causes before what they cause, so that among equals the cause is read first
    "activation_loss_mismatch", "softmax_axis", "constant_output", "labels_out_of_range", "output_bounded",
    "loss_broadcast", "loss_negated", "parameters_unregistered", "layers_shared", "loss_unsuitable",
    "gradients_not_reset", "step_missing", "backward_missing", "graph_detached", "optimizer_stale",
    "gradients_reset_early", "optimizer_incomplete", "optimizer_recreated", "frozen", "tie_broken", "labels_one_class",
    "labels_sorted",
    "validation_classes_unseen",
    "labels_imbalanced", "padding_in_loss", "attention_not_causal", "targets_not_shifted", "padding_attended",
    "batch_axis_mixed", "positions_constant", "order_repeated", "evaluation_inputs_differ", "worker_states_equal",
    "batches_repeated", "data_changed", "momentum_absurd", "weight_decay_high", "eps_too_small", "scheduler_per_batch",
    "scheduler_never_stepped", "updates_lost", "learning_rate_zero", "clipping_too_hard", "loss_summed",
    "targets_not_normalised", "accumulation_unscaled", "trained_in_eval_mode", "eval_in_train_mode",
    "batchnorm_cannot_estimate", "dropout_high", "dropout_in_evaluation", "linear_stack", "softmax_hidden",
    "poor_initialisation", "learning_rate_high", "log_of_zero", "nonfinite", "ranks_train_apart", "ranks_repeat_data",
    "replicas_differ", "rank_outlier", "inputs_not_normalised", "sample_out_of_size", "learning_rate_low", "never_ran",
    "unchanged",
    "update_ratio", "dead_units", "saturated", "exploding_gradients", "vanishing_gradients", "attention_collapse",
    "representation_collapse", "outliers", "constant", "all_zero", "loss_spike", "loss_at_chance",
    "loss_not_decreasing", "drift", "low_precision",
)  # fmt: skip


NO_CONTEXT: Final = (
    "no training context was recorded: write tt.watch(model, context=True), or run the script by tensortap run SCRIPT"
)


class NoData(Exception):  # noqa: N818  # not an error: the rule's data was not recorded
    """Raised by a rule whose data was not recorded. The message says how to record it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A function of a history, with the name and severity of its findings; it needs at least one of its ports.

    >>> from tensortap.diagnose import dead_units
    >>> dead_units.thresholds["dead"]
    0.5
    >>> dead_units.using(dead=0.9).thresholds["dead"]
    0.9
    """

    name: str
    severity: Severity
    needs: tuple[str, ...]
    function: Looks

    @property
    def thresholds(self) -> dict[str, Any]:
        """Its keyword parameters and their values."""
        signature = inspect.signature(self.function)
        return {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}

    @property
    def about(self) -> str:
        """The first line of its docstring."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        return (inspect.getdoc(function) or "").partition("\n")[0]

    @property
    def missing(self) -> str:
        """The message for a run without any of its ports; empty if it needs none."""
        if not self.needs:
            return ""
        pattern = f"'**:{self.needs[0]}'"
        return (
            f"no {' or '.join(self.needs)} was recorded: write tt.watch(model, '**', {pattern}), or run the script by "
            f"tensortap run --sites {pattern} SCRIPT"
        )

    def using(self, **thresholds: Any) -> Rule:
        """Return the same rule with other thresholds."""
        for name in thresholds:
            if name not in self.thresholds:
                known = ", ".join(f"{key}={value!r}" for key, value in self.thresholds.items()) or "none"
                hint = suggest(name, self.thresholds)
                raise ProbeError(f"{self.name} has no threshold {name!r}.{hint} It has {known}")
        return replace(self, function=partial(self.function, **thresholds))

    def __call__(self, history: RunHistory) -> Iterator[Finding]:
        """Yield the findings about a history. The rule's name and severity are filled in where the function left them
        empty.
        """
        if self.needs and not any(history.sites(port) for port in self.needs):
            raise NoData(self.missing)
        for finding in self.function(history) or ():
            yield replace(finding, rule=finding.rule or self.name, severity=finding.severity or self.severity)


@overload
def rule(function: Looks, /) -> Rule: ...
@overload
def rule(
    name: str = ..., /, *, severity: Severity = ..., needs: str | Iterable[str] = ...
) -> Callable[[Looks], Rule]: ...
def rule(
    name: str | Looks = "", /, *, severity: Severity = "warning", needs: str | Iterable[str] = ()
) -> Rule | Callable[[Looks], Rule]:
    """Make a function a rule, which `run.findings()` calls from now on.

    >>> @rule("broad", severity="info", needs="output")
    ... def broad(history, *, most=1e6):
    ...     for site in history.sites("output"):
    ...         if (bad := site["std"] > most).any():
    ...             yield site.finding(bad, f"The std is above {most:g}.")
    >>> del REGISTRY["broad"]
    """
    if callable(name):
        return rule()(name)
    if severity not in SEVERITIES:
        raise ProbeError(
            f"severity must be one of {', '.join(SEVERITIES)}, got {severity!r}.{suggest(severity, SEVERITIES)}"
        )
    ports = (needs,) if isinstance(needs, str) else tuple(needs)

    def make(function: Looks) -> Rule:
        made = Rule(name or function.__name__, severity, ports, function)
        known = REGISTRY.get(made.name)
        if known is not None and _origin(known) != _origin(made):
            raise ProbeError(f"there is a rule {made.name!r} already; give yours another name: @rule('my_{made.name}')")
        REGISTRY[made.name] = made
        return made

    return make


def as_rules(rules: Iterable[Rule | Looks | str] | Rule | Looks | str | None) -> list[Rule]:
    """Return the `rules` argument of `findings` as rules; None means every registered rule, causes first."""
    if rules is None:
        return sorted(REGISTRY.values(), key=lambda r: ORDER.index(r.name) if r.name in ORDER else len(ORDER))
    given = [rules] if isinstance(rules, (str, Rule)) or callable(rules) else list(rules)
    return [_as_rule(item) for item in given]


def _as_rule(item: Rule | Looks | str) -> Rule:
    if isinstance(item, Rule):
        return item
    if isinstance(item, str):
        if item not in REGISTRY:
            raise ProbeError(
                f"there is no rule {item!r}.{suggest(item, REGISTRY)}\nThere are:{names_listed(item, REGISTRY)}"
            )
        return REGISTRY[item]
    if callable(item):
        return Rule(getattr(item, "__name__", type(item).__name__), "warning", (), item)
    raise ProbeError(f"rules must be names, functions or rules such as dead_units.using(dead=0.9), got {item!r}")


def _origin(made: Rule) -> tuple[str, str]:
    """Return where it was defined: running a notebook's cell again replaces its rule."""
    return getattr(made.function, "__module__", ""), getattr(made.function, "__qualname__", "")
