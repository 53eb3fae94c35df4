"""Every column of a segment is read by other engines with their default settings."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import tensortap as tt

RNG = np.random.default_rng(0)
STEPS = [RNG.standard_normal(5000).astype(np.float32) * (step + 1) for step in range(4)]


@pytest.fixture
def segments(tmp_path: Path) -> str:
    """The Parquet files of a small run, as a pattern."""
    with tt.watch(tt.probe("x", keep=[tt.histogram(), tt.hash()]), to=tmp_path / "run") as watching:
        for x in STEPS:
            tt.tap(x, "x")
            watching.step(loss=1.0)
    return str(tmp_path / "run" / "rank=0" / "seg-*.parquet")


def expected() -> list[list[int]]:
    """The counts that every reader must find."""
    return [tt.summarize(x).hist_counts.tolist() for x in STEPS]


def hashes() -> list[int | None]:
    """The content hashes that every reader must find."""
    return [tt.summarize(x, hash=True).hash for x in STEPS]


def test_pandas_reads_it(segments: str) -> None:
    """pandas, by way of PyArrow."""
    (path,) = Path(segments).parent.glob("seg-*.parquet")
    frame = pytest.importorskip("pandas").read_parquet(path).sort_values("step")
    assert [counts.tolist() for counts in frame["hist_counts"]] == expected()
    assert frame["hash"].tolist() == hashes()


def test_duckdb_reads_it(segments: str) -> None:
    """DuckDB."""
    duckdb = pytest.importorskip("duckdb")
    rows = duckdb.sql(f"select * exclude (time) from '{segments}' order by step")  # times need pytz to become Python's
    found = [dict(zip(rows.columns, row, strict=True)) for row in rows.fetchall()]
    assert [row["hist_counts"] for row in found] == expected() and [row["hash"] for row in found] == hashes()


def test_polars_reads_it(segments: str) -> None:
    """Polars."""
    frame = pytest.importorskip("polars").read_parquet(segments).sort("step")
    assert frame["hist_counts"].to_list() == expected() and frame["hash"].to_list() == hashes()


def test_spark_reads_it(segments: str) -> None:
    """Spark, where it and Java are installed, with its vectorized reader."""
    sql = pytest.importorskip("pyspark.sql")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    spark = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        rows = spark.read.parquet(segments).orderBy("step").collect()
        assert [row["hist_counts"] for row in rows] == expected() and [row["hash"] for row in rows] == hashes()
    finally:
        spark.stop()


def test_no_column_is_unsigned(segments: str) -> None:
    """Spark's default reader has no unsigned integers in split byte planes, so no file has any."""
    (path,) = Path(segments).parent.glob("seg-*.parquet")
    assert not [f.name for f in pq.read_schema(path) if "uint" in str(f.type)]
