"""A harvest's folder is data from elsewhere: what is damaged is refused by name, and nothing crashes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import tensortap as tt
from tensortap.cli.app import cli
from tensortap.errors import HarvestError, TensortapError
from tensortap.harvest.reader import open_harvest
from tensortap.view.api.service import Api

SEEDS = 40


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete harvest of two sites, with a record of every row."""
    path = tmp_path_factory.mktemp("harvest") / "acts"
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    data = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    tt.harvest(model, data, "0", "1", to=path, progress=False)
    return path


@pytest.fixture
def copy(acts: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(acts, tmp_path / "acts"))


def rows(path: Path) -> Iterator[bytes]:
    harvest = open_harvest(path)
    for site in harvest.sites:
        for batch in harvest.batches(5, site, seed=None):
            yield from (f"{site} {s} ".encode() + v.tobytes() for s, v in zip(batch.sample, batch.values, strict=True))


def read_in_every_way(path: Path) -> None:
    """Each way ends well or is refused with a reason: no traceback."""
    for arguments in (["show", str(path)], ["show", str(path), "--json"], ["show", str(path), "--dimension", "1"],
                      ["check", str(path), "--against", str(path)]):  # fmt: skip
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code in (0, 1, 2), (arguments, result.output, result.exception)
    service = Api(str(path.parent))
    try:
        for request in ("/api/runs", "/api/harvest", "/api/harvest/site", "/api/harvest/top"):
            with contextlib.suppress(TensortapError):
                service.encoded(request, {} if request == "/api/runs" else {"harvest": "acts"})
    finally:
        service.close()


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def zero(file: Path, rng: random.Random) -> None:
    data, at = bytearray(file.read_bytes()), rng.randrange(file.stat().st_size)
    data[at : at + 64] = bytes(len(data[at : at + 64]))
    file.write_bytes(data)


def replace(file: Path, rng: random.Random) -> None:
    file.unlink()
    kind = rng.randrange(4)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.symlink_to("/dev/zero")
    elif kind == 2:
        file.mkdir()


def retype(file: Path, rng: random.Random) -> None:
    """Put another value somewhere into a JSON file, at any depth; of other files flip a bit."""
    if file.suffix != ".json":
        return flip(file, rng)
    content = json.loads(file.read_text())
    inside: Any = content
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = rng.choice(keys)
        if not isinstance(inside[key], (dict, list)) or not inside[key] or rng.randrange(3) == 0:
            break
        inside = inside[key]
    values = (None, -1, 10**30, 1e308, "x", [], {}, True, "\x1b[31m", 10**18, "../../../etc", 3)
    inside[key] = rng.choice(values)
    file.write_text(json.dumps(rng.choice((content, content, content, [content], "[" * 5000))))
    return None


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_mutations_end_in_a_reason(acts: Path, tmp_path: Path, part: int) -> None:
    """Whatever happens to one file, every reader ends at once and without a traceback."""
    files = sorted(str(p.relative_to(acts)) for p in acts.rglob("*") if p.is_file())
    for seed in range(part, SEEDS, 2):
        rng = random.Random(seed)
        path = Path(shutil.copytree(acts, tmp_path / str(seed) / "acts"))
        rng.choice((flip, cut, zero, replace, retype, retype))(path / rng.choice(files), rng)
        read_in_every_way(path)
        with np.errstate(all="ignore"), contextlib.suppress(TensortapError):
            list(rows(path))
        shutil.rmtree(path.parent)


def lie(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        said = json.loads((path / "manifest.json").read_text())
        change(said["parts"][0])
        (path / "manifest.json").write_text(json.dumps(said))

    return damage


def other_width(path: Path) -> None:
    file = next(path.glob("data/*/*.parquet"))
    table = pq.read_table(file)
    narrow = pa.array([value.as_py()[:4] for value in table["values"]], pa.binary(4))
    pq.write_table(table.set_column(table.column_names.index("values"), "values", narrow), file)


def elsewhere(path: Path) -> None:
    said = json.loads((path / "harvest.json").read_text())
    said["sites"][0]["folder"] = "../../elsewhere"
    (path / "harvest.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    "damage",
    [
        lie(lambda part: part["shards"][0].update(rows=10**15)),
        lie(lambda part: part["shards"][0].update(rows=part["shards"][0]["rows"] + 1)),
        lie(lambda part: part["shards"][0].update(rows=1)),
        lie(lambda part: part["shards"][0].update(file="../../x")),
        other_width, elsewhere,
    ],
)  # fmt: skip
def test_what_lies_about_sizes_is_refused(copy: Path, damage: Callable[[Path], None]) -> None:
    """More rows or narrower vectors than there are would be read from wherever memory lies: they are refused."""
    damage(copy)
    with pytest.raises(HarvestError):
        list(rows(copy))
    read_in_every_way(copy)


def test_a_damaged_shard_does_not_hide_the_statistics(copy: Path) -> None:
    """`show` names the file in a line, and shows what was counted when rows were written."""
    file = next(copy.glob("data/*/*.parquet"))
    file.write_bytes(file.read_bytes()[:50])
    result = CliRunner().invoke(cli, ["show", str(copy)])
    assert result.exit_code == 0 and file.name in result.output.replace("\n", "") and "1:output" in result.output
