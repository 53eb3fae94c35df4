"""A real Trainer of transformers, watched."""

import pytest

import tensortap as tt

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from tensortap.integrations.hf import Watch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning")


@pytest.fixture
def trainer(net, data, tmp_path):
    """A function that makes a Trainer: steps of two micro-batches, clipped, evaluated every second step."""

    def make(*callbacks, **more):
        options = {
            "max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1,
            "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "report_to": [],
            "use_cpu": True, "disable_tqdm": True, "seed": 3, "learning_rate": 0.1, "remove_unused_columns": False,
            "dataloader_pin_memory": False,
        }  # fmt: skip
        args = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), **(options | more))
        return transformers.Trainer(
            net(), args, train_dataset=data, eval_dataset=data[:8], callbacks=list(callbacks),
            optimizers=(None, None),
        )  # fmt: skip

    return make


def test_steps_metrics_and_weights(trainer, same, assert_clipped, tmp_path):
    """Steps are the optimizer's, with both micro-batches and what was logged; evaluation is not in them; weights are
    those of a training without us, bit for bit."""
    plain = trainer()
    plain.train()
    watching = Watch("**", "**:grad", to=str(tmp_path / "run"))
    watched = trainer(watching)
    watched.train()
    assert same(watched.model, plain.model)
    run = watching.tap.run
    assert run.steps == [0, 1, 2, 3]
    assert {r.call for r in run.records(sites="body:output")} == {0, 1}
    assert {r.phase for r in run.records()} == {"train"}
    assert run.table(sites="head:output").num_rows == 8
    losses = [row["loss"] for row in plain.state.log_history if "loss" in row]
    table = run.metrics().to_pylist()
    assert [row["value"] for row in table if row["name"] == "loss"] == pytest.approx(losses)
    assert "global_step" not in {row["name"] for row in table}
    assert_clipped(run, 0.1)
    assert watching.tap.closed


def test_evaluation_too(trainer, tmp_path):
    """When asked for, each batch of an evaluation is a step of its own, of the phase `eval`."""
    watching = Watch("head", evaluation=True, to=str(tmp_path / "run"))
    trainer(watching).train()
    phases = {r.step: r.phase for r in watching.tap.run.records()}
    assert list(phases.values()) == ["train", "train", "eval", "train", "train", "eval"]
    noted = [row["value"] for row in watching.tap.run.metrics().to_pylist() if row["name"] == "global_step"]
    assert noted == [2, 3]  # their own numbers are 3 and 4


def test_a_trigger_sees_the_loss_of_its_step(trainer, tmp_path):
    """The step that is kept is the one whose loss was high, not the one after."""
    watching = Watch(tt.probe("head", when=tt.metric("loss") > 1.0), to=str(tmp_path / "run"))
    watched = trainer(watching)
    watched.train()
    losses = [row["loss"] for row in watched.state.log_history if "loss" in row]
    assert watching.tap.run.steps == [n for n, loss in enumerate(losses) if loss > 1.0]


def test_resumed(trainer, tmp_path):
    """A training that goes on from a checkpoint goes on in the same run, with the Trainer's numbers."""
    first = Watch("head", to=str(tmp_path / "run"))
    trainer(first, save_strategy="steps", save_steps=2, max_steps=2, lr_scheduler_type="constant").train()
    second = Watch("head", to=str(tmp_path / "run"))
    trainer(second, lr_scheduler_type="constant").train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert second.tap.run.steps == [0, 1, 2, 3]


def test_resumed_after_a_crash(trainer, tmp_path):
    """Steps that came after the checkpoint stay; the same ones anew are numbered after them, with `global_step`."""
    first = Watch("head", to=str(tmp_path / "run"))
    trainer(first, save_strategy="steps", save_steps=2, max_steps=3).train()
    second = Watch("head", to=str(tmp_path / "run"))
    trainer(second).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    run = second.tap.run
    assert run.steps == [0, 1, 2, 3, 4]
    noted = {row["step"]: row["value"] for row in run.metrics().to_pylist() if row["name"] == "global_step"}
    assert noted == {3: 2, 4: 3}


def test_an_exception(trainer, data, tmp_path):
    """Inside `with`, an exception in training takes the taps off and keeps every step before it."""

    class Bomb(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **more):
            if state.global_step == 2:
                raise RuntimeError("out of memory, say")

    with pytest.raises(RuntimeError, match="out of memory"), Watch("head", to=str(tmp_path / "run")) as watching:
        watched = trainer(watching, Bomb())
        watched.train()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.model.modules())
    assert watching.tap.run.steps[:2] == [0, 1]
    assert watching.tap.run.state == "finished"


@pytest.mark.thorough  # test_resumed has a second training
def test_twice(trainer, tmp_path):
    """A second training with the same callback goes on in its run instead of failing."""
    watching = Watch("head", to=str(tmp_path / "run"))
    for _ in range(2):
        trainer(watching, max_steps=2).train()
    assert watching.tap.run.steps == [0, 1, 2, 3]
