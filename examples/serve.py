"""An inference loop as a server has it: requests come in, several threads answer them with one model.

    python examples/serve.py --requests 200 --threads 4

Each request is a short list of words of its own length; the answer is a mood. The model's weights are drawn from a
seed, so the answers mean nothing and are the same every time.
"""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

WORDS = ("the", "lamp", "burns", "low", "but", "ships", "will", "see", "it", "from", "afar", "and", "nobody")
MOODS = ("calm", "worried", "glad", "cross")


class Request(NamedTuple):
    """What a client sends."""

    number: int
    words: list[str]


class Answer(NamedTuple):
    """What it gets back, and after how long."""

    number: int
    mood: str
    score: float
    seconds: float


class Mood(nn.Module):
    """Words to vectors, a GRU over them, a mood out of its last state."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), width)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))
        self.mood = nn.Linear(width, len(MOODS))

    def forward(self, words: Tensor) -> Tensor:
        """Logits of the moods."""
        _, last = self.reader(self.words(words))
        return self.mood(self.hidden(last[-1]))


class Server:
    """Answers requests. Any number of threads may call it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Mood().eval()

    @torch.inference_mode()
    def answer(self, request: Request) -> Answer:
        """One request."""
        begun = time.perf_counter()
        words = torch.tensor([[WORDS.index(word) for word in request.words]])
        score, mood = self.model(words).softmax(-1).max(-1)
        return Answer(request.number, MOODS[int(mood)], float(score), time.perf_counter() - begun)


def requests(count: int, seed: int) -> list[Request]:
    """What clients send."""
    choose = random.Random(seed)
    return [Request(n, choose.choices(WORDS, k=choose.randint(3, 20))) for n in range(count)]


def main() -> None:
    """Answer them all, in as many threads as asked for."""
    parser = argparse.ArgumentParser(description="Answer requests with a small model.")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timing", action="store_true", help="print how long the answers took")
    args = parser.parse_args()

    server = Server(args.seed)
    with ThreadPoolExecutor(args.threads) as pool:
        answers = list(pool.map(server.answer, requests(args.requests, args.seed)))
    for answer in answers[:5]:
        print(f"request {answer.number}: {answer.mood} ({answer.score:.8f})")
    moods = [answer.mood for answer in answers]
    print(f"{len(answers)} answered: " + ", ".join(f"{mood} {moods.count(mood)}" for mood in MOODS))
    if args.timing:
        middle = sorted(answer.seconds for answer in answers)[len(answers) // 2]
        print(f"half of them within {middle * 1000:.2f} ms")


if __name__ == "__main__":
    main()
