"""Records the runs that the browser tests look at: real trainings and real taps, small, the same every time.

python tests/web/record.py FOLDER
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import tensortap as tt

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits_cnn.py"
HOSTILE = "<img src=x onerror=\"document.title='hacked'\">.<b>bold</b>"
NEVER_SEEN = "blocks_of_the_model." + "never_named_" * 20  # a pattern


def digits(to: Path, *, steps: int = 60, rate: float = 0.003) -> None:
    """The example's CNN with the dead ReLU: outputs, gradients, parameters, updates; some tensors kept."""
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model = example["DigitsNet"]()
    example["plant"](model)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    probes = [
        tt.probe("**:{output,grad_output}", keep=[tt.stats(), tt.histogram()]),
        tt.probe("**:{param,grad,update}"),
        tt.probe("stem.0", "head.3", keep=[tt.stats(), tt.full()], when=tt.every(20)),
        tt.probe("head.1", keep=[tt.stats(), tt.sample(64)], when=tt.every(20)),
    ]
    with tt.watch(model, *probes, to=str(to)) as tap:
        for x, y in batches(example["data"]()[0], steps):
            optimizer.zero_grad()
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            tap.step(loss=loss.item(), accuracy=(out.argmax(1) == y).float().mean().item())


def batches(data: Any, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """So many batches of 32, in the data's own order."""
    for step in range(steps):
        rows = torch.arange(step * 32, step * 32 + 32) % len(data)
        yield data[rows]


class Encoder(nn.Module):
    """Layers with a norm each, and a head."""

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(OrderedDict(norm1=nn.LayerNorm(width), up=nn.Linear(width, width), act=nn.GELU()))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def jump(to: Path, *, steps: int = 60, at: int = 40) -> None:
    """The learning rate rises a millionfold at a step, NaN follows; evaluation between, checkpoints, one high loss."""
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = torch.randn(64, 16)
    probe = tt.probe("**", keep=[tt.stats(), tt.histogram()])
    with tt.watch(model, probe, to=str(to), context=True) as tap:
        for step in range(steps):
            if step == at:
                optimizer.param_groups[0]["lr"] = 1e4
            model.train()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(data), data[:, :4] * (20 if step == 20 else 1))
            loss.backward()
            optimizer.step()
            tap.step(loss=loss.item())
            if step % 20 == 10:
                torch.save(model.state_dict(), to.parent / "model.pt")
                model.eval()
                with torch.no_grad():
                    model(data)
                tap.step()
    (to.parent / "model.pt").unlink(missing_ok=True)


def four_ranks(to: Path) -> None:
    """Four ranks of which one is off."""
    launch = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517", "WORLD_SIZE": "4"}
    for rank in range(4):
        rng = np.random.default_rng(rank)
        with patch.dict(os.environ, launch), tt.watch(to=str(to), rank=rank) as tap:
            for _ in range(40):
                for name in ("embed", "blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "head"):
                    tt.tap(rng.normal(size=256).astype(np.float32) * (1.6 if rank == 2 else 1.0), name)
                tap.step(loss=1.0 + 0.1 * rank)


def raised(to: Path) -> None:
    """A training that an error ended."""
    with contextlib.suppress(ZeroDivisionError), tt.watch(to=str(to)) as tap:
        for step in range(9):
            tt.tap(np.arange(8.0) * step, "fc")
            tap.step(loss=1.0 / (8 - step))


def attention(to: Path) -> None:
    """Attention maps of four heads, a module called twice a step, a large matrix, zeros, and one that runs late."""
    rng = np.random.default_rng(0)
    with tt.watch(tt.probe("**", keep=[tt.stats(), tt.histogram(), tt.full()]), to=str(to)) as tap:
        for step in range(4):
            scores = rng.normal(size=(2, 4, 12, 12)).astype(np.float32)
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            tt.tap(weights, "attention")
            for _call in range(2):
                tt.tap(rng.normal(size=(8, 16)).astype(np.float32), "shared")
            tt.tap(np.sin(np.outer(np.arange(900), np.arange(700)) / 20_000).astype(np.float32), "matrix")
            tt.tap(np.zeros(4, np.float32), "silent")
            if step >= 2:
                tt.tap(np.ones(4, np.float32), "late")
            tap.step(loss=1.0)


def nan(to: Path) -> None:
    """Nothing but NaN and infinities, in every tensor of every step, and in the loss."""
    with tt.watch(to=str(to)) as tap:
        for step in range(8):
            for i in range(5):
                tt.tap(np.full(16, np.nan if (step + i) % 3 else np.inf, np.float32), f"layers.{i}")
            tap.step(loss=float("nan"))


def empty(to: Path) -> None:
    """A run that was closed before its first step."""
    with tt.watch(to=str(to)):
        pass


def hostile(to: Path) -> None:
    """Names that are HTML, very long, or not ASCII; one of them is wanted and never seen."""
    names = [
        HOSTILE,
        "</script><script>document.title='hacked'</script>",
        "a" * 300,
        "слой.層.✓",
        "x' onmouseover='document.title=1'",
    ]
    with tt.watch("**", NEVER_SEEN, to=str(to)) as tap:
        for step in range(3):
            for name in names:
                tt.tap(np.arange(4, dtype=np.float32) * step, name)
            tap.step(**{"<i>loss</i>": float(step)})


def crashed(to: Path) -> None:
    """A process that died with its run open."""
    program = f"""
        import os, signal
        import numpy as np
        import tensortap as tt
        tap = tt.watch(to={str(to)!r})
        tap.__enter__()
        for step in range(12):
            tt.tap(np.arange(9.0) + step, "fc1")
            tt.tap(np.arange(4.0) * step, "fc2")
            tap.step(loss=1.0 / (step + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=dict(os.environ), check=False)


def large(to: Path, *, sites: int = 500, steps: int = 1000) -> None:
    """Half a million records."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(0, 1 + i / 50, 8).astype(np.float32) for i in range(sites)]
    names = [f"blocks.{i // 10}.{part}" for i, part in zip(range(sites), _parts(), strict=False)]
    with tt.watch(tt.probe("**", keep=tt.stats()), to=str(to)) as tap:
        for step in range(steps):
            for array, name in zip(arrays, names, strict=True):
                tt.tap(array, name)
            arrays[step % sites] *= 1.5
            tap.step(loss=1 / (1 + step))


def long(to: Path, *, steps: int = 10_001) -> None:
    """More steps of one site than histograms are read of."""
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    with tt.watch(to=str(to)) as tap:
        for _ in range(steps):
            tt.tap(x, "fc")
            tap.step()


def _parts() -> Iterator[str]:
    while True:
        yield from ("norm1", "attn.q", "attn.k", "attn.v", "attn.out", "norm2", "mlp.up", "mlp.act", "mlp.down", "drop")


def record(folder: Path) -> None:
    """All of them."""
    digits(folder / "digits")
    digits(folder / "digits-faster", rate=0.01)
    for make in (attention, nan, empty, hostile, crashed, large, long, jump, four_ranks, raised):
        make(folder / make.__name__)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
