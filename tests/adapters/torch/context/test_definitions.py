"""Where a model is written down, what its attention looks at, and how targets follow tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensortap as tt
from tensortap.adapters.torch.context.recorder import CONTEXT
from tensortap.context.events import EventLog

HERE = Path(__file__).read_text().splitlines()


class Decoder(nn.Module):
    """A language model of one attention, which may forget its mask."""

    def __init__(self, causal, fused):
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.qkv = nn.Linear(8, 24)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 11)
        nn.init.normal_(self.head.weight, std=0.1)
        self.causal, self.fused = causal, fused

    def forward(self, tokens):
        q, k, v = self.qkv(self.table(tokens) * self.scale).unsqueeze(1).chunk(3, -1)
        if self.fused:
            return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).squeeze(1))
        scores = q @ k.transpose(-2, -1)
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        return self.head((torch.softmax(scores, -1) @ v).squeeze(1))


def trained(causal=True, fused=False, shift=1, by_name=False):
    """Return the events of a training of four steps."""
    log, owner = EventLog(), object()
    CONTEXT.join(log, owner)
    try:
        torch.manual_seed(0)
        model = Decoder(causal, fused)
        with tt.watch(model, to=tt.Memory(), context=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                text = torch.randint(1, 11, (4, 12))
                text[:, 7:9] = 0
                tokens, targets = text[:, : 12 - shift], text[:, shift:]
                logits = model(tokens=tokens) if by_name else model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    finally:
        CONTEXT.leave(owner)
    events = log.take()
    return {
        kind: [json.loads(e.data) for e in events if e.kind == kind] for kind in ("model", "loss", "backward", "batch")
    }


@pytest.mark.parametrize("fused", [False, True])
def test_attention_that_looks_ahead(fused):
    """How much of an attention looks ahead is known with its mask and without, fused or written out."""
    masked, open_ = (trained(causal, fused)["backward"][0]["attention"][0] for causal in (True, False))
    assert masked["ahead"] == 0 and open_["ahead"] > 0.3
    assert open_["padding"] == pytest.approx(2 / 11) and open_["at_padding"] > 0.05
    assert open_["site"].startswith("qkv.")


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_the_shift_of_targets(shift):
    """By how many positions targets follow the tokens is known, also of a model that is called by name."""
    assert trained(shift=shift, by_name=True)["loss"][0]["shift"] == shift


def test_inputs_given_by_name():
    """A model that is given its batch by name has events of it as any other."""
    assert trained(by_name=True)["batch"][0]["input"]["shape"] == [4, 11]


def test_the_lines_of_a_model():
    """The lines that make modules, set parameters and apply functions are known."""
    model = trained()["model"][0]
    lines, parameters = ({k: _text(v) for k, v in model[name].items()} for name in ("lines", "parameter_lines"))
    assert "nn.Linear(8, 24)" in lines["qkv"] and "" not in lines
    assert "nn.init.normal_" in parameters["head.weight"] and "nn.Parameter" in parameters["scale"]
    assert ["torch.softmax" in _text(line) for line in model["functions"]["Softmax"]] == [True]


def _text(code):
    return HERE[int(code.rpartition(":")[2]) - 1]
