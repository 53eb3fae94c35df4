"""Three hundred seeded mutations of run folders, each read in several ways, end in one of four right verdicts."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutations import Fuzz, both_versions

SEEDS = 300
PARTS = 4


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> list[Fuzz]:
    """A run with checksums, and one of version 1 without."""
    return both_versions(tmp_path_factory.mktemp("subjects"))


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_costs_what_was_damaged(subjects: list[Fuzz], tmp_path: Path, part: int) -> None:
    """No traceback, no hang, no crash, no silent loss, and no good row lost."""
    verdicts: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        folder = tmp_path / str(seed)
        verdicts[subjects[seed // PARTS % 2].verdict(seed, folder)] += 1
        shutil.rmtree(folder)
    assert set(verdicts) <= {"right", "refused", "salvaged", "harmless"} and verdicts.total() == SEEDS // PARTS
