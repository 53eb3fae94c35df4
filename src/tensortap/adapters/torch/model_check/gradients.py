"""Check whether every trainable parameter gets a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tensortap.adapters.torch.model_check.fitting import Fit
from tensortap.adapters.torch.model_check.subject import CheckedModel, NotApplicableError, user_code
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.finding import Finding, Severity

RULE: Final = "no_gradient"
_STEPS: Final = 4  # a factor that begins with zero lets gradients through after the first of them


class _Uses(TorchFunctionMode):
    """Note which tensors functions are called with, and whether gradients were recorded then."""

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[int, bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _arguments((*args, *(kwargs or {}).values())):
            self.used[id(tensor)] = self.used.get(id(tensor), False) or torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))


def _arguments(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def no_gradient(subject: CheckedModel) -> Iterator[Finding]:
    """Train for a few steps and check the gradients: none, or zero in all steps."""
    trainable = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    if not trainable:
        raise NotApplicableError("the model has no parameter that requires a gradient")
    output = subject.output(training=True, gradients=True)
    if not tensors_in(output):
        raise NotApplicableError("the model returns no tensor")
    if not any(t.requires_grad for _, t in tensors_in(output)):
        yield _finding(subject, "error", list(trainable), "No output depends on a parameter: the graph is cut.",
                       "Remove detach(), .data, .numpy(), no_grad() and argmax from the forward.")  # fmt: skip
        return
    subject.restore()
    subject.model.train()
    with torch.enable_grad(), _Uses() as uses:
        subject.call()
    used = {name: uses.used[id(p)] for name, p in trainable.items() if id(p) in uses.used}
    fit = Fit(subject, 1e-3)
    fit.run(_STEPS, seconds=subject.question.seconds / 2)
    yield from _judged(subject, trainable, used, fit)


def _judged(
    subject: CheckedModel, trainable: dict[str, nn.Parameter], used: dict[str, bool], fit: Fit
) -> Iterator[Finding]:
    without = [name for name in trainable if name not in fit.reached]
    zero = [n for n in fit.reached if n in trainable and n not in fit.moved and trainable[n].dim() > 1]
    apart = set(_beside_the_loss(subject, without)) if without else set()
    if plain := [name for name in without if used.get(name) is False and name not in apart]:
        yield _finding(subject, "info", plain, "It is used under torch.no_grad() only.",
                       "Set requires_grad=False, and leave it out of the optimizer.")  # fmt: skip
    if cut := [name for name in without if used.get(name) and name not in apart]:
        yield _finding(subject, "warning", cut, "It is used in the forward, but nothing that the model returns depends "
                       "on it by a gradient.", "Look for detach(), .data, no_grad() or argmax behind it; if that is "
                       "meant, set requires_grad=False.")  # fmt: skip
    if beside := [name for name in without if name in apart]:
        yield _finding(subject, "info", beside, "An output depends on it, but the loss does not.",
                       "Add that output to the loss, or leave it out of the optimizer.")  # fmt: skip
    unused = [name for name in without if name not in used]
    chosen = [name for name in (*used, *fit.moved) if name not in without]
    for severity, names in _by_severity(subject, unused, chosen):
        yield _finding(subject, severity, names, "It is never used in the forward.",
                       "Call its module, remove it, or set requires_grad=False (DDP wants "
                       "find_unused_parameters=True).")  # fmt: skip
    for severity, names in _by_severity(subject, zero if len(fit.losses) == _STEPS else [], fit.moved):
        yield _finding(subject, severity, names, f"Its gradient is exactly zero in all of {_STEPS} steps.",
                       "Look for dead activations, a factor of zero, or a softmax over one element.")  # fmt: skip


def _by_severity(
    subject: CheckedModel, names: Sequence[str], others: Iterable[str]
) -> Iterator[tuple[Severity, list[str]]]:
    """Split parameters into warnings and infos. Parameters of a library, and of list entries that were not used, are
    infos.

    A layer that somebody wrote and forgot is the user's own; libraries hold parameters for other uses. Layers
    of a list, such as experts, may be unused by this batch while others of the list are used.
    """
    lists = [
        path for path, module in subject.model.named_modules() if isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]
    active = {path for path in lists if any(name.startswith(f"{path}.") for name in others)}
    looked: list[str] = []
    known: list[str] = []
    for name in names:
        in_list = any(name.startswith(f"{path}.") for path in active)
        own = user_code(subject.model, name.rpartition(".")[0])
        (known if in_list or not own else looked).append(name)
    if looked:
        yield "warning", looked
    if known:
        yield "info", known


def _beside_the_loss(subject: CheckedModel, names: Sequence[str]) -> list[str]:
    """Return the parameters that some output depends on."""
    outputs = [t for _, t in tensors_in(subject.output(training=True, gradients=True)) if t.requires_grad]
    parameters = dict(subject.model.named_parameters())
    wanted = [parameters[name] for name in names]
    total = torch.stack([t.float().sum() for t in outputs if not t.is_complex()]).sum()
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [name for name, gradient in zip(names, found, strict=True) if gradient is not None]


def _finding(subject: CheckedModel, severity: Severity, names: Sequence[str], message: str, advice: str) -> Finding:
    parameters = dict(subject.model.named_parameters())
    elements = sum(parameters[name].numel() for name in names)
    owner = names[0].rpartition(".")[0]
    places = tuple(f"{name}:grad" for name in names[1:])
    return Finding(RULE, severity, f"{names[0]}:grad", None, {"parameters": len(names), "elements": elements}, message,
                   advice=advice, code=user_code(subject.model, owner), places=places)  # fmt: skip
