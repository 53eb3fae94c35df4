"""Modules of PyTorch's whose operations are known need no hooks where no pattern means these operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.adapters.torch.ops.names import operations_of


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)))


def sites(model: nn.Module, *patterns: str) -> set[str]:
    memory = tt.Memory()
    with tt.watch(model, *patterns, to=memory):
        model(torch.randn(3, 4))
    return {str(record.place) for record in memory.records}


def hooked(model: nn.Module, pattern: str) -> set[str]:
    with tt.watch(model, pattern, to=tt.Memory()):
        return {path for path, module in model.named_modules() if path and module._forward_pre_hooks}


def test_only_modules_that_may_do_the_operation_have_hooks():
    """For matrix products a ReLU, a dropout and a normalisation carry no hook."""
    assert hooked(net(), "op:@matmul") == {"0", "2", "2.2"}
    assert hooked(net(), "op:*") == {"0", "1", "2", "2.0", "2.1", "2.2"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("op:linear", {"0/linear#0:output", "2.2/linear#0:output"}),
        ("op:relu", {"1/relu#0:output"}),
        ("op:batch_norm", {"2.0/batch_norm#0:output"}),
        ("op:dropout", {"2.1/dropout#0:output"}),
        ("op:add_", {"2.0/add_#0:output"}),
    ],
)
def test_an_operation_is_found_where_it_runs(pattern, expected):
    """Each operation has its site under the module that does it."""
    assert sites(net(), pattern) == expected


def test_the_known_operations_are_all_there_are():
    """What every known module does with all operations watched is what the table says."""
    for module, x in [
        (nn.ReLU(), torch.randn(2, 4)), (nn.ReLU(inplace=True), torch.randn(2, 4)), (nn.GELU(), torch.randn(2, 4)),
        (nn.SiLU(), torch.randn(2, 4)), (nn.Sigmoid(), torch.randn(2, 4)), (nn.Tanh(), torch.randn(2, 4)),
        (nn.LeakyReLU(), torch.randn(2, 4)), (nn.ELU(), torch.randn(2, 4)), (nn.Identity(), torch.randn(2, 4)),
        (nn.Softmax(-1), torch.randn(2, 4)), (nn.LogSoftmax(-1), torch.randn(2, 4)), (nn.Dropout(), torch.randn(2, 4)),
        (nn.LayerNorm(4), torch.randn(2, 4)), (nn.RMSNorm(4), torch.randn(2, 4)),
        (nn.GroupNorm(2, 4), torch.randn(2, 4)), (nn.BatchNorm1d(4), torch.randn(2, 4)),
        (nn.BatchNorm2d(4), torch.randn(2, 4, 3, 3)), (nn.Flatten(), torch.randn(2, 4)),
        (nn.Embedding(5, 3), torch.tensor([1, 2])), (nn.MaxPool2d(2), torch.randn(2, 4, 4, 4)),
        (nn.AvgPool2d(2), torch.randn(2, 4, 4, 4)), (nn.AdaptiveAvgPool2d(1), torch.randn(2, 4, 4, 4)),
    ]:  # fmt: skip
        memory, known = tt.Memory(), operations_of(module)
        with tt.watch(module, "op:*", to=memory):
            module(x)
        assert known is not None
        assert {str(r.place).split("/")[1].split("#")[0] for r in memory.records} <= set(known), module


def test_what_a_users_hook_does_keeps_its_module():
    """A module with a hook of the user's is watched, because the hook may do any operation."""
    model = net()
    model[1].register_forward_hook(lambda module, args, output: output @ torch.eye(4))
    assert "1/matmul#0:output" in sites(model, "op:matmul")
