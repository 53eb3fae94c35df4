"""`tensortap run --budget`: what a long training may cost, and who has no budget."""

import pytest

import tensortap as tt
from tensortap.distributed.ranks import World
from tensortap.errors import ProbeError
from tensortap.script.options import FREE_STEPS, RunOptions, budget_for

TINY = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
x = torch.ones(1, 2)
with torch.no_grad():
    for _ in range({steps}):
        model(x)
"""


def test_a_long_training_of_tiny_steps_is_thinned(scripts):
    """All of the first steps are there, of the later ones some, and those of the schedule; the rest is counted."""
    steps = 1025
    done, run = scripts.observe(TINY.format(steps=steps), "--budget", "0.01")
    assert done.returncode == 0, done.stderr
    assert run.steps[:FREE_STEPS] == list(range(FREE_STEPS)) and {512, 768, 1024} <= set(run.steps)
    # The schedule's own steps may have been thinned too, for the probe that wants every one; and the open step.
    assert 0 < steps - len(run.steps) <= run.counts["thinned_steps"] <= steps - len(run.steps) + 4


def test_who_has_a_budget():
    """One process that asks for it; ranks are recorded at the same steps, so that they can be compared."""
    asked = RunOptions("train.py", budget=0.2)
    assert budget_for(asked, World(0, 1)).share == 0.2
    assert budget_for(asked, World(1, 2)) is None and budget_for(RunOptions("train.py"), World(0, 1)) is None


def test_a_wrong_budget(scripts):
    """A share that is none is refused with what is expected."""
    done, run = scripts.observe(TINY.format(steps=1), "--budget", "2")
    assert run is None and done.returncode == 2 and "0<x<1" in done.stderr
    with pytest.raises(ProbeError, match="between 0 and 1, got 2"):
        tt.watch(budget=2)
