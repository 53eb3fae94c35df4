"""A small sample of the subjects that `make outside` runs."""

from __future__ import annotations

import pytest

from outside import language, loops, zoo
from outside.checks import check

ARCHITECTURES = ("gpt2", "whisper", *(pytest.param(k, marks=pytest.mark.thorough) for k in ("t5", "vit", "mamba")))
LOOPS = ("GAN", "LBFGS", "saves the whole model")


def shapes():
    """Every sixth; the others in `make thorough` and `make outside`."""
    for number, subject in enumerate(zoo.subjects()):
        yield pytest.param(subject, id=subject.name, marks=() if number % 6 == 0 else pytest.mark.thorough)


@pytest.mark.parametrize("subject", list(shapes()))
@pytest.mark.filterwarnings("ignore")
def test_shapes_of_models(subject):
    """Every promise holds for models of unusual shapes."""
    assert check(subject).failed == {}


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")
def test_architectures(kind):
    """Every promise holds for models of transformers."""
    subject = next(s for s in language.subjects() if s.name == f"transformers/{kind}")
    assert check(subject).failed == {}


# tests/script/test_imports.py has a library that imports PyTorch by itself.
@pytest.mark.parametrize("name", [*LOOPS, pytest.param("asks transformers before torch", marks=pytest.mark.thorough)])
def test_training_loops(name, warm_python):
    """A script ends as it would without us, and is recorded."""
    assert next(s for s in loops.subjects() if s.name == f"loop/{name}").check(warm_python).failed == {}
