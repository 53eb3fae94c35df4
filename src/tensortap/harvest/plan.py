"""The plan of a harvest: what is kept, and how work is cut into parts."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tensortap.errors import HarvestError
from tensortap.harvest.dtypes import NATIVE
from tensortap.version import __version__

FORMAT: Final = "tensortap-harvest"
SCHEMA: Final = 1
_UNITS: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_PARTS: Final = 16  # a data set of known length is cut into at least so many, so that little is lost with a worker
_SMALL: Final = 1_000_000  # bytes below which a shard is not worth a file of its own
_BLOCK: Final = 2_000_000  # bytes that are gathered of one site and shard before they are written
_BLOCKS: Final = 128_000_000  # and of all sites and shards of a part together
MOST_ROWS_IN_BLOCK: Final = 8192
_OTHER: Final = {"model": "another model", "data": "other data", "options": "other options"}
_HINTS: Final = {"data": "Data must come in the same order each time: a loader needs shuffle=False. "}


@dataclass(frozen=True, slots=True)
class SitePlan:
    """A site as it is written: its name, its folder, how wide a row is and of what type."""

    site: str
    folder: str
    width: int
    dtype: str
    indices: int = 0  # how many dimensions are named with each row; 0: all are there


@dataclass(frozen=True, slots=True)
class HarvestPlan:
    """Everything that decides what is written, as `harvest.json` has it."""

    sites: tuple[SitePlan, ...]
    batches_per_part: int
    shards_per_part: int
    block_rows: int
    seed: int
    fingerprints: Mapping[str, str]  # of the model, the data and the options
    about: Mapping[str, Any]  # the model, the data and the options as people read them

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {"format": FORMAT, "schema": SCHEMA, "tensortap": __version__, **dataclasses.asdict(self)}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> HarvestPlan:
        """Return the plan that `to_json` gave."""
        if data.get("format") != FORMAT:
            raise HarvestError("harvest.json must have been written by tensortap.harvest(); it was not")
        try:
            if data["schema"] > SCHEMA:
                raise HarvestError(f"harvest.json has schema {data['schema']}, newer than this tensortap {__version__}")
            sites = tuple(_checked(SitePlan(**site)) for site in data["sites"])
            names = [field.name for field in dataclasses.fields(cls) if field.name != "sites"]
            plan = cls(sites=sites, **{name: data[name] for name in names})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HarvestError(f"harvest.json is damaged: {type(error).__name__}: {error}") from error
        if not sites or not all(isinstance(said, Mapping) for said in (plan.fingerprints, plan.about)):
            raise HarvestError("harvest.json is damaged: it must name sites, fingerprints and what it is about")
        return plan

    @property
    def left_out(self) -> tuple[str, ...]:
        """The sites without a dimension for samples, of which nothing is kept."""
        return tuple(self.about.get("left_out", ()))

    def check_same(self, fingerprints: Mapping[str, str], where: str) -> None:
        """Raise if a harvest with other fingerprints is to be continued here."""
        for what, before in self.fingerprints.items():
            if (now := fingerprints[what]) != before:
                raise HarvestError(
                    f"{where} was begun with {_OTHER[what]}: the fingerprint of the {what} is {before}, now it is "
                    f"{now}. {_HINTS.get(what, '')}Give another folder, or overwrite=True (--overwrite) to begin again"
                )


def _checked(site: SitePlan) -> SitePlan:
    """Return a site as it is; ValueError when it has another form than was written, or a folder elsewhere."""
    numbers = all(type(number) is int and 0 <= number < 1 << 31 for number in (site.width, site.indices))
    if not isinstance(site.site, str) or not numbers or not site.width or site.dtype not in NATIVE:
        raise ValueError(f"{site} is not a site")
    if folder_name(str(site.folder)) != site.folder:
        raise ValueError(f"{site.folder!r} is not the folder of a site")
    return site


def cut_into_parts(bytes_per_batch: float, batches: int | None, shard_size: int, spread: int) -> tuple[int, int]:
    """Return how many batches make a part, and how many shards of each site it fills.

    >>> cut_into_parts(bytes_per_batch=1e6, batches=None, shard_size=32_000_000, spread=8)
    (256, 8)
    >>> cut_into_parts(bytes_per_batch=1e6, batches=160, shard_size=32_000_000, spread=8)
    (10, 8)
    """
    wanted = max(1, round(shard_size * spread / max(bytes_per_batch, 1.0)))
    if batches is not None:
        wanted = min(wanted, longest_part(batches))
    return wanted, max(1, min(spread, round(wanted * bytes_per_batch / min(shard_size, _SMALL))))


def longest_part(batches: int) -> int:
    """Return the most batches that make a part of a data set of so many."""
    return max(1, -(-batches // _PARTS))


def rows_in_block(bytes_per_row: int, shards: int = 1) -> int:
    """Return how many rows are gathered before they are written, of each of the shards that are filled at a time.

    >>> rows_in_block(768), rows_in_block(768, shards=400), rows_in_block(16_000_000)
    (2604, 416, 1)
    """
    size = min(_BLOCK, _BLOCKS // max(shards, 1))
    return max(1, min(MOST_ROWS_IN_BLOCK, size // max(bytes_per_row, 1)))


def folder_name(site: str, taken: Sequence[str] = ()) -> str:
    """Return a site's folder: its name without what file systems and globs treat specially.

    >>> folder_name("blocks.6.mlp:output[0]")
    'blocks.6.mlp-output_0'
    """
    path = f"root{site}" if site.startswith(":") else site
    name = re.sub(r"[^\w.\-]+", "_", path.replace(":", "-")).strip("_.-")
    return name if name not in taken else f"{name}-{hashlib.sha256(site.encode()).hexdigest()[:6]}"


def checked_seed(seed: Any) -> int:
    """Return a seed; HarvestError where it is not a whole number of at least 0."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise HarvestError(f"seed must be a whole number of at least 0, got {seed!r}: write seed=0")
    return int(seed)


def number_of_bytes(size: int | str) -> int:
    """Return a size in bytes.

    >>> number_of_bytes("32MB"), number_of_bytes(1024)
    (32000000, 1024)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size).lower())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise HarvestError(f'a size must be a number of bytes or text such as "256MB", got {size!r}')
    return int(float(found[1]) * _UNITS[found[2]])
