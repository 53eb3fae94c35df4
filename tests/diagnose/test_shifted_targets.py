"""Targets of language models: how they follow the tokens, whoever shifts them, the script or the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tensortap as tt


class LanguageModel(nn.Module):
    """A causal transformer that shifts labels itself where it is given some, as those of Hugging Face do."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(24, 16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 24)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.embed(input_ids))[:, None].chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)[:, 0]
        logits: Tensor = self.head(mixed)
        if labels is None:
            return logits
        shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def by_hand(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def padded(tokens: Tensor) -> Tensor:
    return torch.where(torch.arange(tokens.shape[1]) < tokens.shape[1] - 3, tokens, -100)


RIGHT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "labels are the tokens": lambda m, s: m(input_ids=s, labels=s),
    "labels first": lambda m, s: m(labels=s.clone(), input_ids=s),
    "some labels are ignored": lambda m, s: m(input_ids=s, labels=padded(s)),
    "shifted by the script": lambda m, s: by_hand(m(s[:, :-1]), s[:, 1:]),
    "other labels": lambda m, s: m(input_ids=s, labels=(s * 7 + 3) % 24),
}
WRONG: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "shifted by both": (lambda m, s: m(input_ids=s[:, :-1], labels=s[:, 1:]), 2),
    "shifted by both, labels first": (lambda m, s: m(labels=s[:, 1:], input_ids=s[:, :-1]), 2),
    "rolled": (lambda m, s: m(input_ids=s, labels=functional.pad(s[:, 1:], (0, 1), value=-100)), 2),
    "shifted the other way": (lambda m, s: m(input_ids=s[:, 1:], labels=s[:, :-1]), 0),
    "given by position": (lambda m, s: m(s[:, :-1], s[:, 1:]), 2),
    "not shifted by the script": (lambda m, s: by_hand(m(s[:, :-1]), s[:, :-1]), 0),
    "shifted twice by the script": (lambda m, s: by_hand(m(s[:, :-2]), s[:, 2:]), 2),
}


def findings(loss: Callable[[Any, Tensor], Tensor], to: Path, causal: bool = True) -> list[tt.Finding]:
    torch.manual_seed(0)
    model = LanguageModel(causal)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.watch(model, to=to, context=True) as tap:
        for _ in range(6):
            optimizer.zero_grad()
            loss(model, torch.randint(0, 24, (4, 13))).backward()
            optimizer.step()
    return [finding for finding in tap.run.findings() if finding.rule == "targets_not_shifted"]


@pytest.mark.parametrize("form", WRONG)
def test_targets_that_are_not_the_next_token_are_named(form: str, tmp_path: Path) -> None:
    """Targets that end up as the tokens themselves, or as those after the next, are an error, whoever shifted them."""
    loss, shift = WRONG[form]
    (found,) = findings(loss, tmp_path / "run")
    assert (found.severity, found.evidence["shift"]) == ("error", shift)


@pytest.mark.parametrize("form", RIGHT)
def test_targets_that_are_the_next_token_are_not(form: str, tmp_path: Path) -> None:
    """Labels that the model shifts once, and labels that are no tokens, are as they should be."""
    assert findings(RIGHT[form], tmp_path / "run") == []


def test_an_encoder_may_be_asked_for_its_tokens(tmp_path: Path) -> None:
    """Where attention looks ahead, the tokens themselves may be the targets, as of an autoencoder."""
    assert findings(lambda m, s: by_hand(m(s[:, :-1]), s[:, :-1]), tmp_path / "run", causal=False) == []
