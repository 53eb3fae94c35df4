"""`tensortap run --sites 'op:…'`: operations of every model in a script that says nothing about them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tensortap as tt
from tensortap.adapters.torch.ops.taps import NEVER

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return (self.fc(x) @ x.T).softmax(-1)


generator, critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), Critic()
optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], 0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = critic(generator(torch.randn(5, 3))).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.9f}")
"""


def run(folder: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(Path(tt.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=folder, env=env, check=True
    )
    return done.stdout


def test_operations_of_a_script(tmp_path):
    """Its output is what it was, and each model's operations are recorded under its name, with their lines."""
    (tmp_path / "train.py").write_text(SCRIPT)
    watched = run(tmp_path, "-m", "tensortap", "run", "--sites", "op:@matmul", "--sites", "critic/softmax:grad_output",
                  "--sites", "op:conv2d", "--to", "seen", "train.py")  # fmt: skip
    assert watched == run(tmp_path, "train.py")
    found = tt.open(tmp_path / "seen")
    assert found.sites == [
        "generator.0/linear#0:output", "critic.fc/linear#0:output", "critic/matmul#0:output",
        "critic/softmax#0:grad_output",
    ]  # fmt: skip
    assert found.steps == [0, 1, 2] and found.info["unseen"] == {"op:conv2d": NEVER}
    assert found.lines["critic/matmul#0"].endswith("train.py:14  return (self.fc(x) @ x.T).softmax(-1)")
