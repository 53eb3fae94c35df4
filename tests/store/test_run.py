"""Reading a run: filters, series, SQL, folding, and what others read without us."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.dataset as ds
import pytest

from tensortap.errors import PatternError, RunError
from tensortap.record.counters import Counters
from tensortap.record.recorder import Recorder
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.histogram import dense, edges
from tensortap.reduce.reducers import histogram, quantiles, stats
from tensortap.reduce.statistics import COLUMNS, COUNTS, NUMBERS
from tensortap.reduce.summary import summarize
from tensortap.select.probes import probe
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import Run, open_run
from tensortap.types import Place

PLACES = [
    Place("stem", "input"), Place("stem"), Place("blocks.0.mlp"), Place("blocks.1.mlp"),
    Place("blocks.1.attn/matmul#0", "output", "", "matmul"), Place("head", "output", "[0]"),
    Place("head", "output", "[1]"),
]  # fmt: skip
STEPS = 12


def value(place: Place, step: int, call: int, rank: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng((PLACES.index(place), step, call, rank))
    x = rng.normal(rank, 1 + step, size=(4, 5 + step)).astype(np.float32)
    x[0, 0] = [0.0, np.nan, np.inf, -np.inf][(step + call) % 4]
    return x


def largest(x: np.ndarray[Any, Any]) -> float:
    return float(np.nanmax(x))


def write(path: Path, rank: int, sealed: int) -> Writer:
    """A rank's part of a run: two lives are sealed, and the last steps still in a tail when `sealed` < STEPS."""
    counters, writer = Counters(), None
    recorder = Recorder([probe("**", keep=[histogram(), quantiles(0.5), largest])], rank=rank, counters=counters)
    for part in (range(sealed // 2), range(sealed // 2, sealed), range(sealed, STEPS)):
        if not part:
            continue
        run = RunFolder(path, rank=rank, launch="test", resume=part.start > 0, counters=counters)
        writer = Writer([run], counters=counters, release=recorder.release)
        for number in part:
            for place in PLACES:
                for call in range(2 if place.site == "stem" else 1):
                    x = value(place, number, call, rank)
                    recorder.observe(recorder.point(place, 1), buffer_of(x), x)
            again = value(PLACES[2], number, 0, rank)
            recorder.observe(recorder.point(PLACES[2], 1), buffer_of(again), again, recomputed=True)
            for step in recorder.close({"loss": number / 2}, phase="train" if number % 2 else "eval"):
                writer.put(step)
        if part.stop < STEPS or sealed >= STEPS:
            writer.close()
    assert writer is not None
    return writer


@pytest.fixture(scope="module", params=["live", "sealed", "compacted"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run of two ranks: partly in tails, sealed in segments, and compacted."""
    path = tmp_path_factory.mktemp(request.param) / "run"
    writers = [write(path, rank, 8 if request.param == "live" else STEPS) for rank in range(2)]
    if request.param == "compacted":
        compact(path)
    yield open_run(path)
    for writer in writers:
        writer.close()


ROWS = STEPS * 2 * (len(PLACES) + 2 + 1)


def test_the_columns_are_the_contracts(run: Run) -> None:
    """A table has exactly the columns of the contract, in order, and `numbers`."""
    table = run.table()
    assert table.column_names == [*COLUMNS, "numbers"] and table.num_rows == ROWS
    assert run.table(columns=["mean", "site"]).column_names == ["mean", "site"]


def test_rows_come_by_step_rank_and_execution(run: Run) -> None:
    """Rows are in the order in which things happened, and carry what was seen."""
    table = run.table()
    keys = list(zip(*(table[name].to_pylist() for name in ("step", "rank", "seq")), strict=True))
    assert keys == sorted(keys)
    assert set(table["phase"].to_pylist()) == {"train", "eval"}
    assert set(table["op"].to_pylist()) == {"", "matmul"}
    assert set(table["reason"].to_pylist()) == {"every(1)"}


def test_every_record_is_what_was_seen(run: Run) -> None:
    """Read back one by one, records have the statistics and histograms of the tensors."""
    calls = 0
    for record in run.records(steps=(3, 6)):
        x = value(record.place, record.step, record.call, record.rank)
        known = summarize(x)
        for name in ("dtype", "shape", *NUMBERS):
            assert record[name] == known[name], name
        assert record["hist_offset"] == known.hist_offset
        assert record["hist_counts"].tolist() == known.hist_counts.tolist()  # type: ignore[union-attr]
        assert record.numbers == {"largest": largest(x), "q0.5": known.quantile(0.5)}
        calls += 1
    assert calls == ROWS // STEPS * 3


@pytest.mark.parametrize(
    ("sites", "ports", "count"),
    [
        ("stem", None, 2), ("stem:input", None, 2), ("stem:*", None, 4), (["stem", "blocks.0.mlp"], None, 4),
        ("blocks.*.mlp", None, 3), ("blocks.**", None, 4), ("**", None, 8), (None, "input", 2),
        (None, ["input", "output"], 10), ("op:matmul", None, 1), ("head:output[1]", None, 1), ("head", None, 2),
        ("blocks.1.attn/matmul#0", None, 1), ("re:blocks.[01].mlp", None, 3), ("**:*", "input", 2),
    ],
)  # fmt: skip
def test_sites_and_ports_are_chosen_by_pattern(run: Run, sites: Any, ports: Any, count: int) -> None:
    """Patterns choose as they do in a probe; ports narrow them."""
    assert run.table(sites, ports).num_rows == count * 2 * STEPS


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        (3, [3]), ((2, 5), [2, 3, 4]), ([1, 7, 100], [1, 7]), (slice(None, 3), [0, 1, 2]),
        (slice(9, None), [9, 10, 11]), (slice(0, 10, 4), [0, 4, 8]), (slice(1, None, 5), [1, 6, 11]),
        (range(2, 8, 3), [2, 5]), ([], []),
        (slice(20, 30), []), ((2, 5, 7), [2, 5, 7]), (np.int64(3), [3]),
    ],
    ids=str,
)  # fmt: skip
def test_steps_are_chosen_by_number_range_list_or_slice(run: Run, steps: Any, chosen: list[int]) -> None:
    """A number, a pair, a list, a range or a slice of steps."""
    assert sorted(set(run.table(steps=steps, columns=["step"])["step"].to_pylist())) == chosen


def test_what_is_not_there_is_named_with_what_is(run: Run) -> None:
    """Wrong sites, columns, statistics and folds are errors with the nearest names."""
    for ask, text in [
        (lambda: run.table("blocks.0.mpl"), "matches nothing in this run.*'blocks.0.mlp:output'"),
        (lambda: run.table(columns=["maen"]), "no column 'maen'. Did you mean 'mean'"),
        (lambda: run.series("blocks.0.mlpp", "std"), "no records of 'blocks.0.mlpp'.*'blocks.0.mlp:output'"),
        (lambda: run.series("stem", "sdt"), "no statistic 'sdt'. Did you mean 'std'"),
        (lambda: run.series("stem", "q7"), "no statistic 'q7'"),
        (lambda: run.series("head", "std"), r"several places: say which of head:output\[0\], head:output\[1\]"),
        (lambda: run.merged("rank"), "over= must be ranks, steps or calls, got 'rank'.*Did you mean 'ranks'"),
        (lambda: run.sql("select nothing from records"), "nothing.*The tables are records"),
        (lambda: run.table(steps=slice(5, 1, -1)), "must count upwards"),
    ]:
        with pytest.raises((RunError, PatternError), match=f"(?s){text}"):
            ask()  # type: ignore[no-untyped-call]


def test_sites_and_steps_are_known(run: Run) -> None:
    """Sites come in order of execution, with ports and slots."""
    assert run.sites == [str(place) for place in PLACES]
    assert run.steps == list(range(STEPS)) and run.ranks == [0, 1] and run.last_step == STEPS - 1
    assert run.metrics().to_pydict()["value"] == [step / 2 for step in range(STEPS) for _ in range(2)]
    assert run.counts == {} and repr(run).startswith("<Run ")


def whole(place: Place, step: int) -> np.ndarray[Any, Any]:
    calls = 2 if place.site == "stem" else 1
    return np.concatenate([value(place, step, call, rank).ravel() for call in range(calls) for rank in range(2)])


@pytest.mark.parametrize("stat", [*NUMBERS, "nonfinite", "q0.5", "q1", "q0.25"])
def test_a_series_folds_calls_and_ranks(run: Run, stat: str) -> None:
    """One value a step: that of all calls and ranks together, and recomputed calls do not count again."""
    for place in (PLACES[1], PLACES[2]):
        series = run.series(place.site, stat)
        assert series.steps.tolist() == list(range(STEPS))
        for step, got in zip(series.steps, series.values, strict=True):
            known = summarize(whole(place, int(step)))
            if stat == "nonfinite":
                wanted: float = known.nan + known.posinf + known.neginf
            elif stat == "absmax":
                wanted = max(abs(known.min), abs(known.max))
            else:
                wanted = known.quantile(float(stat[1:])) if stat[0] == "q" else known[stat]
            assert got == pytest.approx(wanted, rel=1e-6, abs=1e-5), (place, step)


def test_a_series_of_one_rank_call_or_own_number(run: Run) -> None:
    """A series can be narrowed to a rank and a call, and a function's own numbers have one too."""
    for stat, wanted in (("max", lambda x: x[np.isfinite(x)].max()), ("largest", largest)):
        series = run.series("stem", stat, rank=1, call=1)
        assert series.values.tolist() == [float(wanted(value(PLACES[1], step, 1, 1))) for step in range(STEPS)]
    assert run.series("stem", "mean", port="input").steps.tolist() == list(range(STEPS))
    assert run.series("head:output[1]", "mean").values.tolist() != run.series("head:output[0]", "mean").values.tolist()


@pytest.mark.parametrize("over", ["ranks", "steps", "calls", ("ranks", "steps"), ("ranks", "steps", "calls")], ids=str)
def test_merged_is_what_all_elements_together_give(run: Run, over: Any) -> None:
    """Counts and histograms are exact, moments to rounding, whatever is folded."""
    names = {over} if isinstance(over, str) else set(over)
    table = run.merged(over, sites=["stem", "blocks.0.mlp"], steps=(2, 7))
    groups = 0
    for row in table.to_pylist():
        if row["recomputed"]:
            continue
        place = Place(row["site"], row["port"])
        steps = range(2, 7) if "steps" in names else [row["step"]]
        ranks = range(2) if "ranks" in names else [row["rank"]]
        every = range(2 if row["site"] == "stem" else 1)
        calls = every if "calls" in names else [row["call"]]
        parts = [value(place, s, c, r).ravel() for s in steps for c in calls for r in ranks]
        known = summarize(np.concatenate(parts))
        assert row["records"] == len(parts)
        for name in ("numel", *COUNTS, "min", "max", "hist_offset"):
            assert row[name] == known[name], name
        assert row["hist_counts"] == known.hist_counts.tolist()  # type: ignore[union-attr]
        for name in ("mean", "std", "l1", "l2"):
            assert row[name] == pytest.approx(known[name], rel=1e-6, abs=1e-5), name
        if "steps" in names:
            assert (row["first_step"], row["last_step"]) == (2, 6)
        groups += 1
    per_step = {"ranks": 3, "steps": 6, "calls": 4}
    if isinstance(over, str):
        assert groups == (per_step[over] if over == "steps" else per_step[over] * 5)


def test_merging_nothing_gives_an_empty_table(run: Run) -> None:
    """A fold of no rows has the columns and no rows."""
    assert run.merged("steps", steps=[]).num_rows == 0
    assert run.series("stem", "mean", rank=7).steps.tolist() == []


def test_sql_sees_live_and_sealed_rows(run: Run) -> None:
    """DuckDB's answer is that of the table, with the rank from the folder's name."""
    answer = run.sql("select rank, count(*) n, sum(nan) nans, max(step) last from records group by rank order by rank")
    table = run.table()
    assert answer["rank"].to_pylist() == [0, 1] and answer["n"].to_pylist() == [ROWS // 2] * 2
    assert sum(answer["nans"].to_pylist()) == sum(table["nan"].to_pylist())
    assert answer["last"].to_pylist() == [STEPS - 1] * 2
    joined = run.sql(
        "select r.step, any_value(m.value) loss, max(r.max) m from records r join metrics m using (step, rank) "
        "where m.name = 'loss' group by r.step order by r.step"
    )
    assert joined["loss"].to_pylist() == [step / 2 for step in range(STEPS)]


def test_a_histogram_is_decoded_from_sql(run: Run) -> None:
    """Bucket j of a row is hist_counts[j − hist_offset]: from SQL it gives the counts between bounds."""
    answer = run.sql("""
        with b as (select step, hist_offset + generate_subscripts(hist_counts, 1) - 1 as j, unnest(hist_counts) as n
                   from records where site = 'blocks.1.mlp' and rank = 0)
        select step, j, n from b where n > 0 order by step, j
    """).to_pydict()
    for step in (0, 5, STEPS - 1):
        x = value(PLACES[3], step, 0, 0)
        mine = [(j, n) for s, j, n in zip(answer["step"], answer["j"], answer["n"], strict=True) if s == step]
        low, high = edges([j for j, _ in mine])
        for (_, n), a, b in zip(mine, low, high, strict=True):
            inside = (x >= a) & (x < b) if a >= 0 else (x > a) & (x <= b)
            assert np.count_nonzero(inside & (x != 0)) == n
        known = summarize(x)
        assert known.hist_offset is not None and known.hist_counts is not None
        every = dense(known.hist_offset, known.hist_counts)
        assert dict(mine) == {int(j): int(every[j]) for j in np.flatnonzero(every)}


def sealed_rows(run: Run) -> int:
    return run.table(columns=["step"]).num_rows if run.state == "finished" else 2 * 8 * (len(PLACES) + 3)


def test_duckdb_reads_the_segments_without_us(run: Run) -> None:
    """A glob with hive partitions gives every sealed row."""
    glob = f"{run.path}/rank=*/seg-*.parquet"
    query = f"select rank, count(*), sum(numel) from read_parquet('{glob}', hive_partitioning=true) group by all"
    rows = duckdb.connect().execute(query).fetchall()
    assert {rank for rank, *_ in rows} == {0, 1} and sum(n for _, n, _ in rows) == sealed_rows(run)


def test_polars_reads_the_segments_without_us(run: Run) -> None:
    """Polars scans them, ranks included."""
    frame = pl.scan_parquet(f"{run.path}/rank=*/seg-*.parquet", hive_partitioning=True).collect()
    assert len(frame) == sealed_rows(run) and set(frame["rank"].unique().to_list()) == {0, 1}
    assert frame["site"].dtype == pl.String and frame["hist_counts"].dtype == pl.List(pl.Int64)


def test_pandas_and_pyarrow_read_the_segments_without_us(run: Run) -> None:
    """Each rank's folder is a dataset by itself: hidden names are left out."""
    table = ds.dataset(f"{run.path}/rank=0", format="parquet", exclude_invalid_files=True).to_table()
    assert table.num_rows == sealed_rows(run) // 2
    segments = sorted(Path(run.path).glob("rank=1/seg-*.parquet"))
    frame = pd.concat([pd.read_parquet(segment) for segment in segments])
    assert len(frame) == sealed_rows(run) // 2 and not frame["mean"].isna().any()


def test_state_and_counts(tmp_path: Path) -> None:
    """A run is live while its process holds it, finished when closed; counts of all ranks add up."""
    writers = [write(tmp_path / "run", rank, 2) for rank in range(2)]
    run = open_run(tmp_path / "run")
    assert run.state == "live"
    for writer in writers:
        writer.counters.add("dropped_steps", 2)
        writer.close()
    assert run.state == "finished" and run.counts == {"dropped_steps": 4}


def test_rows_without_histogram_and_without_finite_elements(make_run: Callable[..., str]) -> None:
    """Where nothing is finite, min, max, mean and std are null; where no histogram was kept, it is null."""
    nothing = np.array([np.nan, np.inf])
    run = open_run(make_run([({"a": nothing, "b": np.zeros(0)}, {})], keep=stats()))
    for row in run.table().to_pylist():
        assert [row[name] for name in ("min", "max", "mean", "std", "hist_counts", "hist_offset")] == [None] * 6
        assert (row["l1"], row["l2"], row["numbers"]) == (0.0, 0.0, None)
    assert math.isnan(next(run.records())["mean"]) and next(run.records())["hist_counts"] is None
    assert run.merged("steps").to_pylist()[0]["hist_counts"] is None
    assert np.isnan(run.series("a", "mean").values).all() and np.isnan(run.series("a", "q0.5").values).all()


def test_many_sites_are_chosen_at_once(make_run: Callable[..., str]) -> None:
    """A pattern that matches thousands of sites is one filter, not thousands."""
    run = open_run(make_run([({f"layers.{i}": np.ones(2) for i in range(3000)}, {})]))
    assert run.table("layers.*").num_rows == 3000
    assert run.table("layers.1*").num_rows == 1111
    compact(run.path)


def test_a_run_says_the_commit_it_was_made_at(make_run, tmp_path, monkeypatch) -> None:
    """The commit of the user's code and whether it was changed since; nothing before the first commit or elsewhere."""

    def git(*words: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        return subprocess.run(["git", *author, *words], capture_output=True, text=True, check=True).stdout.strip()

    def said(name: str) -> Any:
        return open_run(make_run([({"a": np.ones(2)}, {})], name=name)).info["git"]

    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    assert said("outside") is None
    git("init", "-q")
    assert said("empty") is None
    Path("train.py").write_text("a = 1\n")
    git("add", "train.py")
    git("commit", "-qm", "Begin")
    assert said("clean") == {"commit": git("rev-parse", "HEAD"), "changed": False}
    Path("train.py").write_text("a = 2\n")
    assert said("changed") == {"commit": git("rev-parse", "HEAD"), "changed": True}
