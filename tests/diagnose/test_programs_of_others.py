"""What programs by other people have in common, and rules once took for a fault, or overlooked."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diagnose.test_kinds_of_training import FLAT, Events, found_by, totals

from tensortap.adapters.torch.context.attention import describe_attention
from tensortap.adapters.torch.context.graph import LossGraph
from tensortap.diagnose.code_lines import with_lines
from tensortap.diagnose.rules.activations import _is_given
from tensortap.diagnose.rules.context.chance import loss_at_chance
from tensortap.diagnose.rules.context.labels import labels_one_class
from tensortap.diagnose.rules.context.loops import batchnorm_cannot_estimate, gradients_reset_early
from tensortap.diagnose.rules.context.loss_calls import _wrong_axis
from tensortap.diagnose.rules.context.optimizers import learning_rate_high, learning_rate_low
from tensortap.diagnose.rules.context.sequences import positions_constant
from tensortap.diagnose.rules.context.shared import goes_wrong
from tensortap.diagnose.rules.context.structure import layers_shared
from tensortap.diagnose.rules.loss import _is_one_batch
from tensortap.diagnose.rules.representation import _sums_to_one
from tensortap.finding import Finding
from tensortap.types import Place


def classes(counts, n=20):
    """Calls of a loss whose targets have these classes."""
    shares = np.array([*counts.values()]) / sum(counts.values())
    target = {"counts": counts, "classes": len(counts), "entropy": float(-(shares * np.log(shares)).sum()),
              "shape": [sum(counts.values())]}  # fmt: skip
    return [("loss", "cross_entropy", {"train": True, "target": target})] * n


def noisy(values, spread=0.02):
    return np.asarray(values) + spread * np.random.default_rng(0).normal(size=len(values))


@pytest.mark.parametrize(("calls", "loss", "found"), [
    (classes({"0": 8, "1": 8, "2": 8, "3": 8}), noisy(np.full(90, np.log(4))), ["warning"]),
    (classes({"0": 1, "3": 1}) + classes({"1": 1, "2": 1}), noisy(np.full(90, 0.9)), []),  # four classes, not two
    (classes({"0": 8, "1": 8, "2": 8, "3": 8}), noisy(np.linspace(1.38, 1.34, 90), 0.005), []),  # it is on its way
    ([*classes({"0": 8, "1": 8, "2": 8, "3": 8}), ("batch", "", {"mode": "train", "epoch": 3})],  # learnt by heart
     noisy(np.linspace(1.38, 1.34, 90), 0.005), ["warning"]),
    (classes({str(i): 1 for i in range(200)}), noisy(np.full(90, 5.3)), []),  # too few labels for as many classes
])  # fmt: skip
def test_chance_is_that_of_all_labels(calls, loss, found):
    """What a guess would give is told by the labels of all batches together, and a loss that steadily falls is fine."""
    assert found_by(loss_at_chance, Events(*calls, loss=loss)) == found


@pytest.mark.parametrize(("targets", "found"), [
    ([(0.0, 0.0)] * 6, ["error"]),
    ([(0.0, 1.0)] * 6, []),
    ([(1.0, 1.0)] * 3 + [(0.0, 0.0)] * 3, []),  # a discriminator: real ones, then false ones
    ([(0.0, 0.0)] * 2, []),  # seen too rarely
])  # fmt: skip
def test_labels_of_yes_and_no_may_all_be_no(targets, found):
    """Targets of a binary cross entropy are judged as classes are, over all of its calls."""
    calls = [
        ("loss", "binary_cross_entropy_with_logits",
         {"train": True, "target": {"binary": True, "min": low, "max": high, "shape": [16]}})
        for low, high in targets
    ]  # fmt: skip
    assert found_by(labels_one_class, Events(*calls)) == found


@pytest.mark.parametrize(("values", "last", "found"), [
    ((0.0, 0.0), "Addmm", ["error"]),  # fractions that were cut to integers
    ((0.0, 0.7), "Addmm", []),
    ((0.0, 0.0), "Sub", []),  # the residual of an equation is to be zero
])  # fmt: skip
def test_targets_of_a_regression_may_all_be_the_same(values, last, found):
    """What a layer is to give must vary; what is computed from its output, as a residual, may well have one target."""
    data = {"train": True, "operations": [last], "target": {"min": values[0], "max": values[1], "shape": [16, 1]}}
    assert found_by(labels_one_class, Events(*[("loss", "mse_loss", data)] * 5)) == found


@pytest.mark.parametrize(("ties", "found"), [
    ([["layers.0.weight", "layers.1.weight", "layers.2.weight"], ["layers.0.bias", "layers.1.bias"]], ["warning"]),
    ([["embed.weight", "head.weight"]], []),
    ([["encoder.0.embed.weight", "decoder.0.embed.weight"]], []),
    ([], []),
])  # fmt: skip
def test_a_list_of_one_layer_is_named(ties, found):
    """`[layer] * 3` is one layer three times; an embedding that is the head too is meant."""
    assert found_by(layers_shared, Events(("model", "", {"ties": ties}))) == found


@pytest.mark.parametrize(("ratio", "loss", "found"), [
    (1e-5, FLAT, ["warning"]), (1e-5, np.linspace(1, 0.1, 40), []), (1e-3, FLAT, []), (1e-6, FLAT, ["warning"]),
])  # fmt: skip
def test_a_rate_is_too_low_where_it_gets_nowhere(ratio, loss, found):
    """Steps of a hundred-thousandth of the weights are too small where the loss stays, and fine where it falls."""
    moved = [("parameters", "Adam", {"shapes": [[4, 4]], "update": [ratio]})] * 5
    history = Events(*moved, totals(), ("loss", "cross_entropy", {"train": True}), loss=loss)
    assert found_by(learning_rate_low, history) == found


def test_a_scheduler_that_takes_the_rate_for_a_factor_is_named():
    """The rate that is told is the one that the steps had, and the line is that of the scheduler that made it."""
    groups = [("optimizer", "SGD", {"number": 1, "groups": [{"lr": 1e-3}]}), ("scheduler", "LambdaLR", {})]
    rate = ("rate", "SGD", {"number": 1, "groups": [{"lr": 1e-6, "before": 1e-3}]})
    moved = [("parameters", "SGD", {"shapes": [[4, 4]], "update": [1e-6]})] * 5
    history = Events(*groups, rate, *moved, totals(), ("loss", "cross_entropy", {"train": True}), loss=FLAT)
    (found,) = learning_rate_low(history)
    assert "The learning rate is 1e-6: LambdaLR made it of 0.001 before the first step." in found.message
    assert "a factor of the optimizer's rate" in found.advice


def test_a_loss_that_leaps_and_comes_back_has_gone_wrong():
    """A rate that is too high throws the loss up at once; coming down to where it began is no progress."""
    leap = [2.3, 365, 665, 397, 215, 72, 73, 31, 19, 12, 5, *np.full(80, 2.3)]
    assert goes_wrong(Events(totals(), ("loss", "cross_entropy", {"train": True}), loss=leap))
    assert not goes_wrong(Events(totals(), ("loss", "cross_entropy", {"train": True}), loss=np.linspace(2.3, 0.5, 90)))


@pytest.mark.parametrize(("empty", "found"), [(70, ["error"]), (0, [])])
def test_steps_that_were_not_looked_at_do_not_count(empty, found):
    """In a long training only some steps are looked at: of those, most must have no gradient."""
    history = Events(totals(steps=1000, backwards=1000, steps_looked_at=120, steps_without_gradients=empty), loss=FLAT)
    assert found_by(gradients_reset_early, history) == found


@pytest.mark.parametrize(("zeros", "attention"), [(90.0, False), (40.0, True)])
def test_one_hot_inputs_are_no_attention(zeros, attention):
    """Rows of one 1 and else zeros are classes, as data; attention has other values too."""
    columns = {"numel": 100.0, "zeros": zeros, "min": 0.0, "max": 1.0, "l1": 10.0}

    class Site(SimpleNamespace):
        def __getitem__(self, name):
            return np.array([columns[name]])

    site = Site(shape=(2, 5, 10), floating=True)
    assert _sums_to_one(SimpleNamespace(sites=lambda *_: []), site) is attention


@pytest.mark.parametrize(("weigh", "wrong"), [
    (lambda scores, v: scores.softmax(-1) @ v, False),
    (lambda scores, v: scores.softmax(-2) @ v, True),
    (lambda scores, v: scores.softmax(0) @ v, True),
    (lambda scores, v: scores.softmax(-2).transpose(-2, -1) @ v, False),  # keys came first
])  # fmt: skip
def test_the_weights_of_an_attention_sum_to_one_over_the_keys(weigh, wrong):
    """A softmax over queries is a mistake, unless the weights are turned before they are used."""
    scores, values = torch.randn(2, 5, 5, requires_grad=True), torch.randn(2, 5, 3)
    graph = LossGraph(weigh(scores, values).square().mean(), lambda _: None)
    (told,) = describe_attention(graph.attentions, graph.upright, None, None, lambda _: None)
    assert _wrong_axis(told) is wrong


@pytest.mark.parametrize(("zeros", "path", "found"), [
    (0.9, "pos_emb", ["warning"]), (0.3, "pos_emb", []), (0.9, "speaker", []), (1.0, "pos_emb", [])])  # fmt: skip
def test_positions_that_are_all_the_same_are_named(zeros, path, found):
    """Only one row of a table of positions ever gets a gradient."""
    table = ("model", "", {"modules": [{"path": path, "type": "Embedding"}]})
    looks = [("parameters", "Adam", {"names": [f"{path}.weight"], "shapes": [[10, 8]], "grad": [[1.0] * 5 + [zeros]]})]
    assert found_by(positions_constant, Events(table, *looks * 4)) == found


@pytest.mark.parametrize(("momentum", "found"), [
    (0.1, []), (0.01, []), (None, []), (0.5, []), (0.99, ["warning"]), (1.0, ["warning"]), (0, ["warning"]),
])  # fmt: skip
def test_running_statistics_need_a_momentum_between(momentum, found):
    """Near one, the statistics are those of the last batch; PyTorch counts the new one, other frameworks the old."""
    norm = {"path": "bn", "type": "BatchNorm2d", "momentum": momentum, "track_running_stats": True}
    assert found_by(batchnorm_cannot_estimate, Events(("model", "", {"modules": [norm]}))) == found


@pytest.mark.parametrize(("loss", "one"), [
    ([1.0] * 12 + [4.0] + [0.9] * 10, True),
    ([1.0] * 12 + [4.0, 4.0] + [0.9] * 10, False),
    ([1.0] * 12 + [40.0] + [0.9] * 10, False),
    ([1.0] * 12 + [4.0] + [2.5] * 10, False),
])  # fmt: skip
def test_a_batch_that_is_harder_is_no_instability(loss, one):
    """One step that is some times higher, with all as before right after it, is the batch and not the training."""
    values = np.asarray(loss)
    assert _is_one_batch(values, values >= 4, 1.0) is one


@pytest.mark.parametrize(("bad_inputs", "line"), [(1, "data.py:3"), (0, "net.py:9")])
def test_a_sample_that_came_in_bad_leads_to_the_data(bad_inputs, line):
    """Where a sample was not finite when it came in, the line that makes the data is named, not that of the layer."""
    evidence = {"samples": [{"bad_inputs": bad_inputs}], "sample_is_clear": True}
    finding = Finding("nonfinite", "error", "fc:output", None, evidence, "", "")
    history = Events(("model", "", {"lines": {"fc": "net.py:9"}}), ("batch", "", {"origins": ["data.py:3"]}))
    assert [found.code for found in with_lines([finding], history)] == [line]


@pytest.mark.parametrize(("place", "given"), [
    (Place("", "input", "adjacency", ""), True), (Place("G", "input", "", ""), True),
    (Place("fc2", "input", "", ""), False), (Place("", "output", "", ""), False),
])  # fmt: skip
def test_what_a_model_is_given_is_no_activation(place, given):
    """An adjacency matrix is zero nearly everywhere and no dead ReLU; a layer's input may well be one's output."""
    assert _is_given(Events(("model", "G", {})), SimpleNamespace(place=place)) is given


JUMP = [1.5, *np.linspace(30, 12, 10), *np.full(29, 11.0)]
COMES_BACK = [3.6, 4.8, 10.5, *np.linspace(9.5, 3.3, 17), *np.linspace(3.3, 3.05, 20)]
GETS_ON = [3.6, 4.8, 10.5, *np.linspace(9.5, 2, 17), *np.linspace(2, 0.5, 20)]


@pytest.mark.parametrize(("ratios", "loss", "found"), [
    ([5.0, 0.0, 0.0, 0.0], JUMP, ["error"]),  # the first step leaves no gradient
    ([3.6, 0.7, 0.4, 0.2], COMES_BACK, ["error"]),
    ([0.4, 0.3, 0.2, 0.1], COMES_BACK, ["error"]),
    ([3.6, 0.7, 0.4, 0.2], GETS_ON, []),
    ([0.05, 0.05, 0.05, 0.05], COMES_BACK, []),
    ([1.0, 0.1, 0.1, 0.1], JUMP, []),  # a layer that begins at zero, once
    ([0.4, 0.3, 0.2, 0.1], np.linspace(3.6, 2.9, 40), []),  # it falls from the start, slowly
])  # fmt: skip
def test_a_rate_is_too_high_where_it_throws_the_loss_up(ratios, loss, found):
    """Steps of the weights' own size are too large where the loss jumps and stays, and fine where it gets on."""
    moved = [("parameters", "Adam", {"shapes": [[4, 4]], "update": [ratio]}) for ratio in ratios]
    history = Events(*moved, totals(), ("loss", "cross_entropy", {"train": True}), loss=loss)
    assert found_by(learning_rate_high, history) == found


@pytest.mark.parametrize(("loss", "found"), [(JUMP, ["error"]), (COMES_BACK, ["error"]), (GETS_ON, [])])
def test_a_rate_is_judged_where_the_loss_function_is_not_seen(loss, found):
    """In a compiled step of JAX only the loss itself is seen, which is enough to see it jump."""
    moved = [("parameters", "adam", {"shapes": [[4, 4]], "update": [r]}) for r in (200.0, 0.7, 0.4)]
    assert found_by(learning_rate_high, Events(*moved, totals(), loss=loss)) == found


@pytest.mark.parametrize(("times", "found"), [(0.8, []), (1.0, ["warning"]), (1.2, ["warning"]), (8.0, [])])
def test_far_above_chance_is_not_at_chance(times, found):
    """A loss of many times what answering without looking gives has other causes than one that stays there."""
    calls = classes({"0": 50, "1": 50}, 20)
    assert found_by(loss_at_chance, Events(*calls, totals(), loss=noisy(np.full(60, times * np.log(2))))) == found
