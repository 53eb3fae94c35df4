"""One model, many threads: a request is a step of its own, and nothing of another request is in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tensortap as tt

THREADS, ROUNDS = 4, 5


class Together(nn.Module):
    """Lets nobody through before all are there: every request is under way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(THREADS, timeout=30)

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait()
        return x


class Twice(nn.Module):
    """A layer used twice, so that calls must be counted for each request by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.together = nn.Linear(3, 3), Together()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.together(self.fc(x)))


def serve(model: nn.Module, around: Callable[[str], Any]) -> dict[str, Tensor]:
    """Requests by name, and what they were given; as many at once as there are threads."""
    given = {f"{thread}-{n}": torch.randn(2, 3) for thread in range(THREADS) for n in range(ROUNDS)}

    def answer(thread: int) -> None:
        for n in range(ROUNDS):
            with around(name := f"{thread}-{n}"), torch.inference_mode():
                model(given[name])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(answer, range(THREADS)))
    return given


def expected(model: Twice, x: Tensor) -> list[float]:
    """The means that a request's two calls of the layer have."""
    with torch.inference_mode():
        first = model.fc(x)
        return [float(tt.summarize(y).mean) for y in (first, model.fc(first))]


def means(run: tt.Run) -> dict[int, list[float]]:
    """By step, the means of the layer's calls, in order."""
    records = sorted(run.records("fc"), key=lambda record: (record.step, record.call))
    assert [record.call for record in records] == [0, 1] * (len(records) // 2)
    return {record.step: [r["mean"] for r in records if r.step == record.step] for record in records}


def test_spans_of_threads_hold_their_own_request(tmp_path: Path) -> None:
    """With as many requests under way as threads, each is one step, with its label and its own tensors."""
    model = Twice().eval()
    with tt.watch(model, "fc", to=tmp_path / "run") as tap:
        given = serve(model, lambda name: tap.span(request_id=name))
    run = tt.open(tmp_path / "run")
    labels = {row["step"]: row["text"] for row in run.metrics().to_pylist() if row["name"] == "request_id"}
    assert sorted(labels.values()) == sorted(given)
    assert means(run) == {step: expected(model, given[name]) for step, name in labels.items()}
    assert run.counts == {}


def test_threads_without_spans_do_not_mix(tmp_path: Path) -> None:
    """Where nobody says what a request is, each call of the model in a thread is a step."""
    model = Twice().eval()
    with tt.watch(model, "fc", to=tmp_path / "run"):
        given = serve(model, lambda name: nullcontext())
    found = means(tt.open(tmp_path / "run"))
    assert sorted(found.values()) == sorted(expected(model, x) for x in given.values())


def test_what_the_root_returns_is_in_its_step(tmp_path: Path) -> None:
    """Each thread's step holds the output of the whole model, not only those of its layers."""
    model = Twice().eval()
    with tt.watch(model, ":output", "fc:output", to=tmp_path / "run"):
        serve(model, lambda _: nullcontext())
    rows = tt.open(tmp_path / "run").table(columns=["step", "site"]).to_pylist()
    by_step: dict[int, list[str]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row["site"])
    assert [sorted(sites) for sites in by_step.values()] == [["", "fc", "fc"]] * (THREADS * ROUNDS)


def test_a_span_that_fails_is_closed(tmp_path: Path) -> None:
    """A request that ends with an error keeps what was seen of it, and the thread's next one is its own."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).eval()
    with tt.watch(model, "**", to=tmp_path / "run") as tap:
        for name, width in (("bad", 5), ("good", 3)):
            try:
                with tap.span(request_id=name):
                    tt.tap(torch.ones(1), "seen")
                    model(torch.randn(2, width))
            except RuntimeError:
                assert name == "bad"
    run = tt.open(tmp_path / "run")
    steps = {row["text"]: row["step"] for row in run.metrics().to_pylist() if row["name"] == "request_id"}
    assert {name: len(list(run.records(steps=step))) for name, step in steps.items()} == {"bad": 1, "good": 4}


def test_the_first_span_is_the_first_step(tmp_path: Path) -> None:
    """Requests are numbered from 0 on, as calls without spans are, and only those that are recorded are labelled."""
    model = nn.Linear(3, 2).eval()
    with torch.inference_mode(), tt.watch(model, tt.probe("**", when=tt.every(10)), to=tmp_path / "run") as tap:
        for number in range(12):
            with tap.span(request_id=number):
                model(torch.randn(1, 3))
    assert tap.run.steps == [0, 10]
    assert [(row["step"], row["text"]) for row in tap.run.metrics().to_pylist()] == [(0, "0"), (10, "10")]


def test_a_span_beside_an_open_step_has_a_number_of_its_own() -> None:
    """A call outside of spans keeps the number of its step, and spans around it take the next ones."""
    model, memory = nn.Linear(3, 2).eval(), tt.Memory()
    x = torch.randn(1, 3)
    with torch.inference_mode(), tt.watch(model, ":output", to=memory) as tap:
        for inside in (True, False, True, True, False):
            with tap.span() if inside else nullcontext() as step:
                model(x)
                assert step is None or not step.closed
    assert sorted(record.step for record in memory.records) == [0, 1, 2, 3, 4]


def test_a_span_after_a_pause_is_recorded() -> None:
    """The step that was open in a pause is not recorded, and no span takes its place."""
    model, memory = nn.Linear(3, 2).eval(), tt.Memory()
    with torch.inference_mode(), tt.watch(model, ":output", to=memory) as tap:
        tap.pause()
        with tap.span():
            model(torch.randn(1, 3))
        tap.resume()
        with tap.span():
            model(torch.randn(1, 3))
    assert len(memory.records) == 1
