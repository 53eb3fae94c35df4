"""`tensortap run --sites 'op:…'`: operations of every model in a script that says nothing about them."""

from __future__ import annotations

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


def test_operations_of_a_script(tmp_path, warm_python):
    """Its output is what it was, and each model's operations are recorded under its name, with their lines."""
    (tmp_path / "train.py").write_text(SCRIPT)
    sites = ("--sites", "op:@matmul", "--sites", "critic/softmax:grad_output", "--sites", "op:conv2d")
    watched = warm_python.run(["-m", "tensortap", "run", *sites, "--to", "seen", "train.py"], tmp_path)
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout == warm_python.run(["train.py"], tmp_path).stdout != ""
    found = tt.open(tmp_path / "seen")
    assert found.sites == [
        "generator.0/linear#0:output", "critic.fc/linear#0:output", "critic/matmul#0:output",
        "critic/softmax#0:grad_output",
    ]  # fmt: skip
    assert found.steps == [0, 1, 2] and found.info["unseen"] == {"op:conv2d": NEVER}
    assert found.lines["critic/matmul#0"].endswith("train.py:14  return (self.fc(x) @ x.T).softmax(-1)")
