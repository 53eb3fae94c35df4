"""Signs of policy gradients, and samplers that are not told the epoch: faults, and what only looks like one."""

from __future__ import annotations

import sys

import pytest
import torch
from diagnose.test_kinds_of_training import Events, found_by
from torch import nn
from torch.nn import functional

from tensortap.adapters.torch.context.policy import reward_sign
from tensortap.diagnose.rules.context.labels import validation_classes_unseen
from tensortap.diagnose.rules.context.loops import batches_repeated, order_repeated
from tensortap.diagnose.rules.context.loss_calls import _differ, loss_negated


def policy():
    """States, their logits, actions that were drawn, and rewards of these."""
    torch.manual_seed(0)
    states = torch.randn(16, 4)
    logits = nn.Linear(4, 3)(states)
    actions = torch.distributions.Categorical(logits=logits.detach()).sample()
    return logits, actions, (actions == 1).float() + 0.1 * torch.rand(16)


def judged(loss):
    """What is read of a loss from its graph and the names of the function that calls this."""
    found = reward_sign(loss, [sys._getframe(1)])
    return None if found is None else (found["sign"], found["reward"])


def test_the_sign_of_a_policy_gradient():
    """A log-probability times what the script calls a reward or an advantage counts with its sign, however written."""
    logits, actions, reward = policy()
    dist = torch.distributions.Categorical(logits=logits)
    assert judged((dist.log_prob(actions) * reward).mean()) == (1, "reward")
    assert judged(-(dist.log_prob(actions) * reward).mean()) == (-1, "reward")
    assert judged((dist.log_prob(actions) * -reward).sum()) == (-1, "reward")
    assert judged((functional.cross_entropy(logits, actions, reduction="none") * reward).mean()) == (-1, "reward")
    chosen = torch.log_softmax(logits, 1).gather(1, actions[:, None])[:, 0]
    entropy = dist.entropy().mean()
    assert judged(0.5 * (chosen * reward).mean() - 0.01 * entropy) == (1, "reward")
    probability = torch.softmax(logits, 1).gather(1, actions[:, None])[:, 0]
    assert judged(-2.0 * (torch.log(probability + 1e-8) * reward).mean()) in ((-1, "reward"), None)


def test_gaussian_policies_and_lists():
    """The density of a normal distribution is one too, and rewards may be numbers in a list."""
    torch.manual_seed(0)
    mean = nn.Linear(4, 1)(torch.randn(8, 4))
    dist = torch.distributions.Normal(mean, 0.5)
    taken = dist.sample()
    advantages = torch.randn(8, 1)
    assert judged((dist.log_prob(taken) * advantages).mean()) == (1, "advantages")
    del advantages
    returns = [0.5, 1.5, -0.25]
    terms = [-dist.log_prob(taken)[i, 0] * r for i, r in enumerate(returns)]
    assert judged(torch.stack(terms).sum()) == (-1, "returns")


def test_what_has_no_reward_is_not_judged():
    """A cost has the other sign by right, and what is called an advantage but falls with the reward is a cost."""
    logits, actions, cost = policy()
    log_probability = torch.log_softmax(logits, 1).gather(1, actions[:, None])[:, 0]
    assert judged((log_probability * cost).mean()) is None
    reward, advantage = -cost, cost - cost.mean()
    assert reward.mean() < 0
    assert judged((log_probability * advantage).mean()) is None
    assert judged(functional.mse_loss(logits[:, 0], cost)) is None


@pytest.mark.parametrize(("signs", "found"), [([1] * 4, ["warning"]), ([-1] * 4, []), ([1, 1], []), ([1, -1, 1], [])])
def test_a_policy_that_avoids_rewards(signs, found):
    """It is named when each backward that was looked at has the wrong sign, three of them at least."""
    backwards = [("backward", "", {"policy": {"sign": sign, "reward": "adv"}}) for sign in signs]
    assert found_by(loss_negated, Events(*backwards)) == found


def epochs(*told, line="train.py:9", **more):
    """Epochs of loaders that are made again in each, with the epoch that their sampler was told."""
    data = [{"sampler": "DistributedSampler", "sampler_epoch": e, "sampler_seed": 0, "made_at": line} for e in told]
    return [("epoch", str(i + 1), d | more) for i, d in enumerate(data)]


TRAINS = ("batch", "", {"mode": "train", "loader": 1})


@pytest.mark.parametrize(("found", "said"), [
    ([TRAINS, *epochs(0, 0)], ["warning"]),
    ([TRAINS, *epochs(0, 1, 2)], []),
    ([*epochs(0, 0, 0)], []),  # of a loader that only evaluates
    ([TRAINS, *epochs(0)], []),
    ([TRAINS, *epochs(0, 1, 0, 1)], []),  # two trainings
])  # fmt: skip
def test_a_sampler_is_told_the_epoch(found, said):
    """Epochs of a loader that trains have one order when its DistributedSampler is told one epoch each time."""
    assert found_by(order_repeated, Events(*found)) == said


def test_a_generator_that_forgets_its_index():
    """Batches of one epoch that are all the same are named; one batch that is trained again and again is not."""
    same = ("batch", "", {"mode": "train", "fingerprint": "a"})
    several = ("batch", "", {"mode": "train", "fingerprint": "a", "batches": 40})
    assert found_by(batches_repeated, Events(*[several] * 6)) == ["warning"]
    assert found_by(batches_repeated, Events(*[same] * 6)) == []
    assert found_by(batches_repeated, Events(*[several] * 5, ("batch", "", several[2] | {"fingerprint": "b"}))) == []


@pytest.mark.parametrize(("share", "found"), [(1.0, ["warning"]), (0.1, [])])
def test_validation_of_other_classes(share, found):
    """Validation data whose classes training never sees is named."""
    call = ("loss", "sparse_categorical_crossentropy", {"train": True})
    assert found_by(validation_classes_unseen, Events(call, ("validation", "", {"unseen": share}))) == found


@pytest.mark.parametrize(("output", "target", "differ"), [
    ([16, 1], [16], False), ([16, 12, 1], [16, 1], True), ([16, 12, 1], [16, 12], False), ([16, 1], [16, 1], False),
])  # fmt: skip
def test_shapes_that_keras_makes_equal(output, target, differ):
    """Keras gives labels a column, or takes the last axis of outputs away, before it compares them."""
    assert _differ({"keras": True, "input": {"shape": output}, "target": {"shape": target}}) is differ
