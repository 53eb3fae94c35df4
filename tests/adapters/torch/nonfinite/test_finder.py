"""`on_nonfinite` looks at every module, whatever the probes, and searching leaves no trace in the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt


class LogInRoot(nn.Module):
    """Makes a NaN in its own forward, in no module below it; keeps state in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.calls, self.history = 0, []
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.kept = self.l(x)
        return torch.log(tt.tap(self.kept, "my/value") - 100)


class Whole(nn.Module):
    """Has the bad module inside, and nothing else to do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def found_by(model: nn.Module, *sites: Any, steps: int = 1, **options: Any) -> tuple[list[Any], tt.Tap, tt.Memory]:
    found: list[Any] = []
    memory = tt.Memory()
    with tt.watch(model, *sites, to=memory, on_nonfinite=found.append, **options) as tap:
        for _ in range(steps):
            model(torch.randn(2, 4))
            tap.step()
    return found, tap, memory


@pytest.mark.parametrize("sites", [(), ("l",), ("l.weight:param",)], ids=["default", "leaf", "parameter"])
def test_a_nan_born_in_a_roots_own_forward(sites):
    """It is found and counted although no probe records the root's output, with its operation and line."""
    (origin,), tap, _ = found_by(LogInRoot(), *sites)
    assert (origin.site, origin.operation, origin.module) == ("", "log", "LogInRoot")
    assert "log of a negative number" in origin.why and "test_finder.py" in origin.source
    assert tap.counts["nonfinite_steps"] == 1


def test_a_nan_born_in_a_module_between_root_and_leaves():
    """The module that made it is named, not the one around it."""
    (origin,), _, _ = found_by(Whole(Whole(LogInRoot())), "inner.inner.l")
    assert origin.site == "inner.inner" and origin.operation == "log"


def test_record_warns_of_it():
    """The README's call says where the NaN comes from."""
    with pytest.warns(tt.TensortapWarning, match="step 0 is not finite: log in"):
        model = LogInRoot()
        with tt.watch(model, "l", to=tt.Memory(), on_nonfinite="record"):
            model(torch.randn(2, 4))


def test_a_large_finite_output_is_no_fault():
    """A sum that overflows does not make finite values a fault."""

    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x, 3e38)

    assert not found_by(Whole(Large()), "inner:input")[0]


def test_a_mask_of_minus_infinity_is_no_fault():
    """A module that nobody records and that returns −inf because it was told to is passed over, and run again once."""

    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x).masked_fill(x > 0, float("-inf"))

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.l = Mask(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.arange(-2.0, 2.0).expand(2, 4)
            return (self.l(x) + self.mask(x)).softmax(-1)

    found, tap, _ = found_by(Masked(), "l", steps=3)
    assert not found and tap.counts.get("modules_run_again") == 1


def test_an_in_place_forward_is_noticed():
    """A module that spoils its own input has no finite input left to show, but the step is not silent."""

    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sub_(100).log_()

    (origin,), _, _ = found_by(Whole(InPlace()), "inner:input")
    assert origin.site == "inner"


def test_the_module_runs_once_more_on_a_copy():
    """Three bad steps run forward three times: attributes, inputs, hooks and records are as unwatched."""
    model, fired, globally = Whole(LogInRoot()), [], []
    model.inner.l.register_forward_hook(lambda *_: fired.append(1))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: globally.append(1))
    try:
        found, tap, memory = found_by(model, "**", "my/*", steps=3)
    finally:
        handle.remove()
    assert len(found) == 3 and {origin.operation for origin in found} == {"log"}
    assert model.inner.calls == 3 and model.inner.history == [1, 2, 3]
    assert len(fired) == 3 and len(globally) == 9
    assert [r.step for r in memory.records if str(r.place) == "inner.l:output"] == [0, 1, 2]
    assert [r.step for r in memory.records if str(r.place) == "my/value:output"] == [0, 1, 2]
    assert tap.counts["modules_run_again"] == 1


def test_later_steps_tell_their_own_values():
    """What a module was given is told anew at each bad step, although it runs again only once."""
    model = LogInRoot()
    found, _, _ = found_by(model, "l", steps=2)
    one, other = (origin.inputs[0].summary.mean for origin in found)
    assert one != other and found[0].why and found[1].operation == "log"


def test_a_module_that_cannot_be_copied():
    """The origin names the module without its operation, and that is counted."""
    model = LogInRoot()
    model.stream = (character for character in "generators cannot be copied")
    with pytest.warns(tt.TensortapWarning, match="run it again"):
        (origin,), tap, _ = found_by(model, "l")
    assert origin.site == "" and not origin.operation and origin.output.nan == 8
    assert tap.counts["origins_without_operation"] == 1 and model.calls == 1


def test_inputs_and_random_states_are_left_alone():
    """An in-place forward that draws random numbers runs again on copies."""

    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.rand_like(x)
            return (x + self.seen.mul_(0)).log()

    model, x = Noisy(), -torch.ones(2, 4)
    states = []
    for watched in (False, True):
        torch.manual_seed(0)
        tap = tt.watch(model, to=tt.Memory(), on_nonfinite=lambda origin: None) if watched else None
        model(x)
        if tap:
            tap.close()
        states.append(torch.get_rng_state())
    assert torch.equal(*states) and torch.equal(x, -torch.ones(2, 4))


def test_values_on_a_device_are_read_when_the_step_closes(monkeypatch):
    """Where reading would wait for a device, the module is named at the end of the step."""
    monkeypatch.setenv("TENSORTAP_DEVICE_PATH", "torch")
    (origin,), _, _ = found_by(Whole(LogInRoot()), "inner.l")
    assert origin.site == "inner" and origin.module == "LogInRoot"
