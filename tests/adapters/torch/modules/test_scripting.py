"""Watched models and TorchScript."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.jit import _recursive

import tensortap as tt


class Model(nn.Module):
    """A model with a child, which TorchScript compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return torch.relu(self.fc(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_watched_model_can_be_scripted() -> None:
    """`torch.jit.script` compiles the model as without a tap, which goes on seeing the model itself."""
    model, x, memory = Model(), torch.randn(2, 4), tt.Memory()
    with tt.watch(model, "**", "**:input", to=memory) as tap:
        hooks = [list(module._forward_hooks.values()) for module in model.modules()]
        scripted = torch.jit.script(model)
        assert [list(module._forward_hooks.values()) for module in model.modules()] == hooks
        assert torch.equal(scripted(x), model(x))
        tap.step()
        tap.flush()
        assert {str(record.place) for record in memory.records} >= {":output", "fc:output", "fc:input"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_hooks_of_others_are_compiled_or_refused_as_before() -> None:
    """A hook that TorchScript refuses is refused with a tap too, and nothing of ours stays behind."""
    model, own = Model(), _recursive.create_script_module
    model.fc.register_forward_hook(lambda module, inputs, output: None)
    with tt.watch(model, to=tt.Memory()), tt.watch(model, to=tt.Memory()):
        with pytest.raises((RuntimeError, AttributeError)):
            torch.jit.script(model)
        assert len(model.fc._forward_hooks) > 1
    assert _recursive.create_script_module is own and len(model.fc._forward_hooks) == 1
