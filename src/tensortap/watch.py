"""`watch` puts the pipeline together, from a model to the run folder; a `Tap` is the running observation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from tensortap import markup, text
from tensortap.adapters.closing import StepCloser, note_end, replicas_over_ranks, sharing_over_ranks
from tensortap.adapters.garbage import collection_paused
from tensortap.adapters.lookup import adapter_for, numbers_in, world_now
from tensortap.adapters.named_values import ACTIVE, NamedValueRecorder, tap
from tensortap.adapters.nonfinite import NonFiniteMonitor, OnNonFinite
from tensortap.adapters.null import IdleAdapter, NullAdapter
from tensortap.adapters.plan import Plan
from tensortap.adapters.protocol import Adapter, AdapterOptions
from tensortap.control.tap_control import TapControl
from tensortap.distributed.ranks import Ranks, World, records
from tensortap.errors import ProbeError, UnsupportedError
from tensortap.options import Options
from tensortap.record import serial
from tensortap.record.budget import Budget
from tensortap.record.cost import Cost
from tensortap.record.counters import Counters
from tensortap.record.global_stats import GlobalStats, Sharing, check
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.record.replicas import check_hashes
from tensortap.record.writer import Writer
from tensortap.select.probes import Probe, as_probes, probe
from tensortap.select.sites import Candidate, Pattern
from tensortap.sinks.destinations import RunFolderMaker, open_destinations, path_of_others
from tensortap.sinks.serving import ServingSink
from tensortap.store.folder import RunFolder
from tensortap.store.run import Run, open_run

__all__ = ["Tap", "tap", "watch"]


_SPLIT_EARLY: Final = (
    "before the first tap.step() each call of the model was taken for a step of its own, though no backward followed: "
    "{} of them are numbered before this one. Write tt.watch(..., explicit_steps=True) where a step calls the model "
    "several times"
)


class _NoModel:
    """The default of `watch`: no model was given, which None does not say."""

    def __repr__(self) -> str:
        return "NO_MODEL"


NO_MODEL: Final = _NoModel()


class Tap(AbstractContextManager["Tap"]):
    """A running observation. Leave the `with` block, or call `close`, and it is gone without a trace.

    >>> import numpy as np, tensortap as tt
    >>> memory = tt.Memory()
    >>> with tt.watch(to=memory) as watching:
    ...     for loss in (0.5, 0.4):
    ...         _ = tt.tap(np.ones(3), "my/value")
    ...         watching.step(loss=loss)
    >>> [(record.step, record["mean"]) for record in memory.records]
    [(0, 1.0), (1, 1.0)]
    """

    def __init__(
        self, adapter: Adapter, plan: Plan, recorder: Recorder, writer: Writer, monitor: NonFiniteMonitor, *,
        watched: str, folder: RunFolder | None = None, sharing: Sharing | None = None, control: bool = False,
        explicit_steps: bool = False,
    ) -> None:  # fmt: skip
        with collection_paused():
            adapter.attach(recorder, plan)
        self.recorder, self.writer, self.watched = recorder, writer, watched
        self.closed = False
        self.ended_by = ""  # the error that ended the code that is watched; the run says so
        self.steps = adapter.steps
        self.steps.explicit |= explicit_steps
        self.steps.ends_with_call = any(isinstance(sink, ServingSink) for sink in writer.sinks)
        self.named_values = NamedValueRecorder(adapter, recorder)
        self.path = None if folder is None else str(folder)
        self.ask_path: Callable[[], str | None] = lambda: None  # where other ranks write, when this one does not
        self._adapter, self._folder = adapter, folder
        self._closer = StepCloser(adapter, recorder, writer, monitor, sharing, folder)
        self.steps.listen(self._closer)
        self._control = TapControl(adapter, recorder, self._closer, self.named_values)
        if recorder.probes:
            ACTIVE.add(self.named_values)
        if folder is not None and control:
            self._control.listen(folder)

    def __repr__(self) -> str:
        return f"<Tap on {self.watched}: {self.summary()}>"

    def summary(self) -> str:
        """Return whether it is open, its probes, the steps so far and where they go, in a line."""
        state = "closed" if self.closed else "paused" if self.recorder.paused else "open"
        probes = text.counted(len(self.recorder.probes), "probe")
        where = " and ".join(str(s) if isinstance(s, RunFolder) else type(s).__name__ for s in self.writer.sinks)
        return f"{state}, {probes}, {text.counted(self.recorder.account.steps, 'step')}, to {where or 'nowhere'}"

    def _repr_html_(self) -> str:
        said = "closed" if self.closed else f"watching, step {self.recorder.current.number}"
        lost = "".join(f", {name.replace('_', ' ')} {count}" for name, count in self.counts.items())
        title = markup.line(markup.element("b", f"tap: {said}"), markup.coloured(lost, markup.WARN if lost else ""))
        cost = markup.line(f"cost: {str(self.cost).splitlines()[0]}")
        return markup.page(title, cost, *([] if self.path is None else [markup.Html(self.run._repr_html_())]))

    @property
    def run(self) -> Run:
        """What has been written so far."""
        self.path = self.path or self.ask_path()
        if self.path is None:
            raise UnsupportedError("this tap writes to no run folder; give one: watch(..., to='runs/exp1')")
        return open_run(self.path)

    @property
    def counts(self) -> dict[str, int]:
        """What was dropped, thinned, skipped or not seen so far."""
        return self.recorder.counters.counts()

    @property
    def cost(self) -> Cost:
        """What observing has cost so far, in all and by site."""
        return self.recorder.account.report(self.recorder.names)

    @property
    def global_stats(self) -> GlobalStats | None:
        """With `watch(global_stats=True)`: what all ranks together saw in the last observed step that was closed."""
        return self._closer.global_stats

    def step(self, *unnamed: Any, **metrics: Any) -> None:
        """Close the step. What its triggers want, given these metrics, is durable when this returns.

        From the first call on only this closes steps; before it, unless `explicit_steps=True`, they are found
        automatically.
        """
        if unnamed:
            raise UnsupportedError(_unnamed_metrics(unnamed))
        steps, closer = self.steps, self._closer
        if not steps.explicit:
            steps.explicit = True
            if steps.was_split:
                self.recorder.counters.warn("steps", _SPLIT_EARLY.format(self.recorder.account.steps))
        if not metrics:
            recorder = self.recorder
            asked = not recorder.current.idle or closer.requested is not None or closer.asks_every_step
            if asked or not recorder.pass_by():
                steps.finish()
            return
        steps.finish(metrics=numbers_in(metrics, self.recorder.counters))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function that is watched: `with watch(fn, "op:matmul") as tap: y = tap.call(x)`."""
        return self._adapter.call(*args, **kwargs)

    @contextmanager
    def span(self, **labels: Any) -> Iterator[OpenStep]:
        """Make what the calling thread does inside a step of its own: one request of many, served side by side."""
        detector, current = self.steps, self.recorder.current
        in_use = detector.busy or any(step is current for step in detector.left_open())
        step = self.recorder.open(before_current=not in_use)
        step.labels = {name: str(value) for name, value in labels.items()}
        before = self._adapter.enter(step)
        try:
            yield step
        finally:
            self._adapter.enter(before)
            self.steps.finish(step)

    def pause(self) -> None:
        """Record nothing until `resume`."""
        self.recorder.pause()
        self._adapter.arm()

    def resume(self) -> None:
        """Record again, from the next step on. What went on in the pause is no step's time."""
        self.recorder.resume()
        self._closer.restart_clock()

    def mute(self) -> None:
        """Record nothing until `unmute`; the open step waits and goes on then. For what is not part of it."""
        self.recorder.mute()
        self._adapter.arm()

    def unmute(self) -> None:
        """Go on with the open step."""
        self.recorder.unmute()
        self._adapter.arm()

    def flush(self) -> None:
        """Wait until everything recorded so far is written."""
        serial.run(self.writer.flush)

    def close(self) -> None:
        """Close the open step if it saw anything, take the taps off, write everything. A second call does nothing."""
        if not self.closed:
            serial.run(self._close)  # a signal handler may close the tap while a step is being closed

    def _close(self) -> None:
        if self.closed:
            return
        self.closed = self._closer.alone = True
        ACTIVE.discard(self.named_values)
        self._control.close()
        if self.ended_by and self._folder is not None:
            self._folder.note(ended_by=self.ended_by)
        try:
            for step in self._adapter.left_open():
                self.steps.finish_now(step)
            if self.recorder.current.table.rows:
                self.steps.finish_now()
        finally:  # a step that is not finite may raise, or a warning that is an error; the taps come off all the same
            try:
                unseen = self._control.still_unseen(self._adapter.unseen() | self.named_values.unseen())
                note_end(self.recorder, unseen, self._folder, self.writer)
            finally:
                self._adapter.detach()
                self._closer.write_events()
                self.writer.close()

    def __exit__(self, *error: object) -> None:
        self.ended_by = error[0].__name__ if error and isinstance(error[0], type) else ""
        self.close()


def watch(
    model: Any = NO_MODEL,
    *probes: Probe | str | Pattern | Callable[[Candidate], bool],
    to: Any = None,
    lookback: int = 0,
    budget: float | Budget | None = None,
    on_nonfinite: OnNonFinite = None,
    strict: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    ranks: Ranks = None,
    global_stats: bool = False,
    options: Options | None = None,
    **more: Any,
) -> Tap:
    """Observe a model, or without one the values that `tap(x, "name")` names, and write what is seen.

    A plain function shows its operations when it is called by `tap.call(...)`. `probes` are patterns or probes; none
    means the outputs of layers and of the model. `to` is a path, a logger, a function, a sink or a list of them; none
    means a new folder under `runs/`. With `strict` our errors are raised instead of counted. `budget=0.02` observes
    as many steps as keep the cost below 2 % of the step time. `on_nonfinite` names the origin of a NaN or an infinity:
    "record" warns of it, "raise" ends the training, a function is called with it. Among several processes `ranks=0`,
    `ranks=[0, 2]` or `ranks=lambda rank, world: ...` chooses those that record; `global_stats=True` adds one
    all-reduce at the end of an observed step, whose result is `tap.global_stats`. What is rarely needed is in
    `options` (`tensortap.Options`); its names are accepted here too.
    """
    if model is None:
        raise ProbeError(
            "the first argument of tt.watch must be a model, got None: give the model, or none at all to record the "
            "values that tt.tap names: tt.watch(to='runs/exp1')"
        )
    if isinstance(model, (str, Probe, Pattern)):
        model, probes = NO_MODEL, (model, *probes)
    options = (options or Options()).with_keywords(more)
    if isinstance(lookback, bool) or not isinstance(lookback, int) or lookback < 0:
        raise ProbeError(f"lookback= must be a number of steps from 0 up, got {lookback!r}; write lookback=10")
    bounded = budget if budget is None or isinstance(budget, Budget) else Budget(budget)
    counters, world = Counters(strict=strict), world_now(options.rank)
    monitor = NonFiniteMonitor(on_nonfinite, counters, f" on rank {world.rank}" if world.size > 1 else "")
    looks = AdapterOptions(options.fast_path, origins=on_nonfinite is not None, context=options.context)
    adapter = NullAdapter() if model is NO_MODEL else adapter_for(model, looks)
    if options.context:
        _check_context(adapter)
    chosen = as_probes(probes) or (probe(adapter.default_sites()),)
    with collection_paused():
        plan = adapter.plan(chosen)  # a pattern that matches nothing raises before anything is made
    compares_replicas = check_hashes(chosen)
    if global_stats:
        check(chosen, model=not adapter.names_only, all_ranks=ranks is None, budget=budget is not None)
    if not records(ranks, world):
        return _unrecorded_tap(IdleAdapter(adapter.function), to, world, monitor, counters)
    described = adapter.describe()
    kind = described.get("class", "values")
    about: dict[str, Any] = {"probes": [p.describe() for p in chosen], **({"model": described} if described else {})}
    about |= {"world": world.size} if world.size > 1 else {}
    about |= {"independent": True} if world.size > 1 and world.independent else {}
    sinks, folder = open_destinations(to, RunFolderMaker(kind, world, about, counters, resume, overwrite))
    recorder = Recorder(
        chosen, rank=world.rank, start=max(options.start, folder.start if resume and folder is not None else 0),
        lookback=lookback, lookback_bytes=options.lookback_bytes, counters=counters,
        budget=bounded,
    )  # fmt: skip
    writer = Writer(
        sinks, counters=counters, queue_bytes=options.queue_bytes, when_full=options.when_full, release=recorder.release
    )
    try:
        recorder.replicas = replicas_over_ranks(world, folder, counters) if compares_replicas else None
        sharing = sharing_over_ranks(adapter, plan, world, recorder) if global_stats else None
        return Tap(
            adapter, plan, recorder, writer, monitor, watched=kind, folder=folder, sharing=sharing,
            control=options.control, explicit_steps=options.explicit_steps,
        )  # fmt: skip
    except BaseException:
        writer.close()
        raise


def _unnamed_metrics(given: tuple[Any, ...]) -> str:
    """Return what to write instead of `tap.step(loss)`."""
    others = f" and {len(given) - 1} more" if len(given) > 1 else ""
    write = "tap.step(**metrics)" if isinstance(given[0], Mapping) else "tap.step(loss=loss)"
    return f"metrics of tap.step must be named, got {text.a_kind(given[0])}{others}: write {write}"


def _check_context(adapter: Adapter) -> None:
    """Refuse `context=True` where nothing would record it."""
    if adapter.names_only:
        raise ProbeError("context=True needs a model, whose training is recorded: write tt.watch(model, context=True)")
    if not adapter.capabilities.gives("context"):
        raise UnsupportedError(adapter.capabilities.refusal("context"))


def _unrecorded_tap(adapter: IdleAdapter, to: Any, world: World, monitor: NonFiniteMonitor, counters: Counters) -> Tap:
    """Return the tap of a rank that does not record: it works, costs nothing and writes nothing."""
    recorder = Recorder((), rank=world.rank, counters=counters)
    writer = Writer((), counters=counters, release=recorder.release)
    idle = Tap(adapter, Plan({}), recorder, writer, monitor, watched="nothing")
    idle.path, idle.ask_path = path_of_others(to, world)
    return idle
