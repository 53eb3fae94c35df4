"""Plans: which patterns are asked about which places, and how often."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import tensortap as tt
from tensortap.adapters.plan import OpName, choose
from tensortap.record.recorder import Recorder
from tensortap.select.probes import as_probes
from tensortap.select.sites import Candidate

SITES = [Candidate(path, ("Linear",), ("output",)) for path in ("", "a", "a.b", "c")]


def calls_of(function: Callable[[], object]) -> int:
    """How many Python functions a call runs."""
    count = 0

    def seen(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def test_later_sites_are_matched_by_named_and_by_general_patterns():
    """A site that was not known at set-up has every probe whose pattern fits, in the order of the probes."""
    probes = as_probes([tt.probe(text) for text in ("in/x", "**", "{in/x,in/y}", "c")])
    plan, recorder = choose(probes, SITES, late=True), Recorder(probes)
    port = plan.port_for_named_value(recorder, Candidate("in/x", (), ("output",)), "output")
    assert port is not None and [(pattern.text, bit) for pattern, bit in port.patterns] == [
        ("in/x", 1),
        ("**", 2),
        ("{in/x,in/y}", 4),
    ]
    assert plan._replace(indexes=None).port_for_named_value(recorder, SITES[-1], "output") is not None


def test_operations_are_matched_by_named_and_by_general_patterns():
    """An operation has every probe whose pattern means it, but those left out by the mask."""
    texts = ("a/relu", "op:relu", "{a,c}/relu#1", "c/relu", "**/relu", "a")
    probes = as_probes([tt.probe(text) for text in texts])
    plan, recorder = choose(probes, SITES), Recorder(probes)
    for number, mask, bits in ((0, -1, 0b010011), (1, -1, 0b010111), (1, 0b100, 0b100)):
        port = plan.port_for_operation(recorder, OpName("a", "relu", number), "output", mask)
        assert port is not None and port.bits == bits
    assert plan.port_for_operation(recorder, OpName("a.b", "tanh", 0), "output") is None


@pytest.mark.parametrize("pattern", ["{}.0", "{}.1:input", "{}.0/linear", "{}.0.weight:grad"])
def test_a_pattern_for_each_module_costs_as_much_as_the_modules(pattern):
    """Twice as many modules with as many patterns take twice as many calls, not four times."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    def watched(count: int) -> Callable[[], object]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(count)))
        probe = tt.probe(*(pattern.format(i) for i in range(count)))

        def run() -> None:
            with tt.watch(model, probe, to=[]) as watching:
                model(torch.ones(1, 2))
                watching.step()

        return run

    watched(2)()  # what is done once in a process
    small, large = (calls_of(watched(count)) for count in (60, 120))
    assert large < 2.5 * small
