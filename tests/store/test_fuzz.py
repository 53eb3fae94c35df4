"""Three hundred seeded mutations of run folders, each read in several ways, end in one of four right verdicts."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutations import MEMORY, Fuzz, both_versions

SEEDS = 300
PARTS = 4
OLD = 5  # one of so many is of version 1, whose run is larger


@pytest.fixture(scope="module")
def subjects() -> Iterator[list[Fuzz]]:
    """A run with checksums, and one of version 1 without."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield both_versions(Path(folder))


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_costs_what_was_damaged(subjects: list[Fuzz], part: int) -> None:
    """No traceback, no hang, no crash, no silent loss, and no good row lost."""
    verdicts: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            verdicts[subjects[seed // PARTS % OLD == 0].verdict(seed, Path(folder))] += 1
    assert set(verdicts) <= {"right", "refused", "salvaged", "harmless"} and verdicts.total() == SEEDS // PARTS


@pytest.mark.parametrize("seed", [708615419])  # a footer of version 1 that names fewer rows than its columns have
def test_what_was_lost_once_is_counted(subjects: list[Fuzz], seed: int, tmp_path: Path) -> None:
    """Mutations of version 1 that the fuzzer found to be a silent loss."""
    assert subjects[1].verdict(seed, tmp_path) in {"salvaged", "refused"}
