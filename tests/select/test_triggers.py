"""Triggers: the schedule, the metrics, the three-valued logic, and what the errors say."""

from __future__ import annotations

import copy
import math
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.errors import ProbeError
from tensortap.select.triggers import (
    Answer,
    Trigger,
    as_trigger,
    at,
    between,
    chance,
    every,
    first,
    metric,
    nonfinite,
    powers_of,
    spike,
)
from tensortap.types import StepOutcome

NOTHING = StepOutcome({})
exact = settings(derandomize=True, deadline=None)


def kept(trigger: Trigger, steps: int = 40) -> list[int]:
    return [step for step in range(steps) if trigger.before(step) is Answer.YES]


def fires(trigger: Trigger, values: list[float], name: str = "loss") -> list[int]:
    return [step for step, value in enumerate(values) if trigger.after(step, StepOutcome({name: value})) is not None]


@pytest.mark.parametrize(
    ("trigger", "steps"),
    [
        (every(10), [0, 10, 20, 30]),
        (every(10, start=5), [5, 15, 25, 35]),
        (every(10, start=5, stop=25), [5, 15]),
        (at([3, 1, 3]), [1, 3]),
        (at(range(2, 5)), [2, 3, 4]),
        (between(2, 5), [2, 3, 4]),
        (first(3), [0, 1, 2]),
        (powers_of(2), [1, 2, 4, 8, 16, 32]),
        (powers_of(3), [1, 3, 9, 27]),
        (chance(0.0), []),
        (chance(1.0), list(range(40))),
        (powers_of(2) | at([0]), [0, 1, 2, 4, 8, 16, 32]),
        (every(2) & ~at([4]) & first(8), [0, 2, 6]),
    ],
)
def test_schedule(trigger: Trigger, steps: list[int]) -> None:
    """A trigger that looks at the step's number says the same before and after."""
    assert kept(trigger) == steps
    assert [step for step in range(40) if trigger.after(step, NOTHING) is not None] == steps


def test_every_has_no_end() -> None:
    """A schedule without a stop goes on past any run's length, at constant cost."""
    assert every(1000).before(10**15) is Answer.YES


def test_chance_is_pure() -> None:
    """The chosen steps depend on seed and step alone, and the global generator is not touched."""
    state = random.getstate()
    assert kept(chance(0.1, seed=1), 50) == [6, 20, 23, 40, 45]
    assert kept(chance(0.1, seed=2), 50) != kept(chance(0.1, seed=1), 50)
    assert random.getstate() == state


@pytest.mark.parametrize("p", [0.01, 0.25, 0.9])
def test_chance_has_its_rate(p: float) -> None:
    """Over many steps the share of chosen steps is p."""
    n = 20_000
    assert abs(len(kept(chance(p, seed=7), n)) / n - p) < 4 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize(
    ("trigger", "steps"),
    [
        (metric("loss") > 1.0, [2, 3]),
        (metric("loss") >= 1.0, [1, 2, 3]),
        (metric("loss") < 1, [0]),
        (metric("loss") <= 1, [0, 1]),
        (1.0 < metric("loss"), [2, 3]),  # noqa: SIM300
        ((metric("loss") > 0.6) & (metric("loss") < 1.5), [1]),
    ],
)
def test_metric(trigger: Trigger, steps: list[int]) -> None:
    """A comparison is decided when the step closes; a NaN satisfies none."""
    assert trigger.before(0) is Answer.MAYBE
    assert fires(trigger, [0.5, 1.0, 2.0, math.inf, math.nan]) == steps


def test_metric_that_was_not_passed() -> None:
    """A step without the metric does not fire, and the trigger tells which names it reads."""
    trigger = (metric("loss") > 1.0) | ~spike("grad") & nonfinite()
    assert (metric("loss") > 1.0).after(0, NOTHING) is None
    assert trigger.metrics() == {"loss", "grad"}


def test_spike() -> None:
    """A value above factor × the recent mean fires, once enough of the past is known."""
    assert fires(spike("loss", factor=2.0), [9.0] + [1.0] * 8 + [50.0, 8.0, 20.0]) == [11]
    assert fires(spike("loss", window=3), [1.0, 50.0, 1.0, 30.0, 90.0]) == [4]
    assert fires(spike("loss", window=1, factor=3.0), [1.0, 2.9, 9.0, 0.0, 0.1]) == [2, 4]


def test_spike_window_forgets() -> None:
    """Only the last `window` values count."""
    assert fires(spike("loss", window=2), [100.0, 100.0, 1.0, 1.0, 3.0]) == [4]


def test_spike_fires_on_nonfinite_and_keeps_its_history_clean() -> None:
    """NaN and infinities fire at once and do not enter the mean."""
    values = [math.nan] + [1.0] * 10 + [math.inf, 1.5, 2.5]
    assert fires(spike("loss"), values) == [0, 11, 13]


@pytest.mark.parametrize("level", [-5.0, 0.0, 1e300, -1e300])
def test_spike_around_any_mean(level: float) -> None:
    """Steady values of any sign do not fire, and a jump upwards does."""
    scatter = [level + 0.01 * (-1) ** i for i in range(20)]
    assert fires(spike("loss"), [*scatter, level + 2 * abs(level) + 1]) == [20]


def test_spike_in_noise_around_zero() -> None:
    """Values that scatter around zero fire only far outside what was seen."""
    noise = random.Random(0)
    values = [noise.gauss(0, 1) for _ in range(1000)]
    assert fires(spike("loss"), [*values, 20.0]) == [1000]


def test_nonfinite() -> None:
    """A bad tensor or a bad metric fires."""
    assert nonfinite().before(0) is Answer.MAYBE
    assert nonfinite().after(0, StepOutcome({"loss": 1.0})) is None
    assert nonfinite().after(0, StepOutcome({"loss": 1.0}, nonfinite=2)) == "nonfinite()"
    assert nonfinite().after(0, StepOutcome({"loss": math.nan})) == "nonfinite()"


def test_reasons() -> None:
    """A reason names what fired, joined as it was written."""
    high = metric("loss") > 1.0
    seen = StepOutcome({"loss": 2.0})
    assert (every(2) | high).after(2, seen) == "every(2) | metric('loss') > 1.0"
    assert (every(2) | high).after(3, seen) == "metric('loss') > 1.0"
    assert (every(2) & high).after(2, seen) == "every(2) & metric('loss') > 1.0"
    assert (~every(2)).after(3, seen) == "~every(2)"


@pytest.mark.parametrize(
    "text",
    [
        "every(100)",
        "every(100, start=5, stop=50)",
        "metric('loss') > 1.0",
        "(every(2) & ~at([4]))",
        "((metric('loss') > 1) | ~(metric('acc') < 0.5))",
        "spike('loss', window=100, factor=2.0)",
        "chance(0.5, seed=3)",
        "(nonfinite() | between(1, 2))",
    ],
)
def test_text_is_the_code(text: str) -> None:
    """A trigger prints as the expression that makes it."""
    assert str(eval(text)) == repr(eval(text)) == text


def test_long_lists_are_shortened() -> None:
    """A trigger of a thousand steps has a short name."""
    assert str(at(range(1000))) == "at([0, 1, 2, 3, 4, 5, 6, 7, … 992 more])"


def test_callable() -> None:
    """A function of step and metrics is asked at the end, and its own exception comes through."""

    def late_and_high(step: int, metrics: dict[str, float]) -> bool:
        return step > 1 and metrics["loss"] > 1

    trigger = as_trigger(late_and_high)
    assert trigger.before(0) is Answer.MAYBE
    assert trigger.after(0, StepOutcome({"loss": 2.0})) is None
    assert trigger.after(2, StepOutcome({"loss": 2.0})) == "late_and_high"
    assert str(every(2) | late_and_high) == str(every(2) | trigger) == "(every(2) | late_and_high)"
    assert str(late_and_high & every(2)) == "(late_and_high & every(2))"
    with pytest.raises(KeyError):
        trigger.after(2, NOTHING)


def test_as_trigger() -> None:
    """A trigger is itself, and None means every step."""
    trigger = every(3)
    assert as_trigger(trigger) is trigger
    assert str(as_trigger(None)) == "every(1)"


def test_own_trigger() -> None:
    """A subclass with one method is a whole trigger."""

    class Odd(Trigger):
        def after(self, step: int, seen: StepOutcome) -> str | None:
            return "odd" if step % 2 else None

    assert (Odd() & first(4)).before(1) is Answer.MAYBE
    assert (Odd() & first(4)).after(1, NOTHING) == "odd & first(4)"
    assert str(~Odd()) == "~Odd()"


def test_fresh_copies_share_no_history() -> None:
    """Two taps using one probe do not see each other's values, even for a trigger used twice in one expression."""
    jump = spike("loss", window=2)
    assert fires(jump, [1.0, 1.0, 3.0]) == [2]
    tree = (~jump | jump).fresh()
    assert fires(tree & jump.fresh(), [1.0, 1.0, 3.0]) == [2]
    assert fires(jump.fresh(), [9.0]) == []
    assert copy.deepcopy(jump).after(3, StepOutcome({"loss": 9.0})) is not None


def test_triggers_can_be_pickled() -> None:
    """Triggers travel to spawned processes."""
    trigger = (every(2) | chance(0.5) | powers_of(2) | at([1])) & ~(metric("loss") > 1) & spike("loss") | nonfinite()
    assert str(pickle.loads(pickle.dumps(trigger))) == str(trigger)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: every(0), "at least 1, got 0: write every(100)"),
        (lambda: every(-1), "got -1"),
        (lambda: every(2.5), "got 2.5"),
        (lambda: every(True), "got True"),
        (lambda: every(5, start=-1), "every(5, start=0)"),
        (lambda: every(5, start=10, stop=10), "every(5, start=10, stop=15)"),
        (lambda: at("12"), "got '12': write at([10])"),
        (lambda: at(5), "write at([5])"),
        (lambda: at([]), "at least one step, got []: write at([0, 10])"),
        (lambda: at([1, -2]), "got -2"),
        (lambda: between(5, 5), "between(5, 105)"),
        (lambda: first(0), "first(10)"),
        (lambda: powers_of(1), "powers_of(2)"),
        (lambda: chance(2), "between 0 and 1, got 2"),
        (lambda: chance(math.nan), "got nan"),
        (lambda: chance(0.5, seed="a"), "chance(0.5, seed=0)"),
        (lambda: spike("loss", window=0), "spike('loss', window=100)"),
        (lambda: spike("loss", factor=1.0), "spike('loss', factor=2.0)"),
        (lambda: spike(3), "spike('loss')"),
        (lambda: metric(""), "metric('loss')"),
        (lambda: metric("loss") == 1, "use >, <, >= or <="),
        (lambda: metric("loss") > "high", "metric('loss') > 1.0"),
        (lambda: metric("loss") > math.nan, "> nan"),
        (lambda: bool(metric("loss") > 1), "use & and |"),
        (lambda: 0 < metric("loss") < 1, '(metric("loss") > 0) & (metric("loss") < 1)'),
        (lambda: every(2) and at([1]), "use & and |"),
        (lambda: metric("loss") and every(2), "(metric('loss') > 1.0)"),
        (lambda: as_trigger(metric("loss")), "(metric('loss') > 1.0)"),
        (lambda: nonfinite() | metric("loss") > 1, "(metric('loss') > 1.0)"),
        (lambda: metric("loss") | nonfinite(), "(metric('loss') > 1.0)"),
        (lambda: metric("loss") > 1.5 | nonfinite(), "parentheses: (metric('loss') > 1.5)"),
        (lambda: ~metric("loss"), "(metric('loss') > 1.0)"),
        (lambda: as_trigger(100), "every(100)"),
        (lambda: as_trigger(math.inf), "every(1)"),
        (lambda: as_trigger([1, 2]), "at([1, 2])"),
        (lambda: as_trigger("loss > 1"), "must be a trigger, got 'loss > 1': write every(100)"),
        (lambda: as_trigger(nonfinite), "call it, as in nonfinite()"),
        (lambda: as_trigger(Trigger), "call it, as in Trigger()"),
        (lambda: as_trigger(lambda step: True), "(step, metrics) -> bool"),
        (lambda: every(2) | None, "must be a trigger, got None"),
    ],
)
def test_errors_name_the_value_and_the_correction(make: object, named: str) -> None:
    """A wrong argument raises at once and says what to write."""
    with pytest.raises(ProbeError) as error:
        make()
    assert named in str(error.value)


leaves = st.sampled_from(
    [
        every(2),
        every(3, start=1),
        at([4]),
        between(2, 6),
        first(3),
        powers_of(2),
        chance(0.5),
        nonfinite(),
        metric("loss") > 1.0,
        metric("acc") <= 0.5,
        as_trigger(lambda step, metrics: step % 3 == 0),
    ]
) | st.builds(spike, st.just("loss"), st.integers(1, 4))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.builds(lambda a, b: a | b, inner, inner)
        | st.builds(lambda a, b: a & b, inner, inner)
        | st.builds(lambda a: ~a, inner)
    ),
    max_leaves=8,
)
metrics = st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats())
histories = st.lists(st.builds(StepOutcome, metrics, st.integers(0, 2)), max_size=12)


@exact
@given(trees, histories)
def test_before_and_after_agree(tree: Trigger, history: list[StepOutcome]) -> None:
    """What is YES before is kept, and what is NO before is not, for any combination of triggers."""
    tree = tree.fresh()
    for step, seen in enumerate(history):
        answer, reason = tree.before(step), tree.after(step, seen)
        assert answer is Answer.MAYBE or (answer is Answer.YES) == (reason is not None)


@exact
@given(trees, trees, histories)
def test_logic_of_after(a: Trigger, b: Trigger, history: list[StepOutcome]) -> None:
    """After the step, the operators are those of two-valued logic, and De Morgan's laws hold in both halves."""
    parts = [t.fresh() for t in (a, b, a | b, a & b, ~(a | b), ~a & ~b, ~~a)]
    for step, seen in enumerate(history):
        answers = [part.before(step) for part in parts]
        assert answers[4] is answers[5] and answers[0] is answers[6]
        x, y, either, both, neither, morgan, twice = (part.after(step, seen) is not None for part in parts)
        assert (either, both, neither, morgan, twice) == (x or y, x and y, not (x or y), not (x or y), x)


class Fixed(Trigger):
    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked = answer, 0

    def before(self, step: int) -> Answer:
        return self.answer

    def after(self, step: int, seen: StepOutcome) -> str | None:
        self.asked += 1
        return "yes" if self.answer is Answer.YES else None


@pytest.mark.parametrize("a", Answer)
@pytest.mark.parametrize("b", Answer)
def test_three_valued_tables(a: Answer, b: Answer) -> None:
    """NO decides an &, YES decides an |, and otherwise MAYBE stays MAYBE."""
    either, both = (Fixed(a) | Fixed(b)).before(0), (Fixed(a) & Fixed(b)).before(0)
    if Answer.YES in (a, b):
        assert either is Answer.YES
    else:
        assert either is (Answer.NO if a is b is Answer.NO else Answer.MAYBE)
    if Answer.NO in (a, b):
        assert both is Answer.NO
    else:
        assert both is (Answer.YES if a is b is Answer.YES else Answer.MAYBE)
    assert (~Fixed(a)).before(0) is {Answer.NO: Answer.YES, Answer.YES: Answer.NO}.get(a, Answer.MAYBE)


@pytest.mark.parametrize("a", Answer)
@pytest.mark.parametrize("b", Answer)
def test_after_asks_both_sides_once(a: Answer, b: Answer) -> None:
    """Every part is asked exactly once for each closed step, so history has no gaps."""
    left, right = Fixed(a), Fixed(b)
    (~left | right).after(0, NOTHING)
    (left & ~right).after(1, NOTHING)
    assert (left.asked, right.asked) == (2, 2)
