"""A file of records read forwards, a few thousand rows at a time, gives what reading it whole gives."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tensortap.store import row_window
from tensortap.store.blocks import BlockSource, PerPlace, blocks, sources
from tensortap.store.row_window import RowWindow
from tensortap.store.run import open_run
from tensortap.store.snapshot import Snapshot

sys.path.insert(0, str(Path(__file__).parent))
import itertools

from mutations import record

COLUMNS = ("hist_offset", "hist_counts", "shape")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return open_run(record(tmp_path_factory.mktemp("run") / "run")).snapshots.take()


def test_a_window_gives_the_rows_of_the_file(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards, from the same row again, and backwards; of segments and of tails."""
    monkeypatch.setattr(row_window, "AT_ONCE", 5)
    for source in sources(snapshot):
        whole = source.read(COLUMNS).select(COLUMNS).to_pylist()
        window = RowWindow(snapshot, source, COLUMNS)
        ends = np.linspace(0, source.rows, 7).astype(int).tolist()
        spans = [*itertools.pairwise(ends), (0, source.rows), (source.rows - 1, source.rows), (2, 4)]
        for low, high in spans:
            assert window.rows(low, high).to_pylist() == whole[low:high]


def test_a_file_that_is_shorter_than_it_says_is_damaged(snapshot: Snapshot) -> None:
    """Rows behind its end are an error that readers count."""
    source = sources(snapshot)[0]
    with pytest.raises(ValueError, match="fewer rows"):
        RowWindow(snapshot, source, COLUMNS).rows(0, source.rows + 1)


def test_rows_are_taken_in_the_order_asked_for(snapshot: Snapshot) -> None:
    """Backwards and twice, as from a table in memory."""
    for source in sources(snapshot):
        rows = np.array([source.rows - 1, 0, 3, 3], np.int64)
        whole = source.take(np.arange(source.rows), ("step", *COLUMNS)).to_pylist()
        assert source.take(rows, ("step", *COLUMNS)).to_pylist() == [whole[i] for i in rows]


def test_files_without_the_chosen_places_are_not_opened(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The footer tells which places a segment holds."""
    opened: list[BlockSource] = []
    monkeypatch.setattr("tensortap.store.blocks.read_block", lambda _, source, names: opened.append(source))
    assert not list(blocks(snapshot, (), chosen=lambda place: place.port == "nosuch"))
    assert all(source.places is None for source in opened)


def test_a_question_is_asked_once_of_each_place_that_files_share() -> None:
    """Of the same list again nothing is asked; of another one it is."""
    asked: list[str] = []
    per_place = PerPlace(lambda place: asked.append(place.site) or len(asked), np.int64)  # type: ignore[func-returns-value]
    places = [("a", "output", "", ""), ("b", "output", "", "")]
    assert per_place.of(places).tolist() == per_place.of(places).tolist() == [1, 2]
    assert per_place.of(list(places)).tolist() == [3, 4]
