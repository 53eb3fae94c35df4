"""One function in two programs: other names, other frameworks, other precision, other layouts."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt

WIDTH = 8


class Original(nn.Module):
    """Three layers with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.norm, self.down = nn.Linear(WIDTH, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.norm(self.act(self.up(x))))
        return result


@pytest.fixture
def model() -> Original:
    torch.manual_seed(0)
    return Original()


X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))


def test_onnx_against_pytorch(model: Original) -> None:
    """A session is called with the same values as arrays; sites are found by order and values; a fault by its node."""
    sessions = pytest.importorskip("onnx_sessions")
    from onnx import helper, numpy_helper

    def exported(epsilon: float) -> object:
        state = {name.replace(".", "_"): value.numpy() for name, value in model.state_dict().items()}
        nodes = [
            helper.make_node("Gemm", ["x", "up_weight", "up_bias"], ["a"], "first", transB=1),
            helper.make_node("Tanh", ["a"], ["b"], "squash"),
            helper.make_node(
                "LayerNormalization", ["b", "norm_weight", "norm_bias"], ["c"], "normalise", epsilon=epsilon
            ),
            helper.make_node("Gemm", ["c", "down_weight", "down_bias"], ["d"], "last", transB=1),
        ]
        constants = [numpy_helper.from_array(value, name) for name, value in state.items()]
        ends = [sessions.value("x", [6, WIDTH])], [sessions.value("d", [6, 4])]
        return sessions.session(nodes, *ends, constants)

    found = tt.compare(model, exported(1e-5), X, "?*")
    assert found and found.aligned_by == "order" and len(found) >= 3, str(found)
    found = tt.compare(model, exported(1e-2), X, "?*")
    assert (found.cause.kind, found.cause.module) == ("forward", "norm"), str(found)


def test_jax_against_pytorch(model: Original) -> None:
    """A port to Flax is compared in one call; a wrong weight is found in its layer."""
    nnx = pytest.importorskip("flax.nnx")
    import jax.numpy as jnp

    class Port(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.first, self.last = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
            self.scale = nnx.LayerNorm(16, epsilon=1e-5, rngs=rngs)
            for layer, of in ((self.first, model.up), (self.last, model.down)):
                layer.kernel[...] = jnp.asarray(of.weight.detach().numpy().T)
                layer.bias[...] = jnp.asarray(of.bias.detach().numpy())

        def __call__(self, x):  # type: ignore[no-untyped-def]
            return self.last(self.scale(jnp.tanh(self.first(x))))

    port = Port()
    names = {"up": "first", "norm": "scale", "down": "last"}
    assert tt.compare(model, port, X, "{up,norm,down,first,scale,last}", map=names)
    port.last.kernel[...] = port.last.kernel[...].at[3, 2].add(0.5)
    assert tt.compare(model, port, X, "{up,norm,down,first,scale,last}", map=names).cause.module == "down"


def test_compiled_and_in_low_precision(model: Original) -> None:
    """`_orig_mod` does not count, and what bf16 rounds is no difference; a layer that is wrong is one."""
    wrapped = nn.ModuleDict({"_orig_mod": copy.deepcopy(model).bfloat16()})
    wrapped.forward = lambda x: wrapped["_orig_mod"](x.bfloat16())  # type: ignore[method-assign]
    found = tt.compare(model, wrapped, X, "?*", "**:param")
    assert found and found.aligned_by == "name" and not found.only_in_a, str(found)
    wrapped["_orig_mod"].norm.weight.data *= 1.5  # type: ignore[union-attr, operator]
    assert tt.compare(model, wrapped, X, "?*").cause.module == "norm"


class Renamed(nn.Module):
    """The same with other names."""

    def __init__(self, of: Original) -> None:
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy([of.up, of.act, of.norm, of.down]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("wrong", [False, True])
def test_other_names_in_another_layout(model: Original, tmp_path: Path, wrong: bool) -> None:
    """A rollout in microbatches, by other code, against the trainer: sites are found by order, parts by their rows."""
    rollout = Renamed(model)
    if wrong:
        rollout.layers[2].eps = 0.05  # type: ignore[assignment]
    probe = tt.probe("**", keep=[tt.stats(), tt.full()])
    for network, parts, name in ((model, [X], "trainer"), (rollout, X.chunk(3), "rollout")):
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        with tt.watch(network, probe, to=tmp_path / name) as tap:
            for part in parts:
                network(part).sum().backward()
            optimizer.step()
            tap.step()
    found = tt.diff(tmp_path / "trainer", tmp_path / "rollout")
    assert found.aligned_by == "order" and len(found) == 5, str(found)
    assert bool(found) is not wrong and (not wrong or found.cause.module == "norm"), str(found)


def test_hashes_of_pieces_make_that_of_the_whole(make_run) -> None:
    """Rows in order have the hash of the whole, and find their order by it; columns and every other row have none."""
    whole = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    tokens = np.arange(48).reshape(8, 6)
    keep = [tt.stats(), tt.hash()]

    def run(name: str, *ranks: dict[str, np.ndarray]) -> str:
        for rank, sites in enumerate(ranks):
            path = make_run([(sites, {})], name=name, rank=rank, keep=keep)
        return str(path)

    one = run("one", {":input": tokens, "fc.w:param": whole})
    for name, cut, equal in (
        ("rows", lambda x: np.split(x, 2), (1.0, 1.0)),
        ("columns", lambda x: np.split(x, 2, axis=1), (None, None)),
        ("turns", lambda x: [x[::2], x[1::2]], (None, 0.0)),
    ):
        parts = [{":input": t, "fc.w:param": w} for t, w in zip(cut(tokens), cut(whole), strict=True)]
        found = {row.site: row.worst.hash_equal for row in tt.diff(one, run(name, *parts))}
        assert found.get(":input") == equal[0], name
        if name != "turns":
            assert found.get("fc.w:param") == equal[1], name
    other = [{":input": t, "fc.w:param": w} for t, w in zip(np.split(tokens[::-1], 2), np.split(whole, 2), strict=True)]
    assert tt.diff(one, run("other", *other)).cause is None  # the order of rows is not known, so nothing is said


@pytest.mark.parametrize("framework", ["keras", "torch"])
def test_as_many_channels_as_rows(make_run, framework: str) -> None:
    """Where the shape leaves the order of channels open, it is found by values, but not within one framework."""
    x = np.random.default_rng(0).normal(size=(2, 3, 3, 3)).astype(np.float32)
    runs = [
        make_run([({"conv": values}, {})], name=name, keep=[tt.stats(), tt.full()], about={"model": {"framework": of}})
        for name, values, of in (("a", x, "torch"), ("b", np.moveaxis(x, 1, -1).copy(), framework))
    ]
    assert bool(tt.diff(*runs)) == (framework == "keras")
