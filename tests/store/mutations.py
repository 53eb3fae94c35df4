"""Seeded damage to run folders, and a verdict on what every reader makes of it.

    python tests/store/mutations.py 10000                    # `make fuzz`: as many mutations, from another seed each
    python tests/store/mutations.py 100 --from 500           # a hundred, from seed 500 on: a long row goes in pieces
    python tests/store/mutations.py 10000 --seconds 400      # as many as that allows
    python tests/store/mutations.py 100 --frameworks         # of trainings of Keras, JAX and DDP too
    python tests/store/mutations.py 100 --run runs/exp1      # damage copies of this run, recorded by whatever there is

Four verdicts are right: the same rows as before, refused with a reason, salvaged and counted, harmless. A traceback, a
hang, a row that was never written, a lost row that is not counted, or a lost row of a file that nothing happened to is
none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
import framework_runs
from file_damage import MUTATIONS

import tensortap as tt
from tensortap.errors import TensortapError
from tensortap.record.recorder import Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.store import names as layout
from tensortap.store import queries
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.store.tail import read_checks
from tensortap.types import Place

SECONDS = 30
REQUESTS = 4  # of the viewer's, each time others
ORIGINAL: list[Path] = []  # the run that was damaged, as it was
SITE: list[str] = []  # one of its sites
random_id = layout.new_id
Verdict = str


def record(path: Path, names: tuple[str, ...] = ("a", "naïve.b"), launches: int = 3, steps: int = 4) -> Path:
    """Record a run in several launches of which the last is killed, with all of its checksums; where it lies."""
    start = 0
    numbered = itertools.count(1)
    layout.new_id = lambda: f"{next(numbered):032x}"  # the same names every time, so that a seed means the same
    for launch in range(launches):
        keep = [tt.stats(), tt.histogram(), tt.full()]
        folder = RunFolder(path, resume=True)
        recorder = Recorder([tt.probe("**", keep=keep)], start=start, clock=lambda: 1e9)
        for number in range(start, start + steps):
            for name in names:
                x = np.arange(4.0) + number + len(name)
                recorder.observe(recorder.point(Place(name), 1), buffer_of(x), x)
            [step] = recorder.close({"loss": float(number)})
            folder.append(step)
        folder.tick()
        if launch == launches - 1:
            shutil.copytree(path, path.with_name("killed"))
        folder.close()
        start += steps
    layout.new_id = random_id
    return path.with_name("killed")


class Fuzz:
    """A run, its rows by file, and what to do with damaged copies of it."""

    def __init__(self, run: Path, *, checksums: bool) -> None:
        self.run = run
        self.checksums = checksums
        self.files = sorted(
            str(p.relative_to(run)) for p in run.rglob("*") if p.is_file() and p.name != "_lock" and p.stat().st_size
        )
        self.rows = Counter(rows_of(open_run(run)))
        judged = [name for name in self.files if name != layout.RUN_JSON] if checksums else []
        self.kept = {name: self._rows_without(name) for name in judged}
        self.site = open_run(run).sites[0]
        self.commands = [command(name) for name in COMMANDS]

    def verdict(self, seed: int, folder: Path) -> Verdict:
        """Damage one file of a copy and read it in every way; raise AssertionError when that goes wrong."""
        rng = random.Random(seed)
        ORIGINAL[:], SITE[:] = [self.run], [self.site]
        name, mutate = rng.choice(self.files), rng.choice(MUTATIONS)
        copy = Path(shutil.copytree(self.run, folder / "run"))
        mutate(copy / name, rng)
        where = f"seed {seed}: {mutate.__name__} {name}"
        with limited(where), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return f"{self._read(copy, name, rng, where)}"
            except AssertionError:
                raise
            except Exception as error:
                error.add_note(where)
                raise

    def _read(self, copy: Path, name: str, rng: random.Random, where: str) -> Verdict:
        try:
            opened = open_run(copy)
            before = Counter(rows_of(opened))
        except TensortapError:
            assert not (copy / "run.json").is_file() or name == "run.json", f"{where}: refused whole"
            rng.choice(self.commands)(copy, where)
            return "refused"
        counts = opened.counts
        if name == layout.RUN_JSON:
            same = json.loads((copy / name).read_bytes()) == json.loads((self.run / name).read_bytes())
            assert counts or same or not self.checksums, f"{where}: run.json was changed, and nothing is counted"
        self._judge(before, counts, name, where, copy)
        if rng.random() < 0.5:
            rng.choice(self.commands)(copy, where)
        self._write(copy, before, rng.choice((compact, resume, None)), where)
        return "right" if before == self.rows and not counts else "salvaged" if counts else "harmless"

    def _write(self, copy: Path, before: Counter[str], change: Callable[[Path], object] | None, where: str) -> None:
        """Compact or resume the damaged copy: no row that could be read before may be lost by that."""
        if change is None:
            return
        change(copy)
        with contextlib.suppress(TensortapError):
            after = Counter(rows_of(open_run(copy)))
            assert not before - after, f"{where}: {sum((before - after).values())} rows lost by {change.__name__}"

    def _judge(self, rows: Counter[str], counts: dict[str, int], name: str, where: str, copy: Path) -> None:
        fewer = sum(self.rows.values()) - sum(rows.values())
        unknowable = self._unknowable(name, copy / name)
        assert fewer <= 0 or counts or unknowable, f"{where}: {fewer} rows are gone, and nothing is counted"
        if self.checksums:
            assert not rows - self.rows, f"{where}: rows that were never written"
            good = self.kept.get(name, self.rows)
            assert not good - rows, f"{where}: {sum((good - rows).values())} good rows of other files lost"

    def _unknowable(self, name: str, file: Path) -> bool:
        """Whether nobody can know: a deleted tail; the message that was being written when the process was killed,
        whose checksum comes after it; of version 1, which has neither checksums nor names in its files, a cut that
        looks like a torn end, and another whole segment in a segment's place.
        """
        if not file.exists():
            return not self.checksums or "seg-" not in name
        if not file.is_file():
            return False
        whole, rest = (self.run / name).read_bytes(), file.read_bytes()
        if self.checksums:
            covered = max((check.end for check in read_checks(self.run / name)), default=len(whole))
            return "_tail-" in name and covered < len(whole) and rest[:covered] == whole[:covered]
        if "seg-" in name and rest in [(self.run / other).read_bytes() for other in self.files if "seg-" in other]:
            return True
        return whole.startswith(rest) or (len(rest) < len(whole) and rest.startswith(whole[: last_message(whole)]))

    def _rows_without(self, name: str) -> Counter[str]:
        """The rows of all files but one."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(self.run, Path(folder, "run")))
            (copy / name).unlink()
            return Counter(rows_of(open_run(copy)))


def last_message(tail: bytes) -> int:
    """Where the last message of a tail begins; 0 when it is no tail."""
    source, starts = pa.BufferReader(tail), [0]
    with contextlib.suppress(pa.ArrowException, OSError, EOFError):
        while source.tell() < len(tail):
            starts.append(source.tell())
            pa.ipc.read_message(source)
    return starts[-1]


def rows_of(run: tt.Run) -> Iterator[str]:
    """Every record, metric, event and tensor, as text."""
    reads = (queries.table, queries.metrics, queries.events)
    for table in run.snapshots.read(lambda snapshot: [read(snapshot) for read in reads]):
        yield from map(str, table.to_pylist())
    yield from (f"{key} {array.tobytes().hex()}" for key, array in run.tensors())


def resume(path: Path) -> None:
    """Go on with a run, if that is possible."""
    with contextlib.suppress(TensortapError):
        RunFolder(path, resume=True).close()


@contextlib.contextmanager
def limited(where: str) -> Iterator[None]:
    """Fail when something takes too long."""

    def late(*_: object) -> None:
        raise AssertionError(f"{where}: it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


COMMANDS = (
    "api", "show", "check", "findings", "diff", "other", "merged", "sql", "export", "doctor", "explain", "json",
    "report",
)  # fmt: skip


def command(name: str) -> Callable[[Path, str], None]:
    """A way to read a run; it may refuse, with a reason."""
    from tensortap.cli.app import cli as entry
    from tensortap.view.api.service import Api

    def api(path: Path, where: str) -> None:
        with contextlib.suppress(TensortapError):
            service = Api(str(path))
            try:
                requests = [(path, {}) for path in ("runs", "run", "heat", "metrics", "cost", "depth", "findings")]
                requests += [("site", {"site": SITE[0]}), ("tensor", {"site": SITE[0], "step": "3"})]
                requests += [("diff", {"a": path.name, "b": path.name})]
                for request, given in random.Random(where).sample(requests, REQUESTS):
                    with contextlib.suppress(TensortapError, FileNotFoundError):
                        service.encoded(f"/api/{request}", given)
            finally:
                service.close()

    def cli(*arguments: str) -> Callable[[Path, str], None]:
        def run(path: Path, where: str) -> None:
            given = [word.replace("RUN", str(path)) for word in arguments]
            result = CliRunner().invoke(entry, given, env={"TENSORTAP_DEBUG": "1"})
            unexpected = result.exception is not None and not isinstance(result.exception, SystemExit)
            assert not unexpected and result.exit_code in (0, 1, 2), (
                f"{where}: {given}: {result.exit_code} {result.output}"
            )

        return run

    def read(how: Callable[[Any], object]) -> Callable[[Path, str], None]:
        def run(path: Path, where: str) -> None:
            with contextlib.suppress(TensortapError):
                how(open_run(path))

        return run

    return {
        "api": api,
        "show": cli("show", "RUN"),
        "check": cli("check", "RUN"),
        "findings": read(lambda run: run.findings()),
        "diff": read(lambda run: tt.diff(run, run)),
        "other": read(lambda run: tt.diff(run, open_run(ORIGINAL[0]), bitwise=True)),
        "merged": read(lambda run: run.merged(("ranks", "steps")).to_pylist()),
        "doctor": cli("doctor", "RUN"),
        "explain": cli("explain", "RUN"),
        "json": cli("show", "RUN", "--json"),
        "report": cli("report", "RUN", "-o", "RUN.html"),
        "sql": read(lambda run: run.sql("select count(*), max(step) from records")),
        "export": cli("export", "RUN", "--to", "csv", "-o", "RUN.csv"),
    }[name]


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # compaction waits for a disk


def main(count: int, first: int, runs: list[str], frameworks: bool, seconds: float) -> int:
    """As many mutations, each of its own seed, or as many as time allows; the verdicts by number, and every failure."""
    end = time.monotonic() + seconds
    verdicts: Counter[str] = Counter()
    print(f"seeds from {first}", flush=True)  # known also after a crash
    with tempfile.TemporaryDirectory(dir=MEMORY) as base:
        if frameworks:
            runs = [*runs, *map(str, framework_runs.recorded(Path(base, "frameworks"), [*framework_runs.FRAMEWORKS]))]
        subjects = [Fuzz(Path(run), checksums=True) for run in runs]
        subjects += both_versions(Path(base)) if frameworks or not runs else []
        for seed in itertools.takewhile(lambda _: time.monotonic() < end, range(first, first + count)):
            if sum(verdicts.values()) % 100 == 99:
                print(dict(verdicts), flush=True)
            with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
                try:
                    verdicts[subjects[seed % len(subjects)].verdict(seed, Path(folder))] += 1
                except Exception as error:
                    verdicts["FAILED"] += 1
                    subject = subjects[seed % len(subjects)].run.name
                    print(f"{subject}: {type(error).__name__}: {error} {getattr(error, '__notes__', '')}", flush=True)
    print(f"seeds {first} to {first + verdicts.total() - 1}: {dict(verdicts)}")
    return 1 if verdicts["FAILED"] else 0


def both_versions(base: Path) -> list[Fuzz]:
    """A run with checksums, and one of version 1 without."""
    old = shutil.copytree(Path(__file__).parent / "fixtures" / "v1", base / "v1")
    return [Fuzz(record(base / "new" / "run"), checksums=True), Fuzz(Path(old), checksums=False)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--from", dest="first", type=int, default=None, metavar="SEED")
    parser.add_argument("--run", action="append", default=[], help="a run that was recorded by this version")
    parser.add_argument("--frameworks", action="store_true", help="record trainings of frameworks and damage those too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    given = parser.parse_args()
    start = random.randrange(1 << 30) if given.first is None else given.first
    sys.exit(main(given.count, start, given.run, given.frameworks, given.seconds))
