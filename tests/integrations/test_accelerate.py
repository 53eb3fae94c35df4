"""A real loop with Accelerate, watched."""

import pytest

from tensortap.errors import UnsupportedError

accelerate = pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")

from tensortap.integrations.accelerate import watch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def train(net, data):
    """A function that trains: steps of two micro-batches, clipped."""

    def run(observe, stop=99):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        model = net()
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        torch.manual_seed(3)
        with observe(accelerator, model) as tap:
            for number, batch in enumerate(loader):
                if number == stop:
                    raise RuntimeError("out of memory, say")
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                if tap is not None and tap.metrics and accelerator.sync_gradients:
                    tap.step(loss=loss)
        return accelerator.unwrap_model(model), tap

    return run


class Nothing:
    """In place of a tap."""

    def __init__(self, *args):
        pass

    def __enter__(self):
        return None

    def __exit__(self, *error):
        return None


def watched(path, metrics=False):
    """How `train` is to observe."""

    def observe(accelerator, model):
        tap = watch(accelerator, model, "**", "**:grad", to=str(path))
        tap.metrics = metrics
        return tap

    return observe


@pytest.mark.parametrize("metrics", [False, True])
def test_steps_and_weights(train, same, used, tmp_path, metrics):
    """Steps are those that the optimizer really makes, found or told; weights are bit for bit those without us."""
    plain, _ = train(Nothing)
    model, tap = train(watched(tmp_path / "run", metrics))
    assert same(model, plain)
    assert tap.run.steps == [0, 1, 2, 3]
    assert {r.call for r in tap.run.records(sites="body:output")} == {0, 1}
    total = [sum(used(r) ** 2 for r in tap.run.records(sites="**:grad", steps=s)) ** 0.5 for s in tap.run.steps]
    assert max(total) <= 0.1 + 1e-5  # the norm that all are clipped to
    assert len(tap.run.metrics()) == (4 if metrics else 0)


def test_an_exception(train, tmp_path):
    """An exception in training takes the taps off and keeps every step before it."""
    models = []

    def observe(accelerator, model):
        models.append(accelerator.unwrap_model(model))
        return watched(tmp_path / "run")(accelerator, model)

    with pytest.raises(RuntimeError, match="out of memory"):
        train(observe, stop=5)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in models[0].modules())


def test_the_accelerator_comes_first(net):
    """Arguments the wrong way round are an error that shows the right one."""
    with pytest.raises(UnsupportedError, match=r"watch\(accelerator, model"):
        watch(net(), accelerate.Accelerator(cpu=True))
