"""What is being written and does not count yet: a part's unfinished files, and notes for the next try."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tensortap.errors import HarvestError, TensortapError
from tensortap.store.files import Files, load_json

PARTIAL: Final = ".partial"
_STAYS: Final = "what is committed stays. {}, run the same command again, which goes on there"


@contextlib.contextmanager
def storing(where: object) -> Iterator[None]:
    """Turn errors of writing inside the block into one that says what they mean for the harvest."""
    try:
        yield
    except TensortapError:
        raise
    except Exception as error:  # object stores have errors of their own, which are no OSError
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HarvestError(f"{where} is full: {_STAYS.format('Make room')}") from error
        what = f"{type(error).__name__}: {error}"
        raise HarvestError(f"cannot write to {where} ({what}): {_STAYS.format('When it can be written')}") from error


@contextlib.contextmanager
def reading(where: object) -> Iterator[None]:
    """Turn errors of reading inside the block into one that names the place; a file that is missing is none of them."""
    try:
        yield
    except (TensortapError, FileNotFoundError, MemoryError):
        raise
    except Exception as error:  # object stores have errors of their own, which are no OSError
        raise HarvestError(f"{where} cannot be read ({type(error).__name__}: {error})") from error


class Staging:
    """The folder `.partial`: files on the local disk, notes beside the harvest, where every worker finds them."""

    def __init__(self, files: Files) -> None:
        self._files = files

    @contextlib.contextmanager
    def folder(self, part: int) -> Iterator[Path]:
        """Give a local folder for a part's unfinished files; what an earlier try left is removed."""
        base = self._files.staging() / PARTIAL
        for old in base.glob(f"{part_name(part)}.*") if base.is_dir() else ():
            shutil.rmtree(old, ignore_errors=True)
        folder = base / f"{part_name(part)}.{uuid.uuid4().hex[:8]}"
        self._files.make_folder(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def note(self, name: str) -> dict[str, Any]:
        """Return a small note that an earlier try left; empty where there is none."""
        try:
            return dict(load_json(self._files.read(f"{PARTIAL}/{name}.json")))
        except (OSError, ValueError):
            return {}

    def write_note(self, name: str, value: dict[str, Any]) -> None:
        """Leave a note for the next try."""
        with storing(self._files):
            self._files.write(f"{PARTIAL}/{name}.json", json.dumps(value).encode())

    def remove_note(self, name: str) -> None:
        """Remove a note."""
        with storing(self._files):
            self._files.remove(f"{PARTIAL}/{name}.json")


def part_name(part: int) -> str:
    """Return what the files of a part are called."""
    return f"part-{part:06d}"
