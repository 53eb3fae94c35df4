"""Watch processes that are not started by `tensortap run`: by environment variables, which children inherit.

`TENSORTAP` names the run and `TENSORTAP_OPTIONS` holds options of `tensortap run` as a JSON object. Python's start-up
finds us (`startup/sitecustomize.py`) only where that folder is on PYTHONPATH, so nothing happens by default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tensortap.distributed.ranks import SPAWNED
from tensortap.errors import RunError
from tensortap.script.options import RunOptions

RUN: Final = "TENSORTAP"
OPTIONS: Final = "TENSORTAP_OPTIONS"
STARTUP: Final = str(Path(__file__).parent / "startup")
# Programs that start the script in processes of their own.
LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "torchrun")
LAUNCHER_COMMANDS: Final = ("torchrun", "accelerate")  # found on PATH
_PASSED: Final = ("sites", "watch", "every", "keep", "budget", "resume", "overwrite")


def python_path() -> str:
    """Return PYTHONPATH with the folder that Python's start-up finds us in, and with the folder of the package."""
    known = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    ours = [STARTUP, str(Path(__file__).parents[2])]
    return os.pathsep.join([*(folder for folder in ours if folder not in known), *known])


def variables(to: str, options: RunOptions, spawned: int = 0) -> dict[str, str]:
    """Return the environment in which processes record into a run, with these options; `spawned` is their number."""
    passed = {name: value for name, value in options._asdict().items() if name in _PASSED and value}
    number = {SPAWNED: str(spawned)} if spawned else {}
    return {RUN: to, OPTIONS: json.dumps(passed), "PYTHONPATH": python_path(), **number}


@contextmanager
def joined(to: str, options: RunOptions, spawned: int = 0) -> Iterator[None]:
    """Let processes that are started meanwhile record into a run."""
    new = variables(to, options, spawned)
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def options_here(target: str) -> RunOptions:
    """Return the options that the environment gives to this process."""
    text = os.environ.get(OPTIONS) or "{}"
    try:
        read = json.loads(text).items()
        given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in read}
        if unknown := sorted(given.keys() - set(_PASSED)):
            raise RunError(f"{OPTIONS} must have the names {', '.join(_PASSED)}, got {', '.join(unknown)}")
    except (ValueError, AttributeError):
        raise RunError(f"{OPTIONS} must be a JSON object such as '{{\"every\": 10}}', got {text!r}") from None
    return RunOptions(target, to=str(Path(os.environ[RUN]).absolute()), **given)


def is_launcher(options: RunOptions) -> bool:
    """Return whether what is run starts the script in processes of its own: torchrun, `accelerate launch`."""
    name = options.target if options.module else Path(options.target).name
    return name in LAUNCHERS or (name == "accelerate" and options.args[:1] == ("launch",))
