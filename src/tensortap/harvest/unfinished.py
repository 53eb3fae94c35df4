"""A part that is being written: its shards in a hidden folder, and how they are put in place and committed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensortap.harvest.folder import Entry, HarvestFolder
from tensortap.harvest.plan import HarvestPlan
from tensortap.harvest.rows import KeptRows
from tensortap.harvest.shards import PartWriter, checksum, shard_name
from tensortap.harvest.staging import storing


class UnfinishedPart:
    """The files of one part until its entry is in the manifest. All methods are called on one thread."""

    def __init__(self, folder: HarvestFolder, plan: HarvestPlan, part: int) -> None:
        self.part = part
        self._folder = folder
        self._plan = plan
        self._open = contextlib.ExitStack()
        self._writer: PartWriter | None = None

    def add(self, found: list[tuple[str, KeptRows]]) -> None:
        """Write the rows of a batch."""
        with storing(self._folder):
            for site, rows in found:
                self._shards().add(site, rows)

    def commit(self, samples: int, set_aside: list[dict[str, Any]], committed: Callable[[Entry], None]) -> None:
        """Put the shards in place, write the part's entry in the manifest, and hand it over."""
        with storing(self._folder):
            writer = self._shards()
            closed = list(writer.close())
        shards = []
        for site, number, shard in closed:
            name = f"data/{site.folder}/{shard_name(self.part, number)}"
            shards.append(_shard_entry(name, site.site, shard.path, shard.rows))
            with storing(self._folder):
                self._folder.publish(shard.path, name)
        statistics = self._folder.write_part_statistics(self._plan, self.part, writer.statistics)
        entry = {
            "part": self.part, "samples": samples, "rows": sum(shard["rows"] for shard in shards), "shards": shards,
            "statistics": statistics, "set_aside": sorted(set_aside, key=lambda each: each["sample"]),
        }  # fmt: skip
        self._folder.commit(entry)
        self.close()
        committed(entry)

    def close(self) -> None:
        """Close and remove the files that are not in place."""
        self._open.close()

    def _shards(self) -> PartWriter:
        if self._writer is None:
            folder = self._open.enter_context(self._folder.staging.folder(self.part))
            self._writer = PartWriter(folder, self._plan, self.part)
            self._open.callback(self._writer.abandon)
        return self._writer


def _shard_entry(name: str, site: str, path: Path, rows: int) -> dict[str, Any]:
    return {"file": name, "site": site, "rows": rows, "bytes": path.stat().st_size, "sha256": checksum(path)}
