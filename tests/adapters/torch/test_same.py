"""It changes nothing: bits, state, hooks, copies; during and after."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tensortap as tt

PORTS = "**:{output,input,grad_output,grad_input,param,grad,update}"


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.body(x)
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Rnn(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(5, 6, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def floats(*shape: int) -> Any:
    return lambda: torch.randn(shape)


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)), floats(6, 4)),
    "inplace": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Hardtanh(inplace=True)),
        floats(6, 4),
    ),
    "cnn": (Cnn, floats(4, 3, 8, 8)),
    "lstm": (lambda: Rnn(nn.LSTM), floats(3, 4, 5)),
    "gru": (lambda: Rnn(nn.GRU), floats(3, 4, 5)),
    "transformer": (Transformer, lambda: torch.randint(20, (2, 6))),
}


def everything(model: nn.Module) -> dict[str, Tensor]:
    found = {f"state {name}": tensor for name, tensor in model.state_dict().items()}
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"rng": torch.get_rng_state()}


def train(name: str, *probes: Any, steps: int = 4, **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A short training run from a fixed seed, watched when there are probes: what it leaves, and each output."""
    torch.manual_seed(3)
    make, batch = MODELS[name]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    tap = tt.watch(model, *probes, to=tt.Memory(), strict=True, **options) if probes else None
    outputs = []
    for _ in range(steps):
        out = model(batch())
        out.float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        outputs.append(out.detach().clone())
        left = everything(model)
        left = {key: value.clone() for key, value in left.items()}
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outputs.append(model(batch()))
    if tap is not None:
        assert tap.recorder.current.table.rows
        tap.close()
        assert not set(tap.counts) - {"unseen"}
    return left, outputs


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert list(a) == list(b)
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("keep", [[tt.stats()], [tt.histogram(), tt.sample(7), tt.rows([0])]], ids=["stats", "more"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_bit_for_bit(name, keep):
    """Outputs, gradients, weights, buffers and the random state after training with every port tapped."""
    left, outputs = train(name)
    tapped, seen = train(name, tt.probe(PORTS, keep=keep))
    assert differing(left, tapped) == []
    assert all(map(torch.equal, outputs, seen))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["linear", "relu", "tanh", "drop", "norm", "skip"]), min_size=1, max_size=6))
def test_random_networks_are_the_same_bit_for_bit(kinds):
    """Any small stack of layers gives the same outputs and gradients, or the same error, with every port tapped."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inside(x)

    make = {
        "linear": lambda: nn.Linear(4, 4),
        "relu": lambda: nn.ReLU(inplace=True),
        "tanh": nn.Tanh,
        "drop": lambda: nn.Dropout(0.4),
        "norm": lambda: nn.BatchNorm1d(4),
        "skip": Skip,
    }

    def run(watched: bool) -> dict[str, Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 4), *(make[kind]() for kind in kinds))
        tap = tt.watch(model, PORTS, to=tt.Memory(), strict=True) if watched else None
        out = model(torch.randn(3, 4))
        with contextlib.suppress(RuntimeError):  # an in-place layer after one that needs its output
            out.square().sum().backward()
        if tap is not None:
            tap.close()
        return everything(model) | {"out": out.detach()}

    assert differing(run(False), run(True)) == []


def hook_state(model: nn.Module) -> Any:
    names = [name for name in vars(model) if "hook" in name]
    return [
        (path, name, list(value.items()) if isinstance(value, dict) else value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name in names
    ]


def test_nothing_is_left_behind():
    """Hook dicts, attributes, flags, names and state are identical after closing; others' hooks as they were."""
    model, order = Cnn(), []
    for i in range(3):
        model.stem.register_forward_hook(lambda *args, i=i: order.append(f"after {i}"))
        model.stem.register_forward_pre_hook(lambda *args, i=i: order.append(f"before {i}"))
    model.stem[0].weight.register_hook(lambda g: None)
    x = torch.randn(2, 3, 8, 8)
    before = hook_state(model)
    attributes = {path: list(vars(m)) for path, m in model.named_modules()}
    tensors = {name: p._backward_hooks and list(p._backward_hooks) for name, p in model.named_parameters()}
    flags = [m.training for m in model.modules()]
    modules = list(model.named_modules())
    keys = list(model.state_dict())
    bare_order = (model(x), order.copy(), order.clear())[1]
    with tt.watch(model, PORTS, to=tt.Memory()):
        assert list(model.named_modules()) == modules and list(model.state_dict()) == keys
        assert {path: list(vars(m)) for path, m in model.named_modules()} == attributes
        model(x).sum().backward()
        assert order == bare_order
    assert hook_state(model) == before
    assert {path: list(vars(m)) for path, m in model.named_modules()} == attributes
    assert {name: p._backward_hooks and list(p._backward_hooks) for name, p in model.named_parameters()} == tensors
    assert [m.training for m in model.modules()] == flags
    optimizers = sys.modules["torch.optim.optimizer"]
    assert not optimizers._global_optimizer_pre_hooks and not optimizers._global_optimizer_post_hooks


def test_a_hook_of_the_users_that_changes_the_output_still_does(watch):
    """Hooks that return values keep their effect, and taps see what was there when their turn came."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda m, a, out: out * 0)
    seen = watch(model, "0", ":output")
    model[0].register_forward_hook(lambda m, a, out: out + 1)
    assert torch.equal(model(torch.randn(1, 2)), torch.ones(1, 2))
    seen.tap.step()
    assert (seen.one("0:output")["max"], seen.one(":output")["max"]) == (0.0, 1.0)


def test_user_backward_hooks_fire_as_before(watch, same):
    """Full backward hooks see the same gradients, and taps the same as without them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    found: list[Tensor] = []
    model[1].register_full_backward_hook(lambda m, given, out: found.append(given[0].clone()))
    seen = watch(model, "1:grad_input", "0:grad_output")
    model(torch.randn(2, 3)).sum().backward()
    seen.tap.step()
    assert same(seen.one("1:grad_input"), found[0])
    assert same(seen.one("0:grad_output"), found[0])


@pytest.mark.parametrize("ports", ["**", PORTS])
def test_copies_carry_no_tap(watch, ports):
    """A deep copy works alone: nothing it does is recorded, and its first call sweeps off what it was copied with."""
    model = Cnn()
    seen = watch(model, ports)
    twin = copy.deepcopy(model)
    twin(torch.randn(2, 3, 8, 8)).sum().backward()
    seen.tap.step()
    assert not [r for r in seen.records if r.place.port in ("output", "input")]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
    assert not any(m._forward_hooks_with_kwargs or m._forward_hooks_always_called for m in twin.modules())


def test_a_copy_of_a_fused_layer_runs_fused(watch, monkeypatch):
    """A copy made while the layer was tapped in training is not kept off its fused path in inference."""
    calls = []
    real = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: (calls.append(1), real(*args))[1])
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    watch(model, "**")
    model(torch.randn(2, 3, 8))
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        twin.layers[0](torch.randn(2, 3, 8))
    assert calls == [1]


def test_a_saved_model_opens_without_tensortap(watch, tmp_path, warm_python):
    """torch.save and pickle of a watched model work, and what they write needs no tensortap to open."""
    model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.randn(4, 3)
    watch(model, PORTS)
    expected = model(x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    torch.save(model, tmp_path / "model.pt")
    torch.save((x, expected), tmp_path / "data.pt")
    (tmp_path / "open.py").write_text(
        "import sys\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'tensortap'] + ['tensortap']:\n"
        "    sys.modules[name] = None\n"  # importing it, or a part of it, fails
        "import torch\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        "x, expected = torch.load('data.pt')\n"
        "assert torch.equal(model(x), expected)\n"
    )
    done = warm_python.run(["open.py"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_outputs_can_be_saved_and_copied(watch):
    """A tapped output carries nothing of ours: no hook on it, no warning when it is saved."""
    model = nn.Linear(2, 2)
    watch(model, ":output", ":grad_output")
    out = model(torch.randn(1, 2))
    assert out._backward_hooks is None and type(out.grad_fn).__name__ == "AddmmBackward0"
    torch.save(out.detach(), io.BytesIO())
    parameter = nn.Parameter(torch.ones(2))
    tt.tap(parameter, "mine/leaf")
    torch.save(parameter, io.BytesIO())
    copy.deepcopy(parameter)


def test_shallow_state_survives(watch):
    """load_state_dict, to(), half() and parameters() work on a watched model as on any."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    seen = watch(model, "**")
    model.load_state_dict(collections.OrderedDict((k, v.clone()) for k, v in model.state_dict().items()))
    model.double().eval()
    model(torch.randn(3, 2, dtype=torch.float64))
    seen.tap.step()
    assert {r["dtype"] for r in seen.records} == {"float64"}
