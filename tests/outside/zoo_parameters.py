"""Shapes of models that differ in how they hold parameters, buffers and state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from outside.shapes import MAKERS, Base, X, shape


@shape()
class WeightNorm(nn.Module):
    """A parametrized linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.fc(x)


@shape()
class SpectralNorm(nn.Module):
    """A parametrization with buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.spectral_norm(nn.Conv1d(1, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.conv(x.unsqueeze(1))


@shape()
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


@shape()
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


@shape()
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


@shape()
class Attention(nn.Module):
    """Multi-head attention, whose projection is never called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        x = x.unsqueeze(0)
        return self.attention(x, x, x)[0]


@shape()
class EncoderLayer(nn.Module):
    """A layer that PyTorch runs fused in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.encoder(x.unsqueeze(0))


@shape()
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


@shape()
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


@shape()
class Checkpointed(nn.Module):
    """Activation checkpointing, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return checkpoint(self.block, x, use_reentrant=False)


@shape()
class ReentrantCheckpoint(nn.Module):
    """Checkpointing as older code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return checkpoint(self.block, self.first(x), use_reentrant=True)


@shape()
class SharedLayer(nn.Module):
    """One layer under two names, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.b(self.a(self.a(x)))


@shape()
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


@shape()
class GrowingBuffer(Base):
    """A buffer that grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        self.memory = torch.cat([self.memory, x.detach()])
        return self.fc(x) + self.memory.mean()


@shape()
class BufferFromNone(Base):
    """A buffer that is None until the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        if self.scale is None:
            self.scale = x.detach().std()
        return self.fc(x) / self.scale


@shape()
class BufferRegisteredLate(Base):
    """A buffer that forward registers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        if not hasattr(self, "offset"):
            self.register_buffer("offset", x.detach().mean(0))
        return self.fc(x) - self.offset


@shape()
class BufferChangesType(Base):
    """A buffer that changes its type."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        self.count = self.count.float() + 1
        return self.fc(x) * self.count


@shape()
class StateInAttribute(Base):
    """A hidden state in a plain attribute, detached between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.h = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        h = self.fc(x) if self.h is None else self.fc(x) + self.h
        self.h = h.detach()
        return h


@shape()
class CountsInList(Base):
    """A list attribute that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        out = self.fc(x)
        self.losses.append(float(out.sum()))
        return out


@shape()
class Lazy(nn.Module):
    """Layers that are made by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.fc(x)


MAKERS[-1] = ("Lazy", lambda: (Lazy(), torch.randn(X)), False)
