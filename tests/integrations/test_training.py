"""What all callbacks share: steps at the loop's word, and what lies between them kept out."""

import pytest
import torch

import tensortap as tt
from tensortap.diagnose.rule import NO_CONTEXT
from tensortap.errors import UnsupportedError
from tensortap.integrations.training import TrainingSession, numbers_in

X = torch.ones(2, 4)


def test_muted_in_the_middle_of_a_step(net):
    """What happens while a tap is muted is in no step, carries no hooks, and the open step goes on afterwards."""
    memory, model = tt.Memory(), net()
    with tt.watch(model, "head", to=memory, start=7) as tap:
        tap.steps.explicit = True
        model(X)
        tap.mute()
        tap.mute()
        assert not model.head._forward_hooks
        model(X * 5)
        tap.unmute()
        tap.unmute()
        model(X)
        tap.step()
        model(X)
        tap.step()
    assert [(r.step, r.call) for r in memory.records] == [(7, 0), (7, 1), (8, 0)]


def test_muted_and_paused(net):
    """A pause that came while muted is still one afterwards."""
    memory, model = tt.Memory(), net()
    with tt.watch(model, "head", to=memory) as tap:
        tap.steps.explicit = True
        tap.mute()
        tap.pause()
        tap.unmute()
        model(X)
        tap.step()
    assert list(memory.records) == []


def test_triggers_are_not_undone(net):
    """A step that no probe wants is not recorded because something was muted in it."""
    memory, model = tt.Memory(), net()
    session = TrainingSession(tt.probe("head", when=tt.every(2)), to=memory)
    session.begin(model, 0, 0)
    for number in range(4):
        model(X)  # evaluation, say
        session.enter()
        model(X)
        session.step(number)
    session.close()
    assert [(r.step, r.call, r.phase) for r in memory.records] == [(0, 0, "train"), (2, 0, "train")]


def test_before_it_begins():
    """There is no tap before the training has begun, and asking for it says so; nothing else fails."""
    session = TrainingSession("head")
    with pytest.raises(UnsupportedError, match="has not begun"):
        _ = session.tap
    session.step(0)
    session.enter()
    session.evaluated()
    session.close()


def test_only_numbers_are_metrics():
    """Words among the metrics are left out."""
    assert numbers_in({"loss": 0.5, "model": "net", "n": 3}) == {"loss": 0.5, "n": 3}
    assert numbers_in(None) == {}


def test_the_context_of_a_callback(net, tmp_path):
    """A callback hands `context=True` on to the tap, so that no rule lacks the training context."""
    session, model = TrainingSession("**", to=str(tmp_path / "run"), context=True), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.begin(model, 0, 0)
    for number in range(4):
        session.enter()
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        session.step(number)
    session.close()
    assert NO_CONTEXT not in session.tap.run.findings().skipped.values()
