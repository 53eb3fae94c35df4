"""What may be given as `to=`."""

import io
import logging

import pytest

from tensortap.errors import TensortapError
from tensortap.sinks.console import Console
from tensortap.sinks.convert import Function, as_sink
from tensortap.sinks.logger import Log
from tensortap.sinks.memory import Memory


def test_loggers_streams_functions_and_sinks_are_taken():
    """Each becomes the sink one expects; a sink stays itself."""
    memory = Memory()
    assert as_sink(memory) is memory
    assert isinstance(as_sink(logging.getLogger("x")), Log)
    assert isinstance(as_sink(io.StringIO()), Console)
    assert isinstance(as_sink(print), Function)


@pytest.mark.parametrize("value", [3, "runs/exp1", None, object()])
def test_anything_else_is_named_in_the_error(value):
    """The error names the value and what would do."""
    with pytest.raises(TensortapError, match="must be a sink, got") as caught:
        as_sink(value)
    assert repr(value) in str(caught.value)
    assert "Memory()" in str(caught.value)


def test_a_class_is_not_taken_for_a_function():
    """Forgetting the parentheses is said so."""
    with pytest.raises(TensortapError, match=r"to=Memory\(…\)"):
        as_sink(Memory)
