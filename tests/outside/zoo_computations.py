"""Shapes of models that differ in how they compute: transforms, sparse and complex tensors, hooks, precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outside.shapes import Base, shape


@shape()
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


@shape()
class Vmapped(Base):
    """A child under vmap."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return torch.func.vmap(self.fc)(x.unsqueeze(1)).squeeze(1)


@shape()
class Generates(Base):
    """A generator that yields what modules return."""

    def _parts(self, x: torch.Tensor) -> Any:
        for _ in range(3):
            x = self.fc(x)
            yield x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return torch.stack(list(self._parts(x)))


@shape()
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


@shape()
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


@shape()
class ComplexNumbers(nn.Module):
    """Complex tensors between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.identity = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return torch.fft.irfft(self.identity(torch.fft.rfft(self.fc(x))))


@shape(train=False)
class SparseTensors(nn.Module):
    """A sparse tensor between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.identity(x.relu().to_sparse()).to_dense()


@shape(train=False)
class NestedTensors(nn.Module):
    """A nested tensor between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.fc(torch.nested.nested_tensor([x[:1], x])).to_padded_tensor(0.0)


@shape()
class BatchNorms(nn.Module):
    """Running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.net(x)


@shape()
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


@shape()
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


@shape()
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


@shape()
class HalfPrecision(nn.Module):
    """bfloat16 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x)


@shape()
class Doubles(nn.Module):
    """Double precision with values far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.fc(x.double() * torch.logspace(-8, 8, 8, dtype=torch.float64))


@shape()
class EmptyTensors(nn.Module):
    """Tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return torch.cat([self.fc(x[:0]), self.fc(x)])


@shape()
class NoGradInside(Base):
    """A target network under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        with torch.no_grad():
            goal = self.target(x)
        return (self.fc(x) - goal).pow(2)


@shape()
class GradientInside(Base):
    """A gradient penalty: autograd inside forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        if not torch.is_grad_enabled():
            return self.fc(x)
        x = x.requires_grad_()
        out = self.fc(x).tanh()
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + gradient.pow(2)
