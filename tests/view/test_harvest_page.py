"""What the viewer's page is told of harvests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.errors import TensortapError
from tensortap.view.api.service import Api
from tensortap.view.api.wire import unpack


class Lookup(nn.Module):
    """Of every token a vector: dimension 0 is constant, 1 always positive, 2 largest for token 7."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = input_ids.float()
        return torch.stack([torch.full_like(x, 3.0), x + 1, torch.where(input_ids == 7, 100 + x, -x)], dim=-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("harvests")
    data = [{"input_ids": np.arange(i, i + 4)} for i in range(12)]
    tt.harvest(Lookup(), data, ":output", to=found / "inner" / "acts", batch_size=4, progress=False)
    return found


def answers(api: Api, path: str, **given: str) -> Any:
    answer = api.encoded(path, given)
    kind, data = answer.kind, answer.data
    return unpack(data) if kind == "columns" else api.answer(path, given)


def test_a_harvest_is_listed_and_described(folder: Path) -> None:
    """Harvests are found below a folder, or at it; a site has its histogram, spectrum, dead and dense dimensions."""
    api = Api(str(folder))
    assert [each["id"] for each in api.runs()["harvests"]] == ["inner/acts"]
    about = answers(api, "/api/harvest", harvest="inner/acts")
    assert (about["rows"], about["samples"], about["complete"]) == (48, 12, True)
    assert [site["site"] for site in about["sites"]] == [":output"]
    header, columns = answers(api, "/api/harvest/site", harvest="inner/acts", site=":output")
    assert (header["dead"], header["dense"]) == ([0], [1])
    assert columns["counts"].sum() == pytest.approx(3 * 48)
    assert columns["mean"][0] == 3.0
    assert sum(header["spectrum"]) == pytest.approx(1.0, abs=1e-3)
    alone = Api(str(folder / "inner" / "acts"))
    assert answers(alone, "/api/harvest")["id"] == "acts"
    assert alone.runs()["runs"] == []


def test_the_samples_that_activate_a_dimension(folder: Path) -> None:
    """The rows in which a dimension is largest, one of each sample, with the text around the token where it can be."""
    api = Api(str(folder), decode=lambda ids: " ".join(map(str, ids)))
    rows = answers(api, "/api/harvest/top", harvest="inner/acts", dimension="2", count="3")["rows"]
    assert [row["token"] for row in rows] == [7, 7, 7]
    assert [row["sample"] for row in rows] == [4, 5, 6]
    assert rows[0]["around"] == ("4 5 6", "7", "")


@pytest.mark.parametrize("given", [{"harvest": "../x"}, {"site": "nope"}, {"dimension": "3"}, {"dimension": "x"}])
def test_what_is_not_there_is_refused(folder: Path, given: dict[str, str]) -> None:
    """Another folder, site or dimension is refused by name."""
    with pytest.raises(TensortapError):
        Api(str(folder)).answer("/api/harvest/top", {"harvest": "inner/acts", **given})
