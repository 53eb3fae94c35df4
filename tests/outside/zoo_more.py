"""More shapes of models: recursion, modules that come and go, distributions, graphs, solvers, quantized layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from outside.shapes import Base, X, shape


class GraphBatch:
    """What graph libraries give to their models."""

    def __init__(self, x: torch.Tensor, edges: torch.Tensor) -> None:
        self.x = x
        self.edges = edges
        self.name = "cora"


@shape(batch=lambda: GraphBatch(torch.randn(X), torch.randint(0, 4, (2, 10))))
class TakesGraph(Base):
    """Message passing over an object that is handed on."""

    def forward(self, batch: GraphBatch) -> torch.Tensor:
        """Compute."""
        source, target = batch.edges
        return torch.zeros_like(batch.x).index_add(0, target, self.fc(batch.x)[source]).relu()


@shape()
class CallsItself(Base):
    """A root that calls itself."""

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        """Compute."""
        y = self.fc(x).tanh()
        return self(y, depth - 1) if depth else y


@shape()
class Tree(nn.Module):
    """Modules of the same class in each other."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.left, self.right = (Tree(depth - 1), Tree(depth - 1)) if depth else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        y = self.fc(x)
        return y if self.left is None or self.right is None else self.left(y) + self.right(y)


@shape(train=False)
class ReturnsDistribution(Base):
    """A policy that returns a distribution."""

    def forward(self, x: torch.Tensor) -> torch.distributions.Normal:
        """Compute."""
        return torch.distributions.Normal(self.fc(x), F.softplus(self.fc(x)) + 0.1)


@shape()
class MakesModuleInForward(Base):
    """A module that lives for one call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return nn.LayerNorm(8)(self.fc(x))


@shape()
class ReplacesChild(Base):
    """A child that forward replaces by another with the same weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        other = nn.Linear(8, 8)
        other.weight, other.bias = self.fc.weight, self.fc.bias
        y = self.fc(x)
        self.__dict__["spare"] = other
        return y


@shape()
class ModulesInList(Base):
    """Modules in a plain list, which PyTorch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 8), nn.ReLU()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        for layer in self.layers:
            x = layer(x)
        return self.fc(x)


@shape()
class SliceAssignment(Base):
    """Results written into parts of a tensor that was made before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        out = x.new_zeros(4, 16)
        out[:, :8] = self.fc(x)
        out[:, 8:] = self.fc(out[:, :8].clone())
        return out


@shape()
class Expanded(Base):
    """Outputs with strides of zero, transposed, empty in one dimension, and of no dimension."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute."""
        y = self.fc(x)
        return y[:1].expand(64, 8), y.t(), y[:, 3:3], y.sum(), y[:, ::3], y.flip(0)


@shape(train=False)
class ManyTypes(Base):
    """Outputs of every kind of number."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Compute."""
        y = self.fc(x)
        kinds = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int64,
                 torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip
        return [y.to(kind) for kind in kinds] + [y.argmax(-1), y > 0]


@shape(train=False)
class Quantized(nn.Module):
    """Linear layers that were quantized dynamically."""

    def __init__(self) -> None:
        super().__init__()
        plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.net = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.net(x)


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + 0.1 * function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x + 0.1 * ctx.function(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), gradients[0])


@shape()
class Adjoint(Base):
    """A solver's step whose backward runs the module again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        for _ in range(3):
            x = _Adjoint.apply(self.fc, x, *self.fc.parameters())
        return x


@shape()
class Equilibrium(Base):
    """A fixed point, with a hook on the result that changes its gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                z = torch.tanh(self.fc(z) * 0.1 + x)
        z = torch.tanh(self.fc(z) * 0.1 + x)
        if z.requires_grad:
            z.register_hook(lambda gradient: gradient * 1.5)
        return z


@shape()
class StraightThrough(Base):
    """A quantizer with the gradient of the identity, and a codebook that moves."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute."""
        y = self.fc(x)
        nearest = torch.cdist(y.detach(), self.codes).argmin(-1)
        if self.training:
            self.codes[nearest] = 0.9 * self.codes[nearest] + 0.1 * y.detach()
        return y + (self.codes[nearest] - y).detach(), nearest


@shape()
class HyperNetwork(Base):
    """A network that makes the weights of another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        weight = self.fc(torch.eye(8)).view(8, 8)
        return F.linear(F.dropout(x, 0.2, self.training), weight)


@shape()
class SequentialCheckpoint(nn.Module):
    """A chain that is checkpointed in segments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return checkpoint_sequential(self.net, 2, x, use_reentrant=False)  # type: ignore[no-any-return]


@shape()
class TracedPart(nn.Module):
    """A part that torch.fx has traced, beside one that torch.jit has."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        self.script = torch.jit.trace(nn.Linear(8, 8), torch.zeros(X))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.script(self.graph(x))  # type: ignore[no-any-return]


@shape()
class BackwardHooks(nn.Module):
    """Backward hooks of the user's own, which replace gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.net[0].register_full_backward_hook(lambda module, inputs, outputs: None)
        self.net[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.net(x)


@shape()
class OwnCall(Base):
    """A class with a `__call__` and a `__getattr__` of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call as PyTorch does, and add one."""
        return super().__call__(*args, **kwargs) + 1

    def __getattr__(self, name: str) -> Any:
        """Look a name up as PyTorch does, with an alias."""
        return super().__getattr__("fc" if name == "head" else name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.head(x)


@shape()
class DecoratedForward(Base):
    """A child whose forward runs without gradients, and one under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.low = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.forward = torch.no_grad()(self.frozen.forward)  # type: ignore[method-assign]

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.low(self.fc(x) + self.frozen(x)).float()
