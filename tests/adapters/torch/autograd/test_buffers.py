"""Buffers of modules, such as running statistics: recorded, listed, and refused where a framework has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.adapters import capabilities, registry
from tensortap.errors import PatternError, UnsupportedError
from tensortap.select.sites import Pattern


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(self.fc(x))


def test_buffers_are_recorded_once_a_step(watch, same):
    """`:buffer` shows running statistics, and what changes behind the optimizer, as they are when the step closes."""
    model = Normed()
    optimizers = [torch.optim.SGD([p], 0.1) for p in (model.fc.weight, model.fc.bias)]
    seen = watch(model, "**:buffer")
    expected = []
    for training in (True, False):
        model(torch.randn(5, 3)).sum().backward()
        for optimizer in optimizers if training else ():
            optimizer.step()
        model.bn.running_mean += 1
        expected.append(model.bn.running_mean.clone())
        seen.tap.step()
    rows = seen.of("bn.running_mean:buffer")
    assert [row.step for row in rows] == [0, 1]
    assert all(same(row, value) for row, value in zip(rows, expected, strict=True))
    assert set(seen.places) == {f"bn.{name}:buffer" for name, _ in model.bn.named_buffers()}


def test_buffers_are_listed_and_missing_ones_explained(watch):
    """`sites` lists buffers; a parameter's refusal says what it has; a buffer that was replaced is followed."""
    model = Normed()
    model.bn.register_buffer("absent", None)
    text = str(tt.sites(model))
    assert "bn.running_var" in text and "Buffer" in text and "bn.absent" not in text
    with pytest.raises(PatternError, match=r"'fc.weight' has no buffer; it has param, grad, update"):
        tt.watch(model, "fc.weight:buffer")
    seen = watch(model, "bn.running_mean:buffer")
    model.bn.running_mean = torch.full((4,), 7.0)
    model.eval()(torch.randn(5, 3))
    seen.tap.step()
    assert seen.one("bn.running_mean:buffer")["max"] == 7.0


def test_buffers_elsewhere_are_refused_by_name():
    """A framework without the port says what to write instead."""
    instead = dict.fromkeys(("keras", "numpy", "onnx"), r".*write 'bn\.moving_mean:param'")
    for framework, advice in {**instead, "jax": r".*tensortap\.tap\(self\.bn\.mean\[\.\.\.\], 'bn/mean'\)"}.items():
        with pytest.raises(UnsupportedError, match=rf"no port 'buffer' in .*: {advice}"):
            capabilities.refuse(registry.capabilities_of(framework), Pattern.parse("**:buffer"))
