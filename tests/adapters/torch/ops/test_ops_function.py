"""Operations of code that has no module: blocks and plain functions."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tensortap as tt
from tensortap.errors import PatternError, UnsupportedError


def modes() -> int:
    return torch._C._len_torch_function_stack()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def places(memory: tt.Memory) -> list[tuple[int, str]]:
    return [(record.step, str(record.place)) for record in memory.records]


def test_a_block(same):
    """What runs in the block is recorded, in order; what runs before and after is not."""
    memory, x = tt.Memory(), torch.randn(3, 3)
    x @ x
    with tt.ops("matmul", "@softmax:{input,output}", to=memory):
        out = attention(x, x, x)
    x @ x
    assert [place for _, place in places(memory)] == [
        "/matmul#0:output", "/softmax#0:input", "/softmax#0:output", "/matmul#1:output"
    ]  # fmt: skip
    assert same(memory.records[-1], out)
    assert modes() == 0


def test_steps_of_a_block():
    """`tap.step()` divides a block into steps, in each of which numbers begin again; triggers choose among them."""
    memory, x, depths = tt.Memory(), torch.randn(3, 3), []
    with tt.ops("matmul", when=tt.every(2), to=memory) as tap:
        for _ in range(4):
            depths.append(modes())
            attention(x, x, x)
            tap.step()
    assert places(memory) == [(step, f"/matmul#{i}:output") for step in (0, 2) for i in (0, 1)]
    assert depths == [1, 0, 1, 0]


def test_every_operation_is_the_default_of_a_block():
    """Without names all operations are recorded, but no reading of attributes."""
    memory = tt.Memory()
    with tt.ops(to=memory):
        x = torch.ones(2, 2)
        assert x.shape == (2, 2)
        F.relu(x * 2)
    assert [r["op"] for r in memory.records] == ["ones", "mul", "relu"]


def test_gradients_in_a_block(same):
    """Gradients of outputs and inputs come when backward runs before the step is closed."""
    memory = tt.Memory()
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    with tt.ops("matmul:grad*", to=memory):
        (a @ b).sum().backward()
    found = {str(record.place): record for record in memory.records}
    assert same(found["/matmul#0:grad_input[0]"], a.grad) and same(found["/matmul#0:grad_input[1]"], b.grad)
    assert same(found["/matmul#0:grad_output"], torch.ones(2, 4))


def test_where_in_a_block():
    """A predicate chooses among the calls of a block."""
    memory = tt.Memory()
    with tt.ops("mul", where=lambda call: call.args[1] > 1, to=memory):
        for i in range(4):
            torch.ones(2) * i
    assert [place for _, place in places(memory)] == ["/mul#2:output", "/mul#3:output"]


def test_a_misspelt_name_raises_before_anything_is_made(tmp_path):
    """The error offers the nearest operation, and no mode is on."""
    with pytest.raises(PatternError, match="Did you mean 'op:softmax'"):
        tt.ops("sofmax", to=tmp_path / "run")
    assert modes() == 0 and not (tmp_path / "run").exists()


def test_operations_without_a_model():
    """`watch` without a model sees no operations, and says what does."""
    with pytest.raises(PatternError, match=r"Write ops\('matmul'\)"):
        tt.watch("op:matmul", to=tt.Memory())


def test_a_block_that_fails_leaves_nothing():
    """An exception goes through, and the mode is off."""
    memory = tt.Memory()
    with pytest.raises(KeyError, match="mine"), tt.ops(to=memory):
        torch.ones(2) * 1
        raise KeyError("mine")
    assert modes() == 0 and len(memory.records) == 2


class Quiet(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_the_users_around_steps_of_a_block():
    """A mode that is on while a step closes, and the block's comes or goes, comes off as it would."""
    memory, mine = tt.Memory(), Quiet()
    with tt.ops("mul", when=tt.every(2), to=memory) as tap:
        for _ in range(2):
            with mine:
                torch.ones(2) * 2
                tap.step()
                assert torch._C._get_function_stack_at(modes() - 1) is mine
                torch.ones(2) * 2
            tap.step()
    assert modes() == 0
    assert {step for step, _ in places(memory)} == {0, 2}


def test_blocks_in_blocks():
    """Each block sees what runs in it, and the inner one's reading is no operation for the outer."""
    outer, inner, x = tt.Memory(), tt.Memory(), torch.ones(2, 2)
    with tt.ops("*", to=outer):
        x * 2
        with tt.ops("mul:{input,output}", to=inner):
            x * 3
    assert [r["op"] for r in outer.records] == ["mul", "mul"]
    assert [r["op"] for r in inner.records] == ["mul"] * 2


def test_other_threads_are_not_seen():
    """A block is the thread's that began it; closing it elsewhere stops it all the same."""
    memory, x = tt.Memory(), torch.ones(2)
    tap = tt.ops("mul", to=memory)
    other = threading.Thread(target=lambda: x * 2)
    other.start()
    other.join()
    x * 3
    closer = threading.Thread(target=tap.close)
    closer.start()
    closer.join()
    x * 4
    assert [r["max"] for r in memory.records] == [3.0]
    tap._adapter.detach()
    assert modes() == 0


def test_fused_layers_in_a_block_stay_fused():
    """A block changes nothing about layers that run fused in inference."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    memory = tt.Memory()
    with torch.no_grad():
        bare = layer(x)
        with tt.ops(to=memory) as tap:
            tapped = layer(x * 1)
    assert torch.equal(bare, tapped)
    assert [r["op"] for r in memory.records] == ["mul"]
    assert "fused" in tap._adapter._taps.visibility.hidden


def test_a_function(same):
    """Each call through the tap is a step, and its operations lie under the function's name."""
    memory, x = tt.Memory(), torch.randn(3, 3)
    with tt.watch(attention, "op:matmul", "attention/softmax", to=memory) as tap:
        for _ in range(2):
            out = tap.call(x, x, v=x)
        attention(x, x, x)
    names = ["attention/matmul#0:output", "attention/softmax#0:output", "attention/matmul#1:output"]
    assert places(memory) == [(step, name) for step in (0, 1) for name in names]
    assert same(memory.records[-1], out) and torch.equal(out, attention(x, x, x))


def test_a_function_with_steps_of_the_users():
    """With `tap.step()` several calls belong to one step, and count as calls."""
    memory, x = tt.Memory(), torch.randn(3, 3)
    with tt.watch(attention, "op:softmax", to=memory) as tap:
        tap.step()
        tap.call(x, x, x)
        tap.call(x, x, x)
        tap.step(loss=1.0)
    assert [(r.step, r.call) for r in memory.records] == [(1, 0), (1, 1)]


def test_without_patterns_a_function_shows_all_it_does():
    """The default of a function is every operation."""
    memory, x = tt.Memory(), torch.randn(3, 3)
    with tt.watch(functools.partial(attention, x), to=memory) as tap:
        tap.call(x, x)
    assert [r["op"] for r in memory.records] == ["matmul", "softmax", "matmul"]


def test_a_function_that_calls_itself():
    """A call within a call belongs to the same step and has numbers of its own."""

    def halve(x: Tensor, times: int) -> Tensor:
        return tap.call(x * 0.5, times - 1) if times else x

    memory = tt.Memory()
    with tt.watch(halve, "op:mul", to=memory) as tap:
        tap.call(torch.ones(1), 3)
    assert [(r.step, str(r.place), r.call, r["max"]) for r in memory.records] == [
        (0, "halve/mul#0:output", 0, 0.5), (0, "halve/mul#0:output", 1, 0.25), (0, "halve/mul#0:output", 2, 0.125)
    ]  # fmt: skip
    assert modes() == 0


def test_a_function_that_fails():
    """Its error is the user's, and the mode is off."""
    with tt.watch(attention, "op:*", to=tt.Memory()) as tap:
        with pytest.raises(RuntimeError):
            tap.call(torch.ones(2, 3), torch.ones(2, 4), torch.ones(2, 2))
        assert modes() == 0


def test_a_function_that_was_never_called_through_the_tap(tmp_path):
    """It is reported with what to write instead."""
    x = torch.randn(2, 2)
    with tt.watch(attention, "op:softmax", to=tmp_path / "run") as tap:
        attention(x, x, x)
    assert "tap.call(" in tap.run.info["unseen"]["op:softmax"]


def test_named_values_in_a_function():
    """Values named inside the function are recorded beside its operations, gradients too."""
    memory = tt.Memory()

    def mine(x: Tensor) -> Tensor:
        return tt.tap(x * 2, "my/value") + 1

    with tt.watch(mine, "op:mul", "my/value:{output,grad_output}", to=memory) as tap:
        tap.call(torch.ones(2, requires_grad=True)).sum().backward()
        tap.step()
    assert [place for _, place in places(memory)] == ["mine/mul#0:output", "my/value:output", "my/value:grad_output"]


def test_call_is_for_functions_only():
    """A model is called itself, and a block is not called; the error says so. A class is no function."""
    with tt.watch(nn.Linear(2, 2), to=tt.Memory()) as tap, pytest.raises(UnsupportedError, match="call the watched"):
        tap.call(1)
    with tt.ops(to=tt.Memory()) as tap, pytest.raises(UnsupportedError, match="a block of code"):
        tap.call(1)
    with pytest.raises(UnsupportedError, match="cannot be watched"):
        tt.watch(object(), "op:mul")


def test_spans_give_threads_steps_of_their_own():
    """DispatchObserver `tap.span()` a call of the function is recorded in that span's step, with its labels."""
    memory, x = tt.Memory(), torch.ones(2, 2)
    with tt.watch(attention, "op:softmax", to=memory) as tap:
        for name in ("a", "b"):
            with tap.span(request=name):
                tap.call(x, x, x)
    assert len({r.step for r in memory.records}) == 2 == len(memory.records)
