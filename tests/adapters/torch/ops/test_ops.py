"""Single operations: each has a site under the module that called it, with inputs, output, gradients and line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensortap.select.operations import GROUPS

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
