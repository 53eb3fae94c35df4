"""The line of the user's code, as against those of packages wherever they are installed."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

import tensortap
from tensortap.context.caller import frames_of_caller, in_library, line_of_user

LAUNCHER = str(Path(tensortap.__file__).parent / "script" / "launch.py")
FOLDERS = [
    sysconfig.get_paths()["purelib"],
    "/home/me/.local/lib/python3.11/site-packages",
    "/usr/lib/python3/dist-packages",
    "/opt/conda/envs/base/lib/python3.12/site-packages",
]


def called_by(file: str) -> str:
    """Return the line that is found where a function of `file` calls ours."""
    names = {"line_of_user": line_of_user}
    exec(compile("def fit():\n    return line_of_user()\n", file, "exec"), names)
    return names["fit"]()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_package_is_not_the_users_code(folder: str) -> None:
    """A package in the user's folder, in Debian's or beside the environment is passed over."""
    assert in_library(f"{folder}/keras/trainer.py")
    assert "test_caller.py" in called_by(f"{folder}/keras/trainer.py")


def test_the_users_own_file_is() -> None:
    """A file anywhere else is the user's."""
    assert not in_library("/home/me/project/packages/train.py")
    assert called_by("/home/me/project/train.py") == "/home/me/project/train.py:2"


def test_the_launcher_of_a_command_is_not_the_users_code() -> None:
    """What runs `tensortap run`, from wherever it is installed, is outside the user's code."""
    names = {"frames_of_caller": frames_of_caller, "line_of_user": line_of_user}
    exec(compile("def main():\n    return [f.f_code.co_filename for f in frames_of_caller()], line_of_user()\n",
                 LAUNCHER.replace("launch", "session"), "exec"), names)  # fmt: skip
    exec(compile("def launched():\n    return main()\n", LAUNCHER, "exec"), names)
    frames, line = names["launched"]()
    assert (len(frames), line) == (1, "")
