"""A harvest's folder, local or at any fsspec address: the plan, the shards, and the manifest that says what counts.

harvest.json                      the plan; at the end also totals
manifest/part-000012.json         written last: with it part 12 is committed, and never done again
manifest.json                     all entries in one file, once the harvest is complete
data/<site>/part-000012-03.parquet
statistics/part-000012.safetensors, and at the end statistics.safetensors
.partial/                         what is being written; nothing in it counts
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.numpy

from tensortap.errors import HarvestError, RunError
from tensortap.harvest.plan import HarvestPlan
from tensortap.harvest.rows import Array
from tensortap.harvest.staging import PARTIAL, Staging, part_name, reading, storing
from tensortap.harvest.statistics import SiteStatistics
from tensortap.store.files import Files, load_json
from tensortap.store.names import HARVEST_JSON, is_hidden_name, visible_name

PLAN: Final = HARVEST_JSON
MANIFEST: Final = "manifest"
STATISTICS: Final = "statistics"
Entry = dict[str, Any]
# What a process leaves that is killed while it writes one of the files beside `data`.
_UNFINISHED: Final = re.compile(r"\.(harvest\.json|manifest\.json|statistics\.safetensors)\.[0-9a-f]{8}")
# What a harvest consists of, beside the files at the top. Nothing else is ever removed.
_OURS: Final = {
    MANIFEST: re.compile(r"part-\d{6,}\.json"),
    STATISTICS: re.compile(r"part-\d{6,}\.safetensors"),
    "data": re.compile(r"part-\d{6,}-\d{2,}\.parquet"),
}


class HarvestFolder:
    """Read and write the files of a harvest. Everything is written whole or not at all."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.files = Files(path)
        except RunError as error:
            raise HarvestError(str(error)) from error
        except TypeError:
            raise HarvestError(f'a harvest must lie in a folder or at a URL, got {path!r}: write to="acts"') from None
        self.staging = Staging(self.files)

    def __str__(self) -> str:
        return str(self.files)

    # The plan

    def read(self) -> dict[str, Any] | None:
        """Return `harvest.json`; None where there is none."""
        with reading(self):
            if not self.files.exists(PLAN):
                return None
        said = self._read_json(PLAN)
        if not isinstance(said, dict):
            raise HarvestError(f"{self}/{PLAN} must hold an object, got {type(said).__name__}")
        return said

    def write_plan(self, plan: HarvestPlan, totals: dict[str, Any] | None = None) -> None:
        """Write `harvest.json`; with totals the harvest is complete."""
        state = {"complete": False} if totals is None else {"complete": True, **totals}
        self._write_json(PLAN, plan.to_json() | state)

    def clear(self) -> None:
        """Remove a harvest, so that another can be begun here; files that are not a harvest's stay."""
        with contextlib.suppress(HarvestError, FileNotFoundError):  # one that is damaged is removed as it is
            if (before := self.read()) is not None:
                self._write_json(PLAN, before | {"complete": False})  # killed from here on, it is not complete
        for name in (f"{MANIFEST}.json", f"{STATISTICS}.safetensors"):
            self.files.remove(name)
        _remove_work(self.files)
        for folder in self.files.list("data"):
            _remove_ours(self.files, f"data/{folder}", "data")
        _remove_if_empty(self.files, "data")
        self.files.remove(PLAN)

    # The manifest

    def committed(self) -> set[int]:
        """Return the parts that are committed."""
        with reading(self):
            if self.files.exists(f"{MANIFEST}.json"):
                return {entry["part"] for entry in self.entries()}
            return {int(name[5:-5]) for name in self.files.list(MANIFEST) if name.startswith("part-")}

    def entries(self) -> list[Entry]:
        """Return the manifest's entries in the order of parts."""
        name = f"{MANIFEST}.json"
        with reading(self):
            whole = self.files.exists(name)
            parts = [] if whole else self.files.list(MANIFEST)
        if whole:
            said = self._read_json(name)
            entries = said.get("parts") if isinstance(said, dict) else None
            if not isinstance(entries, list):
                raise HarvestError(f"{self}/{name} is damaged: it must hold a list of parts")
            return [checked_entry(entry, f"{self}/{name}") for entry in entries]
        names = [f"{MANIFEST}/{name}" for name in parts if name.startswith("part-")]
        return [checked_entry(self._read_json(name), f"{self}/{name}") for name in names]

    def commit(self, entry: Entry) -> None:
        """Write a part's entry: from now on it counts."""
        self._write_json(f"{MANIFEST}/{part_name(entry['part'])}.json", entry)

    def finish(self, plan: HarvestPlan, parts: int) -> None:
        """Write the whole manifest and the statistics of all parts; another process may be doing the same."""
        try:
            entries = self.entries()
        except FileNotFoundError:
            entries = []
        if len(entries) == parts:
            try:
                self._finish(plan, entries)
            except (OSError, HarvestError):  # another process was sooner, and has tidied up
                if not (self.read() or {}).get("complete"):
                    raise
        elif not (self.read() or {}).get("complete"):
            raise HarvestError(f"{self} must have {parts} parts, but {len(entries)} are committed: run it again")

    def _finish(self, plan: HarvestPlan, entries: list[Entry]) -> None:
        totals = _totals(entries)
        statistics = self.statistics(plan, entries)
        self._write_arrays(f"{STATISTICS}.safetensors", _named(plan, statistics))
        totals["statistics"] = {site: found.totals() for site, found in statistics.items()}
        self._write_json(f"{MANIFEST}.json", {"parts": entries})
        self.write_plan(plan, totals)
        self.tidy()

    def tidy(self) -> None:
        """Remove what a complete harvest needs no more."""
        _remove_work(self.files)
        for name in self.files.list():
            if _UNFINISHED.fullmatch(name):
                self.files.remove(name)

    # Statistics

    def statistics(self, plan: HarvestPlan, entries: list[Entry] | None = None) -> dict[str, SiteStatistics]:
        """Return the statistics of every site over the parts that are committed."""
        with reading(self):
            whole = self.files.exists(f"{STATISTICS}.safetensors")
        if whole:
            return self._sites(plan, f"{STATISTICS}.safetensors")
        total = {site.site: SiteStatistics.empty(site.width) for site in plan.sites}
        for entry in self.entries() if entries is None else entries:
            for site, found in self._sites(plan, entry[STATISTICS]).items():
                total[site].add(found)
        return total

    def write_part_statistics(self, plan: HarvestPlan, part: int, found: dict[str, SiteStatistics]) -> str:
        """Write the statistics of a part and return the file's name."""
        name = f"{STATISTICS}/{part_name(part)}.safetensors"
        self._write_arrays(name, _named(plan, found))
        return name

    def _write_arrays(self, name: str, arrays: dict[str, Array]) -> None:
        with storing(self):
            self.files.write(name, safetensors.numpy.save(arrays))

    def _sites(self, plan: HarvestPlan, name: str) -> dict[str, SiteStatistics]:
        try:
            with reading(f"{self}/{name}"):
                data = self.files.read(name)
            arrays = dict(safetensors.numpy.load(data))
            return {site.site: SiteStatistics.of_arrays(arrays, site.folder, site.width) for site in plan.sites}
        except FileNotFoundError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, safetensors.SafetensorError) as error:
            raise HarvestError(f"{self}/{name} is damaged: {error}") from error

    def _read_json(self, name: str) -> Any:
        with reading(f"{self}/{name}"):
            return load_json(self.files.read(name))

    def publish(self, source: Path, name: str) -> None:
        """Put a file that is on the disk in its place; a local one by renaming it."""
        if self.files.local is not None:
            target = self.files.local / name
            self.files.make_folder(target.parent)
            source.replace(target)
        else:
            self.files.fs.makedirs(self.files.path(name).rpartition("/")[0], exist_ok=True)
            self.files.fs.put_file(os.fspath(source), self.files.path(name))

    def _write_json(self, name: str, value: Any) -> None:
        with storing(self):
            self.files.write(name, json.dumps(value, indent=1, allow_nan=False).encode())


def is_harvest(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a harvest."""
    try:
        files = Files(path)
        if files.local is not None:
            return files.exists(PLAN)
    except (RunError, OSError, ValueError):
        return False
    with reading(path):
        return files.exists(PLAN)


def _remove_work(files: Files) -> None:
    """Remove what is needed only until a harvest is complete."""
    files.remove_all(PARTIAL)
    for name in (MANIFEST, STATISTICS):
        _remove_ours(files, name, name)


def _remove_ours(files: Files, folder: str, kind: str) -> None:
    there = files.list(folder)
    ours = [name for name in there if _OURS[kind].fullmatch(visible_name(name)) or is_hidden_name(name)]
    if ours and len(ours) == len(there):
        files.remove_all(folder)
        return
    for name in ours:
        files.remove(f"{folder}/{name}")
    _remove_if_empty(files, folder)


def _remove_if_empty(files: Files, folder: str) -> None:
    if files.local is not None:
        with contextlib.suppress(OSError):  # it is not there, or holds what is not a harvest's
            (files.local / folder).rmdir()


def _totals(entries: list[Entry]) -> dict[str, Any]:
    return {
        "rows": sum(entry["rows"] for entry in entries),
        "samples": sum(entry["samples"] for entry in entries),
        "bytes": sum(shard["bytes"] for entry in entries for shard in entry["shards"]),
        "set_aside": [each for entry in entries for each in entry["set_aside"]],
    }


def _named(plan: HarvestPlan, statistics: dict[str, SiteStatistics]) -> dict[str, Array]:
    return {
        name: array for site in plan.sites for name, array in statistics[site.site].arrays(site.folder).items()
    }  # fmt: skip


def checked_entry(entry: Any, where: str) -> Entry:
    """Return an entry of the manifest; HarvestError when it has another form than was written."""
    if (
        isinstance(entry, dict)
        and _fits(entry, _OF_ENTRY)
        and all(_fits(shard, _OF_SHARD) for shard in entry["shards"])
    ):
        return entry
    raise HarvestError(f"{where} is damaged: it must say what each part holds, got {str(entry)[:80]!r}")


_OF_ENTRY: Final = {"part": int, "rows": int, "samples": int, "shards": list, "set_aside": list, STATISTICS: str}
_OF_SHARD: Final = {"file": str, "site": str, "rows": int, "bytes": int}


def _fits(said: Any, form: dict[str, type]) -> bool:
    """Return whether an object has fields of these types, numbers being at least 0."""
    if not isinstance(said, dict) or not all(type(said.get(name)) is kind for name, kind in form.items()):
        return False
    return all(0 <= said[name] < 1 << 62 for name, kind in form.items() if kind is int)
