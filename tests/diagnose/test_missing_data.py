"""What is said where rules had no data: the call that records it."""

import re

import pytest
import torch
from click.testing import CliRunner

import tensortap as tt
from tensortap.cli.app import cli
from tensortap.diagnose.rule import NO_CONTEXT
from tensortap.errors import ProbeError, UnsupportedError


def _trained(path, *probes, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(16, 4), torch.arange(16) % 2
    with tt.watch(model, *probes, to=path, **options) as tap:
        for _ in range(8):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tap.step(loss=loss)
    return tap.run


def test_the_reason_names_the_call_that_records_the_context(tmp_path):
    """A rule that needs the training context says what to write, which is more than the user wrote already."""
    found = _trained(tmp_path / "run").findings()
    assert found.skipped["gradients_not_reset"] == found.skipped["sample_out_of_size"] == NO_CONTEXT
    assert "tt.watch(model, context=True)" in NO_CONTEXT and "tensortap run SCRIPT" in NO_CONTEXT


def test_that_call_gives_the_data(tmp_path):
    """With `context=True`, as the reason says, no rule lacks the training context."""
    found = _trained(tmp_path / "run", context=True).findings()
    assert NO_CONTEXT not in found.skipped.values()


def test_the_reason_names_the_port_to_record(tmp_path):
    """A rule that needs a port names the pattern, and with that pattern it looks."""
    reason = _trained(tmp_path / "a").findings().skipped["update_ratio"]
    (pattern,) = re.findall(r"tt\.watch\(model, '\*\*', '(.+?)'\)", reason)
    assert "update_ratio" in _trained(tmp_path / "b", "**", pattern).findings().rules


def test_printed_findings_say_why_most_rules_had_no_data(tmp_path):
    """The findings of a run without context end with the reason that most of the idle rules share."""
    without, of_one_rule = (
        _trained(tmp_path / "run").findings(),
        _trained(tmp_path / "other").findings(["update_ratio"]),
    )
    *_, last = str(without).splitlines()
    count = list(without.skipped.values()).count(NO_CONTEXT)
    assert last == f"{count} rules: {NO_CONTEXT}"
    assert NO_CONTEXT in without._repr_html_()
    assert str(of_one_rule).splitlines()[-1] == f"1 rule: {of_one_rule.skipped['update_ratio']}"


def test_check_ends_with_what_to_write(tmp_path):
    """The last line of `tensortap check` names the call and the command for what this run lacks, and no other."""
    _trained(tmp_path / "neither"), _trained(tmp_path / "ports", context=True)
    _trained(
        tmp_path / "context", *("**", "**:input", "**:grad_output", "**:grad_input", "**:grad", "**:param"), "**:update"
    )
    last = {name: _last_line(tmp_path / name) for name in ("neither", "ports", "context")}
    assert re.match(r"give them data: tt\.watch\(model, '\*\*', .*'\*\*:\{.*update\}', context=True\)", last["neither"])
    assert last["neither"].endswith("or tensortap run --watch recommended SCRIPT")
    assert "update}')" in last["ports"] and "context" not in last["ports"]
    assert last["context"] == "give them data: tt.watch(model, context=True), or tensortap run SCRIPT"


def _last_line(path):
    return CliRunner().invoke(cli, ["check", str(path)]).output.strip().splitlines()[-1]


def test_context_needs_a_model(tmp_path):
    """`context=True` without a model is refused, with the call that works."""
    with pytest.raises(ProbeError, match=r"context=True needs a model.*tt\.watch\(model, context=True\)"):
        tt.watch(to=tmp_path / "run", context=True)
    assert not (tmp_path / "run").exists()


def test_a_step_of_jax_says_how_its_context_is_recorded(tmp_path):
    """`watch_step(..., context=True)` names the command that records the context of compiled steps."""
    jax = pytest.importorskip("jax")
    with pytest.raises(UnsupportedError, match=r"JAX does not support .*context=True.*tensortap run SCRIPT"):
        tt.watch_step(jax.jit(lambda x: x + 1), to=tmp_path / "run", context=True)
    assert not (tmp_path / "run").exists()


def test_check_counts_the_steps_of_each_phase(tmp_path):
    """Where training and evaluation share one sequence of numbers, `check` still says how many steps each has."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    with tt.watch(model, to=tmp_path / "run") as tap:
        for number in range(5):
            model.train(number < 3)(torch.ones(1, 4))
            tap.step()
    said = CliRunner().invoke(cli, ["check", str(tmp_path / "run")]).output
    assert "5 steps (3 train, 2 eval)" in said
