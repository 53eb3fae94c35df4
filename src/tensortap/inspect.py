"""Quick looks at a model: list its sites, capture tensors, verify that tapping changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from tensortap.adapters.lookup import adapter_for, framework_for
from tensortap.adapters.model_check import CHECKS, ModelCheck, ModelQuestion, RankedSample
from tensortap.adapters.nested import values_in
from tensortap.adapters.results import Captured, Origin, TensorSummary, Verification
from tensortap.diagnose import findings
from tensortap.errors import ProbeError, TensortapError, suggest
from tensortap.finding import Findings
from tensortap.reduce.summary import Summary, summarize
from tensortap.select.probes import Probe, is_model_or_array
from tensortap.select.sites import Candidate, Pattern
from tensortap.verification import run_verification
from tensortap.watch import watch


@dataclass(frozen=True, slots=True)
class Sites(Sequence[Candidate]):
    """The sites of a model that can be tapped, and those that cannot, with the reason. Print it to copy patterns."""

    found: tuple[Candidate, ...]
    untappable: Mapping[str, str]

    def __getitem__(self, index: Any) -> Any:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __str__(self) -> str:
        rows = [(site.path or "(root)", site.types[0], ", ".join(site.ports)) for site in self.found]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"{path:<{widths[0]}}  {kind:<{widths[1]}}  {ports}" for path, kind, ports in rows]
        return "\n".join(lines + [f"{path:<{widths[0]}}  not tappable: {why}" for path, why in self.untappable.items()])


def sites(model: Any, batch: Any = None) -> Sites:
    """Return every place of a model that can be tapped, with its ports; and what cannot be tapped, and why.

    >>> import torch
    >>> print(sites(torch.nn.Sequential(torch.nn.ReLU())))
    (root)  Sequential  output, input, grad_output, grad_input
    0       ReLU        output, input, grad_output, grad_input

    Operations are known only while the model runs. Given a batch (one value, a tuple or a dict), it is called once
    and left as it was, and its operations are listed too, where its framework shows single operations. Each site's
    `default` says whether `watch(model)` observes it; for a module that calls others, a batch is needed to know.
    """
    adapter = adapter_for(model)
    found = adapter.candidates()
    if batch is not None:
        found = framework_for(model).sites_of_call(model, batch, found)
    return Sites(tuple(found), adapter.untappable())


def capture(model: Any, inputs: Any, *patterns: str | Pattern | Callable[[Candidate], bool]) -> Captured:
    """Call the model once and give the tensors at the chosen sites: the quick look.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    >>> [(name, tuple(x.shape)) for name, x in capture(model, torch.ones(2, 4), "1", "0:input").items()]
    [('0:input', (2, 4)), ('1', (2, 3))]

    `inputs` is the one argument, a tuple of arguments or a dict of keyword arguments. The tensors are copies, in
    order of execution; a second call of one site is `name#1`.
    """
    if not patterns:
        raise ProbeError('capture(model, x, ...) needs at least one site, e.g. capture(model, x, "layer1")')
    _refuse_other_order(inputs, patterns)
    return framework_for(model).capture(model, inputs, patterns)


def _refuse_other_order(inputs: Any, patterns: Sequence[Any]) -> None:
    named = isinstance(inputs, (str, Pattern))
    for item in patterns:
        is_pattern = isinstance(item, (str, Pattern, Probe, type)) or callable(item)
        if is_model_or_array(item) or (named and not is_pattern):
            example = getattr(inputs, "text", inputs) if named else "layer1"
            raise ProbeError(
                f"capture(model, batch, patterns) takes the batch second and patterns after it, got a "
                f"{type(item).__name__} as a pattern: write capture(model, batch, {example!r})"
            )


def verify(
    model: Any,
    batch: Any,
    *probes: Probe | str | Pattern | Callable[[Candidate], bool],
    repeats: int = 7,
) -> Verification:
    """Verify on your own model that tapping changes nothing, and measure what it costs.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout())
    >>> bool(verify(model, torch.ones(2, 4), repeats=1))
    True

    `batch` is what the model is called with (one value, a tuple or a dict), or a function that runs a step
    (forward and backward, no optimizer) and returns what is to be compared. Runs from one seed and state, with and
    without taps; afterwards model, gradients and random state are as they were. A compiled Keras model trains for one
    step: `batch` is `(x, y)`, or `x`, for which targets are made up.
    """
    with framework_for(model).verification(model, batch) as subject:
        return run_verification(subject, lambda to, strict: watch(model, *probes, to=to, strict=strict), repeats)


def locate_nonfinite(model: Any, batch: Any) -> Origin | None:
    """Run one step and name the first NaN or infinity: module, operation, line, inputs, and why. None if there is none.

    >>> import torch
    >>> class Bad(torch.nn.Module):
    ...     def forward(self, x):
    ...         return (x - 1).log()
    >>> origin = locate_nonfinite(torch.nn.Sequential(torch.nn.ReLU(), Bad()), torch.ones(2))
    >>> print(origin.site, origin.operation, origin.why)
    1 log log of 0

    `batch` is what the model is called with, or a function that runs a step. The model is left as it was. Where no
    layer made it of finite numbers and the batch holds one, the batch is named.
    """
    found = framework_for(model).locate_nonfinite(model, batch)
    made = found is not None and found.direction == "forward" and all(_usable(seen.summary) for seen in found.inputs)
    return found if made else _in_batch(batch) or found


# Rules of a recorded training that one step on one batch can answer.
_RULES_OF_ONE_STEP: Final = (
    "activation_loss_mismatch", "softmax_axis", "constant_output", "output_bounded", "loss_broadcast",
    "labels_out_of_range", "loss_unsuitable", "log_of_zero", "softmax_hidden", "loss_negated",
    "parameters_unregistered", "batchnorm_cannot_estimate",
)  # fmt: skip


def check_model(
    model: Any, batch: Any, *, target: Any = None, loss: Callable[..., Any] | None = None,
    checks: Sequence[str] | None = None, batch_axis: int | None = None, causal: bool | None = None, steps: int = 30,
    seconds: float = 10.0,
) -> Findings:  # fmt: skip
    """Check on one batch, without training, whether a model does what its author believes. It is left as it was.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(dim=0))
    >>> x, y = torch.randn(8, 4), torch.arange(8) % 3
    >>> found = check_model(model, x, target=y, loss=torch.nn.functional.cross_entropy)
    >>> [(finding.rule, finding.site) for finding in found.at_least("error")][0]
    ('samples_mixed', '1:output')

    `batch` is the one argument, a tuple of arguments or a dict of keyword arguments. `loss` is called with output and
    target; without one, a loss that the model returns is used. `batch_axis` is 0 unless you say otherwise.
    `causal=True` says that no position may see a later one. `steps` and `seconds` limit the training on the one batch.
    `checks` are names of `docs/check-model.md`; none means all.
    """
    names = _known_checks(checks)
    if target is not None and loss is None:
        raise ProbeError(
            "target= must be given with loss=, a function of output and target, got no loss: write "
            "loss=torch.nn.functional.cross_entropy"
        )
    question = ModelQuestion(
        model, batch, target=target, loss=loss, batch_axis=batch_axis, causal=causal, steps=steps, seconds=seconds
    )
    with framework_for(model).model_check(question) as check:
        found = check.run(names)
        rules = _of_one_step(model, check) if checks is None else Findings.of([], [], {})
    told = any(f.rule == "targets_unpaired" and f.severity == "error" for f in found)
    said = [dataclasses.replace(f, steps=None) for f in rules if not (told and f.rule == "loss_broadcast")]
    return Findings.of([*found, *said], [*found.rules, *rules.rules], {**found.skipped, **rules.skipped})


def rank_samples(
    model: Any, batch: Any, *, target: Any = None, loss: Callable[..., Any] | None = None, gradients: bool = False
) -> tuple[RankedSample, ...]:
    """Run every sample of a batch alone and return them, the most suspicious first. The model is left as it was.

    >>> import torch
    >>> x = torch.ones(4, 2)
    >>> x[2, 1] = torch.nan
    >>> print(rank_samples(torch.nn.Linear(2, 1), x)[0])
    sample 2: 1 input values not finite, first not finite at :output

    The same arguments as `check_model` takes. With `gradients`, a backward for each sample tells its share of the
    gradient. For a batch of a run, `finding.evidence` of `nonfinite` and `loss_spike` has the samples already.
    """
    with framework_for(model).model_check(ModelQuestion(model, batch, target, loss)) as check:
        return check.rank_samples(gradients)


def _known_checks(names: Sequence[str] | None) -> list[str]:
    for name in names or ():
        if name not in CHECKS:
            raise ProbeError(f"checks must be among {', '.join(CHECKS)}, got {name!r}.{suggest(name, CHECKS)}")
    return list(CHECKS if names is None else names)


def _of_one_step(model: Any, check: ModelCheck) -> Findings:
    """Ask the rules on outputs, loss and targets about one recorded step."""
    with tempfile.TemporaryDirectory(prefix="tensortap-check-") as folder:
        with watch(model, ":output", to=f"{folder}/run", context=True, control=False) as tap:
            if not check.training_step():
                return Findings.of([], [], {})
            tap.step()
        return findings(tap.run, _RULES_OF_ONE_STEP)


@runtime_checkable
class _Tensor(Protocol):
    shape: Any
    dtype: Any


def _in_batch(batch: Any) -> Origin | None:
    """Return the first tensor of a batch that was not finite when it came in."""
    for slot, tensor in values_in(batch, _Tensor):  # type: ignore[type-abstract]
        with contextlib.suppress(TensortapError):  # a tensor that cannot be read was not checked
            if not _usable(summary := summarize(tensor)):
                return Origin.in_batch([TensorSummary(slot, summary)])
    return None


def _usable(summary: Summary) -> bool:
    """Return whether it holds neither NaN nor +inf; −inf may be a mask."""
    return not (summary.nan or summary.posinf)
