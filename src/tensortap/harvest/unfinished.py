"""A part that is being written: its shards in a hidden folder, and how they are put in place and committed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from tensortap.harvest.folder import Entry, HarvestFolder
from tensortap.harvest.plan import HarvestPlan
from tensortap.harvest.rows import KeptRows
from tensortap.harvest.shards import PartWriter, sealed_file, shard_name
from tensortap.harvest.staging import storing

_TOGETHER: Final = 8  # files that are hashed and brought to the disk at the same time


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
            with ThreadPoolExecutor(_TOGETHER) as pool:  # a disk brings many files home in the time of one
                sealed = list(pool.map(sealed_file, [shard.path for _, _, shard in closed]))
        shards: list[dict[str, Any]] = []
        for (site, number, shard), (size, digest) in zip(closed, sealed, strict=True):
            name = f"data/{site.folder}/{shard_name(self.part, number)}"
            shards.append({"file": name, "site": site.site, "rows": shard.rows, "bytes": size, "sha256": digest})
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
