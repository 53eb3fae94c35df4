"""Runs for a language model: small answers, the same numbers, nothing else read and nothing written."""

import asyncio
import json
import os
import sys

import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import RunError
from tensortap.finding import Finding, Findings, Steps
from tensortap.store.sandbox import sql_in_sandbox
from tensortap.view.agent.brief import ROOM, paged
from tensortap.view.agent.questions import POINTS, Questions
from tensortap.view.agent.server import TOOLS
from tensortap.view.agent.story import plain_causes, story

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: `fine`, and `broken`, in which NaN begins at step 60 and a layer is dead."""
    folder = tmp_path_factory.mktemp("agent")
    for name in ("fine", "broken"):
        probe = tt.probe("**", keep=[tt.stats(), tt.histogram()])
        with tt.watch(probe, to=str(folder / name)) as watching:
            for step in range(100):
                x = RNG.normal(size=(16, 8)).astype(np.float32)
                bad = name == "broken"
                tt.tap(x * (np.nan if bad and step >= 60 else 1), "encoder.fc")
                tt.tap(np.maximum(x, 0) * (0 if bad else 1), "encoder.relu")
                watching.step(loss=1 / (step + 1))
    return folder


@pytest.fixture(scope="module")
def ask(runs):
    return Questions(str(runs))


def test_every_answer_is_small(ask):
    """No answer is longer than two thousand tokens or so, whatever is asked."""
    answers = [
        ask.runs(), ask.explain("broken"), ask.summary("broken"), ask.findings("broken"), ask.metric("loss", "fine"),
        ask.series("encoder.fc", "std", "fine"), ask.histogram("encoder.fc", run="fine"),
        ask.site("encoder.fc", run="fine"), ask.compare("fine", "broken"), ask.sql("select * from records", "fine"),
    ]  # fmt: skip
    assert all(len(json.dumps(answer)) < 1.3 * ROOM for answer in answers)


def test_numbers_are_those_of_the_run(ask, runs):
    """Series, sites, histograms and metrics are what the run holds, to four digits, thinned evenly."""
    run = tt.open_run(str(runs / "fine"))
    steps, values = run.series("encoder.fc", "std")
    told = ask.series("encoder.fc", "std", "fine")
    assert told["of"] == 100 and len(told["steps"]) == POINTS and told["steps"][0] == 0 and told["steps"][-1] == 99
    assert told["values"] == pytest.approx([values[list(steps).index(s)] for s in told["steps"]], rel=1e-3)
    site = ask.site("encoder.fc", 5, "fine")
    assert site["step"] == 5 and site["mean"] == pytest.approx(run.series("encoder.fc", "mean")[1][5], rel=1e-3)
    drawn = ask.histogram("encoder.fc", 5, "fine")
    assert sum(drawn["bars"]) == pytest.approx(128, abs=12) and drawn["nan"] == 0
    assert ask.metric("loss", "fine")["values"][0] == 1.0
    assert ask.metric("", "fine")["names"] == ["loss"]


def test_a_story_names_what_is_wrong(ask):
    """The earliest error is told first, with its place, its steps and the change to make."""
    text = ask.explain("broken")["text"]
    assert "100 steps" in text and "loss: 1 at step 0, 0.01 at step 99" in text
    wrong = [line for line in text.splitlines() if line[:2] in ("1.", "2.")]
    assert "error: nonfinite at encoder.fc:output, steps 60–99" in wrong[0]
    assert any("encoder.relu:output" in line for line in wrong)
    found = ask.findings("broken")["findings"]
    assert found[0]["rule"] == "nonfinite" and found[0]["places"] == ["encoder.fc:output (steps 60–99)"]


def test_a_finding_is_told_with_its_line_places_and_consequences(runs):
    """A cause has the line to change, where else it is and what follows from it; of very many places some are named."""
    hence = Finding("dead_units", "warning", "encoder.relu:output", Steps(61, 99, 39), {}, "All are zero.")
    places = tuple(f"layers.{i}:output" for i in range(300))
    cause = Finding(
        "nonfinite", "error", "encoder.fc:output", Steps(60, 99, 40), {}, "NaN.", "lower the rate", "train.py:12",
        places, (hence,),
    )  # fmt: skip
    found = Findings.of([cause], ["nonfinite"], {})
    text = story(tt.open_run(str(runs / "broken")), found)
    assert "1. error: nonfinite at encoder.fc:output (train.py:12), steps 60–99" in text
    assert "The same at layers.0:output" in text and "and 296 more." in text
    assert "Change: lower the rate" in text and "Hence dead_units at encoder.relu:output: All are zero." in text
    (item,) = plain_causes(found)
    assert item["lines"] == ["train.py:12"] and item["follows"] == ["dead_units at encoder.relu:output (steps 61–99)"]
    assert item["places"][:2] == ["encoder.fc:output (steps 60–99)", "layers.0:output"]
    assert item["places"][-1] == "and 281 more"


def test_a_long_story_comes_in_pages(ask, monkeypatch):
    """What does not fit into one answer is on the next page."""
    monkeypatch.setattr("tensortap.view.agent.questions.story", lambda run: "\n".join(["word " * 20] * 200))
    first, last = ask.explain("fine"), ask.explain("fine", page=3)
    assert first["pages"] == 4 and len(json.dumps(first)) < 1.3 * ROOM and last["text"].startswith("word")


def test_a_wrong_question_says_what_would_be_right(ask):
    """An unknown run, site, metric or page is answered with what there is."""
    with pytest.raises(RunError, match="broken"):
        ask.summary("brokne")
    with pytest.raises(RunError, match=r"encoder\.fc"):
        ask.series("encoder.fcc", "std", "fine")
    assert "did you mean" in ask.metric("los", "fine")["hint"].lower() or "loss" in ask.metric("los", "fine")["hint"]
    with pytest.raises(ValueError, match="page must be from 0 to 0, got 3"):
        paged("rows", [1], 3)


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('/etc/passwd')",
        "copy records to '/tmp/tensortap-stolen.csv'",
        "create table mine as select 1",
        "set enable_external_access = true",
        "attach '/tmp/other.db'",
        "install httpfs",
    ],
)
def test_sql_reads_this_run_and_nothing_else(ask, query):
    """Files, tables, settings and extensions are out of reach."""
    with pytest.raises(RunError):
        ask.sql(query, "fine")


def test_sql_is_bounded(ask):
    """Rows come in pages, and a query that never ends is ended."""
    assert ask.sql("select count(*) as n from records", "fine")["rows"] == [{"n": 200}]
    assert ask.sql("select step, mean from records", "fine")["pages"] > 1
    run = ask._run("fine")
    endless = "select count(*) from range(100000000) a, range(100000000) b"
    with pytest.raises(RunError, match=r"took longer than 0\.2 s"):
        run.snapshots.read(lambda snapshot: sql_in_sandbox(snapshot, endless, 10, 0.2))


def test_the_server_over_stdio(runs):
    """The SDK's own client lists the tools, calls them, and gets errors as answers."""
    mcp = pytest.importorskip("mcp")

    async def talk():
        words = ["-m", "tensortap", "mcp", str(runs)]
        started = mcp.StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))
        async with mcp.Client(started) as client:
            tools = (await client.list_tools()).tools
            calls = [("runs", {}), ("findings", {"run": "broken"}), ("site", {"site": "nothing", "run": "fine"})]
            answers = [await client.call_tool(name, given) for name, given in calls]
            return tools, [json.loads(answer.content[0].text) for answer in answers]

    tools, (listed, findings, wrong) = asyncio.run(talk())
    assert {tool.name for tool in tools} == set(TOOLS)
    assert all(tool.annotations.read_only_hint and tool.description for tool in tools)
    assert [run["run"] for run in listed["runs"]] == ["broken", "fine"]
    assert findings["findings"][0]["rule"] == "nonfinite"
    assert "no records of 'nothing'" in wrong["error"]
