"""Rules as values: thresholds, rules of the user's, and runs that have little or nothing to look at."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.diagnose import REGISTRY, NoData, RunHistory, dead_units, loss_spike, nonfinite, unchanged
from tensortap.diagnose.rule import ORDER
from tensortap.errors import ProbeError
from tensortap.finding import Steps

Make = Callable[..., str]
X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)


@pytest.fixture
def registry() -> Iterator[None]:
    """Rules that a test registers are gone after it."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


# --- rules of the user's ---


@pytest.mark.usefixtures("registry")
def test_own_rule(make_run: Make) -> None:
    """A decorated function is asked from then on; its findings carry its name and severity."""

    @tt.rule("test_wide", severity="info", needs="output")
    def wide(history: RunHistory, *, most: float = 0.5) -> Iterator[tt.Finding]:
        """Outputs that are wide."""
        for site in history.sites("output"):
            if (bad := site["std"] > most).any():
                yield site.finding(bad, "It is wide.", std=float(site["std"].max()))

    run = tt.open(make_run([({"fc": X * n}, {}) for n in range(4)]))
    (found,) = [f for f in run.findings() if f.rule == "test_wide"]
    assert (found.severity, found.site, found.steps.first, found.steps.last) == ("info", "fc:output", 1, 3)
    assert found.evidence["std"] == pytest.approx(3 * X.std(), rel=1e-5)
    assert list(run.findings(rules=["test_wide"])) == [found]
    assert not run.findings(rules=[wide.using(most=100.0)])
    assert (wide.about, wide.thresholds) == ("Outputs that are wide.", {"most": 0.5})


def test_plain_function(make_run: Make) -> None:
    """A function that nobody decorated can be passed; it is a warning, and is not remembered."""

    def something(history: RunHistory) -> list[tt.Finding]:
        return [history.sites("output")[0].finding(None, "Something.")]

    (found,) = tt.open(make_run([({"fc": X}, {})])).findings(rules=something)
    assert (found.rule, found.severity) == ("something", "warning")
    assert "something" not in REGISTRY


@pytest.mark.usefixtures("registry")
def test_registering() -> None:
    """Defining a rule again replaces it, as a notebook does; taking another's name is an error."""
    for _ in range(2):

        @tt.rule
        def again(history: RunHistory) -> None: ...

    assert "again" in REGISTRY
    with pytest.raises(ProbeError, match="my_nonfinite"):
        tt.rule("nonfinite")(lambda history: [])
    with pytest.raises(ProbeError, match="Did you mean 'error'"):
        tt.rule("x", severity="eror")  # type: ignore[call-overload]


def test_errors_offer_what_there_is(make_run: Make) -> None:
    """A wrong rule or threshold is answered with the nearest, and a rule's own mistake with its name."""
    run = tt.open(make_run([({"fc": X}, {})]))
    with pytest.raises(ProbeError, match="Did you mean 'dead_units'"):
        run.findings(rules=["dead_unit"])
    with pytest.raises(ProbeError, match="Did you mean 'zeros'"):
        dead_units.using(zeroes=0.5)
    with pytest.raises(ProbeError, match="rules must be"):
        run.findings(rules=[3])
    with pytest.raises(ZeroDivisionError) as error:
        run.findings(rules=[lambda history: 1 / 0])
    assert "in the rule '<lambda>'" in error.value.__notes__


def test_every_rule_is_described() -> None:
    """Each has a line about it, thresholds that can be changed, and each threshold is named in its docstring."""
    for rule in REGISTRY.values():
        assert rule.about
        for name, value in rule.thresholds.items():
            assert rule.using(**{name: value}).thresholds[name] == value
            assert f"`{name}`" in (rule.function.__doc__ or ""), f"{rule.name}: {name}"


def test_thresholds_decide(zoo: Any) -> None:
    """What a rule finds depends on its thresholds."""
    run = zoo.run("dead_units_of_a_layer")
    assert [f.site for f in run.findings(rules=dead_units).at_least("warning")] == ["3:output"]
    assert run.findings(rules=dead_units.using(dead=0.95)).at_least("warning") == []
    assert run.findings(rules=dead_units.using(dead=0.05)).at_least("warning")[0].site == "1:output"


def test_findings_of_a_path(zoo: Any) -> None:
    """`tt.findings` takes a path as well as a run."""
    run = zoo.run("bad_batch")
    assert [str(f) for f in tt.findings(run.path)] == [str(f) for f in run.findings()]


# --- runs with little to look at ---


def test_empty_run(tmp_path: Path) -> None:
    """A run without a record has no findings; every rule says why."""
    with tt.watch("x", to=tmp_path / "run") as tap:
        pass
    found = tap.run.findings()
    assert len(found) == 0
    assert set(found.skipped) | set(found.rules) == set(REGISTRY)
    assert set(found.rules) <= {"never_ran"}
    assert str(found).startswith("nothing found")


PORTS = ("**", ":input", "**:grad", "**:grad_output", "**:grad_input", "**:param", "**:update")


@pytest.mark.parametrize("ports", [(p,) for p in PORTS] + [PORTS], ids=str)
@pytest.mark.parametrize("steps", [1, 2])
def test_some_ports(tmp_path: Path, ports: tuple[str, ...], steps: int) -> None:
    """Whatever was recorded, and be it one step: no exception, and every rule looked or said why not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(model, *ports, to=tmp_path / "run") as tap:
        for _ in range(steps):
            x = torch.randn(16, 4, requires_grad=True)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            tap.step()
    found = tap.run.findings()
    assert set(found.skipped) | set(found.rules) == set(REGISTRY)
    assert found.at_least("warning") == []
    assert all(found.skipped.values())


def test_live_run(tmp_path: Path) -> None:
    """A run can be asked while it is written; what is known only at its end is said to be unknown."""
    with tt.watch("x", to=tmp_path / "run") as tap:
        for step in range(4):
            tt.tap(np.where(X > 2, np.nan, X) if step == 2 else X, "x")
            tap.step(loss=1.0)
        live = tap.run
        assert live.state == "live"
        (found,) = live.findings()
        assert (found.rule, found.site, found.steps.first) == ("nonfinite", "x:output", 2)
        assert "closed" in live.findings().skipped["never_ran"]


def test_crashed_run(tmp_path: Path) -> None:
    """What a process that was killed had recorded is judged all the same."""
    code = f"""
import os, signal, numpy as np, tensortap as tt
tap = tt.watch("x", to={str(tmp_path / "run")!r})
for step in range(12):
    tt.tap(np.full((4, 4), np.inf if step == 9 else 1.0 * step), "x")
    tap.step(loss=100.0 if step > 9 else 1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(tt.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=env, check=False)
    run = tt.open(tmp_path / "run")
    assert run.state == "crashed"
    assert [f.rule for f in run.findings().at_least("error")] == ["nonfinite"]


def test_integers_and_scalars(make_run: Make) -> None:
    """Indices, masks and single numbers are no activations: nothing is said of them."""
    tensors = {
        "ids": np.zeros((4, 8), np.int64),
        "mask": np.ones((4, 8), bool),
        "scale": np.float32(2.0),
        "none": X[:0],
    }
    assert len(tt.open(make_run([(tensors, {}) for _ in range(5)])).findings()) == 0


# --- single rules, closely ---


def bad(where: float = 2.0, value: float = np.nan) -> np.ndarray:
    return np.where(where < X, value, X)


def test_first_rank_leads(make_run: Make) -> None:
    """At the same step the lower rank is named, whichever wrote first; what follows is counted."""
    make_run([({"a": X, "b": bad()}, {})], rank=1)
    path = make_run([({"a": X, "b": X, "c": bad()}, {})], rank=0)
    (found,) = tt.open(path).findings(rules=nonfinite)
    assert (found.site, found.evidence["rank"], found.evidence["spread"]) == ("c:output", 0, 1)
    assert found.evidence["to"] == ["b:output"]


def test_masks_are_only_noted(make_run: Make) -> None:
    """−Inf at every step and nothing worse is a mask; a NaN elsewhere leads before it."""
    mask = np.where(np.tri(8) > 0, 0.0, -np.inf)
    (noted,) = tt.open(make_run([({"mask": mask, "x": X}, {})] * 3)).findings(rules=nonfinite)
    assert (noted.severity, noted.site) == ("info", "mask:output")
    run = tt.open(make_run([({"mask": mask, "x": bad() if n else X}, {}) for n in range(3)], name="other"))
    (lead,) = run.findings(rules=nonfinite)
    assert (lead.severity, lead.site, lead.evidence["spread"]) == ("error", "x:output", 0)


def test_infinity_that_comes_later_is_no_mask(make_run: Make) -> None:
    """−Inf that was not there at the beginning is a log of zero, not a mask."""
    run = tt.open(make_run([({"log": bad(value=-np.inf) if n else X}, {}) for n in range(3)]))
    (lead,) = run.findings(rules=nonfinite)
    assert (lead.severity, lead.steps.first) == ("error", 1)


def test_metric_that_is_not_finite(make_run: Make) -> None:
    """A loss that is NaN while every recorded tensor is finite is reported as what it is."""
    run = tt.open(make_run([({"x": X}, {"loss": np.nan if n == 3 else 1.0}) for n in range(5)]))
    (found,) = run.findings(rules=nonfinite)
    assert (found.site, found.steps.first, found.severity) == ("metric loss", 3, "error")


def test_spike_that_goes_away(make_run: Make) -> None:
    """A spike is a warning, one that stays an error, and noise near zero neither."""
    losses = {"passing": [1.0] * 15 + [9.0] + [1.0] * 5, "staying": [1.0] * 15 + [9.0] * 6}
    losses["tiny"] = [1.0] * 10 + [0.01] * 15 + [0.05] + [0.01] * 5
    for (name, values), severity in zip(losses.items(), (["warning"], ["error"], []), strict=True):
        run = tt.open(make_run([({"x": X}, {"loss": v}) for v in values], name=name))
        assert [f.severity for f in run.findings(rules=loss_spike)] == severity, name


def test_loss_by_any_name(make_run: Make) -> None:
    """Metrics called something like loss are taken, those of an evaluation are not."""
    run = tt.open(make_run([({"x": X}, {"train/loss": 1.0, "val_loss": 1.0, "accuracy": 0.5})] * 12))
    assert [f.site for f in run.findings(rules="loss_not_decreasing")] == ["metric train/loss"]


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    """Where nothing trains, unchanged parameters are only noted."""
    model = nn.Linear(4, 4)
    with tt.watch(model, "**:param", to=tmp_path / "run") as tap:
        for _ in range(4):
            model(torch.ones(2, 4))
            tap.step()
    (found,) = tap.run.findings(rules=unchanged)
    assert found.severity == "info"


def test_reused_module_is_one_site(tmp_path: Path) -> None:
    """The calls of a module in one step are judged together."""
    relu = nn.ReLU()
    model = nn.Sequential(relu, nn.Linear(8, 8), relu)
    with tt.watch(model, "**", to=tmp_path / "run") as tap:
        for _ in range(3):
            model(torch.randn(4, 8))
            tap.step()
    assert [s.place.site for s in RunHistory(tap.run).sites("output") if s.type == "ReLU"] == ["0"]


def test_containers_are_not_counted_twice(zoo: Any) -> None:
    """What a container returns is what its last module returned: one site, the inner one."""
    history = RunHistory(zoo.run("unused_head"))
    shown = [str(site) for site in history.sites("output")]
    assert "body.2:output" in shown
    assert "body:output" not in shown
    assert ":output" not in shown
    assert "body:output" in [str(site) for site in history.sites("output", duplicates=True)]


def test_no_data_is_no_error() -> None:
    """A rule without its data raises what `findings` turns into `skipped`."""
    with pytest.raises(NoData):
        raise NoData("nothing")
    assert not issubclass(NoData, tt.TensortapError)


def test_diagnosis_imports_no_framework() -> None:
    """The rules run where no framework is installed, and without the side that records."""
    code = "import sys, tensortap.diagnose; print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(tt.__file__).parents[1])}
    loaded = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert {"torch", "tensorflow", "jax", "scipy", "sklearn"}.isdisjoint(loaded.split())


def test_document_lists_every_rule() -> None:
    """The document has a row for every rule there is, with its thresholds and their values."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "findings.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    ours = {name for name, rule in REGISTRY.items() if rule.function.__module__.startswith("tensortap.")}
    assert set(rows) == ours == set(ORDER)
    for name, row in rows.items():
        for threshold, value in REGISTRY[name].thresholds.items():
            assert f"`{threshold}={value!r}`" in row, f"{name}: {threshold}={value!r}"


@pytest.mark.parametrize("units", [False, True])
def test_a_dead_relu_is_named_although_nan_follows(tmp_path: Path, units: bool) -> None:
    """What was wrong before a NaN stays named, next to the NaN."""
    keep = [tt.stats(), *([tt.units()] if units else [])]
    dead, alive = np.zeros((8, 4), np.float32), np.ones((8, 4), np.float32)
    dead[0, 0] = 1e-3 if units else 0.0
    with tt.watch(tt.probe("**", keep=keep), to=tmp_path / "run") as tap:
        for step in range(40):
            tt.tap(np.full_like(dead, np.nan) if step >= 20 else dead if step else alive * (np.arange(4) > 0), "relu")
            tap.step()
    found = {finding.rule: finding for finding in tap.run.findings()}
    assert found["dead_units"].site == "relu:output" and found["dead_units"].steps.last == 19
    assert found["nonfinite"].steps.first == 20


def test_what_an_error_kept_from_running_is_not_said_to_have_been_left_out(tmp_path):
    """Modules behind an error in the first step, and those of a model that was never called, never had the chance."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(4, 2))
    with pytest.raises(RuntimeError), tt.watch(model, to=tmp_path / "error"):
        model(torch.ones(1, 3))
    with tt.watch(model, to=tmp_path / "nothing"):
        pass
    for name, why in (("error", "RuntimeError came before"), ("nothing", "the end came before")):
        found = tt.open_run(tmp_path / name).findings()
        assert "never_ran" not in found.rules and why in found.skipped["never_ran"]


@pytest.mark.parametrize("since", [0, 9])
def test_dead_units_are_told_from_the_step_since_which_they_are_dead(tmp_path: Path, since: int) -> None:
    """The steps begin where the units fell silent, not where the stretch begins by which the rule judges."""
    layer = nn.ReLU()
    with tt.watch(layer, tt.probe("", keep=tt.units()), to=tmp_path / "run", explicit_steps=True) as tap:
        for step in range(25):
            x = torch.from_numpy(X) + 3.0
            x[:, 12:] -= 20.0 * (step >= since)
            layer(x)
            tap.step()
    [found] = tap.run.findings(rules=["dead_units"])
    assert found.evidence["dead"] == 20 and found.steps == Steps(since, 24, 25 - since)


def test_one_of_several_arguments_is_called_by_its_name(tmp_path: Path) -> None:
    """What a step is given may be targets as well as inputs: a finding names the argument."""

    class Step(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x - y).square().mean()

    step, x = Step(), torch.from_numpy(X)
    with tt.watch(step, ":input", ":output", to=tmp_path / "run", explicit_steps=True) as tap:
        for _ in range(3):
            step(x / x.abs().max(), y=x * 1e4)
            tap.step()
    [found] = tap.run.findings(rules=["inputs_not_normalised"])
    assert found.site == ":input.y" and found.message.startswith("The argument y ranges from")
