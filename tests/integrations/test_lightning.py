"""A real Trainer of Lightning, watched."""

import logging

import pytest

L = pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

from tensortap.integrations.lightning import Watch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers, loggers and devices


@pytest.fixture
def fit(net, data, tmp_path):
    """A function that trains: steps of two micro-batches, clipped, validated after every second batch."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            if getattr(self, "bomb", -1) == index:
                raise RuntimeError("out of memory, say")
            loss = self.net(**batch)["loss"]
            self.log("my_loss", loss)
            return loss

        def validation_step(self, batch, index):
            self.net(**batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(*callbacks, ckpt=None, bomb=-1, **more):
        L.seed_everything(3, verbose=False)
        options = {
            "max_steps": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "val_check_interval": 3,
            "limit_val_batches": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(tmp_path),
        }  # fmt: skip
        trainer = L.Trainer(callbacks=list(callbacks), **(options | more))
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        module = Module()
        module.bomb = bomb
        trainer.fit(module, loader, loader, ckpt_path=ckpt)
        return trainer

    return train


def test_steps_metrics_and_weights(fit, same, used, tmp_path):
    """Steps are the optimizer's, with both micro-batches and their mean loss, and none of the validation that lies
    between; weights are those of a training without us, bit for bit."""
    plain = fit()
    watching = Watch("**", "**:grad", to=str(tmp_path / "run"), metrics="my_loss")
    watched = fit(watching)
    assert same(watched.model, plain.model)
    run = watching.tap.run
    assert run.steps == [0, 1, 2, 3]
    assert run.table(sites="net.head:output").num_rows == 8
    assert {r.phase for r in run.records()} == {"train"}
    table = run.metrics().to_pylist()
    losses = [r["mean"] for r in run.records(sites="net:output.loss")]
    pairs = [sum(losses[i : i + 2]) / 2 for i in range(0, 8, 2)]
    assert [row["value"] for row in table if row["name"] == "loss"] == pytest.approx(pairs)
    assert [row["value"] for row in table if row["name"] == "my_loss"] == pytest.approx(losses[1::2])
    total = [sum(used(r) ** 2 for r in run.records(sites="**:grad", steps=step)) ** 0.5 for step in run.steps]
    assert max(total) <= 0.1 + 1e-5  # the norm that all are clipped to
    assert watching.tap.closed


def test_validation_too(fit, tmp_path):
    """When asked for, each batch of a validation is a step of its own, of the phase `eval`."""
    watching = Watch("net.head", evaluation=True, to=str(tmp_path / "run"))
    fit(watching, accumulate_grad_batches=1, val_check_interval=2)
    phases = {r.step: r.phase for r in watching.tap.run.records()}
    assert list(phases.values()) == ["train", "train", "eval", "train", "train", "eval"]


def test_an_exception(fit, tmp_path):
    """An exception in training takes the taps off and keeps every step before it."""
    watching = Watch("net.head", to=str(tmp_path / "run"))
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(watching, bomb=5)
    assert watching.tap.closed
    assert watching.tap.run.steps[:2] == [0, 1]
    assert watching.tap.run.state == "finished"


def test_resumed(fit, tmp_path):
    """A training that goes on from a checkpoint goes on in the same run, with Lightning's numbers."""
    first = fit(Watch("net.head", to=str(tmp_path / "run")), max_steps=2)
    first.save_checkpoint(tmp_path / "at-2.ckpt")
    second = Watch("net.head", to=str(tmp_path / "run"))
    fit(second, ckpt=tmp_path / "at-2.ckpt")
    assert second.tap.run.steps == [0, 1, 2, 3]
