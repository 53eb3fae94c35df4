"""Claim a folder for a run: a new one, one that other ranks of this launch have begun, or one to resume."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tensortap import portable
from tensortap.errors import NotARunError, RunError, RunExistsError, SchemaError
from tensortap.store import checked_json
from tensortap.store.files import Files, unwritable
from tensortap.store.names import (
    COMPACT_LOCK,
    DAMAGED_RUN_JSON,
    EVENTS,
    HARVEST_JSON,
    LOCK,
    METRICS,
    RUN_JSON,
    SCHEMA,
    new_id,
    rank_folder,
    rank_of,
)

_LAUNCH_VARIABLES: Final = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE",
)  # fmt: skip
_NOT_A_LOCK: Final = "{} is not a regular file and is not used as a lock; remove it, or give another path"
_TAKEN: Final = ".overwriting"
_COMMIT: Final = "# branch.oid "  # how git begins the line
_VERSIONS_OF: Final = ("numpy", "pyarrow", "torch", "tensorflow", "keras", "jax", "onnxruntime", "transformers")


def launched() -> bool:
    """Return whether a launcher such as torchrun, Slurm or MPI started this process as one of several."""
    return any(name in os.environ for name in _LAUNCH_VARIABLES)


def launch_id(spawned: bool = False) -> str:
    """Return an identity that the processes of one launch share; for a process without a launcher, its own.

    `spawned`: no launcher, but one of several ranks all the same, which their parent started.
    """
    shared = [f"{name}={os.environ[name]}" for name in _LAUNCH_VARIABLES if name in os.environ]
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "") or (spawned and not shared):
        shared.append(f"parent={_parent()}")  # torchrun on one machine: its next launch may use the same port
    own = [] if shared else [platform.node(), str(os.getpid()), str(time.time_ns())]
    return hashlib.sha256("|".join(shared or own).encode()).hexdigest()[:16]


def _parent() -> str:
    """Return the process that started this one, and when that began: its number alone is used again."""
    parent = os.getppid()
    try:
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = ""
    return f"{platform.node()}:{parent}:{began}"


def read_info(files: Files) -> dict[str, Any]:
    """Return the content of `run.json`, or an error that says what is wrong with the folder."""
    return read_run_json(files)[0]


def read_run_json(files: Files) -> tuple[dict[str, Any], str]:
    """Return the content of `run.json`, and why it may be wrong; an error where no run can be read by it."""
    try:
        info, wrong = checked_json.decode(files.read(RUN_JSON))
    except (FileNotFoundError, NotADirectoryError):
        raise NotARunError(_not_a_run(files)) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{files}/{RUN_JSON} cannot be read ({error}); is the folder damaged?") from error
    if not isinstance(info, dict) or "schema" not in info:
        raise NotARunError(f"{files}/{RUN_JSON} was not written by tensortap (it names no schema)")
    if not isinstance(info["schema"], int) or info["schema"] > SCHEMA:
        raise SchemaError(
            f"{files} was written with schema {info['schema']} by tensortap {info.get('tensortap')}; this one reads up "
            f"to schema {SCHEMA}: pip install --upgrade tensortap"
        )
    return info, wrong


def write_info(files: Files, info: Mapping[str, Any]) -> None:
    """Write `run.json`."""
    files.write(RUN_JSON, checked_json.encode(info))


def _not_a_run(files: Files) -> str:
    if not files.exists():
        return f"there is no run at {str(files)!r}: no such folder{_runs_near(files)}"
    if files.local and files.local.is_file():
        return f"{str(files)!r} is a file; a run is a folder{_runs_near(files)}"
    if files.local and (files.local / HARVEST_JSON).is_file():
        how = "open it with tt.open_harvest, compare it with tensortap check A --against B"
        return f"{str(files)!r} holds a harvest, not a run: {how}"
    return f"{str(files)!r} holds no run: it has no {RUN_JSON}{_runs_near(files)}"


def _runs_near(files: Files) -> str:
    """Return the run of that name in `runs`, where runs go by default, or others that lie near."""
    if files.local is None:
        return ""
    by_default = files.local.parent / "runs" / files.local.name
    if (by_default / RUN_JSON).is_file():
        return f"; did you mean {os.path.relpath(by_default)}?"
    for folder in (files.local, files.local.parent, files.local.parent / "runs"):
        found = sorted(p.parent for p in folder.glob(f"*/{RUN_JSON}")) if folder.is_dir() else []
        if found:
            return "; runs nearby: " + ", ".join(os.path.relpath(p) for p in found[-3:])
    return ""


def claim(
    files: Files, rank: int, about: Mapping[str, Any], *, resume: bool, overwrite: bool, launch: str,
    after: Callable[[], int] = lambda: 0,
) -> tuple[dict[str, Any], Lock]:  # fmt: skip
    """Claim the folder for this run; return its `run.json` and the lock on this rank. Raises when it belongs to another
    run.

    `after` gives the step that a resumed run goes on with. The first rank of a launch asks, while nobody writes yet,
    and leaves the answer for the others: a step is to mean the same step everywhere.
    """
    if resume and overwrite:
        raise RunError("only one of resume= and overwrite= must be True, got both: they exclude each other")
    try:
        with alone(files.local.parent if files.local else None):
            info = _join(files, rank, {"launch": launch, **about}, resume, overwrite)
            if resume:
                info = _resumed(files, rank, info, launch, after)
            folder = files.staging() / rank_folder(rank)
            files.make_folder(folder)
            return info, Lock(folder / LOCK)
    except RunError:
        raise
    except OSError as error:
        raise RunError(unwritable(files, error)) from error


def _join(files: Files, rank: int, about: Mapping[str, Any], resume: bool, overwrite: bool) -> dict[str, Any]:
    for _ in range(3):
        if not files.exists(RUN_JSON):
            fresh = {**describe_process(), **about}
            if _create(files, fresh):
                return fresh
        known, wrong = read_run_json(files)
        if resume and wrong:  # it is written anew, which would hide that
            files.write(DAMAGED_RUN_JSON, files.read(RUN_JSON))
        if resume or (known.get("launch") == about["launch"] and not files.exists(rank_folder(rank))):
            return known
        if not overwrite:
            raise RunExistsError(_exists(files))
        _remove(files)
    raise RunError(f"could not take {files} over: another process keeps writing to it")


def _resumed(files: Files, rank: int, info: dict[str, Any], launch: str, after: Callable[[], int]) -> dict[str, Any]:
    known = last_resumption(info)
    began_before = rank in known.get("ranks", ()) if known else files.exists(rank_folder(rank))
    if info.get("launch") == launch and not began_before:
        if not known:  # a new run, as for the ranks before
            return info
        resumed = {**known, "ranks": [*known["ranks"], rank]}
    else:  # the first of its launch, or of a launch that looks like the one before, e.g. on the same port
        resumed = {"start": after(), "ranks": [rank]}
    info = {**info, "launch": launch, "resumed": resumed}
    write_info(files, info)
    return info


def last_resumption(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step and the ranks of the last resumption; nothing where a damaged `run.json` names no such things."""
    known = info.get("resumed")
    if isinstance(known, dict) and isinstance(known.get("start"), int) and isinstance(known.get("ranks"), list):
        return known
    return {}


def _create(files: Files, info: Mapping[str, Any]) -> bool:
    """Put `run.json` there unless there is one: exactly one process of a launch succeeds."""
    if files.local is not None and files.local.is_file():
        raise RunError(f"{str(files)!r} is a file; a run is a folder: give another path, e.g. {files}-run")
    names = [name for name in files.list() if not name.startswith(".")]
    if names and not files.exists(_TAKEN):
        raise RunError(
            f"{str(files)!r} is not empty and holds no run ({names[0]}, …); give a folder of its own, e.g. {files}/run1"
        )
    if files.local is None:
        shutil.rmtree(files.staging(), ignore_errors=True)  # left by an earlier run of this address
        write_info(files, info)
        return True
    files.make_folder(files.local)
    hidden = files.local / f".{RUN_JSON}.{new_id()}"
    try:
        hidden.write_bytes(checked_json.encode(info))
        os.link(hidden, files.local / RUN_JSON)
    except FileExistsError:
        return False
    finally:
        hidden.unlink(missing_ok=True)
    files.remove(_TAKEN)
    return True


def _remove(files: Files) -> None:
    """Delete a run, but nothing else that lies in its folder. `run.json` goes last, so that it can be done again."""
    names = [name for name in files.list() if rank_of(name) is not None or name in (METRICS, EVENTS, DAMAGED_RUN_JSON)]
    busy = [name for name in names if is_locked(files.staging() / name)]
    if busy:
        raise RunError(_busy(files.staging() / busy[0] / LOCK))
    for name in names:
        files.remove_all(name)
    files.write(_TAKEN, b"")
    files.remove(RUN_JSON)


@contextlib.contextmanager
def alone(folder: Path | None) -> Iterator[None]:
    """Hold a lock on the folder itself, where the file system has such locks: one process at a time, no file left."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            portable.wait_for_lock(fd)
        yield
    finally:
        os.close(fd)


def _exists(files: Files) -> str:
    other = next(f"{files}-{n}" for n in range(2, 10_000) if not Files(f"{files}-{n}").exists())
    return (
        f"{str(files)!r} already holds a run, and it is not overwritten. Give another path, e.g. to={other!r}; "
        "or continue it: resume=True; or replace it: overwrite=True"
    )


def describe_process() -> dict[str, Any]:
    """Return where and with what a run was made."""
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


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Return the commit the user's code is at, and whether it was changed since."""
    try:
        command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    commits = [line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)]
    if not commits or commits[0] == "(initial)":
        return None
    return {"commit": commits[0], "changed": not all(line.startswith("#") for line in lines)}


class Lock:
    """Lock a rank's files for writing: held until closed or until the process ends, however it ends.

    A POSIX record lock, because a forked child does not inherit it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        if self.path in _HELD:  # opening it a second time and closing that would drop the lock
            raise RunError(_busy(path))
        self._fd: int | None = _locked(path)
        _HELD.add(self.path)

    def close(self) -> None:
        """Release the lock."""
        _HELD.discard(self.path)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _locked(path: Path) -> int:
    """Open and lock the file that lies at a path now: it may have been removed between opening and locking."""
    while True:
        fd = _open_lock(path, os.O_RDWR | os.O_CREAT)
        try:
            portable.lock_now(fd)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(fd)):
                return fd
        except OSError:
            os.close(fd)
            raise RunError(_busy(path)) from None
        os.close(fd)


@contextlib.contextmanager
def compacting(files: Files) -> Iterator[None]:
    """Hold the lock for compacting this run; raise RunError while another process has it."""
    files.make_folder(files.staging())
    lock = Lock(files.staging() / COMPACT_LOCK)
    try:
        yield
    finally:
        lock.path.unlink(missing_ok=True)
        lock.close()


def _open_lock(path: Path, flags: int) -> int:
    """Open a lock's file: never emptied, no link followed, no waiting for the other end of a pipe."""
    try:
        fd = os.open(path, flags | portable.CAREFUL, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise RunError(
                f"{path} is not a regular file; it is not used as a lock. Remove it, or use another path"
            ) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RunError(f"{path} is not a regular file; it is not used as a lock. Remove it, or use another path")
    return fd


_HELD: set[Path] = set()
portable.after_fork(_HELD.clear)


def _busy(path: Path) -> str:
    return f"{path.parent} is being written by a process that is still running; wait for it or give another path"


def is_locked(folder: Path) -> bool:
    """Return whether a process is writing this rank's files now. The lock is not taken: a writer may be starting."""
    path = folder / LOCK
    if path.resolve() in _HELD:
        return True
    try:
        fd = _open_lock(path, os.O_RDONLY)
    except (OSError, RunError):
        return False
    try:
        return portable.lock_is_held(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
