"""What a notebook shows of a tap, a run, a record and a finding; and the figure of a site."""

import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import RunError
from tensortap.reduce.reducers import stats
from tensortap.store import queries
from tensortap.view.notebook.svg import SvgFigure

X = np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32)
BAD = X.copy()
BAD[0, :8] = np.nan
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'


class Parsed(HTMLParser):
    """Elements and text of a piece of HTML, all of which must be closed."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text, self.attributes = [], [], "", []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes += [name for name, _ in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def run(make_run):
    """Five steps in which `head` is NaN from the third on, and a site with a hostile name."""
    return tt.open(
        make_run(
            [({"body": X * n, "head": BAD if n > 1 else X, HOSTILE: X}, {"loss": 1.0}) for n in range(5)],
            counts={"dropped_steps": 2},
        )
    )


def test_run(run):
    """A run says what it is, what is wrong, what was lost, and a line for each site, the worst first."""
    shown = Parsed(run._repr_html_())
    assert "5 steps (0–4) · 3 sites" in shown.text
    assert "NaN or Inf in 3 records of 1 site, first at step 2 in head:output" in shown.text
    assert "dropped steps 2" in shown.text
    assert shown.text.index("head:output", shown.text.index("histogram")) < shown.text.index("body:output")
    assert shown.tags.count("svg") == 6
    assert HOSTILE in shown.text


def test_nothing_runs(run):
    """Hostile names are text: no script, no handler, nothing fetched."""
    record = next(record for record in run.records() if "script" in record.place.site)
    finding = tt.Finding("rule", "error", HOSTILE, None, {HOSTILE: HOSTILE}, HOSTILE, HOSTILE)
    for shown in map(Parsed, (run._repr_html_(), record._repr_html_(), finding._repr_html_())):
        assert HOSTILE in shown.text
        assert not {"script", "img", "a", "link", "iframe"} & set(shown.tags)
        assert not any(name.startswith("on") or name in ("src", "href") for name in shown.attributes)


def test_empty_and_long_runs(make_run):
    """A run without records says so; of a long one only the newest steps are read, and that is said."""
    assert "no records yet" in tt.open(make_run([], name="empty"))._repr_html_()
    long = tt.open(make_run([({"fc": X[0, :2]}, {}) for _ in range(300)], name="long", keep=stats()))
    assert "the last 256 steps; 44 earlier ones are not in this view" in long._repr_html_()


def test_record(run):
    """A record names its place, step and reason, says what is not finite before any number, and draws its histogram."""
    shown = Parsed(next(run.records(sites="head", steps=3))._repr_html_())
    assert shown.text.index("head:output") < shown.text.index("NaN 8 (0.781%)") < shown.text.index("mean")
    assert "at step 3" in shown.text
    assert "svg" in shown.tags


def test_summary_of_nothing_finite():
    """Where nothing is finite there is neither range nor histogram."""
    shown = Parsed(tt.summarize(np.full(3, np.nan))._repr_html_())
    assert "NaN 3 (100%)" in shown.text
    assert "mean" not in shown.text and "svg" not in shown.tags


def test_findings(run):
    """Findings are listed with severity, place, sentence and advice; one alone looks the same."""
    found = run.findings(["nonfinite"])
    shown = Parsed(found._repr_html_())
    assert found.summary() in shown.text
    assert all(part in shown.text for part in ("error nonfinite", "head:output", found[0].message, found[0].advice))
    assert found[0].message in Parsed(found[0]._repr_html_()).text


def test_tap(tmp_path):
    """A tap says where it is, what it cost and lost, and shows its run; one without a run shows itself."""
    with tt.watch(to=[str(tmp_path / "run"), tt.Memory()]) as tap:
        tt.tap(X, "body")
        tap.step()
        shown = Parsed(tap._repr_html_())
        assert "watching, step 1" in shown.text and "body:output" in shown.text and "of the step time" in shown.text
    assert "tap: closed" in tap._repr_html_()
    with tt.watch(to=tt.Memory()) as tap:
        assert "watching, step 0" in tap._repr_html_()


def test_plot_with_matplotlib(run, tmp_path):
    """With matplotlib a site is a figure that notebooks show and `savefig` writes."""
    pytest.importorskip("matplotlib")
    figure = run.plot("head")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_legend().get_texts()] == [
        "min … max",
        "5 … 95 %",
        "mean",
        "NaN or Inf",
    ]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), run.series("head", "mean").values)
    assert [line.get_xdata()[0] for line in axes.lines[1:]] == [2, 3, 4]
    assert figure._repr_png_().startswith(b"\x89PNG")
    figure.savefig(tmp_path / "head.svg")
    assert (tmp_path / "head.svg").stat().st_size > 1000


def test_plot_without_matplotlib(run, tmp_path, monkeypatch):
    """Without matplotlib the same is an SVG."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    drawing = run.plot("head:output")
    assert isinstance(drawing, SvgFigure)
    shown = Parsed(drawing._repr_svg_())
    assert shown.tags.count("polygon") == 2 and shown.tags.count("line") == 3
    assert "head:output · 5 steps" in shown.text
    drawing.savefig(tmp_path / "head.svg")
    assert (tmp_path / "head.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("values", [np.full(4, np.nan), np.zeros(4), np.ones(1)])
@pytest.mark.parametrize("there", [True, False])
def test_plot_of_next_to_nothing(make_run, values, there, monkeypatch):
    """A single step, a constant and all NaN are drawn too."""
    if not there:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    figure = tt.open(make_run([({"fc": values}, {})])).plot("fc")
    assert figure._repr_png_() if hasattr(figure, "_repr_png_") else Parsed(figure._repr_svg_())


def test_plot_of_no_such_site(run):
    """A site that there is not is an error with the nearest that there is."""
    with pytest.raises(RunError, match="Did you mean 'head:output'"):
        run.plot("heed:output")


def test_plot_of_a_run_that_grows(tmp_path, monkeypatch):
    """All curves of a figure are of one moment, also when the run grows while they are read."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    series = queries.series
    with tt.watch(to=tmp_path / "run") as watching:

        def write() -> None:
            tt.tap(X, "fc")
            watching.step()
            watching.flush()

        def growing(*args):
            write()
            return series(*args)

        write()
        run = tt.open_run(tmp_path / "run")
        monkeypatch.setattr(queries, "series", growing)
        assert "1 steps" in Parsed(run.plot("fc")._repr_svg_()).text
        monkeypatch.undo()
        assert len(run.steps) == 7
