"""All errors of tensortap. Each message names the bad value, what was expected, and the corrected call."""

from __future__ import annotations

import contextlib
import difflib
import textwrap
from collections.abc import Iterable, Iterator


class TensortapError(Exception):
    """Base of all errors raised by tensortap."""


class PatternError(TensortapError, ValueError):
    """A site pattern cannot be parsed, or matches nothing."""


class ProbeError(TensortapError, ValueError):
    """A probe, trigger or reducer was given a value it cannot use."""


class UnsupportedError(TensortapError, TypeError):
    """A value, model or framework that cannot be observed."""


class NonFiniteError(TensortapError, FloatingPointError):
    """A watched step had a NaN or an infinity in it, and `on_nonfinite="raise"` was asked for."""

    def __init__(self, message: str, origin: object) -> None:
        super().__init__(message)
        self.origin = origin


class RunError(TensortapError):
    """A run folder cannot be opened, read or written."""


class NotARunError(RunError, FileNotFoundError):
    """The folder holds no run."""


class RunExistsError(RunError, FileExistsError):
    """The folder already holds a run, and nothing said to resume or overwrite it."""


class SchemaError(RunError):
    """The run was written by a newer tensortap."""


class HarvestError(TensortapError):
    """Activations cannot be harvested, or a folder of them cannot be read or continued."""


class ControlError(TensortapError):
    """A running tap cannot be asked for this, or cannot be reached."""


class MissingExtraError(TensortapError, ImportError):
    """An optional package is needed for this call."""


@contextlib.contextmanager
def needs(what: str, package: str) -> Iterator[None]:
    """Turn a failed import inside the block into an error that says what needs the package and how to install it.

    >>> with needs("Trackio(…)", "no-such-package"):
    ...     import no_such_package
    Traceback (most recent call last):
    tensortap.errors.MissingExtraError: Trackio(…) needs a package that is missing: pip install 'no-such-package'
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{what} needs a package that is missing: pip install '{package}'") from error


def nearest(word: str, known: Iterable[str], n: int = 3) -> list[str]:
    """Return the names most like `word`, best first: what an error offers instead."""
    names = list(dict.fromkeys(known))
    close = difflib.get_close_matches(word, names, n=n, cutoff=0.5)
    holding = [name for name in names if word and word in name and name not in close]
    return (close + holding)[:n]


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a sentence offering the nearest names, or nothing when there is none near."""
    names = nearest(word, known)
    return f" Did you mean {' or '.join(repr(name) for name in names)}?" if names else ""


def names_listed(word: str, known: Iterable[str]) -> str:
    """Return all names in lines of their own, those most like `word` first.

    >>> print(names_listed("lossspike", ["dead_units", "loss_spike", "constant"]))
    <BLANKLINE>
      loss_spike, constant, dead_units
    """
    names = sorted(dict.fromkeys(known))
    near = nearest(word, names)
    said = ", ".join([*near, *(name for name in names if name not in near)])
    return "\n" + textwrap.fill(said, 80, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
