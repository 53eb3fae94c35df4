"""Threads: one model served side by side, each call its own step."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn

import tensortap as tt


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def together(n: int, work: Callable[[int], None]) -> None:
    """Run `work(0)`, `work(1)` … in threads that start at the same moment; what one raises is raised here."""
    barrier, errors = threading.Barrier(n), []

    def body(i: int) -> None:
        try:
            barrier.wait(30)
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def by_step(seen) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for record in seen.records:
        found.setdefault(record.step, []).append(str(record.place))
    return found


def test_each_call_in_a_thread_is_its_own_step(watch):
    """Two threads running one model in inference: no step mixes two calls."""
    model = net().eval()
    seen = watch(model, "{0,1,2}")

    def serve(i: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                model(torch.full((1, 3), float(i)))

    together(3, serve)
    seen.tap.close()
    assert list(by_step(seen).values()) == [["0:output", "1:output", "2:output"]] * 60


def test_spans_are_steps(watch):
    """What a thread does inside `tap.span(...)` is one step, however many calls."""
    model = net().eval()
    seen = watch(model, "0")
    numbers: list[int] = []

    def serve(i: int) -> None:
        for _ in range(10):
            with seen.tap.span(request_id=i) as step, torch.no_grad():
                numbers.append(step.number)
                for _ in range(i + 1):
                    model(torch.randn(1, 3))

    together(3, serve)
    seen.tap.close()
    found = by_step(seen)
    assert sorted(found) == sorted(numbers)
    assert sorted(map(len, found.values())) == [1] * 10 + [2] * 10 + [3] * 10


def test_a_span_in_the_main_thread(watch):
    """A span keeps its calls apart from the steps around it."""
    model = net()
    seen = watch(model, "0")
    model(torch.randn(1, 3))
    with seen.tap.span(request_id="a") as step:
        model(torch.randn(1, 3))
        model(torch.randn(1, 3))
    model(torch.randn(1, 3))
    seen.tap.close()
    assert [len(seen.of("0:output", step=n)) for n in (0, step.number)] == [1, 2]
    assert len(seen.steps) == 3


def test_labels_of_a_span_are_written(tmp_path):
    """`tap.span(request_id=7)` is found again among the metrics, as text, beside the metrics of other steps."""
    model = net().eval()
    with tt.watch(model, "0", to=tmp_path / "run") as tap:
        model(torch.randn(1, 3))
        tap.step(loss=0.5)
        for request in (7, 8):
            with tap.span(request_id=request, user="ann") as step:
                model(torch.randn(1, 3))
        tap.step(loss=0.25)
    rows = tap.run.metrics().to_pylist()
    labels = {(row["step"], row["name"]): row["text"] for row in rows if row["value"] is None}
    assert [row["value"] for row in rows if row["text"] is None] == [0.5, 0.25]
    assert labels[step.number, "request_id"] == "8" and labels[step.number, "user"] == "ann" and len(labels) == 4
    assert len(tap.run.table(steps=step.number)) == 1


def test_a_span_that_fails_closes(watch):
    """An exception inside a span closes its step, and the thread is back where it was."""
    model = net()
    seen = watch(model, "0")
    try:
        with seen.tap.span(request_id=1):
            model(torch.randn(1, 3))
            raise KeyError
    except KeyError:
        pass
    model(torch.randn(1, 3))
    seen.tap.close()
    assert len(seen.steps) == 2


def test_backward_in_threads_belongs_to_its_own_call(watch):
    """Threads that train keep their step open for the gradients; micro-batches are found in each."""
    model = net()
    seen = watch(model, "0", "0:grad_output", "0:grad_input")

    def work(i: int) -> None:
        for _ in range(5):
            x = torch.full((1, 3), float(i + 1), requires_grad=True)
            torch.autograd.grad(model(x).sum(), x)

    together(3, work)
    seen.tap.close()
    found = by_step(seen)
    # autograd.grad leaves nothing in .grad, so there is nothing to collect and each call is a step
    assert len(found) == 15
    assert all(places == ["0:output", "0:grad_output", "0:grad_input"] for places in found.values())


def test_training_in_a_thread_is_found_like_in_the_main_one(watch):
    """The thread that calls the root first is at home, whichever it is: accumulation and optimizer steps count."""
    model = net()
    seen = watch(model, "0", "0.weight:grad")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(_: int) -> None:
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    together(1, work)
    seen.tap.close()
    assert list(by_step(seen).values()) == [["0:output", "0:output", "0.weight:grad"]] * 3


def test_threads_that_are_gone_leave_no_step_open(watch):
    """A server that forgot no_grad, with a thread for each request: steps of ended threads are closed by the next."""
    model = net()
    seen = watch(model, "0")
    for _ in range(10):
        together(1, lambda i: model(torch.randn(1, 3)))
    assert len(seen.tap._adapter.left_open()) <= 1
    seen.tap.close()
    assert len(seen.steps) == 10 and len(seen.of("0:output")) == 10


def test_a_call_inside_other_threads_belongs_to_the_open_step(watch):
    """Parts of the model that run in helper threads are recorded in the step of the tap."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            together(3, lambda i: self.parts[i](x))
            return x

    model = Parallel()
    seen = watch(model, "parts.*")
    for _ in range(5):
        model(torch.randn(2, 3))
    seen.tap.close()
    assert [sorted(places) for places in by_step(seen).values()] == [[f"parts.{i}:output" for i in range(3)]] * 5
