"""The names of the files in a run folder."""

from __future__ import annotations

import re
import uuid
from typing import Final, NamedTuple

SCHEMA: Final = 1
RUN_JSON: Final = "run.json"
HARVEST_JSON: Final = "harvest.json"  # in the folder of a harvest, which is no run
RANK_JSON: Final = "_rank.json"
LOCK: Final = "_lock"
COMPACT_LOCK: Final = "_compact"
HASHES: Final = "_hashes"  # what a rank posts for others while a trigger compares replicas
METRICS: Final = "metrics"
EVENTS: Final = "events"
DAMAGED: Final = ".damaged"  # ends the names of files that were kept aside
DAMAGED_RUN_JSON: Final = f"{RUN_JSON}{DAMAGED}"

_TAIL = re.compile(r"_tail-([0-9a-f]+)\.arrows")
_SEGMENT = re.compile(r"seg-([0-9a-f]+)\.parquet")
_RANK = re.compile(r"rank=(\d+)")
# The last is what safetensors writes to before it renames.
_HIDDEN = re.compile(
    r"\.(run\.json|_rank\.json|seg-[0-9a-f]+\.parquet|step-[0-9-]+-[0-9a-f]+\.safetensors)\.[0-9a-f]{8,32}"
    r"|\.tmp[0-9A-Za-z]{6}"
)
_TENSORS = re.compile(r"step-(\d+)-(\d+)-([0-9a-f]+)\.safetensors")


class TensorFile(NamedTuple):
    """A file of raw tensors: the steps it covers."""

    name: str
    first: int
    last: int


def new_id() -> str:
    """Return a unique name."""
    return uuid.uuid4().hex


def rank_folder(rank: int) -> str:
    """Return where a rank's records lie."""
    return f"rank={rank}"


def metrics_folder(rank: int) -> str:
    """Return where a rank's metrics lie."""
    return f"{METRICS}/rank={rank}"


def events_folder(rank: int) -> str:
    """Return where a rank's events lie."""
    return f"{EVENTS}/rank={rank}"


def tensors_folder(rank: int) -> str:
    """Return where a rank's raw tensors lie."""
    return f"rank={rank}/tensors"


def rank_folders(rank: int) -> tuple[str, str, str, str]:
    """Return the folders of a rank: its records, metrics, events and tensors."""
    return rank_folder(rank), metrics_folder(rank), events_folder(rank), tensors_folder(rank)


def hidden_name(name: str) -> str:
    """Return how a file is called until it is whole."""
    return f".{name}.{new_id()[:8]}"


def visible_name(name: str) -> str:
    """Return what a hidden file is called once it is whole; other names as they are.

    >>> visible_name(".part-000001.json.0a1b2c3d"), visible_name("part-000001.json")
    ('part-000001.json', 'part-000001.json')
    """
    found = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}", name)
    return found[1] if found else name


def is_hidden_name(name: str) -> bool:
    """Return whether a file has the name of one that is not whole yet."""
    return bool(_HIDDEN.fullmatch(name))


def tail_name(ident: str) -> str:
    """Return an Arrow stream that is being appended to."""
    return f"_tail-{ident}.arrows"


def segment_name(ident: str) -> str:
    """Return a sealed segment. It carries the id of the tail it was sealed from."""
    return f"seg-{ident}.parquet"


def tensors_name(first: int, last: int, ident: str) -> str:
    """Return a sealed file of raw tensors of the steps `first` to `last`."""
    return f"step-{first:09d}-{last:09d}-{ident}.safetensors"


def tail_id(name: str) -> str | None:
    """Return the id in a tail's name."""
    return _first(_TAIL, name)


def segment_id(name: str) -> str | None:
    """Return the id in a segment's name."""
    return _first(_SEGMENT, name)


def rank_of(name: str) -> int | None:
    """Return the rank in a folder's name."""
    found = _first(_RANK, name)
    return None if found is None else int(found)


def tensor_file(name: str) -> TensorFile | None:
    """Return the steps in the name of a file of raw tensors."""
    found = _TENSORS.fullmatch(name)
    return TensorFile(name, int(found[1]), int(found[2])) if found else None


def tensors_id(name: str) -> str | None:
    """Return the id in the name of a file of raw tensors."""
    found = _TENSORS.fullmatch(name)
    return found[3] if found else None


def _first(pattern: re.Pattern[str], name: str) -> str | None:
    found = pattern.fullmatch(name)
    return found[1] if found else None
