"""The same weights in two frameworks: their runs align, agree within rounding, and one changed layer is named."""

from __future__ import annotations

import itertools

import pytest
import reference
from subjects import SUBJECTS, subject_of

import tensortap as tt

# PyTorch with each other framework; the others with each other in `make thorough`.
PAIRS = [
    pytest.param(*pair, marks=() if "torch" in pair else pytest.mark.thorough)
    for pair in itertools.combinations(SUBJECTS, 2)
]


def recorded(subject, path):
    """A run of two steps with the tensors themselves, so that elements are compared."""
    with subject.watch(tt.probe("**", keep=[tt.stats(), tt.full()]), to=path) as tap:
        for seed in range(2):
            subject.call(reference.batch(seed))
            tap.step()
    return path


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_the_same_weights(one, other, tmp_path):
    """Every layer that both have is paired by name and equal within rounding."""
    runs = [recorded(subject_of(name), tmp_path / name) for name in (one, other)]
    found = tt.diff(*runs, rtol=1e-4, atol=1e-5)
    paired = {row.site.partition(":")[0] for row in found}
    assert {"fc1", "act", "blocks.0", "blocks.1", "head"} <= paired
    assert found, found.headline
    assert found.steps == (0, 1)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_one_changed_layer_is_named(one, other, tmp_path):
    """A hundredth more in some weights of one layer, and that layer is where the runs first part."""
    plain = recorded(subject_of(one), tmp_path / "plain")
    with reference.perturbed("blocks.1"):
        changed = recorded(subject_of(other), tmp_path / "changed")
    found = tt.diff(plain, changed, rtol=1e-4, atol=1e-5)
    assert found.first is not None and found.first.name.startswith("blocks.1:"), found.headline
