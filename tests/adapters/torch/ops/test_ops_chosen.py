"""Which calls of operations are recorded: by a function, a trigger, a pattern; and what a run says of them."""

from __future__ import annotations

import contextlib
import inspect
import weakref

import pytest
import torch
from click.testing import CliRunner
from tests.adapters.torch.ops.test_ops import ALL, Attention, Does, Net
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from tensortap.cli import cli
from tensortap.errors import PatternError, ProbeError
from tensortap.view.api.service import Api


def test_where_chooses_calls(watch):
    """Only calls that the predicate wants are recorded, and each probe asks its own."""
    narrow = tt.probe("op:matmul:{input,output,grad_output}", where=lambda call: call.args[0].shape[-1] < 4)
    second = tt.probe("op:matmul", where=lambda call: (call.op, call.path, call.number) == ("matmul", "blocks.1", 1))
    net = Net()
    seen = watch(net, narrow, second, strict=True)
    for _ in range(2):
        net(torch.randn(1, 3, 4)).sum().backward()
    seen.tap.step()
    expected = {
        f"blocks.{i}/matmul#1:{port}" for i in (0, 1) for port in ("input[0]", "input[1]", "output", "grad_output")
    }
    assert set(seen.places) == expected


def test_where_is_told_the_line(watch):
    """The predicate knows the line of the user's code that calls."""
    lines = []
    model = Does(lambda x: x @ x)
    seen = watch(model, tt.probe("op:matmul", where=lambda call: lines.append(call.line) or True))
    model(torch.eye(2))
    seen.tap.step()
    assert lines[0].startswith(f"{__file__}:") and lines[0].endswith("model = Does(lambda x: x @ x)")


def test_where_that_raises_is_counted_and_said_once(watch):
    """An error in a predicate costs that record, is named once, and reaches nobody's training."""
    model = Does(lambda x: (x @ x).relu())
    seen = watch(model, tt.probe("op:matmul", where=lambda call: call.nonsense), "op:relu")
    with pytest.warns(tt.TensortapWarning, match="where= of a probe for /matmul#0.*nonsense"):
        for _ in range(3):
            model(torch.eye(2))
    seen.tap.step()
    assert seen.tap.counts["predicate_errors"] == 3
    assert set(seen.places) == {"/relu#0:output"}


def test_no_tensor_is_kept_after_a_call(watch):
    """What went through an operation is free when the user lets go of it."""
    refs = []

    def forward(x):
        y = x * 2
        refs.append(weakref.ref(y))
        return (y @ y).sum()

    model = Does(forward)
    watch(model, tt.probe(f"op:*:{ALL}", where=lambda call: True), strict=True)
    model(torch.eye(3))
    assert refs[0]() is None


def test_where_needs_operations():
    """A predicate for modules is refused when the probe is made, and so is one that is no function."""
    with pytest.raises(ProbeError, match="operations only, got the pattern 'fc'"):
        tt.probe("op:matmul", "fc", where=lambda call: True)
    with pytest.raises(ProbeError, match="must be a function of the call, got 3"):
        tt.probe("op:matmul", where=3)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("op:matmull", "Did you mean 'op:matmul'"),
        ("op:@matmull", "Did you mean 'op:@matmul'"),
        ("op:*zzz", "there is no operation .* among \\d+"),
    ],
)
def test_an_operation_that_exists_nowhere(pattern, said, tmp_path):
    """A misspelt operation or group raises at set-up with the nearest names, before any file is made."""
    with pytest.raises(PatternError, match=said):
        tt.watch(Net(), pattern, to=tmp_path / "run")
    with pytest.raises(PatternError, match=said):
        tt.capture(Net(), torch.ones(1, 3, 4), pattern)
    assert not (tmp_path / "run").exists()


def test_an_operation_that_never_ran_is_reported(watch, tmp_path):
    """Valid patterns that nothing was recorded for are listed, each with the reason."""
    net = Net()
    with tt.watch(net, "op:matmul", "op:conv2d", "blocks.0/relu", "op:matmul:grad_input", to=tmp_path / "run") as tap:
        net(torch.randn(1, 3, 4))
    assert tap.run.info["unseen"] == {
        "op:conv2d": "no such operation ran in a step that was observed",
        "blocks.0/relu": "no such operation ran in a step that was observed",
        "op:matmul:grad_input": "ran, but no backward came back to it",
    }
    assert tap.run.counts == {"unseen": 3}


def test_named_values_and_operations_share_the_slash(watch):
    """A pattern with a slash finds an operation of that module or a value of that name, and both count as seen."""
    net = Net()
    model = Does(lambda x: tt.tap(net(x), "blocks.0/mine"))
    model.net = net
    seen = watch(model, "net.blocks.0/matmul#0", "blocks.0/mine")
    model(torch.randn(1, 3, 4))
    seen.tap.step()
    assert seen.places == ["net.blocks.0/matmul#0:output", "blocks.0/mine:output"]
    assert seen.unseen() == {}


def test_the_mode_is_on_only_in_steps_that_are_wanted(watch):
    """In an unobserved step no function mode is on, no hook sits on any module but the root, and none is left."""
    depths = []
    net = Net()
    inner = Does(lambda x: (depths.append(torch._C._len_torch_function_stack()), net(x))[1])
    inner.net = net
    seen = watch(inner, tt.probe("op:matmul", when=tt.every(3)))
    for _ in range(5):
        inner(torch.randn(1, 3, 4))
        depths.append(sum(len(m._forward_hooks) for m in net.modules()))
    assert depths[0::2] == [1, 0, 0, 1, 0] and depths[3] == depths[5] == 0
    seen.tap.step()
    assert seen.steps == [0, 3]


def test_triggers_and_reducers_are_those_of_modules(watch, tmp_path):
    """A metric decides afterwards, look-back gives the step before, and full() keeps the tensor."""
    net, given = Net(), []
    probe = tt.probe("blocks.0/softmax", keep=tt.full(), when=tt.metric("loss") > 1)
    with tt.watch(net, probe, to=tmp_path / "run", lookback=1) as tap:
        for step in range(4):
            given.append(torch.randn(1, 3, 4))
            net(given[-1])
            tap.step(loss=2.0 if step == 2 else 0.0)
    assert tap.run.steps == [1, 2]
    with torch.no_grad():
        weights = tt.capture(net, given[2], "blocks.0/softmax")["blocks.0/softmax#0"]
    assert torch.equal(torch.from_numpy(tap.run.tensor("blocks.0/softmax#0", 2)), weights)
    assert len(list(tap.run.records("op:@softmax"))) == 2


def test_escalation_from_modules_to_operations(watch):
    """After a non-finite step the operations are recorded for as many steps as asked, and then no more."""
    net = Net()
    watchful = tt.probe("**", keep=tt.stats(), escalate=tt.escalation("op:*", keep=tt.stats(), steps=2))
    seen = watch(net, watchful, strict=True)
    for step in range(6):
        x = torch.randn(1, 3, 4)
        net(x * (torch.inf if step == 1 else 1))
        seen.tap.step()
    assert sorted({r.step for r in seen.records if r["op"]}) == [2, 3]
    assert {r.step for r in seen.records if not r["op"]} == set(range(6))


def test_recomputed_operations_are_marked(watch):
    """What a checkpoint computes again in backward is recorded once more, and marked."""
    block = Attention()
    model = Does(lambda x: checkpoint(block, x, use_reentrant=False))
    model.block = block
    seen = watch(model, "op:softmax:{output,grad_output}", strict=True)
    model(torch.randn(1, 3, 4, requires_grad=True)).sum().backward()
    seen.tap.step()
    assert [r.recomputed for r in seen.of("block/softmax#0:output")] == [False, True]
    assert len(seen.of("block/softmax#0:grad_output")) == 1
    assert torch._C._len_torch_function_stack() == 0


def test_a_shared_module_goes_by_the_name_under_its_caller(watch):
    """Of two names of one module the operation's site has the one that lies in the module that calls."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    seen = watch(model, "op:linear")
    model(torch.randn(1, 4))
    seen.tap.step()
    assert seen.places == ["0.0/linear#0:output", "1.0/linear#0:output"]


def test_a_loop_of_many_operations_is_bounded(watch, monkeypatch):
    """Beyond the limit operations of one call share the last site, and are its further calls."""
    monkeypatch.setattr("tensortap.adapters.torch.ops.taps._MOST_NUMBERS", 4)
    model = Does(lambda x: [x * i for i in range(9)][-1])
    seen = watch(model, "op:mul")
    model(torch.ones(1))
    seen.tap.step()
    assert [r.call for r in seen.of("/mul#3:output")] == list(range(6))
    assert len(seen.records) == 9


def test_capture_and_sites(watch):
    """`capture` gives an operation's tensors, `sites` with a batch lists the operations and leaves the model alone."""
    net, x = Net(), torch.randn(2, 3, 4)
    got = tt.capture(net, x, "op:softmax", "blocks.0/matmul:input[1]")
    assert list(got) == [
        "blocks.0/matmul#0:input[1]",
        "blocks.0/softmax#0",
        "blocks.0/matmul#1:input[1]",
        "blocks.1/softmax#0",
    ]
    assert torch.equal(got["blocks.0/matmul#1:input[1]"], x)
    state = torch.get_rng_state()
    listed = {site.path: site for site in tt.sites(net, x)}
    assert "blocks.1/matmul#1" in listed and listed["blocks.1/matmul#1"].types == ("matmul",)
    assert "blocks.1/matmul#1" not in {site.path for site in tt.sites(net)}
    assert torch.equal(state, torch.get_rng_state()) and not net.blocks[0]._forward_hooks


def test_copying_what_modules_show_is_no_operation():
    """Copies that `capture` makes of modules' tensors are not taken for operations of the model."""
    got = tt.capture(nn.Linear(4, 4), torch.randn(2, 4), "op:*", "**:{input,output}")
    assert list(got) == [":input", "/linear#0", ":output"]


def test_the_line_is_in_the_run_and_shown(tmp_path):
    """A run knows the line of code of each operation's site; `show`, its --json and the viewer tell it."""
    net = Net()
    with tt.watch(net, "op:softmax", "blocks.0", to=tmp_path / "run") as tap:
        net(torch.randn(1, 3, 4))
    source, start = inspect.getsourcelines(Attention.forward)
    where = f"{inspect.getsourcefile(Attention)}:{start + 2}  {source[2].strip()}"
    assert tap.run.lines == {f"blocks.{i}/softmax#0": where for i in (0, 1)}
    shown = CliRunner().invoke(
        cli, ["show", str(tmp_path / "run"), "--site", "blocks.0/softmax"], env={"COLUMNS": "300"}
    )
    assert f"{start + 2}  {source[2].strip()}" in shown.output.replace("\n", "")
    as_json = CliRunner().invoke(cli, ["show", str(tmp_path / "run"), "--site", "blocks.0/softmax", "--json"])
    assert '"line":' in as_json.output
    with contextlib.closing(Api(str(tmp_path / "run"))) as api:
        record = api.answer("/api/site", {"site": "blocks.0/softmax#0:output"}).header["record"]
        module = api.answer("/api/site", {"site": "blocks.0:output"}).header["record"]
    assert record["line"] == where and "line" not in module


def test_nonfinite_origin_with_operations_tapped(watch, tmp_path):
    """A module that is run again to find the origin is not recorded again."""
    model = Does(lambda x: (x - 1).log() @ torch.ones(2, 2))
    origins = []
    with tt.watch(model, "op:*:{input,output}", ":input", to=tmp_path / "run", on_nonfinite=origins.append) as tap:
        model(torch.ones(2, 2))
        tap.step()
    assert (origins[0].site, origins[0].operation, origins[0].why) == ("", "log", "log of 0")
    assert tap.run.sites == [
        ":input", "/sub#0:input", "/sub#0:output", "/log#0:input", "/log#0:output", "/ones#0:output",
        "/matmul#0:input[0]", "/matmul#0:input[1]", "/matmul#0:output",
    ]  # fmt: skip
    assert set(tap.run.table(columns=["call"])["call"].to_pylist()) == {0}
