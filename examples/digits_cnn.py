"""A small convolutional network that learns to read scikit-learn's handwritten digits, in a few seconds on a CPU.

    python examples/digits_cnn.py --epochs 5
    python examples/digits_cnn.py --fault dead-relu

A fault can be planted where people really make it:

* `dead-relu`: the first convolution of the residual block gets weights from [-a, 0) instead of [-a, a). What comes in
  is never negative, so the ReLU after it is dead. The skip connection carries the signal past it, the network learns
  all the same, and neither loss nor accuracy gives it away.
* `explode`: from step 40 on the learning rate doubles at every step, where it was meant to shrink.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FAULTS = ("none", "dead-relu", "explode")


class Block(nn.Module):
    """Two convolutions beside a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The input, and what the convolutions add to it."""
        return x + self.conv2(self.relu(self.conv1(x)))


class DigitsNet(nn.Module):
    """Stem, residual block, a second convolution and a classifier, for images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.block = Block(16)
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Ten logits an image."""
        return self.head(self.deep(self.block(self.stem(x))))


def data() -> tuple[TensorDataset, TensorDataset]:
    """1 500 images to learn from and 297 to be tested on."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def plant(model: DigitsNet) -> None:
    """The fault in the initialisation."""
    with torch.no_grad():
        model.block.conv1.weight.abs_().neg_()
        model.block.conv1.bias.abs_().neg_()


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    """The share of images that are read correctly."""
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return right / len(loader.dataset)


def train(model: nn.Module, loader: DataLoader, test: DataLoader, epochs: int, rate: float, fault: str) -> None:
    """Learn, and say after every epoch how well."""
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    step = 0
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for x, y in loader:
            if fault == "explode" and step >= 40:
                optimizer.param_groups[0]["lr"] *= 2
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
            step += 1
        print(f"epoch {epoch}  loss {total / len(loader):.6f}  accuracy {accuracy(model, test):.4f}", flush=True)


def main() -> None:
    """Read the options, train, test."""
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=FAULTS, default="none", help="a fault to plant (default: none)")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = DigitsNet()
    if args.fault == "dead-relu":
        plant(model)
    learn, test = data()
    shuffled = DataLoader(learn, batch_size=args.batch, shuffle=True)
    train(model, shuffled, DataLoader(test, batch_size=99), args.epochs, args.lr, args.fault)


if __name__ == "__main__":
    main()
