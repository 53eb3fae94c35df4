"""What observing a training step costs: ratios to the bare step, from interleaved runs in one process.

    python benchmarks/overhead.py [--model transformer|resnet|mlp] [--rounds N] [--threads N]

Exits with 1 when a figure that must be reached is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import tensortap as tt
from tensortap.watch import leaves

# ratio to the bare step that must be reached: transformer, resnet, mlp
LIMITS: dict[str, tuple[float | None, ...]] = {
    "stats": (1.05, 1.06, 1.20),
    "stats+histogram": (1.10, 1.12, 1.30),
    "outputs+gradients, both": (1.20, 1.20, 1.60),
    "every(100)": (1.01, 1.01, 1.01),
    "paused": (1.01, 1.01, 1.01),
    "budget=0.02": (1.03, 1.03, 1.03),
    "op:@matmul stats": (1.08, None, None),
    "op:@matmul, step not observed": (1.02, None, None),
}


class Block(nn.Module):
    """A transformer block out of plain modules, so that every leaf can be seen."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, both residual."""
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Six layers, width 256, vocabulary 5000."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 256)
        self.blocks = nn.ModuleList(Block(256, 8) for _ in range(6))
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 5000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for every token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or given != width:
            self.skip = nn.Sequential(nn.Conv2d(given, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two convolutions and a shortcut."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.skip(x))


def resnet18() -> nn.Module:
    """ResNet-18 without its download."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    given = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(given, width, stride), Residual(width, width, 1)]
        given = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def mlp() -> nn.Module:
    """A hundred small layers: the worst case for a cost per tensor."""
    return nn.Sequential(*(m for _ in range(100) for m in (nn.Linear(64, 64), nn.ReLU())))


def subject(name: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A model and a function that gives the loss of one batch."""
    torch.manual_seed(0)
    if name == "transformer":
        model: nn.Module = Transformer()
        tokens, targets = torch.randint(5000, (8, 128)), torch.randint(5000, (8 * 128,))
        return model, lambda: nn.functional.cross_entropy(model(tokens).view(-1, 5000), targets)
    if name == "resnet":
        model = resnet18()
        images, labels = torch.randn(8, 3, 96, 96), torch.randint(1000, (8,))
        return model, lambda: nn.functional.cross_entropy(model(images), labels)
    model = mlp()
    x = torch.randn(32, 64)
    return model, lambda: model(x).pow(2).mean()


Way = Callable[[nn.Module], contextlib.AbstractContextManager[Callable[[], None]]]


def _watching(*probes: Any, pause: bool = False, **options: Any) -> Way:
    @contextlib.contextmanager
    def way(model: nn.Module) -> Iterator[Callable[[], None]]:
        with tempfile.TemporaryDirectory() as folder, tt.watch(model, *probes, to=f"{folder}/run", **options) as tap:
            if pause:
                tap.pause()
            yield tap.step

    return way


def _hooked(see: Callable[[torch.Tensor], Any]) -> Way:
    @contextlib.contextmanager
    def way(model: nn.Module) -> Iterator[Callable[[], None]]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            with torch.no_grad():
                see(output)

        handles = [m.register_forward_hook(hook) for m in model.modules() if not any(True for _ in m.children())]
        yield lambda: None
        for handle in handles:
            handle.remove()

    return way


def _tensorboard() -> Way:
    from torch.utils.tensorboard import SummaryWriter

    @contextlib.contextmanager
    def way(model: nn.Module) -> Iterator[Callable[[], None]]:
        with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
            histogram = _hooked(lambda y: writer.add_histogram("layer", y.detach()))
            with histogram(model) as step:
                yield step

    return way


def _eight(y: torch.Tensor) -> None:
    for reduce in (torch.mean, torch.std, torch.amin, torch.amax, torch.linalg.vector_norm, torch.count_nonzero):
        reduce(y)
    torch.isnan(y).sum()
    torch.isinf(y).sum()
    torch.histc(y, 64)


@contextlib.contextmanager
def _bare(model: nn.Module) -> Iterator[Callable[[], None]]:
    yield lambda: None


WAYS: dict[str, Way] = {
    "bare": _bare,
    "floor: each output read once": _hooked(lambda y: y.sum()),
    "stats": _watching(tt.probe(leaves, keep=tt.stats())),
    "stats+histogram": _watching(tt.probe(leaves, keep=[tt.stats(), tt.histogram()])),
    "outputs+gradients, both": _watching(
        tt.probe(leaves, keep=[tt.stats(), tt.histogram()]),
        tt.probe("**:grad_output", keep=[tt.stats(), tt.histogram()]),
    ),
    "op:@matmul stats": _watching(tt.probe("op:@matmul", keep=tt.stats())),
    "hook with four .item()": _hooked(lambda y: [f(y).item() for f in (torch.mean, torch.std, torch.amin, torch.amax)]),
    "eight reductions + histc": _hooked(_eight),
    "TensorBoard add_histogram": _tensorboard(),
}


def train_step(model: nn.Module, loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Forward, backward, update."""
    optimizer.zero_grad(set_to_none=True)
    loss_of().backward()
    optimizer.step()


def measure(name: str, rounds: int, steps: int) -> dict[str, float]:
    """The median over rounds of each way's step time over the bare one's, in turn within a round."""
    model, loss_of = subject(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(3):
        train_step(model, loss_of, optimizer)
    for _ in range(rounds):
        seconds = {}
        for way, attach in WAYS.items():
            gc.collect()
            with attach(model) as close_step:
                seconds[way] = min(_timed(model, loss_of, optimizer, close_step) for _ in range(steps + 1))
        for way in WAYS:
            ratios[way].append(seconds[way] / seconds["bare"])
            times[way].append(seconds[way])
    result = {way: statistics.median(found) for way, found in ratios.items()}
    result["paused"] = _paused(model, loss_of, optimizer)
    result["every(100)"] = _every_hundred(model, loss_of, optimizer)
    result["op:@matmul, step not observed"] = _unobserved(model, loss_of, optimizer)
    result["budget=0.02"] = _budgeted(model, loss_of, optimizer)
    print(f"\n{name}: bare step {1e3 * min(times['bare']):.1f} ms, {len([*model.modules()])} modules")
    return result


def _timed(
    model: nn.Module, loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, close: Callable[[], None]
) -> float:
    start = time.perf_counter()
    train_step(model, loss_of, optimizer)
    close()
    return time.perf_counter() - start


def _every_hundred(model: nn.Module, loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    """One observed step in a hundred: the cost of the others, and a hundredth of the one."""
    with _watching(tt.probe(leaves, when=tt.every(100)))(model) as close:
        observed = _timed(model, loss_of, optimizer, close)
        quiet, bare = _in_turn(model, loss_of, optimizer, close, 90)
    return 0.99 * statistics.median(quiet) / statistics.median(bare) + 0.01 * observed / statistics.median(bare)


def _paused(model: nn.Module, loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Watched, but paused."""
    return _quietly(_watching(tt.probe(leaves), pause=True), model, loss_of, optimizer)


def _unobserved(model: nn.Module, loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Operations are wanted, but not in these steps."""
    way = _watching(tt.probe("op:@matmul", keep=tt.stats(), when=tt.at([10**9])))
    return _quietly(way, model, loss_of, optimizer)


def _quietly(
    way: Way, model: nn.Module, loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer
) -> float:
    """Steps in which nothing is recorded."""
    with way(model) as close:
        close()
        quiet, bare = _in_turn(model, loss_of, optimizer, close, 90)
    return statistics.median(quiet) / statistics.median(bare)


def _budgeted(model: nn.Module, loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Every step under a budget, observed ones among them: their mean over the bare mean."""
    with _watching(tt.probe(leaves), budget=0.02)(model) as close:
        for _ in range(10):
            _timed(model, loss_of, optimizer, close)
        watched, bare = _in_turn(model, loss_of, optimizer, close, 120)
    return _trimmed(watched) / _trimmed(bare)


def _in_turn(
    model: nn.Module, loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer,
    close: Callable[[], None], pairs: int,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """A watched step and a bare one, again and again: differences of a percent drown in anything coarser."""
    watched, bare = [], []
    for _ in range(pairs):
        watched.append(_timed(model, loss_of, optimizer, close))
        with _detached(model):
            bare.append(_timed(model, loss_of, optimizer, lambda: None))
    return watched, bare


def _trimmed(times: list[float]) -> float:
    """The mean without the slowest twentieth, which the machine's other work made slow."""
    return statistics.fmean(sorted(times)[: -max(1, len(times) // 20)])


@contextlib.contextmanager
def _detached(model: nn.Module) -> Iterator[None]:
    """Without any hook for a while: what the bare step costs between two watched stretches."""
    kept = [(m, dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    for module, _, _ in kept:
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    yield
    for module, after, before in kept:
        module._forward_hooks.update(after)
        module._forward_pre_hooks.update(before)


def main() -> int:
    """Print the table; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=["transformer", "resnet", "mlp"], action="append")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    missed = 0
    for name in options.model or ["transformer", "resnet", "mlp"]:
        which = ["transformer", "resnet", "mlp"].index(name)
        for way, ratio in measure(name, options.rounds, options.steps).items():
            limit = LIMITS[way][which] if way in LIMITS else None
            late = limit is not None and ratio > limit
            missed += late
            said = f"   must be ≤ {limit:.2f}{'   MISSED' * late}" if limit else ""
            print(f"  {way:32} ×{ratio:6.3f}{said}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
