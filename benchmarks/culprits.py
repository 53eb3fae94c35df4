"""Which sample did it: one sample of a data set is poisoned, and the finding has to name it first.

    python benchmarks/culprits.py [--seeds N] [--first SEED] [--only WORD] [--cost]

Trains five models with five kinds of loaders, on clean data first and then on data with one bad sample: a NaN, an
infinity, values multiplied by 10 000 or by -10 000, or a wrong label. Prints how often
`tensortap check` names the sample, by poison, model and loader; exits with 1 below 95 of 100. `--cost` prints instead
what it costs when nothing happens.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

import tensortap as tt
from tensortap.adapters.torch.samples.monitor import SampleMonitor

COUNT, BATCH, EPOCHS = 192, 16, 12
POISONS = ("nan", "inf", "scaled", "negated", "mislabelled")
MUST_REACH = 0.95


class Samples(Dataset[Any]):
    """Samples of three classes (or of a number), one of them poisoned; each has a file's name."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, poison: str = "", bad: int = 0, keys: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = 0.5 * torch.randn(COUNT, *shape, generator=generator)
        flat = self.x.flatten(1)
        self.y = torch.arange(COUNT) % 3 if classes else flat[:, :3].sum(1)
        if classes:  # by their level: below, above, or about zero
            flat += torch.tensor([-1.5, 1.5, 0.0])[self.y][:, None]
        self.files = [f"sample-{i:04d}.png" for i in range(COUNT)]
        self.keys = keys
        self._poison(poison, bad, classes)

    def _poison(self, poison: str, bad: int, classes: int) -> None:
        if poison in ("nan", "inf"):
            self.x[bad].view(-1)[1] = float(poison)
        elif poison in ("scaled", "negated"):
            self.x[bad] *= 1e4 if poison == "scaled" else -1e4
        elif poison == "mislabelled":
            self.y[bad] = (self.y[bad] + 1) % classes if classes else self.y[bad] + 25.0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        return {"x": self.x[i], "y": self.y[i]} if self.keys else (self.x[i], self.y[i])


class ByChunks:
    """A batch sampler of one's own: chunks of arrays in a random order."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        order = self.generator.permutation(COUNT)
        return iter(np.split(order, COUNT // BATCH))

    def __len__(self) -> int:
        return COUNT // BATCH


class Recurrent(nn.Module):
    """A GRU over float sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 32, batch_first=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        return self.head(self.gru(x)[0].mean(1))


class Attending(nn.Module):
    """A transformer over float tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 1)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        return self.head(self.encoder(self.embed(x)).mean(1))


def mlp(outputs: int) -> nn.Module:
    """Return a small MLP."""
    return nn.Sequential(
        nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, outputs), *([nn.Flatten(0)] if outputs == 1 else [])
    )


def cnn() -> nn.Module:
    """Return a convolutional network with batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 3)
    )


Subject = tuple[Callable[[], nn.Module], tuple[int, ...], int, Callable[[Tensor, Tensor], Tensor]]
MODELS: dict[str, Subject] = {
    "mlp": (lambda: mlp(3), (12,), 3, functional.cross_entropy),
    "cnn, batch norm": (cnn, (1, 6, 6), 3, functional.cross_entropy),
    "gru": (Recurrent, (6, 4), 3, nn.CrossEntropyLoss()),
    "transformer": (Attending, (6, 4), 3, functional.cross_entropy),
    "regression": (lambda: mlp(1), (12,), 0, functional.mse_loss),
}
LOADERS = ("shuffled", "workers", "batch sampler", "dict batches", "subset")


def loader(kind: str, data: Samples) -> DataLoader[Any]:
    """Return a loader of a kind."""
    if kind == "workers":
        return DataLoader(data, BATCH, shuffle=True, num_workers=2)
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=ByChunks())  # type: ignore[arg-type]
    if kind == "subset":
        return DataLoader(Subset(data, list(range(COUNT))[::-1]), BATCH, shuffle=True)
    return DataLoader(data, BATCH, shuffle=True)


def trained(model: nn.Module, batches: Any, loss: Any, optimizer: Any, tap: tt.Tap) -> None:
    """Train for an epoch, as anybody would."""
    for batch in batches:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        tap.step(loss=value.detach())


def named_sample(model_name: str, loader_kind: str, poison: str, seed: int) -> tuple[str, Any]:
    """Train with one bad sample; return the file of the sample that the finding names, and the right one."""
    make, shape, classes, loss = MODELS[model_name]
    torch.manual_seed(seed)
    bad = int(torch.randint(COUNT // 3, ())) * 3  # below zero: with a large negative factor, of another class
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    options = {"keys": loader_kind == "dict batches"}
    clean, dirty = Samples(shape, classes, **options), Samples(shape, classes, poison, bad, **options)
    with tempfile.TemporaryDirectory() as folder, tt.watch(model, ":output", context=True, to=f"{folder}/run") as tap:
        for epoch in range(EPOCHS):
            torch.manual_seed(1000 * seed + epoch)
            data = dirty if epoch == EPOCHS - 1 else clean
            trained(model, loader(loader_kind, data), loss, optimizer, tap)
        tap.close()
        found = tt.findings(tap.run, ["nonfinite", "loss_spike", "sample_out_of_size"])
    rows = [f.evidence["samples"][0] for f in found if f.evidence.get("samples")]
    return (rows[0].get("key", "") if rows else "nothing"), dirty.files[bad]


def table(seeds: range, only: str) -> int:
    """Print how often the right sample was named."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for seed, model, kind, poison in itertools.product(seeds, MODELS, LOADERS, POISONS):
        if only and only not in (model, kind, poison):
            continue
        named, wanted = named_sample(model, kind, poison, 100 * seed + 7)
        for key in (poison, model, kind, "all"):
            total[key] += 1
            right[key] += named == wanted
        if named != wanted:
            print(f"  missed: {model}, {kind}, {poison}: {named} for {wanted}", flush=True)
    for key in (*POISONS, *MODELS, *LOADERS, "all"):
        if total[key]:
            print(f"{key:<16} {right[key]:>4} of {total[key]}")
    return int(right["all"] < MUST_REACH * total["all"])


def cost(pairs: int = 15, steps: int = 300) -> int:
    """Print the time of steps with and without the monitor of samples, in turn, by processor time."""
    own = {name: getattr(SampleMonitor, name) for name in ("model_called", "loss_called", "backward_begins")}
    torch.manual_seed(0)
    model = mlp(3)
    data = loader("shuffled", Samples((12,), 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    ratios = []
    with tempfile.TemporaryDirectory() as folder, tt.watch(model, ":output", context=True, to=f"{folder}/run") as tap:
        for pair in range(pairs):
            taken = {}
            for on in (pair % 2 == 0, pair % 2 == 1):
                for name, method in own.items():
                    setattr(SampleMonitor, name, method if on else lambda *args: None)
                begin = time.process_time()
                for _ in range(steps * BATCH // COUNT):
                    trained(model, data, functional.cross_entropy, optimizer, tap)
                taken[on] = time.process_time() - begin
            ratios.append(taken[True] / taken[False])
    for name, method in own.items():
        setattr(SampleMonitor, name, method)
    low, high = np.quantile(ratios, [0.25, 0.75])
    print(
        f"steps of a small MLP with the monitor of samples: x{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})"
    )
    return 0


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them; ranking was tuned on 0")
    parser.add_argument("--only", default="")
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return cost() if given.cost else table(range(given.first, given.first + given.seeds), given.only)


if __name__ == "__main__":
    sys.exit(main())
