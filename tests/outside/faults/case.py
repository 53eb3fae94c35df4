"""One fault: a correct script, and what is changed in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pair:
    """A correct script and the fault in it.

    `study` is where such a bug was published. `cause` is the cause an expert would name, and `symptoms` are rules whose
    finding is a right diagnosis although it does not name the cause. `at` is text on the line to change, in the faulty
    script; `sites` are places in the model that are as good an answer.
    """

    name: str
    study: str
    kind: str
    good: str
    changes: tuple[tuple[str, str], ...]
    cause: str
    at: str
    symptoms: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()

    @property
    def bad(self) -> str:
        """The faulty script."""
        text = self.good
        for old, new in self.changes:
            if old not in text:
                raise ValueError(f"{self.name}: {old!r} is not in the script")
            text = text.replace(old, new)
        return text

    @property
    def lines(self) -> set[int]:
        """The lines of the faulty script that are to be changed."""
        found = {i for i, line in enumerate(self.bad.splitlines(), 1) if self.at in line}
        if not found:
            raise ValueError(f"{self.name}: no line has {self.at!r}")
        return found


@dataclass(frozen=True)
class Healthy:
    """A training without a fault."""

    name: str
    good: str
    tags: tuple[str, ...] = field(default=())


def is_scored(name: str) -> bool:
    """Return whether a case is only scored, never tuned on: by a hash of its name."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0
