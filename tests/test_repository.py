"""The repository as others meet it: built, installed somewhere else, with and without a compiler."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Not pandas: pyarrow itself loads it where it is installed.
FRAMEWORKS = (
    "torch", "tensorflow", "jax", "keras", "flax", "onnx", "onnxruntime", "polars", "duckdb", "sklearn", "scipy",
    "tensorboard", "wandb", "trackio", "mlflow", "opentelemetry", "prometheus_client", "matplotlib",
    "transformers", "lightning", "accelerate",
)  # fmt: skip
PAGE = "tensortap/view/static"
NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "runs", "node_modules", "artefacts")

LOOK = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import tensortap as tt
    from tensortap.reduce import kernel as kernels
    at_import = len(said)
    # Numbers whose sum is the same in any order but not in every precision, with all that is special among them.
    numbers = [i * 0.1 for i in range(-5000, 5000)] + [float("nan"), float("inf"), -0.0, 1e-310, 1e300]
    rows = [dict(tt.summarize(numbers)) for _ in range(3)]
print(json.dumps({
    "file": tt.__file__,
    "kernel": kernels.ACTIVE,
    "loaded": sorted(name for name in sys.modules if "." not in name),
    "at_import": at_import,
    "warnings": [str(w.message) for w in said if w.category is RuntimeWarning],
    "row": {name: getattr(value, "tolist", lambda: value)() for name, value in rows[0].items()},
}))
"""


def run(*words: str | Path, **more: Any) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copied(folder: Path) -> Path:
    """What is built, copied, so that building leaves nothing in the tree."""
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, folder)
    shutil.copy(ROOT / "constraints.txt", folder)
    for name in ("src", "tests", "docs", "examples", "web"):
        shutil.copytree(ROOT / name, folder / name, ignore=NOT_SOURCE)
    if (packages := ROOT / "web" / "node_modules").is_dir():
        (folder / "web" / "node_modules").symlink_to(packages)  # else npm fetches them
    return folder


def build(folder: Path, what: str, env: dict[str, str] | None = None) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", f"--{what}", "--outdir", folder / "dist", folder, env=env)
    return next((folder / "dist").glob("*.whl" if what == "wheel" else "*.tar.gz"))


def installed(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment that has the wheel, and beside it what this one has but our editable install."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    target = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    # A folder named in a .pth file is searched, but the .pth files in it (our editable install) are not read.
    target.joinpath("beside.pth").write_text("\n".join(site.getsitepackages()))
    return python


def look(python: Path, folder: Path) -> Any:
    return json.loads(run(python, "-c", LOOK, cwd=folder))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("sources") / "tensortap")


@pytest.fixture(scope="module")
def archive(sources: Path) -> Path:
    return build(sources, "sdist")


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from the source archive alone and without optimization, which takes the compiler long."""
    folder = tmp_path_factory.mktemp("archive")
    with tarfile.open(archive) as opened:
        # Debian's Python 3.11.2 has no filters yet; the archive is our own.
        opened.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        root = opened.getnames()[0].partition("/")[0]
    compiler = folder / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    return build(folder / root, "wheel", {**os.environ, "CC": str(compiler)})


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("installed") / "venv", wheel)


def test_wheel(wheel: Path) -> None:
    """The wheel fits Python 3.11 and later, and holds the kernel, the page, the type marker, but no C and no tests."""
    names = zipfile.ZipFile(wheel).namelist()
    assert (f"{PAGE}/index.html" in names) == (ROOT / "src" / PAGE).is_dir()
    assert "cp311-abi3" in wheel.name
    assert any(re.fullmatch(r"tensortap/reduce/_kernel\.abi3\.so", name) for name in names)
    assert "tensortap/py.typed" in names
    assert [name for name in names if name.endswith((".c", ".h")) or "tests" in name or "docs" in name] == []
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist(archive: Path) -> None:
    """The source archive holds all that is built; the wheel of these tests is made from it alone."""
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    root = names[0].partition("/")[0]
    for name in ("kernel.c", "body.h", "pass.h", "xla.h", "onnx.h"):
        assert f"{root}/src/tensortap/reduce/csrc/{name}" in names
    assert {f"{root}/web/package-lock.json", f"{root}/web/src/main.ts"} <= set(names)
    assert [name for name in names if "node_modules" in name] == []


def without_page(sources: Path, folder: Path) -> Path:
    """The sources, with no page made yet."""
    ignored = shutil.ignore_patterns("build", "dist", "*.egg-info", "static")
    return shutil.copytree(sources, folder, symlinks=True, ignore=ignored)


@pytest.mark.thorough  # `make test` has installed the package, which made the page, and test_wheel finds it
@pytest.mark.skipif(shutil.which("npm") is None, reason="the page is made by Node, which is not installed here")
def test_the_page_is_made_where_node_is_and_comes_with_the_wheel(sources: Path, tmp_path: Path) -> None:
    """A wheel and a source archive built with Node hold the page: one script, one style sheet, under 300 kB gzip."""
    folder = without_page(sources, tmp_path / "sources")
    env = {**os.environ, "CC": "/nonexistent/cc"}  # the kernel is another test's
    wheel = zipfile.ZipFile(build(folder, "wheel", env))
    names = [name for name in wheel.namelist() if name.startswith(PAGE)]
    assert f"{PAGE}/index.html" in names
    assert sorted(Path(name).suffix for name in names) == [".css", ".html", ".js"]
    assert sum(len(gzip.compress(wheel.read(name))) for name in names) < 300_000
    with tarfile.open(build(folder, "sdist", env)) as archive:
        assert any(name.endswith("view/static/index.html") for name in archive.getnames())


@pytest.fixture(scope="module")
def bare_wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built without a compiler, and without the page because that was asked for."""
    folder = tmp_path_factory.mktemp("bare")
    env = {**os.environ, "CC": "/nonexistent/cc", "PATH": str(folder), "TENSORTAP_NO_WEB": "1"}
    return build(without_page(sources, folder / "sources"), "wheel", env)


def check_without_page(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "tensortap/view/server/app.py" in names
    assert [name for name in names if name.startswith(PAGE)] == []


@pytest.mark.thorough  # test_wheel and test_installed have the wheel that users get
def test_without_the_page(bare_wheel: Path) -> None:
    """Where the page is not wanted, the wheel is whole but for it."""
    check_without_page(bare_wheel)


@pytest.mark.thorough  # test_without_the_page has a wheel without it; these are other reasons for that
@pytest.mark.parametrize("why", ["no Node", "broken"])
def test_without_the_page_it_installs_all_the_same(sources: Path, tmp_path: Path, why: str) -> None:
    """Where the page cannot be made, or fails to be made, the wheel is whole but for it."""
    folder = without_page(sources, tmp_path / "sources")
    env = {**os.environ, "CC": "/nonexistent/cc"}
    if why == "no Node":
        env["PATH"] = str(tmp_path)
    else:
        (folder / "web" / "src" / "main.ts").write_text("this is not TypeScript(")
    check_without_page(build(folder, "wheel", env))


def test_installed(python: Path, tmp_path: Path) -> None:
    """Installed elsewhere it uses the C kernel, says nothing at import and has its command."""
    seen = look(python, tmp_path)
    assert seen["file"].startswith(str(python.parent.parent))
    assert seen["kernel"].startswith("c:")
    assert seen["warnings"] == []
    assert run(python.parent / "tensortap", "--version", cwd=tmp_path).startswith("tensortap ")
    assert json.loads(run(python.parent / "tensortap", "doctor", "--json", cwd=tmp_path))["kernel"]["active"]


@pytest.mark.thorough  # test_wheel and test_installed have the wheel that users get
def test_without_compiler(bare_wheel: Path, python: Path, tmp_path: Path) -> None:
    """Where nothing compiles it installs all the same, warns once when it is used, and gives the same numbers."""
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(bare_wheel).namelist())
    fallback, compiled = (look(p, tmp_path) for p in (installed(tmp_path / "venv", bare_wheel), python))
    assert fallback["kernel"] == "numpy"
    assert fallback["at_import"] == 0
    assert len(fallback["warnings"]) == 1
    assert "compiler" in fallback["warnings"][0]
    assert fallback["row"] == compiled["row"] or fallback["row"] == pytest.approx(compiled["row"], rel=0, nan_ok=True)
    doctor = json.loads(run(tmp_path / "venv" / "bin" / "tensortap", "doctor", "--json", cwd=tmp_path))
    assert "compiler" in doctor["advice"]["active"]


NAMES = """
import json, sys, tensortap
at_first = len([name for name in sys.modules if name.startswith("tensortap.")])
import tensortap.compare, tensortap.diff, tensortap.harvest, tensortap.watch
kinds = {name: type(getattr(tensortap, name)).__name__ for name in tensortap.__all__}
try:
    tensortap.wacth
except AttributeError as error:
    said = str(error)
print(json.dumps([at_first, kinds, said, sorted(set(tensortap.__all__) - set(dir(tensortap))), list(sys.modules)]))
"""


def test_public_names() -> None:
    """A name is loaded when it is used, is never a module of the same name, and none of them loads a framework."""
    at_first, kinds, said, missing, loaded = json.loads(run(sys.executable, "-c", NAMES))
    assert at_first == 0
    assert [name for name, kind in kinds.items() if kind == "module"] == missing == []
    assert said == "module 'tensortap' has no attribute 'wacth'"
    assert [name for name in FRAMEWORKS if name in loaded] == []


def test_no_framework_for_the_command() -> None:
    """Neither does the command that looks at a run."""
    code = "import sys, tensortap.cli.show, tensortap.view.terminal.show, tensortap.sinks.export; print(*sys.modules)"
    loaded = run(sys.executable, "-c", code).split()
    assert [name for name in FRAMEWORKS if name in loaded] == []


def test_constraints() -> None:
    """Every package that development asks for is pinned, exactly, in the one constraints file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {_plain(name): version for name, version in pins.items()}
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {_plain(re.match(r"[\w-]+", requirement)[0]) for requirement in wanted}
    assert names - set(pinned) == set()
    assert all(re.fullmatch(r"[\d.]+(b\d+|post\d+)?", version) for version in pinned.values())


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_pre_commit_is_local() -> None:
    """The pre-commit hooks are valid and fetch nothing."""
    file = ROOT / ".pre-commit-config.yaml"
    run(sys.executable, "-m", "pre_commit", "validate-config", file)
    assert re.findall(r"repo: (.*)", file.read_text()) == ["local"]


@pytest.mark.thorough  # test_examples.py runs it with one
def test_the_example_without_a_framework(tmp_path: Path) -> None:
    """It finds both faults and says where the run is, within 110 columns."""
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    said = run(sys.executable, ROOT / "examples" / "numpy_mlp.py", cwd=tmp_path, env=env)
    assert "up.relu 100% of the elements are zero" in said
    assert re.search(r"NaN or Inf in \d+ records of \d+ sites, first at step \d+ in head:output", said)
    assert "The run is runs/" in said
    assert max(map(len, said.splitlines())) <= 110


def test_the_files_for_a_release() -> None:
    """The workflows call what a developer calls, and every form and citation file can be read."""
    yaml = pytest.importorskip("yaml")
    read = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml")}
    steps = read["test.yml"]["jobs"]["test"]["steps"]
    assert any(step.get("run") == ".ci/run" for step in steps)
    release = read["release.yml"]["jobs"]
    assert release["publish"]["permissions"] == {"id-token": "write"}  # trusted publishing, no password
    assert set(release["publish"]["needs"]) == {"wheels", "sdist"}
    assert {read[name]["name"] for name in ("bug.yml", "finding.yml")}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"] == "Apache-2.0"
