"""Compare the outputs of two equal calls, of training and evaluation mode, and of fp32 and bf16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tensortap import text
from tensortap.adapters.torch.model_check.samples import located
from tensortap.adapters.torch.model_check.subject import CheckedModel, Named, NotApplicableError, floats, user_code
from tensortap.adapters.torch.model_check.trace import Trace, first_change, traced
from tensortap.adapters.torch.source import current_line
from tensortap.context.caller import in_library, shortened_path
from tensortap.finding import Finding

_DROPOUTS: Final = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
)  # fmt: skip
_WITH_MODE: Final = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU, nn.FractionalMaxPool2d)
_FAR: Final = 0.5  # of the output's size, from fp32
_SOME: Final = 0.1


def not_deterministic(subject: CheckedModel) -> Iterator[Finding]:
    """Call the model twice from one state and seed, and twice in evaluation mode from different seeds."""
    first, again = subject.outputs(), subject.outputs()
    if _distance(first, again):
        path = _origin(subject, subject.model.eval, subject.model.eval)
        yield Finding("not_deterministic", "info", f"{path}:output", None, {"change": _distance(first, again)},
                      "Two calls from one state and one seed differ: other checks would see that, and are left out.",
                      advice="State outside of the model, or its own generator?",
                      code=user_code(subject.model, path))  # fmt: skip
        return
    with _Dropouts() as dropouts:
        subject.outputs()
    if dropouts.lines:
        line = shortened_path(dropouts.lines[0].partition("  ")[0])
        yield Finding("mode_differs", "warning", "", None, {"calls": len(dropouts.lines)},
                      "A dropout is active in evaluation mode: it was not told the mode.",
                      advice="Use nn.Dropout, or dropout(x, training=self.training).", code=line)  # fmt: skip


class _Dropouts(TorchFunctionMode):
    """Note the lines that call an active dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "").rstrip("_") in _DROPOUTS:
            p = given.get("p", args[1] if len(args) > 1 else 0.5)
            training = given.get("training", given.get("train", args[2] if len(args) > 2 else True))
            line = current_line()
            if training is True and isinstance(p, float) and p > 0 and not in_library(line):
                self.lines.append(line)
        return func(*args, **given)


def mode_differs(subject: CheckedModel) -> Iterator[Finding]:
    """Compare the outputs of training and of evaluation mode, from one seed."""
    evaluation, training = subject.outputs(), subject.outputs(training=True)
    if evaluation.keys() != training.keys() or any(evaluation[k].shape != training[k].shape for k in evaluation):
        yield Finding("mode_differs", "info", "", None, {}, "Training and evaluation mode return different structures.",
                      code=user_code(subject.model, ""))  # fmt: skip
        return
    distance = _distance(evaluation, training)
    if not distance:
        return
    path = _origin(subject, subject.model.eval, subject.model.train)
    kinds = Counter(type(m).__name__ for m in subject.model.modules() if isinstance(m, _WITH_MODE))
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "code that asks self.training"
    yield Finding("mode_differs", "info", f"{path}:output", None, {"change": distance, "modules": dict(kinds)},
                  f"Outputs of training and evaluation mode differ by {text.number(100 * distance)} % of their size: "
                  f"{said}.", code=user_code(subject.model, path))  # fmt: skip


def bf16_differs(subject: CheckedModel) -> Iterator[Finding]:
    """Compare fp32 with bf16 by autocast, in evaluation mode."""
    kinds = {p.dtype for p in subject.model.parameters() if p.is_floating_point()}
    device = next((p.device.type for p in subject.model.parameters()), "cpu")
    if kinds != {torch.float32}:
        raise NotApplicableError("the parameters are not fp32")
    plain = subject.outputs()
    try:
        with _bf16(device):
            half = subject.outputs()
    except Exception as error:
        yield Finding(
            "bf16_differs", "info", "", None, {}, f"It does not run under autocast to bf16: {error}"[:300], ""
        )
        return
    lost = [s for s, t in half.items() if s in plain and not t.isfinite().all() and plain[s].isfinite().all()]
    distance = _distance(plain, {slot: t.float() for slot, t in half.items()})
    if not lost and distance < _SOME:
        return
    path = _far_in_bf16(subject, device)
    message = f"In bf16 outputs differ by {text.number(100 * distance)} % of their size from fp32."
    yield Finding("bf16_differs", "warning" if lost or distance > _FAR else "info", f"{path}:output", None,
                  {"change": distance, "nonfinite": lost},
                  "In bf16 outputs are not finite, in fp32 they are." if lost else message,
                  advice="Keep this module in fp32: with torch.autocast(…, enabled=False) around it.",
                  code=user_code(subject.model, path))  # fmt: skip


@contextmanager
def _bf16(device: str, enabled: bool = True) -> Iterator[None]:
    """Autocast to bf16, without oneDNN: its bf16 kernels end the process on machines that only claim to have AMX."""
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            yield
    finally:
        torch._C._set_mkldnn_enabled(was)


def _distance(first: Named, second: Named) -> float:
    """Return the largest difference of two outputs, relative to their size; NaN equals NaN."""
    found = [_apart(t, second[slot]) for slot, t in first.items() if slot in second and t.shape == second[slot].shape]
    return max(found, default=0.0)


def _apart(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, a - b).nan_to_num(nan=float(a.abs().max()), posinf=1e30, neginf=-1e30)
    scale = torch.where(a.isfinite(), a, 0.0).square().mean().sqrt()
    return float(difference.square().mean().sqrt() / scale) if scale else float(bool((~same).any()))


def _origin(subject: CheckedModel, *modes: Any) -> str:
    traces: list[Trace] = []
    for mode in modes:
        subject.restore()
        mode()
        with traced(subject.model) as trace, torch.no_grad():
            floats(subject.call())
        traces.append(trace)
    return located(subject.model, first_change(traces[0], traces[1], lambda a, b: _apart(a, b) > 1e-6))[0]


def _far_in_bf16(subject: CheckedModel, device: str) -> str:
    traces: list[Trace] = []
    for enabled in (False, True):
        with traced(subject.model) as trace, _bf16(device, enabled):
            subject.outputs()
        traces.append(trace)
    return located(subject.model, first_change(traces[0], traces[1], lambda a, b: _apart(a, b.float()) > _SOME))[0]
