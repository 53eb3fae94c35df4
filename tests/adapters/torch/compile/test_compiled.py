"""torch.compile: what eager mode records is recorded, the results are the same, nothing is compiled without need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiling import (
    COMPILING,
    EVERYTHING,
    WAYS,
    as_whole,
    by_regions,
    exactly,
    fresh,
    graphs,
    in_place,
    rows,
    tokens,
    train,
)

import tensortap as tt
from tensortap.adapters.torch.modules import unseen
from tensortap.record.counters import TensortapWarning

pytestmark = COMPILING


@pytest.fixture(scope="module")
def eager() -> dict[tuple[str, int, int], tuple[float, ...]]:
    """What eager mode records of the transformer."""
    model, memory = fresh(), tt.Memory()
    with tt.watch(model, EVERYTHING, to=memory):
        train(model, model)
    return rows(memory.records)


def close_to(got: dict[tuple[str, int, int], tuple[float, ...]], want: dict[tuple[str, int, int], tuple[float, ...]]):
    assert got.keys() == want.keys()
    return all(row == pytest.approx(want[place], rel=1e-4, abs=1e-5) for place, row in got.items())


def _orders() -> Iterator[Any]:
    """Every way to compile, with every backend; two of them usually, the others in `make thorough`."""
    for way in WAYS:
        usual = {in_place: ("watch", "eager"), as_whole: ("compile", "aot_eager")}.get(way)
        for first, backend in (("watch", "eager"), ("compile", "aot_eager"), ("compile", "eager")):
            marks = () if (first, backend) == usual else pytest.mark.thorough
            yield pytest.param(way, first, backend, id=f"{first}-{backend}-{way.__name__}", marks=marks)


@pytest.mark.parametrize(("way", "first", "backend"), list(_orders()))
def test_what_eager_mode_records(watch, eager, way, first, backend):
    """Outputs, inputs and both gradients, whichever came first and whatever was compiled; and not a graph more."""
    model = fresh()
    run = way(model, backend)
    bare = train(run, model)
    alone = graphs()
    if first == "watch":
        torch._dynamo.reset()
        model = fresh()
        seen = watch(model, EVERYTHING)
        run = way(model, backend)
    else:
        seen = watch(model, EVERYTHING)
    tapped = train(run, model)
    seen.tap.close()
    assert exactly(bare, tapped)
    assert graphs() == 2 * alone
    assert close_to(rows(seen.memory.records), eager)
    assert set(seen.tap.counts) == {"unseen"}  # gradients of what needs none


def test_the_order_is_that_of_eager_mode(watch, eager):
    """Records carry the sequence in which tensors were made."""
    model = fresh()
    seen = watch(model, "**:{output,input}")
    run = as_whole(model, "aot_eager")
    run(tokens())
    seen.tap.step()
    assert seen.places == [place for place, _, step in eager if step == 0 and ":grad" not in place]


def test_triggers_never_recompile(watch):
    """StepSource are switched on and off, paused and resumed; the compiler is not asked again."""
    model = fresh()
    seen = watch(
        model, tt.probe("**:{output,grad_output}", when=tt.every(2, start=1)), tt.probe("head", when=tt.at([2]))
    )
    run = as_whole(model, "aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(7):
            if i == 4:
                seen.tap.pause()
            if i == 6:
                seen.tap.resume()
            train(run, model, 1)
            seen.tap.step()
    assert graphs() == 1
    assert seen.steps == [1, 2, 3]
    assert {str(r.place) for r in seen.records if r.step == 2} == {"head:output"}


def test_blocks_share_a_graph(watch):
    """Three blocks compiled one by one are one graph, though every port of them is tapped."""
    model = fresh(3)
    seen = watch(model, EVERYTHING)
    run = by_regions(model, "aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(run, model)
    assert graphs() == 1
    assert len({r.place.site for r in seen.records}) == len(list(model.modules())) - 1  # the list of blocks


def test_wrapped_blocks_have_their_own_names(watch, eager):
    """What torch.compile puts around a module is not in the names, and not a site."""
    model = fresh()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager", fullgraph=True)
    seen = watch(model, EVERYTHING)
    train(model, model)
    seen.tap.close()
    assert close_to(rows(seen.memory.records), eager)


def test_watching_the_wrapper_is_watching_the_model(watch, eager):
    """The compiled model is given to watch(): the sites are those of the model, parameters too."""
    model = fresh()
    run = as_whole(model, "aot_eager")
    seen = watch(run, EVERYTHING, "head.weight:param")
    train(run, model)
    seen.tap.close()
    found = rows(seen.memory.records)
    assert {found.pop(("head.weight:param", 0, step))[0] for step in (0, 1)} == {128}
    assert close_to(found, eager)


def test_closing_leaves_nothing(watch):
    """The model's next call is compiled as it was without taps, and no graph with taps remains."""
    model = fresh()
    run = in_place(model, "eager")
    bare = train(run, model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            memory = tt.Memory()
            with tt.watch(model, EVERYTHING, to=memory):
                train(run, model, 1)
            assert len(memory.records) > 40
            assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
            assert exactly(train(run, model), bare)
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(type(model).forward.__code__)
    assert len(entries) == 1


def test_two_taps_at_once(watch):
    """Each sees its own sites, and one goes on when the other is closed."""
    model = fresh()
    run = as_whole(model, "aot_eager")
    first, second = watch(model, "head"), watch(model, "norm", "head:grad_output")
    train(run, model, 1)
    first.tap.close()
    train(run, model, 1)
    second.tap.close()
    assert rows(first.memory.records).keys() == {("head:output", 0, 0)}
    assert [(str(r.place), r.step) for r in second.records] == [
        (place, step) for step in (0, 1) for place in ("norm:output", "norm:output", "head:grad_output")
    ]


@pytest.mark.parametrize(
    "way", [as_whole, pytest.param(in_place, marks=pytest.mark.thorough)], ids=lambda way: way.__name__
)
def test_another_model_of_the_same_class(watch, way):
    """Code that was compiled for one without taps does not do for the watched one; the other is not watched."""
    model, other = fresh(), fresh()
    run, run_other = way(model, "eager"), way(other, "eager")
    setting = torch._dynamo.config.skip_nnmodule_hook_guards
    run_other(tokens())
    seen = watch(model, "head")
    for each in (run_other, run, run_other, run, run_other, run):
        each(tokens())
    seen.tap.close()
    assert [r.step for r in seen.memory.records] == [0, 1, 2]
    assert torch._dynamo.config.skip_nnmodule_hook_guards is setting


def test_a_function_in_another_file_that_was_compiled_before(watch, tmp_path, monkeypatch):
    """Hooks put on later are passed by there, which is said; resetting the compiler helps."""
    (tmp_path / "elsewhere.py").write_text("def step(model, x):\n    return model(x)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import elsewhere

    model = fresh()
    run = torch.compile(elsewhere.step, backend="eager", fullgraph=True)
    run(model, tokens())
    seen = watch(model, "head", "norm")
    run(model, tokens())
    seen.tap.step()
    with pytest.warns(TensortapWarning, match=r"torch\.compiler\.reset"):
        assert seen.unseen() == dict.fromkeys(["head:output", "norm:output"], unseen.MAYBE_COMPILED)
    torch.compiler.reset()
    run(model, tokens())
    assert seen.unseen() == {}
