"""Seeded damage to one file of a run: each function changes the file in one way, as a random generator says."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from tensortap.store import names as layout


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size + 1))


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes() or b"\0")
    for _ in range(rng.choice((1, 1, 3))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def flip_end(file: Path, rng: random.Random) -> None:
    """Flip a bit near the end: of Parquet in the footer, which says where everything is and what it means."""
    data = bytearray(file.read_bytes() or b"\0")
    length = int.from_bytes(data[-8:-4], "little") + 20 if file.suffix == ".parquet" else 64
    data[-1 - rng.randrange(min(length, len(data)))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def zero(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at, length = rng.randrange(len(data) + 1), rng.choice((8, 64, 1000))
    data[at : at + length] = bytes(len(data[at : at + length]))
    file.write_bytes(data)


def scramble(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data) + 1)
    data[at : at + 32] = rng.randbytes(len(data[at : at + 32]))
    file.write_bytes(data)


def cut_out(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    at = rng.randrange(len(data) + 1)
    file.write_bytes(data[:at] + data[at + rng.choice((1, 8, 200)) :])


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


def lie_about_length(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[:8] = rng.choice((1 << 40, 0, 1, (1 << 64) - 1)).to_bytes(8, "little")
    file.write_bytes(data)


def special(file: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    file.unlink()
    kind = rng.randrange(5)
    if kind == 4:  # a copy under another name, and nothing under its own
        (file.parent / f"copy-of-{file.name}").write_bytes(content)
    elif kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.symlink_to("/dev/zero")
    elif kind == 2:
        file.symlink_to("/etc/hostname")
    else:
        file.mkdir()


def copy_over(file: Path, rng: random.Random) -> None:
    """Put another file of the run in its place, of the same kind where there is one."""
    run = next(parent for parent in file.parents if (parent / layout.RUN_JSON).exists())
    others = sorted(other for other in run.rglob("*") if other.is_file() and other != file and other.stat().st_size)
    alike = [other for other in others if other.suffix == file.suffix]
    shutil.copyfile(rng.choice(alike or others), file)


def retype(file: Path, rng: random.Random) -> None:
    """Put another value somewhere into a JSON file; of other files flip a bit."""
    if file.suffix != ".json":
        flip(file, rng)
        return
    content = json.loads(file.read_text())
    names = list(content)
    values: list[Any] = [None, -1, 10**30, 1e308, "x", [], {}, [[1]], {"a": {"b": []}}, True, "\x1b[31m", [None]]
    content[rng.choice(names)] = rng.choice(values)
    file.write_text(json.dumps(rng.choice((content, content, [content], "[" * 5000))))


MUTATIONS = (
    truncate, flip, flip_end, zero, scramble, cut_out, delete, lie_about_length, special, copy_over, retype
)  # fmt: skip
