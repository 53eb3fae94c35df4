"""What `show` draws: it fits, the worst comes first, and it says what was not seen."""

import io
import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress

import tensortap as tt
from tensortap.errors import PatternError, RunError
from tensortap.reduce.statistics import NUMBERS
from tensortap.reduce.summary import summarize
from tensortap.store.filters import places_matching
from tensortap.store.run import open_run
from tensortap.text import number
from tensortap.view.terminal.arguments import check_sites, resolve_steps
from tensortap.view.terminal.columns import Column, grid, shorten
from tensortap.view.terminal.ordering import SORTS
from tensortap.view.terminal.progress import waiting
from tensortap.view.terminal.show import draw, read_view

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 128)).astype(np.float32)
BAD = X.copy()
BAD[0, :8] = np.nan


def text_of(run, sites=None, width=None, monkeypatch=None, **asked):
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    draw(read_view(open_run(run), sites, **asked), stream)
    return stream.getvalue()


@pytest.fixture
def typical(make_run):
    """Four steps of a small network; NaN begins in `blocks.1.mlp` at step 2 and spreads; `relu` is dead."""

    def step(n):
        broken = n >= 2
        return {
            "blocks.0.mlp": X * (n + 1),
            "blocks.1.mlp": BAD if broken else X,
            "blocks.1.relu": np.zeros_like(X),
            "blocks.2.mlp": [X, X * 3],
            "head": BAD if broken else X,
            "head.weight:grad": X * 1e-6,
        }

    steps = [(step(n), {"loss": 2.0 - n / 4}) for n in range(4)]
    return make_run(steps, about={"model": "Net"}, counts={"dropped_steps": 2})


def test_the_first_to_become_nan_leads(typical):
    """Not finite first, by when it began and how early in the step; then dead; then the rest."""
    names = [row.name for row in read_view(open_run(typical)).shown]
    assert names[:3] == ["blocks.1.mlp:output", "head:output", "blocks.1.relu:output"]
    assert len(names) == 6


def test_the_head_says_what_must_not_be_missed(typical):
    """State, sizes, the origin of NaN, and what was dropped, before any row."""
    lines = text_of(typical).splitlines()
    assert lines[0] == f"{typical} · finished · Net · 4 steps (0–3) · 6 sites · 28 records"
    assert lines[1] == "NaN or Inf in 4 records of 2 sites, first at step 2 in blocks.1.mlp:output"
    assert lines[2] == "not recorded or went wrong: dropped steps 2"
    assert lines[3] == ""
    assert lines[4].split()[:3] == ["site", "nan/inf", "since"]
    assert lines[5].split()[:5] == ["blocks.1.mlp:output", "nan", "0.781%", "step", "2"]


def test_what_was_not_seen_is_named(tmp_path):
    """The head names a few of the sites that were wanted and not seen, and how many more there are."""
    torch = pytest.importorskip("torch")

    class Idle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used = torch.nn.Linear(2, 2)
            self.idle = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(5))

        def forward(self, x):
            return self.used(x)

    model = Idle()
    with tt.watch(model, to=tmp_path / "run") as tap:
        model(torch.ones(1, 2))
    assert "not recorded or went wrong: unseen 5 (idle.0:output, idle.1:output, idle.2:output and 2 more)" in text_of(
        tap.run.path
    )


def test_what_was_only_done_did_not_go_wrong(make_run):
    """Steps that were not finite and modules that were run again to find out why are no loss."""
    lines = text_of(make_run([({"a": X}, {})], counts={"nonfinite_steps": 1, "modules_run_again": 1})).splitlines()
    assert "counted: modules run again 1, nonfinite steps 1" in lines
    assert not any("went wrong" in line for line in lines)


def test_a_nan_that_went_away_is_still_near_the_top(make_run):
    """A site that was not finite at an earlier step comes before healthy ones, with a mark in its line."""
    run = make_run([({"a": X, "b": X * 100}, {}), ({"a": BAD, "b": X}, {}), ({"a": X, "b": X}, {})])
    lines = text_of(run).splitlines()
    assert lines[1].endswith("first at step 1 in a:output")
    assert lines[4].startswith("a:output") and "!" in lines[4]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160, 200])
def test_nothing_is_wider_than_the_terminal(typical, width, monkeypatch):
    """At every width each row is one line that fits, and NaN can be seen."""
    lines = text_of(typical, width=width, monkeypatch=monkeypatch).splitlines()
    table = lines[lines.index("") :]
    assert all(cell_len(line) <= width for line in lines)
    assert len(table) >= 1 + 1 + 6 + 1
    assert "nan 0.781%" in table[2]


def test_narrow_terminals_lose_the_least_important_columns(typical, monkeypatch):
    """At 80 the numbers that matter are there; at 200 everything is."""
    narrow, wide = (text_of(typical, width=w, monkeypatch=monkeypatch) for w in (80, 200))
    for title in ("site", "nan/inf", "std", "zeros", "histogram"):
        assert title in narrow
    assert "dtype" not in narrow
    for title in ("mean", "min", "max", "std over steps", "shape", "dtype"):
        assert title in wide


def test_piped_output_is_plain_and_complete(typical, monkeypatch):
    """Without a terminal there is no colour, and no column or name is left out."""
    monkeypatch.delenv("COLUMNS", raising=False)
    text = text_of(typical)
    assert "\x1b" not in text
    assert "dtype" in text and "…" not in text


def test_several_calls_are_one_row_that_says_so(typical):
    """The numbers of two calls are merged, as if their elements were of one tensor, and a line below says so."""
    lines = text_of(typical).splitlines()
    [line] = [line for line in lines if line.startswith("blocks.2.mlp:output ×2")]
    assert number(np.concatenate([X, X * 3]).std()) in line.split()
    assert lines[-1] == "×N: N calls in this step; the numbers are of all of them together"
    assert "×N" not in text_of(typical, ["head"])


def test_numbers_of_calls_are_merged_exactly(make_run):
    """Counts, extremes, moments and quantiles of several calls are those of all their elements, whatever the shapes."""
    calls = [BAD, np.zeros((3, 5), np.float32), X[:2] * 7]
    run = open_run(make_run([({"a": calls}, {})]))
    [row] = read_view(run).shown
    found, whole = row.record.summary, summarize(np.concatenate([call.ravel() for call in calls]))
    assert row.of == 3 and found.shape == X.shape
    for name in NUMBERS:
        assert found[name] == pytest.approx(whole[name], rel=1e-9), name
    assert [found.quantile(q) for q in (0.1, 0.5, 0.9)] == [whole.quantile(q) for q in (0.1, 0.5, 0.9)]


def test_rows_beyond_the_limit_are_counted(typical):
    """What is not shown is said."""
    assert text_of(typical, limit=2).splitlines()[-1] == "… 4 more sites; --limit 0 shows all"


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("order", "blocks.0.mlp:output"),
        ("name", "blocks.0.mlp:output"),
        ("std", "blocks.0.mlp:output"),
        ("absmax", "blocks.0.mlp:output"),
        ("zeros", "blocks.1.relu:output"),
        ("nan", "blocks.1.mlp:output"),
    ],
)
def test_sorting(typical, sort, first):
    """Each order begins with the row it promises."""
    assert read_view(open_run(typical), None, sort=sort).shown[0].name == first


def test_outliers_come_before_the_ordinary(make_run):
    """Among finite sites those far from their neighbours lead; gradients are held against gradients."""
    tensors = {f"l{i}": X for i in range(5)} | {"big": X * 1e4, "w1:grad": X * 1e-5, "w2:grad": X * 1e-5}
    assert read_view(open_run(make_run([(tensors, {})]))).shown[0].name == "big:output"


def test_a_healthy_run_is_shown_in_order_of_execution(tmp_path):
    """Weights of a norm, which are 1 as they should be, do not lead; a layer that is far from the others does."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)) for _ in range(3)]
    model, x = torch.nn.Sequential(*blocks, torch.nn.Linear(32, 4)), torch.randn(16, 32)
    with tt.watch(model, "**:{output,param}", to=tmp_path / "healthy") as tap:
        model(x)
        tap.step()
    rows = read_view(tap.run).overview.rows
    assert [row.name for row in SORTS["worst"](rows)] == [row.name for row in rows]
    blocks[1][0].weight.data *= 1e4
    with tt.watch(model, "**:{output,param}", to=tmp_path / "far") as tap:
        model(x)
        tap.step()
    assert {row.name for row in read_view(tap.run).shown[:2]} == {"1.0:output", "1.0.weight:param"}


def test_one_site_is_shown_closely(typical, monkeypatch):
    """Statistics of every step with the metrics, quantiles marked approximate, a histogram with an axis."""
    text = text_of(typical, ["blocks.0.mlp"], width=120, monkeypatch=monkeypatch)
    lines = text.splitlines()
    assert "blocks.0.mlp:output" in lines
    [titles] = [line for line in lines if line.lstrip().startswith("step ") and "std" in line]
    assert "loss" in titles.split()
    steps = [line.split()[0] for line in lines[lines.index(titles) + 1 :][:4]]
    assert steps == ["0", "1", "2", "3"]
    assert "approximate" in text and "50%" in text
    assert "└──" in text
    assert all(cell_len(line) <= 120 for line in lines)


@pytest.mark.parametrize("width", [30, 80, 200])
def test_the_close_view_fits(typical, width, monkeypatch):
    """The table and the chart keep within the terminal."""
    lines = text_of(typical, ["head"], width=width, monkeypatch=monkeypatch).splitlines()
    assert all(cell_len(line) <= width for line in lines)


def test_json_says_the_same_and_is_strict(typical):
    """No NaN tokens; the origin, the counts and the trend are there."""

    def refuse(token):
        raise AssertionError(token)

    view = read_view(open_run(typical)).as_json()
    said = json.loads(json.dumps(view, allow_nan=False), parse_constant=refuse)
    assert said["nonfinite"] == {"records": 4, "first": {"step": 2, "seq": 1, "site": "blocks.1.mlp:output"}}
    assert said["counts"] == {"dropped_steps": 2}
    assert said["rows"][0]["nan"] == 8
    assert said["rows"][0]["trend"]["values"][2:] == [None, None]
    close = read_view(open_run(typical), ["blocks.0.mlp"]).as_json()
    json.dumps(close, allow_nan=False)
    assert [r["metrics"]["loss"] for r in close["records"]] == [2.0, 1.75, 1.5, 1.25]
    assert close["quantiles"]["approximate"] is True


def test_all_nan_at_the_last_step(make_run):
    """A tensor with nothing finite is drawn with dashes, in table and close view."""
    run = make_run([({"a": X, "b": X}, {}), ({"a": np.full(4, np.nan, np.float32), "b": X}, {"loss": float("nan")})])
    assert "nan 100%" in text_of(run)
    assert "no element is finite" in text_of(run, ["a"])
    assert "every finite element is 7" in text_of(make_run([({"a": np.full(4, 7.0)}, {})], name="constant"), ["a"])


def test_steps_narrow_what_is_seen(typical):
    """With a step before the trouble there is none."""
    before = read_view(open_run(typical), None, steps=(0, 2))
    assert before.overview.first_bad is None
    assert {row.record.step for row in before.shown} == {1}
    assert read_view(open_run(typical), None, steps=2).overview.steps == [2]


@pytest.mark.parametrize(
    ("asked", "offered"), [("blocks.0.mpl", "blocks.0.mlp:output"), ("haed", "head"), ("zzz", "blocks.0.mlp:output")]
)
def test_an_unmatched_site_offers_the_nearest(typical, asked, offered):
    """The error names the pattern and what is like it, as it would be written."""
    with pytest.raises(PatternError, match=f"--site {asked} .*--site '{offered}'"):
        check_sites(open_run(typical), [asked])


@pytest.mark.parametrize(
    ("asked", "meant"), [(2, 2), (-1, 3), (slice(1, 3), slice(1, 3)), (slice(-2, None), slice(2, None)), (None, None)]
)
def test_steps_are_held_against_those_there_are(typical, asked, meant):
    """Negative numbers count from the last step."""
    assert resolve_steps(open_run(typical), asked) == meant


def test_the_first_nan_is_in_the_close_view_however_old(make_run):
    """The records around it are shown beside the newest."""
    run = make_run([({"a": BAD if n == 4 else X}, {}) for n in range(20)])
    close = read_view(open_run(run), ["a"], limit=3).detail
    assert [record.step for record in close.records] == [3, 4, 17, 18, 19]
    assert close.left_out == 15


def test_an_empty_run_says_so(make_run):
    """A run without records is no crash."""
    with pytest.raises(RunError, match="no records yet"):
        read_view(open_run(make_run([])))


def test_hostile_names_are_shown_as_text(make_run):
    """Markup, escape sequences and newlines in names do nothing."""
    names = ["[bold]x[/bold]", "a\nb\x1b[31mred", "<script>", "モデル.層"]
    text = text_of(make_run([(dict.fromkeys(names, X), {})]))
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3 + 4
    assert "[bold]x[/bold]:output" in text and "モデル.層:output" in text


@given(st.text(max_size=60), st.integers(1, 80))
def test_shortened_names_fit(name, width):
    """Wide characters count as two."""
    assert cell_len(shorten(name, width)) <= max(width, 1)


@pytest.mark.parametrize(
    ("width", "short"),
    [
        (60, "model.decoder.layers.11.self_attn.q_proj:grad_output"),
        (50, "m.decoder.layers.11.self_attn.q_proj:grad_output"),
        (30, "m.d.l.11.s.q_proj:grad_output"),
        (20, "m.d.l.1…grad_output"),
    ],
)
def test_names_are_shortened_so_that_layers_can_be_told_apart(width, short):
    """Words become initials from the left, numbers stay; only then is the middle left out."""
    said = shorten("model.decoder.layers.11.self_attn.q_proj:grad_output", width)
    assert said == short or (width == 20 and said.startswith("m.d.l.1…") and said.endswith("grad_output"))


LONG = [f"model.transformer.{side}.layers.{i}.self_attn.{p}_proj:output" for side in ("encoder", "decoder")
        for i in (0, 11) for p in "qk"] + ["model.transformer.decoder.embed_positions:output"]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 120])
def test_shortened_names_can_be_given_to_another_command(make_run, width, monkeypatch):
    """A name that has not enough room is a pattern that means the same site, and a line below says so."""
    run = make_run([(dict.fromkeys(LONG, X), {})])
    lines = text_of(run, width=width, monkeypatch=monkeypatch, sort="order").splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("site "))
    names = [line.split()[0] for line in lines[top + 1 : top + 10]]
    assert any(name.startswith("**.") for name in names)
    assert lines[-1] == "**.name: a pattern of this site alone, for --site; --wide shows names whole"
    for name, whole in zip(names, LONG, strict=True):
        assert [str(place) for place in places_matching(name, open_run(run).places)] == [whole]


def test_names_that_are_shortened_too_much_are_said_to_be(make_run, monkeypatch):
    """Where no pattern has room, a line below tells how to see the whole names."""
    run = make_run([({"a.very_long_name_of_one_module_alone": X}, {})])
    lines = text_of(run, width=40, monkeypatch=monkeypatch).splitlines()
    assert " ".join(lines[-2:]).replace("  ", " ").endswith("; --wide shows names whole")


def test_names_are_whole_where_they_are_asked_for(make_run, monkeypatch):
    """`wide` leaves nothing out of a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    draw(read_view(open_run(make_run([(dict.fromkeys(LONG, X), {})]))), stream, wide=True)
    assert all(name in stream.getvalue() for name in LONG) and "--wide" not in stream.getvalue()


def test_a_grid_drops_by_importance():
    """The column that matters least goes first; the first one never."""
    columns = [Column("name", lambda r: "n" * 10, 0.0), Column("aaaa", str, 1.0), Column("bbbb", str, 2.0)]

    def titles(width):
        return [str(c.header) for c in grid(columns, [1], width).columns]

    assert titles(22) == ["name", "aaaa", "bbbb"]
    assert titles(21) == ["name", "bbbb"]
    assert titles(9) == ["name"]


def progress_shown(patience, terminal, wait=lambda: None):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=60)
    with waiting("reading runs/x", console, patience) as advance:
        advance(1, 2)
        wait()
    return stream.getvalue()


def test_a_bar_appears_only_when_it_takes_long_and_on_a_terminal(monkeypatch):
    """Nothing is drawn for what is quick, nor when stderr is no terminal; else what is waited for is named."""
    started = threading.Event()
    start = Progress.start
    monkeypatch.setattr(Progress, "start", lambda bar: (start(bar), started.set())[0])
    assert progress_shown(60, terminal=True) == ""
    assert progress_shown(0, terminal=False) == ""
    assert "reading runs/x" in progress_shown(0, terminal=True, wait=lambda: started.wait(30))


def test_ranks_are_counted_and_their_records_too(make_run):
    """Two ranks of one launch are one row a site, which says that it stands for two."""
    make_run([({"a": X}, {})], launch="one")
    run = make_run([({"a": BAD}, {})], launch="one", rank=1)
    lines = text_of(run).splitlines()
    assert "2 ranks" in lines[0]
    assert lines[4].startswith("a:output ×2") and "nan" in lines[4]
    close = text_of(run, ["a"]).splitlines()
    [titles] = [line for line in close if line.startswith("step ") and "std" in line]
    assert titles.split()[1] == "rank"
