"""Shapes of models that public zoos contain and that ordinary test models do not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from outside import zoo_more
from outside.checks import Subject

X = (4, 8)
_MAKERS: list[tuple[str, Callable[[], tuple[nn.Module, Any]], bool]] = []


def subjects() -> list[Subject]:
    """Every shape of this file."""
    return [Subject(f"zoo/{name}", make, train) for name, make, train in (*_MAKERS, *zoo_more.MAKERS)]


def _shape(train: bool = True) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def keep(cls: type[nn.Module]) -> type[nn.Module]:
        _MAKERS.append((cls.__name__, lambda: (cls(), torch.randn(X)), train))
        return cls

    return keep


class Plain:
    """An output object without any registration."""

    def __init__(self, logits: torch.Tensor, extra: Any) -> None:
        self.logits = logits
        self.extra = extra


class Slotted:
    """An output object with slots."""

    __slots__ = ("value", "weights")

    def __init__(self, value: torch.Tensor, weights: torch.Tensor) -> None:
        self.value = value
        self.weights = weights


@dataclass
class Data:
    """A dataclass that nobody registered."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Named(NamedTuple):
    """A named tuple."""

    first: torch.Tensor
    second: torch.Tensor


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)


@_shape()
class ReturnsPlainObject(_Base):
    """Return an object whose tensors are attributes."""

    def forward(self, x: torch.Tensor) -> Plain:
        """Compute."""
        h = self.fc(x)
        return Plain(h.relu(), {"hidden": [h]})


@_shape()
class ReturnsSlots(_Base):
    """Return an object with slots."""

    def forward(self, x: torch.Tensor) -> Slotted:
        """Compute."""
        return Slotted(self.fc(x), self.fc.weight.softmax(-1))


@_shape()
class ReturnsDataclass(_Base):
    """Return a dataclass."""

    def forward(self, x: torch.Tensor) -> Data:
        """Compute."""
        h = self.fc(x)
        return Data(h.tanh(), (x, h))


@_shape()
class ReturnsNamedTuple(_Base):
    """Return a named tuple."""

    def forward(self, x: torch.Tensor) -> Named:
        """Compute."""
        return Named(self.fc(x), x.sum())


@_shape()
class ReturnsDictOfLists(_Base):
    """Return nested dictionaries and lists with None in them."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """Compute."""
        h = self.fc(x)
        return {"a": [h, None, (h.sum(), {"b": h.mean()})], "n": 3, "s": "text"}


@_shape()
class ReturnsNothing(_Base):
    """Keep the result in an attribute and return None."""

    def forward(self, x: torch.Tensor) -> None:
        """Compute."""
        self.result = self.fc(x).detach()


@_shape()
class InPlaceForward(_Base):
    """Change the input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        x += 1
        return self.fc(x).relu_()


@_shape()
class InPlaceChain(nn.Module):
    """Change what an earlier module returned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU6(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.net(x).mul_(2)


@_shape()
class WeightNorm(nn.Module):
    """A parametrized linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.fc(x)


@_shape()
class SpectralNorm(nn.Module):
    """A parametrization with buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.spectral_norm(nn.Conv1d(1, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.conv(x.unsqueeze(1))


@_shape()
class OldWeightNorm(nn.Module):
    """The hook-based weight norm of older code."""

    def __init__(self) -> None:
        super().__init__()
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.fc = torch.nn.utils.weight_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.fc(x)


@_shape()
class ParameterListRoot(nn.Module):
    """A root whose only children are parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        for weight in self.weights:
            x = (x @ weight).tanh()
        return x


@_shape()
class ParameterDictChild(nn.Module):
    """A child that holds its parameters in a dictionary."""

    class Inner(nn.Module):
        """The child."""

        def __init__(self) -> None:
            super().__init__()
            self.p = nn.ParameterDict({"w": nn.Parameter(torch.randn(8, 8)), "b": nn.Parameter(torch.zeros(8))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Compute."""
            return x @ self.p["w"] + self.p["b"]

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.inner(x).relu()


@_shape()
class Attention(nn.Module):
    """Multi-head attention, whose projection is never called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        x = x.unsqueeze(0)
        return self.attention(x, x, x)[0]


@_shape()
class EncoderLayer(nn.Module):
    """A layer that PyTorch runs fused in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.encoder(x.unsqueeze(0))


@_shape()
class Recurrent(nn.Module):
    """An LSTM and a GRU cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, dropout=0.1)
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        """Compute."""
        out, state = self.lstm(x.unsqueeze(0))
        h = torch.zeros(1, 6)
        for t in range(out.shape[1]):
            h = self.cell(out[:, t], h)
        return h, state


@_shape()
class PackedSequence(nn.Module):
    """Packed sequences between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        packed = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(0), [3], batch_first=True)
        out, _ = self.rnn(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]


@_shape()
class Checkpointed(nn.Module):
    """Activation checkpointing, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return checkpoint(self.block, x, use_reentrant=False)


@_shape()
class ReentrantCheckpoint(nn.Module):
    """Checkpointing as older code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return checkpoint(self.block, self.first(x), use_reentrant=True)


@_shape()
class SharedLayer(nn.Module):
    """One layer under two names, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.b(self.a(self.a(x)))


@_shape()
class TiedWeights(nn.Module):
    """An embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.head(self.embedding(x.abs().long().clamp(max=9)))


@_shape()
class GrowingBuffer(_Base):
    """A buffer that grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        self.memory = torch.cat([self.memory, x.detach()])
        return self.fc(x) + self.memory.mean()


@_shape()
class BufferFromNone(_Base):
    """A buffer that is None until the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        if self.scale is None:
            self.scale = x.detach().std()
        return self.fc(x) / self.scale


@_shape()
class BufferRegisteredLate(_Base):
    """A buffer that forward registers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        if not hasattr(self, "offset"):
            self.register_buffer("offset", x.detach().mean(0))
        return self.fc(x) - self.offset


@_shape()
class BufferChangesType(_Base):
    """A buffer that changes its type."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        self.count = self.count.float() + 1
        return self.fc(x) * self.count


@_shape()
class StateInAttribute(_Base):
    """A hidden state in a plain attribute, detached between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.h = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        h = self.fc(x) if self.h is None else self.fc(x) + self.h
        self.h = h.detach()
        return h


@_shape()
class CountsInList(_Base):
    """A list attribute that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        out = self.fc(x)
        self.losses.append(float(out.sum()))
        return out


@_shape()
class Lazy(nn.Module):
    """Layers that are made by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.fc(x)


_MAKERS[-1] = ("Lazy", lambda: (Lazy(), torch.randn(X)), False)


@_shape()
class FunctionalCall(nn.Module):
    """A child called with other parameters than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        weights = {name: p * self.scale for name, p in self.child.named_parameters()}
        return torch.func.functional_call(self.child, weights, (x,))


@_shape()
class Vmapped(_Base):
    """A child under vmap."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return torch.func.vmap(self.fc)(x.unsqueeze(1)).squeeze(1)


@_shape()
class Generates(_Base):
    """A generator that yields what modules return."""

    def _parts(self, x: torch.Tensor) -> Any:
        for _ in range(3):
            x = self.fc(x)
            yield x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return torch.stack(list(self._parts(x)))


@_shape()
class EarlyExit(nn.Module):
    """Children that run only sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        for layer in self.layers:
            x = layer(x)
            if x.mean() > 0:
                break
        return x


@_shape()
class MixtureOfExperts(nn.Module):
    """Experts that see some rows, one of them perhaps none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out[chosen == i] = expert(x[chosen == i])
        return out


@_shape()
class ComplexNumbers(nn.Module):
    """Complex tensors between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.identity = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return torch.fft.irfft(self.identity(torch.fft.rfft(self.fc(x))))


@_shape(train=False)
class SparseTensors(nn.Module):
    """A sparse tensor between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.identity(x.relu().to_sparse()).to_dense()


@_shape(train=False)
class NestedTensors(nn.Module):
    """A nested tensor between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.fc(torch.nested.nested_tensor([x[:1], x])).to_padded_tensor(0.0)


@_shape()
class BatchNorms(nn.Module):
    """Running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.net(x)


@_shape()
class OwnAutograd(nn.Module):
    """A custom autograd function."""

    class Double(torch.autograd.Function):
        """Twice the input."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            """Compute."""
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            """Compute."""
            return gradient * 2

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.Double.apply(self.fc(x))


@_shape()
class KeywordOnly(nn.Module):
    """A child called by keyword, with values that are no tensors."""

    class Child(nn.Module):
        """The child."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, *, x: torch.Tensor, mode: str = "a", flags: tuple[bool, ...] = ()) -> torch.Tensor:
            """Compute."""
            return self.fc(x) if mode == "a" else x

    def __init__(self) -> None:
        super().__init__()
        self.child = self.Child()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.child(x=x, mode="a", flags=(True,))


@_shape()
class HasUserHooks(nn.Module):
    """Hooks of the user's own that change what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.fc.register_forward_hook(_doubled)
        self.fc.register_forward_pre_hook(_shifted)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.fc(x)


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _shifted(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0] + 1,)


@_shape()
class HalfPrecision(nn.Module):
    """bfloat16 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x)


@_shape()
class Doubles(nn.Module):
    """Double precision with values far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.fc(x.double() * torch.logspace(-8, 8, 8, dtype=torch.float64))


@_shape()
class EmptyTensors(nn.Module):
    """Tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return torch.cat([self.fc(x[:0]), self.fc(x)])


@_shape()
class NoGradInside(_Base):
    """A target network under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        with torch.no_grad():
            goal = self.target(x)
        return (self.fc(x) - goal).pow(2)


@_shape()
class GradientInside(_Base):
    """A gradient penalty: autograd inside forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        if not torch.is_grad_enabled():
            return self.fc(x)
        x = x.requires_grad_()
        out = self.fc(x).tanh()
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + gradient.pow(2)
