"""It survives: odd tensors, odd modules, odd contexts. What cannot be recorded is counted, and the model runs on."""

from __future__ import annotations

import gc
import math
import os
import threading
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt


class Returns(nn.Module):
    """Returns what it was made with, or what a function makes of its input."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value(x) if callable(self.value) else self.value


def run(watch, value: Any, *probes: Any, **options: Any):
    """One call of a small model with the odd module in it, under observation."""
    model = nn.ModuleDict({"odd": Returns(value)})
    seen = watch(model, *(probes or ("odd:{output,input}",)), **options)
    model["odd"](torch.randn(2, 3))
    seen.tap.step()
    return seen


def test_inplace_changes_after_a_tapped_layer(watch, same):
    """What is recorded is what was there at the time, kept tensors included."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).mul_(0).add_(7)

    model, x = Model(), torch.randn(2, 3)
    seen = watch(model, tt.probe("fc", keep=[tt.stats(), tt.full()]))
    model(x)
    seen.tap.step()
    assert same(seen.one("fc:output"), model.fc(x))
    assert torch.equal(torch.from_numpy(seen.memory.tensors[0].array), model.fc(x).detach())


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.expand(4, 2, 3),
        lambda x: x.unfold(1, 2, 1),
        lambda x: x.unsqueeze(1).to(memory_format=torch.preserve_format),
        lambda x: x.flip(0)[1:],
        lambda x: x.view(2, 3, 1, 1).to(memory_format=torch.channels_last),
        lambda x: x[:0],
        lambda x: x[0, 0],
        lambda x: x.diagonal(),
    ],
)
def test_views_of_any_stride(watch, same, view):
    """Transposed, strided, broadcast and empty views have the statistics of their elements."""
    base = torch.randn(2, 3)
    seen = run(watch, lambda x: view(base))
    record, dense = seen.one("odd:output"), tt.summarize(view(base).contiguous())
    assert same(record, view(base))
    assert record["l1"] == pytest.approx(dense.l1) and (record["shape"], record["zeros"]) == (dense.shape, dense.zeros)


def test_backward_through_views_and_inplace(watch):
    """Splitting, slicing and in-place writes into views go on working with gradients tapped."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.split = Returns(lambda h: h.chunk(2, 1))

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.split(self.fc(x).clone())
            return a * b

    model = Model()
    seen = watch(model, "**:*")
    model(torch.randn(3, 4)).sum().backward()
    seen.tap.step()
    assert len(seen.of("split:grad_output[0]")) == len(seen.of("split:grad_output[1]")) == 1
    assert seen.one("fc:grad_output")["shape"] == (3, 4)
    assert not seen.tap.counts.get("skipped_tensors")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes(watch, context):
    """Outputs are seen in every gradient mode."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    seen = watch(model, "**:*", strict=True)
    with context():
        model(torch.randn(2, 3))
    seen.tap.step()
    assert seen.one("0:output")["numel"] == seen.one("1:input")["numel"] == 6


def test_autocast(watch, same):
    """Under autocast the lower precision is recorded as such, and nothing is cast for our sake."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), torch.randn(2, 3)
    seen = watch(model, "**:{output,grad_output}")
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        expected = model[0](x)
    out.float().sum().backward()
    seen.tap.step()
    first = seen.of("0:output")[0]
    assert first["dtype"] == "bfloat16" and same(first, expected)
    assert seen.of("0:grad_output")[0]["dtype"] == "bfloat16"


@pytest.mark.parametrize("value", [None, 3, "text", object(), [], {"a": None}, (1, "b")])
def test_outputs_that_are_no_tensors(watch, value):
    """None, numbers, text and empty containers are passed over."""
    seen = run(watch, value)
    assert seen.places == ["odd:input"]


def test_a_returned_parameter_keeps_no_hook(watch):
    """A module that returns a parameter shows its gradient, and the parameter carries nothing afterwards."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(3))
            self.get = Returns(lambda x: self.table)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.get(x)

    model = Model()
    seen = watch(model, "get:{output,grad_output}")
    for i in range(5):
        out = model(torch.randn(2, 3))
        if i % 2:
            out.sum().backward()
        seen.tap.step()
    assert [r.step for r in seen.of("get:grad_output")] == [1, 3]
    assert len(seen.of("get:output")) == 5
    assert model.table._backward_hooks is None


SPARSE = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, -1.0]])


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: SPARSE.to_sparse(), [2.0, -1.0]),
        (lambda: SPARSE.to_sparse_csr(), [2.0, -1.0]),
        (lambda: SPARSE.to_sparse_csc(), [2.0, -1.0]),
        (lambda: torch.quantize_per_tensor(SPARSE, 0.5, 0, torch.qint8), SPARSE.flatten().tolist()),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged), [1, 1, 0, 0, 0]),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]), [1, 1, 0, 0, 0]),
        (lambda: torch.tensor([3 + 4j, 0]), [5.0, 0.0]),
        (lambda: torch.tensor([3 + 4j, 0]).conj(), [5.0, 0.0]),
        (lambda: torch.tensor([3 + 4j, 2j]).conj().imag, [-4.0, -2.0]),
        (lambda: torch.tensor([3 + 4j]).conj().imag, [-4.0]),
        (lambda: torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn), [1.5, -2.0]),
        (lambda: torch.tensor([1.5, -2.0]).to(torch.float8_e5m2fnuz), [1.5, -2.0]),
        (lambda: torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu), [1.0, 2.0]),
        (lambda: torch.tensor([1 + 1j]).to(torch.complex32), [2**0.5]),
        (lambda: torch.tensor([True, False]), [1, 0]),
        (lambda: torch.tensor([2**40, -1]), [2**40, -1]),
        (lambda: torch.tensor([7], dtype=torch.uint16), [7]),
        (lambda: torch.zeros(0, 3), []),
        (lambda: torch.tensor(2.5), [2.5]),
        (lambda: SPARSE.to_mkldnn(), SPARSE.flatten().tolist()),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_odd_tensors(watch, make, values):
    """Sparse, quantised, nested, complex, small-float and empty tensors are taken by their values."""
    tensor = make()
    seen = run(watch, lambda x: tensor, "odd", strict=True)
    record = seen.one("odd:output")
    assert record["l1"] == pytest.approx(sum(map(abs, values)))
    assert record["max"] == pytest.approx(max(values)) if values else math.isnan(record["max"])
    assert record["min"] == pytest.approx(min(values)) if values else math.isnan(record["min"])


def test_meta_tensors_show_their_shape(tmp_path):
    """A tensor without values is recorded by its metadata: no minimum, no NaN count, and it is counted."""
    model = nn.Linear(3, 4, device="meta")
    with tt.watch(model, "**", to=tmp_path / "run") as tap:
        model(torch.randn(2, 3, device="meta"))
    (row,) = tap.run.table().to_pylist()
    assert (row["shape"], row["nan"], row["min"], row["mean"]) == ([2, 4], 0, None, None)
    assert tap.counts["tensors_without_values"] == 1


def test_a_tensor_without_memory_is_counted(watch):
    """Freed storage, as sharding leaves it, is an error of that record alone."""
    gone = torch.randn(5)
    gone.untyped_storage().resize_(0)
    with pytest.warns(tt.TensortapWarning, match="odd:output"):
        seen = run(watch, lambda x: gone)
    assert seen.places == ["odd:input"] and seen.tap.counts["skipped_tensors"] == 1


def test_lazy_modules(watch):
    """Lazy modules take shape under observation; their parameters are recorded once they have one."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    seen = watch(model, "**", "**:param", strict=True)
    seen.tap.step()
    assert seen.places == []
    model(torch.randn(3, 5))
    seen.tap.step()
    assert seen.one("0:output")["shape"] == (3, 4) and seen.one("0.weight:param")["shape"] == (4, 5)


def test_data_parallel(watch):
    """DataParallel without devices hands the call on; with replicas in threads all their calls are in the step."""
    model = nn.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    seen = watch(model, "**")
    model(torch.randn(4, 3))
    seen.tap.step()
    assert seen.places == ["module.0:output", "module.1:output", "module:output", ":output"]


def test_replicas_in_threads(watch):
    """Replicas share the hooks: every replica's calls are recorded."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    whole = nn.ModuleDict({"m": model})
    seen = watch(whole, "m.0")
    replicas = [model._replicate_for_data_parallel() for _ in range(2)]
    for replica in replicas:
        replica._modules = {name: child._replicate_for_data_parallel() for name, child in model._modules.items()}
        for name, child in replica._modules.items():
            child._parameters = model._modules[name]._parameters
    threads = [threading.Thread(target=replica, args=(torch.randn(2, 3),)) for replica in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen.tap.step()
    assert [r.call for r in seen.of("m.0:output")] == [0, 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vmap_and_functional_transforms(watch):
    """Inside vmap, grad and jvp the tensors are seen with the batch that vmap hides, and results are the same."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    x = torch.randn(5, 3)
    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    seen = watch(model, "**:*")
    got = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    seen.tap.step()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert seen.of("0:output")[0]["shape"] == (5, 3)
    torch.func.jvp(lambda x: model(x), (x,), (x,))
    assert not seen.tap.counts.get("skipped_tensors")


def test_deleting_the_model_while_watched(watch):
    """A tap keeps no model alive, whatever it watches and whatever is still running."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = watch(model, "**:*", "mine/x:grad_output")
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    gone = [weakref.ref(model), weakref.ref(model[0]), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    seen.tap.close()
    assert seen.of("0:output")


def test_activations_are_not_kept_alive(watch):
    """After a step nothing of ours holds on to tensors or graphs, with every port tapped."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    seen = watch(model, "**:{output,input,grad_output,grad_input}")
    refs: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda m, args, out: refs.extend(map(weakref.ref, (args[0], out))))
    gc.disable()
    try:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
        assert [ref() for ref in refs] == [None, None]
        out = model(torch.randn(2, 3, requires_grad=True))  # a graph that never sees a backward
        del out
        assert [ref() for ref in refs] == [None] * 4
    finally:
        gc.enable()
    seen.tap.step()


def test_a_failing_reducer_is_counted(watch):
    """A user's function that raises costs its own number only."""

    def broken(tensor: Tensor) -> float:
        raise ValueError("mine")

    with pytest.warns(tt.TensortapWarning, match="broken"):
        seen = run(watch, lambda x: x + 1, tt.probe("odd", keep=[broken, lambda t: t.numel()]))
    assert seen.one("odd:output").numbers == {"<lambda>": 6.0}
    assert seen.tap.counts["reducer_errors"] == 1


@pytest.mark.filterwarnings("ignore::tensortap.TensortapWarning")
def test_strict_lets_errors_out(watch):
    """With strict=True an error of ours reaches the user."""
    with pytest.raises(ValueError, match="mine"):
        run(watch, lambda x: x, tt.probe("odd", keep=lambda t: (_ for _ in ()).throw(ValueError("mine"))), strict=True)


class Hostile(dict):
    """A mapping that cannot be looked into."""

    def items(self) -> Any:
        raise RuntimeError("no")


def test_a_value_that_cannot_be_looked_into(watch):
    """An output whose class misbehaves is counted and handed on."""
    with pytest.warns(tt.TensortapWarning, match="looking into a Hostile failed"):
        seen = run(watch, lambda x: Hostile())
    assert seen.places == ["odd:input"]


def test_deep_nesting_ends(watch):
    """A value that contains itself does not hang the step."""
    loop: list[Any] = []
    loop.append(loop)
    assert run(watch, lambda x: loop).places == ["odd:input"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_records_nothing(watch):
    """A child process runs the model as if nobody watched, and the parent's records are the parent's."""
    model = nn.Linear(3, 3)
    seen = watch(model, "**:*")
    model(torch.randn(2, 3))
    pid = os.fork()
    if pid == 0:
        try:
            model(torch.randn(2, 3)).sum()
            model(torch.randn(2, 3))
            os._exit(0 if seen.tap.recorder.current.table.rows == 0 else 3)
        except BaseException:
            traceback.print_exc()
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    model(torch.randn(2, 3))
    seen.tap.close()
    assert len(seen.of(":output")) == 2


def test_symbolic_tracing(watch):
    """torch.fx traces a watched model to the same graph."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    expected = torch.fx.symbolic_trace(model).code
    watch(model, "**:*")
    assert torch.fx.symbolic_trace(model).code == expected


def test_export(watch):
    """torch.export sees nothing of ours."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval(), torch.randn(2, 3)
    expected = torch.export.export(model, (x,)).graph_module.code
    watch(model, "**:*")
    assert torch.export.export(model, (x,)).graph_module.code == expected
