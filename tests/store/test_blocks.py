"""Records read file by file, and columns read one by one, are what the whole table holds."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tensortap.store import queries
from tensortap.store.blocks import blocks
from tensortap.store.columns import SingleRows
from tensortap.store.compact import compact
from tensortap.store.filters import StepSelection
from tensortap.store.run import open_run
from tensortap.store.snapshot import Snapshot
from tensortap.types import Place

sys.path.insert(0, str(Path(__file__).parent))
from mutations import record

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module", params=["segments and a tail", "compacted", "version 1"])
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    path = tmp_path_factory.mktemp("run") / "run"
    path = Path(shutil.copytree(FIXTURES / "v1", path)) if request.param == "version 1" else record(path)
    if request.param == "compacted":
        compact(path)
    return open_run(path).snapshots.take()


@pytest.mark.parametrize("steps", [None, 7, (3, 9), [0, 8, 17], slice(2, None, 5)])
def test_blocks_hold_the_rows_of_the_table(snapshot: Snapshot, steps: StepSelection) -> None:
    """Of all places and of some, of all steps and of some: the same rows, in some order."""
    run = open_run(str(snapshot.files))
    for port in ("output", "nosuch"):
        table = run.table(ports=port, steps=steps, columns=["step", "rank", "site", "std", "absmax", "nan"])
        found = []
        for block in blocks(
            snapshot, ["std", "absmax", "nan"], chosen=lambda p, port=port: p.port == port, steps=steps
        ):  # type: ignore[misc]
            names = [block.places[i].site for i in block.place]
            numbers = (block.number(name).tolist() for name in ("std", "absmax", "nan"))
            ranks = [block.source.rank] * len(block)
            found += list(zip(block.number("step").tolist(), ranks, names, *numbers, strict=True))
        assert sorted(map(str, found)) == sorted(
            str((*row.values(),)).replace("None", "nan") for row in table.to_pylist()
        )


def test_rows_of_one_step_are_those_of_the_table(snapshot: Snapshot) -> None:
    """Of all places or of some, in the same order; none where there is no such step."""
    names, step = ("site", "rank", "seq", "call", "dtype", "numel"), int(snapshot.steps[1])
    assert queries.step_rows(snapshot, names, step).equals(queries.table(snapshot, steps=step, columns=names))
    some = queries.step_rows(snapshot, names, step, chosen=lambda place: place.port == "output")
    assert some.equals(queries.table(snapshot, ports="output", steps=step, columns=names))
    assert queries.step_rows(snapshot, names, 1 << 40).num_rows == 0


def test_columns_lie_place_by_place(snapshot: Snapshot) -> None:
    """A column of single rows holds each place's values by step; one that is zero throughout takes no room."""
    rows = SingleRows(snapshot, snapshot.steps)
    for block in blocks(snapshot, ()):
        rows.add(block)
    single = rows.arrange()
    assert single or len(snapshot.ranks) > 1
    if not single:
        return
    table = open_run(str(snapshot.files)).table(columns=["step", *Place._fields, "std", "nan"])
    for place, part in rows.parts.items():
        mine = [row for row in table.to_pylist() if Place(*(row[name] for name in Place._fields)) == place]
        assert rows.steps[part].tolist() == [row["step"] for row in mine]
        np.testing.assert_array_equal(rows.column("std")[part], [row["std"] for row in mine])
    assert not rows.column("nan").any() and (snapshot.tails or rows.column("nan").strides == (0,))
