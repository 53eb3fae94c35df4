"""Steps of training loops that a script watcher finds in this process."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.adapters.torch.script.watcher import ScriptWatcher
from tensortap.select.probes import probe


def leaves(site):
    return site.leaf


class Seen:
    """What a watcher in this process has found."""

    def __init__(self):
        self.memory, self.said, self.tap = tt.Memory(), [], None
        self.backward = torch.autograd.backward
        self.watcher = ScriptWatcher([probe(leaves)], self.begin, self.said.append)

    def begin(self, models):
        self.tap = tt.watch(models, leaves, to=self.memory)
        return self.tap

    def steps(self):
        """For each step its phase and how many records it has."""
        self.watcher.stop()
        self.tap.close()
        assert self.said == []
        assert torch.autograd.backward is self.backward
        counts = {}
        for record in self.memory.records:
            counts[record.step, record.phase] = counts.get((record.step, record.phase), 0) + 1
        return [(phase, count) for (_, phase), count in counts.items()]

    def losses(self):
        return [metrics["loss"] for metrics in self.memory.metrics.values()]


@pytest.fixture
def seen():
    found = Seen()
    yield found
    found.watcher.stop()
    found.tap.close()


def test_steps_of_accumulation(seen):
    """Micro-batches are one step, whose loss is their sum, from the first step on."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for n in range(6):
        (model(torch.ones(1, 2)).sum() * 0 + n).backward()
        if n % 3 == 2:
            optimizer.step()
    assert seen.steps() == [("train", 3), ("train", 3)]
    assert seen.losses() == [3.0, 12.0]


def test_steps_of_threads_have_their_own_numbers(seen):
    """Threads that call a model while it is first seen have a step for each call, numbered in its phase."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    together = threading.Barrier(4, timeout=60)

    def answer(_):
        together.wait()
        with torch.inference_mode():
            for _ in range(5):
                model(torch.ones(1, 2))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(answer, range(4)))
    assert seen.steps() == [("eval", 2)] * 20
    assert sorted({record.step for record in seen.memory.records}) == list(range(20))


def test_garbage_names_no_loss(seen):
    """An optimizer that waits for the garbage collector does not give the loss an owner; one that is in use does."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    left_behind = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.0)
    left_behind.itself = left_behind
    del left_behind
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizers = []
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizers.append(torch.optim.Adam(other.parameters()))
    other(torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    seen.steps()
    assert [list(metrics) for metrics in seen.memory.metrics.values()] == [["loss"], ["loss"], ["loss/other"]]


def test_steps_of_training_and_testing(seen):
    """Each batch of a test is a step, with the loss that a loss module gave; training then goes on."""
    model, loss_of = nn.Linear(2, 1), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model.train()
        for _ in range(2):
            loss_of(model(torch.ones(1, 2)), torch.zeros(1, 1)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                loss_of(model(torch.ones(1, 2)), torch.zeros(1, 1))
    assert seen.steps() == ([("train", 1)] * 2 + [("eval", 1)] * 3) * 2
    assert {r.step for r in seen.memory.records if r.phase == "train"} == {0, 1, 2, 3}
    assert {r.step for r in seen.memory.records if r.phase == "eval"} == {0, 1, 2, 3, 4, 5}
    assert [sorted(metrics) for metrics in seen.memory.metrics.values()] == [["eval/loss", "loss"]] * 4 + [
        ["eval/loss"]
    ] * 2
    assert len({value for metrics in seen.memory.metrics.values() for value in metrics.values()}) == 1


def test_steps_with_a_teacher(seen):
    """A frozen model that is called in a training step is in that step, before or after the one that learns."""
    teacher, student = nn.Linear(2, 1).eval(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    for _ in range(3):
        with torch.no_grad():
            wanted = teacher(torch.ones(1, 2))
        (student(torch.ones(1, 2)) - wanted).square().sum().backward()
        optimizer.step()
    assert seen.steps() == [("train", 2)] * 3


def learn(model, optimizer, goal=0.0):
    model.train()
    (model(torch.ones(1, 2)) - goal).square().sum().backward()
    optimizer.step()


@torch.no_grad()
def evaluate(model):
    return model.eval()(torch.ones(1, 2))


@pytest.mark.parametrize("kept", [False, True])
def test_steps_of_folds(seen, kept):
    """One batch of evaluation after a model's training is a step of its own, when the next model begins to learn."""
    models = []
    for _ in range(3):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        models += [model] if kept else []
        for _ in range(2):
            learn(model, optimizer)
        evaluate(model)
    assert seen.steps() == [("train", 1), ("train", 1), ("eval", 1)] * 3


def test_steps_of_folds_in_training_mode(seen):
    """The same holds for a script that never calls `eval()`, also where a model has the id of one that is gone."""

    def fold():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        learn(model, optimizer)
        with torch.no_grad():
            model(torch.ones(1, 2))

    for _ in range(8):
        fold()
    assert seen.steps() == [("train", 1), ("eval", 1)] * 8


def test_steps_of_models_in_turn(seen):
    """Models that are trained and evaluated in turn, again and again, have each evaluation apart."""
    models = [nn.Linear(2, 1) for _ in range(2)]
    pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.0)) for model in models]
    for _ in range(2):
        for model, optimizer in pairs:
            learn(model, optimizer)
            evaluate(model)
    assert seen.steps() == [("train", 1), ("eval", 1)] * 4


def test_steps_with_a_teacher_that_was_trained(seen):
    """A teacher that the script has trained itself is in the student's steps, but for its call before the first."""
    teacher, student = nn.Linear(2, 1), nn.Linear(2, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.0) for model in (teacher, student))
    learn(teacher, first)
    for _ in range(3):
        learn(student, second, evaluate(teacher))
    assert seen.steps() == [("train", 1), ("eval", 1), ("train", 1), ("train", 2), ("train", 2)]


def test_steps_of_models_that_teach_each_other(seen):
    """Two models of which each gives the targets of the other are together in each step."""
    one, two = nn.Linear(2, 1), nn.Linear(2, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.0) for model in (one, two))
    for _ in range(3):
        learn(one, first, evaluate(two))
        learn(two, second, evaluate(one))
    assert seen.steps() == [("train", 2)] * 6


def test_steps_with_a_generator_without_gradients(seen):
    """A generator in training mode whose output a discriminator is given is in the discriminator's step."""
    generator, judge = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.0) for model in (generator, judge))
    for _ in range(2):
        with torch.no_grad():
            fake = generator(torch.ones(1, 2))
        judge(fake).sum().backward()
        second.step()
        generator(torch.ones(1, 2)).sum().backward()
        first.step()
    assert seen.steps() == [("train", 2), ("train", 1)] * 2


def test_steps_without_an_optimizer(seen, monkeypatch):
    """Where weights are changed by hand a step ends after backward; where nothing is learnt, with each call."""
    monkeypatch.setattr("tensortap.adapters.torch.script.step_detector._any_optimizer", lambda: False)
    model = nn.Linear(2, 1)
    for _ in range(2):
        for _ in range(2):
            loss = model(torch.ones(1, 2)).sum()
        loss.backward()
    assert seen.steps() == [("train", 1)] * 4


def test_steps_of_parts(seen):
    """A part of a model that is called by itself makes steps as a model does, however often it calls its own parts."""
    relu = nn.ReLU()
    model = nn.ModuleDict({"coder": nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)}).eval()
    model.forward = lambda x: model["coder"](x)
    with torch.no_grad():
        model(torch.ones(1, 2))
        for _ in range(3):
            model["coder"](torch.ones(1, 2))
    assert seen.steps() == [("eval", 6)] * 4  # the ReLU is called twice, and has two names


def test_steps_of_checkpoints(seen):
    """What a checkpoint computes again belongs to the step, and is marked."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())
    model.forward = lambda x: checkpoint(lambda x: model[1](model[0](x)), x, use_reentrant=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(seen.steps()) == 2
    assert {record.recomputed for record in seen.memory.records} == {False, True}


def test_steps_after_an_interrupt(seen):
    """A call that ends with an error or an interrupt does not hide the calls after it."""

    class Net(nn.Linear):
        def forward(self, x):
            if len(x) > 1:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Net(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for size in (1, 2, 1, 1):
        with contextlib.suppress(KeyboardInterrupt):
            model(torch.ones(size, 2)).sum().backward()
        optimizer.step()
    assert seen.steps() == [("train", 1)] * 3


def test_a_copy_of_a_watched_model(seen):
    """A deep copy is a model of its own, found when it is called, under a name of its own."""
    import copy

    model = nn.Sequential(nn.Linear(2, 1))
    model(torch.ones(1, 2))
    average = copy.deepcopy(model)
    average(torch.ones(1, 2))
    seen.steps()
    assert {record.place.site for record in seen.memory.records} >= {"average.0"}
    assert not average._forward_hooks and not model._forward_hooks and not model[0]._forward_hooks
