"""It changes nothing with operations tapped: bits, random numbers, errors and other people's modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt

EVERYTHING = "op:*:{output,input,grad_output,grad_input}"


def modes() -> int:
    return torch._C._len_torch_function_stack()


class Block(nn.Module):
    """Attention by hand, by nn.MultiheadAttention and by the fused function, with dropout and in-place steps."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)
        self.mha = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.drop, self.act = nn.Dropout(0.3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = self.drop(torch.einsum("bqd,bkd->bqk", q, k).softmax(-1))
        x = x + weights @ v + F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.act(x + self.mha(x, x, x)[0] + self.mha(x, x, x, need_weights=False)[0])


class Subclass(Tensor):
    """A tensor with a class of its own, which sees every function that is called on it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


class Views(nn.Module):
    """In-place operations on views, results written into given tensors, and a value that is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        y[:, 0].mul_(2)
        y[0].add_(x[0])
        y.transpose(0, 1).relu_()
        room = torch.empty(8, 8)
        torch.mm(self.weight.detach(), self.weight.detach(), out=room)
        return y @ room + y


class Transformed(nn.Module):
    """vmap and torch.func.grad inside a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.vmap(lambda row: row @ self.weight)(x)
        slope = torch.func.grad(lambda t: (t @ t.T).tanh().sum())(x)
        per_row = torch.vmap(torch.func.grad(lambda row: (row * row).softmax(-1)[0]))(x)
        return rows + slope + per_row


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.lstm(x)
        return out + h[-1][:, None] * c[-1][:, None]


def sequence() -> Tensor:
    return torch.randn(2, 5, 8, requires_grad=True)


def matrix() -> Tensor:
    return torch.randn(6, 8, requires_grad=True)


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "block": (Block, sequence),
    "views": (Views, matrix),
    "transforms": (Transformed, matrix),
    "checkpoint": (lambda: Checkpointed(False), sequence),
    "reentrant": (lambda: Checkpointed(True), sequence),
    "lstm": (Recurrent, sequence),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), sequence),
    "decoder": (
        lambda: Two(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)),
        sequence,
    ),
    "subclass": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), lambda: torch.randn(6, 8).as_subclass(Subclass)
    ),
}  # fmt: skip


class Two(nn.Module):
    """Gives one input to a layer that wants two."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


def train(name: str, watched: bool, autocast: bool = False) -> dict[str, Any]:
    """A few steps from a fixed seed: outputs, gradients, weights, random state, and what a subclass has seen."""
    torch.manual_seed(4)
    make, batch = SUBJECTS[name]
    model = make()
    Subclass.seen = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tap = tt.watch(model, EVERYTHING, "**:*", to=tt.Memory(), strict=True) if watched else None
    left: dict[str, Any] = {}
    for step in range(3):
        x = batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        out.float().square().mean().backward()
        left[f"out {step}"] = out.detach().clone()
        left |= {f"grad {step} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        left[f"x {step}"] = x.grad
        optimizer.step()
        optimizer.zero_grad()
    if tap is not None:
        tap.close()
        assert not set(tap.counts) - {"unseen"}
    assert modes() == 0
    return left | {"rng": torch.get_rng_state(), "state": [p.detach().clone() for p in model.parameters()]}


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert list(a) == list(b)
    return [name for name in a if not _equal(a[name], b[name])]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(map(_equal, a, b))
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b)))


def _bytes(tensor: Tensor) -> Tensor:
    """What a tensor holds, bit for bit: NaN equals NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", SUBJECTS)
def test_training_is_the_same_bit_for_bit(name):
    """Outputs, gradients, weights and the random state with every port of every operation and module tapped."""
    bare = train(name, watched=False)
    seen = Subclass.seen
    tapped = train(name, watched=True)
    assert Subclass.seen == seen and bool(seen) == (name == "subclass")
    assert differing(bare, tapped) == []


@pytest.mark.parametrize("name", ["block", "encoder"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_autocast_is_the_same_bit_for_bit(name):
    """Under autocast the same casts happen, and operations are recorded with the types they were given and gave."""
    assert differing(train(name, False, autocast=True), train(name, True, autocast=True)) == []


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "both": lambda x, w: x @ x.mT,
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "softmax": lambda x, w: x.softmax(-1),
    "norm": lambda x, w: F.layer_norm(x, (4,)),
    "dropout": lambda x, w: F.dropout(x, 0.4),
    "in place": lambda x, w: (x * 1).relu_(),
    "view": lambda x, w: (y := x.clone(), y[0].mul_(2), y)[-1],
    "chunk": lambda x, w: torch.cat(x.chunk(2, -1)[::-1], -1),
    "skip": lambda x, w: x + torch.tanh(x) * 0.5,
    "where": lambda x, w: torch.where(x > 0, x, w),
    "noise": lambda x, w: x + torch.randn_like(x),
}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=7))
def test_random_programs_are_the_same_bit_for_bit(kinds):
    """Any short program gives the same output, gradients and random state with every operation tapped."""

    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            for kind in kinds:
                x = STEPS[kind](x, self.w)
            return x

    def run(watched: bool) -> list[Tensor | None]:
        torch.manual_seed(6)
        model, x = Program(), torch.randn(4, 4, requires_grad=True)
        tap = tt.watch(model, EVERYTHING, to=tt.Memory(), strict=True) if watched else None
        out = model(x)
        out.square().sum().backward()
        if tap is not None:
            tap.close()
        return [out.detach(), x.grad, model.w.grad, torch.get_rng_state()]

    assert all(map(_equal, run(False), run(True)))


def test_a_default_device_is_no_obstacle(watch):
    """PyTorch's own mode for a device, put on inside the forward, comes and goes below ours."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.device("cpu"):
                y = torch.zeros(2) + x
            return y.relu()

    model = Model()
    seen = watch(model, "op:*", strict=True)
    model(torch.ones(2))
    seen.tap.step()
    assert modes() == 0 and [r["op"] for r in seen.records] == ["zeros", "add", "relu"]


def test_autocast_types_are_recorded(watch):
    """An operation under autocast takes float32 and gives bfloat16."""
    model = nn.Linear(4, 4)
    seen = watch(model, "op:linear:{input,output}")
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 4))
    seen.tap.step()
    assert seen.one("/linear#0:input[0]")["dtype"] == "float32"
    assert seen.one("/linear#0:output")["dtype"] == "bfloat16"


def test_vmap_is_recorded_with_the_batch_it_hides(watch, same):
    """DispatchObserver vmap an operation's tensors have the hidden batch back."""
    weight, x = torch.randn(4, 3), torch.randn(5, 4)
    model = Transformed()
    model.forward = torch.vmap(lambda row: row @ weight)
    seen = watch(model, "op:matmul:{input,output}", strict=True)
    out = model(x)
    seen.tap.step()
    assert same(seen.one("/matmul#0:input[0]"), x) and same(seen.one("/matmul#0:output"), out)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference_is_the_same_bit_for_bit(watch, guard):
    """In evaluation, without gradients, outputs are the same and operations are seen."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), Views()).eval(), torch.randn(6, 8)
    with guard():
        bare = model(x.clone())
        seen = watch(model, EVERYTHING, strict=True)
        assert torch.equal(model(x.clone()), bare)
    seen.tap.step()
    assert {"0/linear#0:output", "1/softmax#0:output", "2/mul_#0:output"} <= set(seen.places)


def test_verify_proves_it():
    """`verify` with operations: the same bits, nothing left over, records taken."""
    proof = tt.verify(Block(), torch.randn(2, 5, 8), EVERYTHING, repeats=1)
    assert proof and proof.deterministic and proof.records > 100
