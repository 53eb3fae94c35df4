"""Taking a folder for a run: a new one, one that other ranks of this launch have begun, or one to go on with."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tensortap.errors import NotARunError, RunError, RunExistsError, SchemaError
from tensortap.store.files import Files
from tensortap.store.layout import LOCK, RUN_JSON, SCHEMA, rank_folder

_LAUNCH_VARIABLES: Final = (
    "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE",
)  # fmt: skip
_VERSIONS_OF: Final = ("numpy", "pyarrow", "torch", "tensorflow", "keras", "jax", "onnxruntime", "transformers")


def launched() -> bool:
    """Whether a launcher such as torchrun, Slurm or MPI started this process as one of several."""
    return any(name in os.environ for name in _LAUNCH_VARIABLES)


def launch_id() -> str:
    """What the processes of one launch have in common; of a process that nobody launched, only its own."""
    shared = [f"{name}={os.environ[name]}" for name in _LAUNCH_VARIABLES if name in os.environ]
    own = [] if shared else [platform.node(), str(os.getpid()), str(time.time_ns())]
    return hashlib.sha256("|".join(shared or own).encode()).hexdigest()[:16]


def read_info(files: Files) -> dict[str, Any]:
    """The content of `run.json`, or an error that says what is wrong with the folder."""
    try:
        info = json.loads(files.read(RUN_JSON))
    except FileNotFoundError:
        raise NotARunError(_not_a_run(files)) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{files}/{RUN_JSON} cannot be read ({error}); is the folder damaged?") from error
    if not isinstance(info, dict) or "schema" not in info:
        raise NotARunError(f"{files}/{RUN_JSON} was not written by tensortap (it names no schema)")
    if info["schema"] > SCHEMA:
        raise SchemaError(
            f"{files} was written with schema {info['schema']} by tensortap {info.get('tensortap')}; this one reads up "
            f"to schema {SCHEMA}: pip install --upgrade tensortap"
        )
    return info


def _not_a_run(files: Files) -> str:
    if not files.exists():
        return f"there is no run at {str(files)!r}: no such folder{_runs_near(files)}"
    return f"{str(files)!r} holds no run: it has no {RUN_JSON}{_runs_near(files)}"


def _runs_near(files: Files) -> str:
    for folder in (files.local, files.local.parent if files.local else None):
        if folder and folder.is_dir():
            found = sorted(p.parent for p in folder.glob(f"*/{RUN_JSON}"))
            if found:
                return "; runs nearby: " + ", ".join(os.path.relpath(p) for p in found[-3:])
    return ""


def claim(
    files: Files, rank: int, about: Mapping[str, Any], *, resume: bool, overwrite: bool, launch: str
) -> dict[str, Any]:
    """Make the folder this run's, and give its `run.json`. Raises when it belongs to another run."""
    if resume and overwrite:
        raise RunError("resume=True and overwrite=True exclude each other; give one of them")
    fresh = {**describe_process(), "launch": launch, **about}
    for _ in range(3):
        if _create(files, fresh):
            return fresh
        known = read_info(files)
        if resume or (known["launch"] == launch and not files.exists(rank_folder(rank))):
            return known
        if not overwrite:
            raise RunExistsError(_exists(files))
        if known["launch"] != launch:
            files.remove_all()
    raise RunError(f"could not take {files} over: another process keeps writing to it")


def _create(files: Files, info: Mapping[str, Any]) -> bool:
    """Put `run.json` there unless there is one: exactly one process of a launch succeeds."""
    data = json.dumps(info, indent=1).encode()
    if files.local is None:
        if files.exists(RUN_JSON):
            return False
        files.write(RUN_JSON, data)
        return True
    folder = files.local
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / RUN_JSON).exists() and any(not p.name.startswith(".run.json") for p in folder.iterdir()):
        raise RunError(f"{str(files)!r} is not empty and holds no run; give a folder of its own, e.g. {files}/run1")
    hidden = folder / f".{RUN_JSON}.{os.getpid()}.{time.time_ns()}"
    hidden.write_bytes(data)
    try:
        os.link(hidden, folder / RUN_JSON)
    except FileExistsError:
        return False
    finally:
        hidden.unlink(missing_ok=True)
    return True


def _exists(files: Files) -> str:
    other = next(f"{files}-{n}" for n in range(2, 10_000) if not Files(f"{files}-{n}").exists())
    return (
        f"{str(files)!r} already holds a run, and it is not overwritten. Give another path, e.g. to={other!r}; "
        "or go on with it: resume=True; or begin it anew: overwrite=True"
    )


def describe_process() -> dict[str, Any]:
    """Where and with what a run was made."""
    return {
        "schema": SCHEMA,
        "tensortap": _version("tensortap") or "0",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "argv": sys.argv,
        "versions": {name: version for name in _VERSIONS_OF if (version := _version(name))},
        "git": _git(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """The commit the user's code is at, and whether it was changed since."""
    try:
        commit = _ask_git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_ask_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _ask_git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=5).stdout.strip()


class Lock:
    """Says that a process is writing a rank's files: held until closed or until the process is gone, however it goes.

    A POSIX record lock, because a forked child does not inherit it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path.resolve()
        if self.path in _HELD:  # opening it a second time and closing that would drop the lock
            raise RunError(_busy(path))
        self._file = path.open("w")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise RunError(_busy(path)) from None
        _HELD.add(self.path)

    def close(self) -> None:
        """Let others write."""
        _HELD.discard(self.path)
        self._file.close()


_HELD: set[Path] = set()


def _busy(path: Path) -> str:
    return f"{path.parent} is being written by a process that is still running; wait for it or give another path"


def is_locked(folder: Path) -> bool:
    """Whether some process is writing this rank's files now."""
    path = (folder / LOCK).resolve()
    if path in _HELD:
        return True
    try:
        with path.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
