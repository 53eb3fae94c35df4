"""Small real trainings, healthy and with planted faults, each recorded once."""

from __future__ import annotations

from pathlib import Path

import diagnose.planted  # noqa: F401  (importing it fills the registry)
import pytest
import torch
from diagnose.trainings import PLANTED, REFERENCES, Expected

import tensortap as tt


class Zoo:
    """The trainings by name; each is recorded when first asked for."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self._folder = folder
        self._seed = seed
        self._runs: dict[str, tt.Run] = {}
        self._findings: dict[str, tt.Findings] = {}

    def run(self, name: str) -> tt.Run:
        if name not in self._runs:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # on a loaded machine a second thread costs more than it brings
            torch.manual_seed(self._seed)
            PLANTED[name].record(self._folder / name)
            torch.set_num_threads(threads)
            self._runs[name] = tt.open(self._folder / name)
        return self._runs[name]

    def expected(self, name: str) -> Expected | None:
        return PLANTED[name].expected

    def findings(self, name: str) -> tt.Findings:
        if name not in self._findings:
            reference = self.run(REFERENCES[name]) if name in REFERENCES else None
            self._findings[name] = self.run(name).findings(reference=reference)
        return self._findings[name]

    @property
    def names(self) -> list[str]:
        return list(PLANTED)

    @property
    def faulty(self) -> list[str]:
        return [name for name, planted in PLANTED.items() if planted.expected]

    @property
    def healthy(self) -> list[str]:
        return [name for name, planted in PLANTED.items() if not planted.expected]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Every training."""
    return Zoo(tmp_path_factory.mktemp("zoo"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `fault` or `healthy` runs once for each such training."""
    for argument, wanted in (("fault", True), ("healthy", False)):
        if argument in metafunc.fixturenames:
            names = [name for name, planted in PLANTED.items() if bool(planted.expected) is wanted]
            metafunc.parametrize(argument, names)
