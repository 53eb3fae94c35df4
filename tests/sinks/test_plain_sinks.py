"""Memory, functions, loggers and the console."""

import io
import logging

import numpy as np
import pytest

from tensortap.reduce.reducers import full, histogram
from tensortap.sinks.console import Console
from tensortap.sinks.convert import Function
from tensortap.sinks.logger import Log
from tensortap.sinks.memory import Memory
from tensortap.types import Place

X = np.linspace(-4, 4, 8 * 16, dtype=np.float32).reshape(8, 16)


def tensors_only(step):
    return type(step)(step.number, step.phase, step.rank, step.time, step.metrics, step.table, step.names, True)


def test_memory_keeps_records_tensors_and_metrics(make_step):
    """What a step held can be looked at afterwards, though the step's memory is used again."""
    memory = Memory()
    step = make_step({"a": X, "b": X * 2}, number=3, keep=[full(), histogram()], metrics={"loss": 0.5})
    memory.write(step)
    step.table.reset()
    assert [(r["step"], r["site"], r["max"]) for r in memory.records] == [(3, "a", 4.0), (3, "b", 8.0)]
    assert memory.metrics == {3: {"loss": 0.5}}
    assert [(t.record.place.site, t.kind) for t in memory.tensors] == [("a", "full"), ("b", "full")]
    np.testing.assert_array_equal(memory.tensors[1].array, X * 2)


def test_memory_counts_what_it_forgets(make_step):
    """With `most` the oldest records go, and how many is said."""
    memory = Memory(most=3)
    for number in range(5):
        memory.write(make_step({"a": X}, number=number))
    assert [r.step for r in memory.records] == [2, 3, 4]
    assert memory.forgotten == 2


@pytest.mark.parametrize("sink", [Memory, lambda: Function(seen.append)])
def test_rows_of_a_lookback_step_are_not_repeated(sink, make_step):
    """A `tensors_only` step brings tensors, not the rows that were written when it closed."""
    seen.clear()
    sink = sink()
    step = make_step({"a": X}, keep=full())
    sink.write(step)
    sink.write(tensors_only(step))
    assert len(getattr(sink, "records", seen)) == 1
    assert len(getattr(sink, "tensors", [1, 2])) == 2


seen: list = []


def test_a_function_is_called_with_each_record(make_step):
    """A function sees the records in order."""
    sites = []
    Function(lambda record: sites.append(record["site"])).write(make_step({"a": X, "b": X}))
    assert sites == ["a", "b"]


def test_the_logger_line_is_the_documented_one(make_step, caplog):
    """One readable line a record, at INFO; the record rides along for handlers."""
    with caplog.at_level(logging.INFO, "layers"):
        Log(logging.getLogger("layers")).write(make_step({"blocks.3.mlp": X + 1.5}, number=12))
    [entry] = caplog.records
    assert entry.getMessage() == (
        "step 12 blocks.3.mlp:output [8,16] f32 mean 1.5 std 2.33 min −2.5 max 5.5 zeros 0% nan 0 ████████"
    )
    assert entry.levelno == logging.INFO
    assert entry.tensortap.step == 12


def test_the_logger_warns_of_nan_and_inf(make_step, caplog):
    """What is not finite is a WARNING, visible at the default level."""
    bad = X.copy()
    bad[0, :2] = np.nan, np.inf
    with caplog.at_level(logging.WARNING, "layers"):
        Log(logging.getLogger("layers")).write(make_step({"good": X, "bad": bad}))
    [entry] = caplog.records
    assert entry.levelno == logging.WARNING
    assert "bad:output" in entry.getMessage() and "nan 1 inf 1" in entry.getMessage()


def test_hostile_names_neither_break_lines_nor_format(make_step, caplog):
    """A name with a newline, an escape sequence or a % stays one line."""
    stream = io.StringIO()
    name = "a\n%s[red]\x1b[31m"
    step = make_step({Place(name): X})
    with caplog.at_level(logging.INFO, "layers"):
        Log(logging.getLogger("layers")).write(step)
    Console(stream).write(step)
    for line in (caplog.records[0].getMessage() + "\n", stream.getvalue()):
        assert line.count("\n") == 1
        assert "\x1b" not in line
        assert "a\\n%s[red]\\x1b[31m:output" in line


def test_the_console_says_call_rank_and_own_numbers(make_step):
    """A second call, another rank and the user's own numbers are on the line."""
    stream = io.StringIO()
    step = make_step({"a": [X, X]}, rank=2, keep=[lambda x: {"top": 7.5}])
    Console(stream).write(step)
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step 0 rank 2 a:output [8,16]")
    assert second.startswith("step 0 rank 2 a:output call 1 [8,16]")
    assert second.endswith(".top 7.5")


def test_the_console_colours_only_a_terminal(make_step):
    """Red for what is not finite, on a terminal; plain everywhere else."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    step = make_step({"a": np.full(4, np.nan, np.float32)})
    piped, terminal = io.StringIO(), Terminal()
    Console(piped).write(step)
    assert "\x1b[" not in piped.getvalue()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm-256color")
        Console(terminal).write(step)
        assert "\x1b[1;31m" in terminal.getvalue()
        patch.setenv("NO_COLOR", "1")
        quiet = Terminal()
        Console(quiet).write(step)
        assert "31m" not in quiet.getvalue()
