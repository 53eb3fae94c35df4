"""Builds what is not Python: the reduction kernel (C) and the viewer's page (TypeScript).

Neither may fail an installation: without a compiler NumPy does the kernel's work, and without Node the terminal, the
API and everything but the page are there. `TENSORTAP_NO_WEB=1` leaves the page out.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = "src/tensortap/reduce/csrc"
WEB = Path("web")
PAGE = Path("src/tensortap/view/static/index.html")
NOT_SOURCE = ("node_modules", "test")
SOURCE = "https://github.com/tensortap/tensortap"
PATIENCE = 600  # seconds for one command of npm


def build_page() -> None:
    """Make the page anew when its sources changed; say why when it cannot be made."""
    if not WEB.is_dir() or _is_fresh():
        return
    if os.environ.get("TENSORTAP_NO_WEB", "0") not in ("", "0"):
        _say("the viewer's page is left out: TENSORTAP_NO_WEB is set")
        return
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        _say("the viewer's page is not built: there is no Node; everything else works without it")
        return
    try:
        if not _has_packages():
            subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=WEB, check=True, timeout=PATIENCE)
        subprocess.run([npm, "run", "build"], cwd=WEB, check=True, timeout=PATIENCE)
    except (OSError, subprocess.SubprocessError) as error:
        _say(f"the viewer's page could not be built ({error}); everything else works without it")


def _is_fresh() -> bool:
    sources = [p for p in WEB.rglob("*") if p.is_file() and not set(NOT_SOURCE) & set(p.relative_to(WEB).parts)]
    return PAGE.exists() and all(source.stat().st_mtime <= PAGE.stat().st_mtime for source in sources)


def _has_packages() -> bool:
    """Whether what the lock file names was installed after it was written."""
    installed, lock = WEB / "node_modules" / ".package-lock.json", WEB / "package-lock.json"
    return installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime


def _say(line: str) -> None:
    sys.stderr.write(f"tensortap: {line}\n")


def with_page(command: type[Command]) -> type[Command]:
    """The same command, after the page was made."""
    run: Callable[[Command], None] = command.run
    return type(command.__name__, (command,), {"run": lambda self: (build_page(), run(self))[1]})


def described() -> str:
    """README.md as PyPI shows it: pictures and links lead to the repository, since its files are not there."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{SOURCE}/raw/main/", text)
    return re.sub(r"(\[[^\]]*\]\()(?!https?:|#)", rf"\1{SOURCE}/blob/main/", text)


setup(
    long_description=described(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": with_page(build_py), "sdist": with_page(sdist)},
    ext_modules=[
        Extension(
            "tensortap.reduce._kernel",
            sources=[f"{HERE}/kernel.c"],
            depends=sorted(map(str, Path(HERE).glob("*.h"))),
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=[
                "-O3",
                "-ffp-contract=off",  # the same sums, to the last bit, at every instruction level
                "-fno-math-errno",
                "-fno-tree-slp-vectorize",  # it would read structures wider than they were just written, and wait
                "-fno-strict-aliasing",
                "-pthread",
                "-Wall",
                "-Wextra",
            ],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
