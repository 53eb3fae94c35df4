"""A sparse autoencoder on the activations of a small GPT: train the GPT, harvest a layer, train on what came out.

python examples/sparse_autoencoder.py            about a minute on two cores
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from small_gpt import GPT, TEXT, batch, loss_of
from torch import Tensor, nn

import tensortap as tt

SITE = "layers.1:output"


class SparseAutoencoder(nn.Module):
    """Many features, few of them active at a time."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(width, features), nn.Linear(features, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features, and what they say the activation was."""
        active = torch.relu(self.encode(x - self.decode.bias))
        return active, self.decode(active)


def trained_gpt(text: Tensor, letters: int, steps: int) -> GPT:
    """A GPT that has learnt some of the story."""
    model = GPT(letters, width=64, heads=4, layers=3, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = loss_of(model, *batch(text, 16, 64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def train(acts: tt.Harvest, features: int, passes: int, sparsity: float) -> SparseAutoencoder:
    """An autoencoder of the harvested rows, which come in another random order in each pass."""
    found = acts.statistics(SITE)
    mean, scale = torch.tensor(found.mean, dtype=torch.float32), float(found.std.mean())
    model = SparseAutoencoder(found.width, features)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for rows in (rows for _ in range(passes) for rows in acts.dataset(1024, SITE)):
        x = (rows.float() - mean) / scale
        active, again = model(x)
        loss = (again - x).square().sum(-1).mean() + sparsity * active.sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main() -> None:
    """Train, harvest, train, and say how well the features explain the layer."""
    parser = argparse.ArgumentParser(description="Train a sparse autoencoder on a layer of a small GPT.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--to", type=Path, default=Path("acts"))
    args = parser.parse_args()

    torch.manual_seed(0)
    story = TEXT.read_text(encoding="utf-8")
    alphabet = sorted(set(story))
    text = torch.tensor([alphabet.index(letter) for letter in story])
    model = trained_gpt(text, len(alphabet), args.steps)

    stretches = [{"letters": text[start : start + 64]} for start in range(0, len(text) - 64, 4)]
    acts = tt.harvest(model, stretches, SITE, to=args.to, dtype="bf16", batch_size=64, token_ids="letters")

    autoencoder = train(acts, args.features, args.passes, args.sparsity)
    found = acts.statistics(SITE)
    mean, scale = torch.tensor(found.mean, dtype=torch.float32), float(found.std.mean())
    with torch.no_grad():
        x = (next(iter(acts.dataset(4096, SITE, seed=99))).float() - mean) / scale
        active, again = autoencoder(x)
    explained = 1 - (again - x).square().sum() / x.square().sum()
    print(f"{acts.rows} rows; {(active > 0).float().sum(-1).mean():.1f} of {args.features} features active in a row")
    print(f"they explain {explained:.1%} of the variance")


if __name__ == "__main__":
    main()
