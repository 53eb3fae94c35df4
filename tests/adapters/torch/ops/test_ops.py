"""Single operations: each has a site under the module that called it, with inputs, output, gradients and line."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from tensortap.cli import cli
from tensortap.errors import PatternError, ProbeError
from tensortap.select.operations import GROUPS
from tensortap.view.api.service import Api

ALL = "{output,input,grad_output,grad_input}"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return scores.softmax(-1) @ x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Does(nn.Module):
    """A module whose forward is a function of its input."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


A, B = torch.randn(3, 4), torch.randn(4, 4)
PRODUCTS = {
    "@": (lambda x: x @ B, "matmul"),
    "torch.matmul": (lambda x: torch.matmul(x, B), "matmul"),
    "Tensor.matmul": (lambda x: x.matmul(B), "matmul"),
    "__rmatmul__": (lambda x: B.__rmatmul__(x), "matmul"),
    "mm": (lambda x: torch.mm(x, B), "mm"),
    "Tensor.mm": (lambda x: x.mm(B), "mm"),
    "bmm": (lambda x: torch.bmm(x[None], B[None]), "bmm"),
    "mv": (lambda x: torch.mv(x, B[0]), "mv"),
    "dot": (lambda x: torch.dot(x[0], B[0]), "dot"),
    "addmm": (lambda x: torch.addmm(x, x, B), "addmm"),
    "addmv": (lambda x: torch.addmv(x[:, 0], x, B[0]), "addmv"),
    "addbmm": (lambda x: torch.addbmm(x, x[None], B[None]), "addbmm"),
    "baddbmm": (lambda x: torch.baddbmm(x[None], x[None], B[None]), "baddbmm"),
    "F.linear": (lambda x: F.linear(x, B), "linear"),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, B), "einsum"),
    "tensordot": (lambda x: torch.tensordot(x, B, 1), "tensordot"),
    "multi_dot": (lambda x: torch.linalg.multi_dot([x, B, B]), "linalg_multi_dot"),
    "bilinear": (lambda x: F.bilinear(x, x, torch.ones(2, 4, 4)), "bilinear"),
}


@pytest.mark.parametrize("way", PRODUCTS)
def test_every_way_to_multiply_matrices_is_seen(watch, same, way):
    """Whatever function multiplies, `op:@matmul` records its output under one name."""
    function, name = PRODUCTS[way]
    model = Does(function)
    seen = watch(model, "op:@matmul", strict=True)
    out = model(A)
    seen.tap.step()
    assert seen.places == [f"/{name}#0:output"]
    assert same(seen.one(f"/{name}#0:output"), out)
    assert seen.records[0]["op"] == name


OTHERS = {
    "softmax": (lambda x: (F.softmax(x, -1), torch.softmax(x, -1), x.softmax(-1))[2], "softmax", 3),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), "scaled_dot_product_attention", 1
    ),
    "norm": (lambda x: F.layer_norm(x, (4,)), "layer_norm", 1),
    "activation": (lambda x: (F.relu(x), torch.relu(x), x.relu())[2], "relu", 3),
    "conv": (lambda x: F.conv1d(x[None], torch.ones(1, 3, 1)), "conv1d", 1),
    "reduce": (lambda x: x.sum(), "sum", 1),
    "elementwise": (lambda x: (x + 1, torch.add(x, 1), x.add(1), 1 + x)[3], "add", 4),
}  # fmt: skip


@pytest.mark.parametrize("group", OTHERS)
def test_groups(watch, same, group):
    """Each group finds its functions, under one name whatever the way to call them."""
    function, name, times = OTHERS[group]
    model = Does(function)
    seen = watch(model, f"op:@{group}", strict=True)
    out = model(A)
    seen.tap.step()
    assert seen.places == [f"/{name}#{i}:output" for i in range(times)]
    assert same(seen.records[-1], out)


def test_every_name_in_a_group_is_an_operation():
    """Except for in-place variants, groups name only what PyTorch has."""
    from tensortap.adapters.torch.ops.names import known_operations

    known = known_operations()
    missing = {name for names in GROUPS.values() for name in names if name not in known and not name.endswith("_")}
    assert missing == set()


def test_sites_lie_under_the_module_that_calls(watch):
    """Operations are numbered by kind in each call of their module; a further call of it is a further `call`."""
    net = Net()
    seen = watch(net, "op:matmul", "op:linear")
    for _ in range(2):
        net(torch.randn(2, 3, 4))
    net.blocks[1](torch.randn(1, 3, 4))
    seen.tap.step()
    block = ["q/linear#0:output", "k/linear#0:output", "matmul#0:output", "matmul#1:output"]
    expected = [f"blocks.{i}{'/' if 'matmul' in name else '.'}{name}" for i in (0, 1) for name in block]
    assert [p for p in seen.places if p in expected][:8] == expected
    assert [r.call for r in seen.of("blocks.1/matmul#1:output")] == [0, 0, 1]


def test_a_pattern_names_module_and_number(watch):
    """`blocks.*/matmul#1` is the second product in every block, and nothing else."""
    net = Net()
    seen = watch(net, "blocks.*/matmul#1", "blocks.0/{softmax,@matmul}#0:output")
    net(torch.randn(2, 3, 4))
    seen.tap.step()
    assert seen.places == [
        "blocks.0/matmul#0:output", "blocks.0/softmax#0:output", "blocks.0/matmul#1:output", "blocks.1/matmul#1:output"
    ]  # fmt: skip


SHAPES = {
    "plain": ((3, 4), (4, 5)), "batched": ((2, 3, 4), (2, 4, 5)), "broadcast": ((2, 1, 3, 4), (5, 4, 6)),
    "vector": ((3, 4), (4,)), "dot": ((4,), (4,)),
}  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES)
def test_gradients_of_an_operations_own_inputs(watch, same, shapes):
    """Gradients are what this product sends to its operands, not what else reaches them, in the operands' shapes."""
    a, b = (torch.randn(shape, requires_grad=True) for shape in SHAPES[shapes])
    model = Does(lambda a, b: (torch.matmul(a, b).sin(), a * 3, b * 5))
    seen = watch(model, f"op:matmul:{ALL}", strict=True)
    product, *others = model(a, b)
    (product.sum() + sum(t.sum() for t in others)).backward()
    seen.tap.step()
    own = [t.detach().requires_grad_() for t in (a, b)]
    result = torch.matmul(*own)
    outer = result.detach().cos()
    expected = torch.autograd.grad(result, own, outer)
    assert same(seen.one("/matmul#0:grad_output"), outer)
    for i in range(2):
        assert same(seen.one(f"/matmul#0:input[{i}]"), own[i])
        assert same(seen.one(f"/matmul#0:grad_input[{i}]"), expected[i])
        assert not torch.equal(expected[i], (a, b)[i].grad)


def test_one_tensor_given_twice(watch, same):
    """Each operand of x @ x has the gradient of both uses, which cannot be told apart."""
    x = torch.randn(3, 3, requires_grad=True)
    model = Does(lambda x: x @ x)
    seen = watch(model, f"op:matmul:{ALL}", strict=True)
    model(x).sum().backward()
    seen.tap.step()
    assert same(seen.one("/matmul#0:grad_input[0]"), x.grad) and same(seen.one("/matmul#0:grad_input[1]"), x.grad)


def test_what_an_in_place_operation_is_given(watch, same):
    """The input is recorded as it was before, the output as it is after, and the name keeps its underscore."""
    x = torch.randn(5)
    before = x.clone()
    model = Does(lambda x: x.mul_(2))
    seen = watch(model, "op:mul_:{input,output}")
    model(x)
    seen.tap.step()
    assert same(seen.one("/mul_#0:input"), before) and same(seen.one("/mul_#0:output"), 2 * before)


def test_keywords_lists_and_several_results_have_slots(watch):
    """Inputs are named by position or keyword, what comes out by field; `out` is no input."""
    x = torch.randn(2, 2)
    model = Does(lambda x: (torch.cat([x, x]).max(0), torch.add(x, other=x), torch.mm(x, x, out=torch.empty(2, 2))))
    seen = watch(model, "op:{cat,max,add,mm}:{input,output}", strict=True)
    model(x)
    seen.tap.step()
    assert seen.places == [
        "/cat#0:input[0][0]", "/cat#0:input[0][1]", "/cat#0:output", "/max#0:input", "/max#0:output.values",
        "/max#0:output.indices", "/add#0:input[0]", "/add#0:input.other", "/add#0:output", "/mm#0:input[0]",
        "/mm#0:input[1]", "/mm#0:output",
    ]  # fmt: skip


def test_reading_is_no_operation(watch):
    """Attributes, shapes, numbers, backward and the like leave no record, whatever the pattern."""

    def forward(x):
        assert (
            x.shape and x.dim() and x.size(0) and x.requires_grad and x.is_contiguous() and len(x) and x.T is not None
        )
        (x * 1).sum().backward()
        return float(x.detach()[0, 0].item())

    model = Does(forward)
    seen = watch(model, "op:*:*", strict=True)
    model(torch.randn(2, 2, requires_grad=True))
    seen.tap.step()
    assert {r["op"] for r in seen.records} == {"mul", "sum", "detach", "getitem"}


def test_inside_multihead_attention(watch, same):
    """The products and the softmax inside nn.MultiheadAttention are seen, with gradients, under that module."""
    mha, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)
    model = nn.ModuleDict({"mha": mha})
    model.forward = lambda x: mha(x, x, x, average_attn_weights=False)
    seen = watch(model, f"op:softmax:{ALL}", "op:@matmul:grad_output", strict=True)
    out, weights = model(x)
    weights.retain_grad()
    out.sum().backward()
    seen.tap.step()
    assert same(seen.one("mha/softmax#0:output"), weights.reshape(4, 3, 3))
    assert {"mha/mm#0:grad_output", "mha/bmm#0:grad_output", "mha/bmm#1:grad_output"} <= set(seen.places)
    scores = seen.one("mha/bmm#0:grad_output")
    assert scores["l2"] == seen.one("mha/softmax#0:grad_input")["l2"] > 0
    assert seen.one("mha/softmax#0:input").summary.shape == (4, 3, 3)


def test_attention_without_weights_is_seen_as_the_dispatcher_does_it(watch):
    """With need_weights=False the fused attention inside is one operation, or its parts where it has them."""
    mha, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)
    model = Does(lambda x: mha(x, x, x, need_weights=False)[0])
    model.mha = mha
    seen = watch(model, "op:{scaled_dot_product_attention,softmax}", strict=True)
    model(x)
    seen.tap.step()
    assert seen.places and all(place.startswith("mha/") for place in seen.places)


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
        ("op:*zzz", "none of .* operations"),
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
    where = f"{Path(__file__)}:{start + 2}  {source[2].strip()}"
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
