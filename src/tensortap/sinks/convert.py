"""What a user may give as `to=`, as a sink."""

from __future__ import annotations

import io
import logging
from typing import Any

from tensortap.errors import ProbeError
from tensortap.record.sink import Sink
from tensortap.sinks.console import Console
from tensortap.sinks.function import Function
from tensortap.sinks.logger import Log


def as_sink(value: Any) -> Sink:
    """A logger, a text stream, a function of a record, or anything with `write(step)` and `close()`.

    >>> print(as_sink(logging.getLogger("layers")), as_sink(print))
    logger 'layers' print()
    """
    if isinstance(value, logging.Logger):
        return Log(value)
    if isinstance(value, io.TextIOBase):
        return Console(value)  # type: ignore[arg-type]
    if isinstance(value, type):
        raise ProbeError(f"to={value.__name__} is the class itself; make one: to={value.__name__}(…)")
    if callable(getattr(value, "write", None)) and callable(getattr(value, "close", None)):
        return value  # type: ignore[no-any-return]
    if callable(value):
        return Function(value)
    raise ProbeError(
        f"{value!r} is no sink; to= takes a folder for the run, a logging.Logger, a function of a record, "
        "or an object with write(step) and close() such as Memory(), Console(), JsonLines(path), Csv(path), Npy(folder)"
    )
