"""A small GPT that learns the letters of a short story, and then tells some of it in its own words."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

TEXT = Path(__file__).with_name("text.txt")


class Attention(nn.Module):
    """Every letter looks back at the ones before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """What was found, for every position."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """Attention and a small network, each beside the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The stream, with both added."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Letters in, a guess at each next letter out."""

    def __init__(self, letters: int, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)

    def forward(self, letters: Tensor) -> Tensor:
        """Logits for the letter after each letter."""
        x = self.letter(letters) + self.place(torch.arange(letters.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(text: Tensor, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Random stretches of the text, and the same one letter later."""
    starts = torch.randint(len(text) - context - 1, (size,))
    stretches = torch.stack([text[s : s + context + 1] for s in starts])
    return stretches[:, :-1], stretches[:, 1:]


def loss_of(model: nn.Module, letters: Tensor, after: Tensor) -> Tensor:
    """How surprising the next letters were."""
    return nn.functional.cross_entropy(model(letters).flatten(0, 1), after.flatten())


def tell(model: GPT, start: Tensor, length: int) -> Tensor:
    """Go on from `start`, one letter at a time."""
    model.eval()
    told = start[None]
    with torch.no_grad():
        for _ in range(length):
            chances = model(told[:, -model.context :])[:, -1].div(0.6).softmax(-1)
            told = torch.cat([told, torch.multinomial(chances, 1)], dim=1)
    return told[0]


def main() -> None:
    """Train, test, tell."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the letters of a story.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--tell", type=int, default=80, help="letters to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    story = TEXT.read_text(encoding="utf-8")
    alphabet = sorted(set(story))
    text = torch.tensor([alphabet.index(letter) for letter in story])
    cut = len(text) * 9 // 10
    model = GPT(len(alphabet), args.width, 4, args.layers, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        model.train()
        loss = loss_of(model, *batch(text[:cut], args.batch, args.context))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == args.steps - 1:
            model.eval()
            with torch.no_grad():
                test = loss_of(model, *batch(text[cut:], args.batch, args.context))
            print(f"step {step:4d}  loss {loss.item():.6f}  test {test.item():.6f}", flush=True)
    if args.tell:
        print("".join(alphabet[i] for i in tell(model, text[:10], args.tell)))


if __name__ == "__main__":
    main()
