"""SIGKILL at random changes to files: every step that had returned is there, once, bit for bit.

    python tests/store/kills.py 500        # `make kills`

In turn while recording, sealing (tails of a few rows), resuming, compacting, with two ranks, and in the training of a
compiled model. Exits with 1 when a step was lost or doubled, or a file left that compaction does not clear away.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import child
from test_killed import KILLED, assert_whole, leftovers, snapshot

from tensortap.store.compact import compact
from tensortap.store.run import open_run


class Kills:
    """Kills the children of a template process, and looks at what they leave."""

    def __init__(self, template: child.Template, rng: random.Random) -> None:
        self.template = template
        self.rng = rng

    def run(self, most: int, **order: object) -> list[int]:
        """Run an order until it has made a random number of changes; return the steps that had returned."""
        self.template.begin(**order, die_at=self.rng.randint(1, most))
        done = [int(line) for line in self.template.lines() if not line.startswith("pid")]
        assert self.template.exit_code in (0, KILLED), f"it ended with {self.template.exit_code}"
        return done

    def recording(self, path: Path) -> None:
        """One launch, sealing included."""
        promised = self.run(150, do="write", path=str(path), seed=1, start=0, stop=15, resume=False)
        self.check(path, promised, 1)

    def resuming(self, path: Path) -> None:
        """Three launches, each of which is killed."""
        promised: list[int] = []
        for launch in range(3):
            start = open_run(path).last_step + 1 if (path / "run.json").exists() else 0
            order = {"do": "write", "path": str(path), "seed": 2, "start": start, "stop": start + 8}
            promised += self.run(120, **order, resume=launch > 0)
        self.check(path, promised, 2)

    def compacting(self, path: Path) -> None:
        """A run with tails, compacted twice, killed both times."""
        self.template.begin(do="write", path=str(path), seed=3, start=0, stop=15, resume=False, close=False)
        promised = [int(line) for line in self.template.lines() if not line.startswith("pid")]
        wanted = snapshot(open_run(path))
        for _ in range(2):
            self.run(60, do="compact", path=str(path))
            assert snapshot(open_run(path)) == wanted, "compaction lost or doubled something"
        self.check(path, promised, 3)

    def two_ranks(self, path: Path) -> None:
        """Two ranks of one launch: one is killed, the other one goes on."""
        promised = {}
        for rank in (0, 1):
            order = {"do": "write", "path": str(path), "seed": 4, "start": 0, "stop": 10, "resume": False, "rank": rank}
            promised[rank] = self.run(120 if rank else 10**6, **order)
        run = open_run(path)
        for rank, steps in promised.items():
            rows = run.table(columns=["step", "rank"]).to_pylist()
            assert set(steps) <= {row["step"] for row in rows if row["rank"] == rank}, f"rank {rank} lost steps"
        before = snapshot(run)
        compact(path)
        assert snapshot(open_run(path)) == before and leftovers(path) == []

    def compiled_training(self, path: Path) -> None:
        """A compiled model under a tap, killed and resumed."""
        promised: list[int] = []
        for launch in range(2):
            start = open_run(path).last_step + 1 if (path / "run.json").exists() else 0
            order = {"do": "train", "path": str(path), "start": start, "stop": start + 10}
            promised += self.run(150, **order, resume=launch > 0)
        if not promised:
            return
        run = open_run(path)
        rows = run.table(columns=["step", "site", "port", "slot", "call", "phase"]).to_pylist()
        assert set(promised) <= set(run.steps), f"lost {sorted(set(promised) - set(run.steps))}"
        assert len(set(map(str, rows))) == len(rows), "rows are there twice"
        compact(path)
        assert open_run(path).table().num_rows == len(rows) and leftovers(path) == []

    def check(self, path: Path, promised: list[int], seed: int) -> None:
        """Every step that had returned is there, before and after compaction, and nothing is left behind."""
        if not (path / "run.json").exists():
            assert not promised, "a run that never began has promised steps"
            return
        steps = open_run(path).steps
        assert set(promised) <= set(steps), f"lost {sorted(set(promised) - set(steps))}"
        assert_whole(open_run(path), seed, steps)
        compact(path)
        assert_whole(open_run(path), seed, steps)
        assert leftovers(path) == [], f"left behind: {leftovers(path)}"


def main(count: int) -> int:
    """Kill as often, and print what came of it."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as base:
        template = child.Template(Path(base))
        kills = Kills(template, random.Random(seed))
        ways: list[tuple[Callable[[Path], None], int]] = [
            (kills.recording, 1), (kills.resuming, 3), (kills.compacting, 2), (kills.two_ranks, 1),
            (kills.compiled_training, 2),
        ]  # fmt: skip
        done = number = 0
        while done < count:
            way, times = ways[number % len(ways)] if number % 20 < 5 else ways[number % (len(ways) - 1)]
            path = Path(base, f"run{number}")
            try:
                way(path)
                verdicts[way.__name__] += times
            except Exception as error:
                verdicts["FAILED"] += 1
                print(f"kill {done}, {way.__name__}: {type(error).__name__}: {error}", flush=True)
            shutil.rmtree(path, ignore_errors=True)
            done, number = done + times, number + 1
        template.close()
    print(f"{done} kills: {dict(verdicts)}")
    return 1 if verdicts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 500))
