"""Record the third set, compare each training with one process, and tell which answers are right."""

from __future__ import annotations

import re
import shutil
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from forked_ranks import run_ranks

import tensortap as tt
from outside.layouts.third.cases import MESHES, TRAIN, Answer, Case
from outside.layouts.third.scene import Scene

ONLY_SPREAD = ("inner", "mixed", "offload", "broadcast", "recomputed", "overlapped", "reduced by parameter")
MOST = 0.8  # of the parameters that are wrong must be listed


class Outcome(NamedTuple):
    """One case, whether the answer is right, and the answer."""

    name: str
    layout: str
    right: bool
    answer: str


def reference(scene: Scene) -> Scene:
    """What a training is compared with: in one process, whole batches, in single precision where it is mixed."""
    options = tuple(option for option in scene.options if option not in ONLY_SPREAD)
    return replace(scene, layout="one", world=1, options=options, fault="")


def reference_name(scene: Scene) -> str:
    """Its folder."""
    one = reference(scene)
    return f"one {one.model} {'-'.join(one.options)} {one.dtype} {one.seed}-{one.steps}".replace("torch.", "")


def record(scene: Scene, to: Path, keep: Sequence[object] = ()) -> None:
    """Train on this rank and record it."""
    watched, step = TRAIN[scene.model](scene)
    ports = ["**:input", "**:output", "**:grad_output", "**:grad_input", "**:param", "**:grad", "**:update"]
    if scene.model in ("resnet", "experts"):
        ports.append("**:buffer")
    probe = tt.probe(*ports, keep=list(keep) or [tt.stats(), tt.full()])
    with tt.watch(watched, probe, to=to) as tap:
        for number in range(scene.steps):
            step(number)
            tap.step()


def record_all(cases: Iterable[Case], out: Path, keep: Sequence[object] = ()) -> dict[str, str]:
    """Record what is not there yet, all of one world size in one start; return errors by name."""
    out.mkdir(parents=True, exist_ok=True)
    scenes = {reference_name(case.scene): reference(case.scene) for case in cases}
    scenes |= {case.name: case.scene for case in cases}
    for world in sorted({scene.world for scene in scenes.values()}):
        left = {n: s for n, s in scenes.items() if s.world == world and not (out / f"{n}.done").exists()}
        while left:  # after an error, those behind it again, in new processes
            for name in left:
                shutil.rmtree(out / name, ignore_errors=True)
            codes = run_ranks(world, partial(_record_group, left, out, keep), out)
            (out / f"meeting{world}").unlink(missing_ok=True)
            done = [name for name in left if (out / f"{name}.rank0").exists() and not list(out.glob(f"{name}.error*"))]
            for name in done:
                (out / f"{name}.done").touch()
            if not any(codes):
                break
            stuck = [name for name in left if name not in done][:1]
            left = {name: scene for name, scene in left.items() if name not in done and name not in stuck}
    return {path.name.partition(".error")[0]: path.read_text() for path in sorted(out.glob("*.error*"))}


def _record_group(scenes: dict[str, Scene], out: Path, keep: Sequence[object]) -> None:
    warnings.simplefilter("ignore")
    for name, scene in scenes.items():
        try:
            record(scene, out / name, keep)
        except Exception:
            (out / f"{name}.error{scene.rank}").write_text(traceback.format_exc())
            if scene.world > 1:
                raise
            continue
        (out / f"{name}.rank{scene.rank}").touch()


def outcomes(cases: Iterable[Case], out: Path) -> Iterator[Outcome]:
    """Compare each with its reference."""
    for case in cases:
        try:
            right, answer = _judged(case, out)
        except Exception as error:
            right, answer = False, f"{type(error).__name__}: {error}"
        yield Outcome(case.name, f"{case.scene.layout}{case.scene.world}", right, answer)


def _judged(case: Case, out: Path) -> tuple[bool, str]:
    run, mesh = out / case.name, MESHES.get(case.scene.layout)
    if case.answer is not None and case.answer.by == "replicas":
        return _by_replicas(case.answer, run)
    found = tt.diff(out / reference_name(case.scene), run, mesh=mesh)
    if case.answer is None:
        alarms = list(tt.open(run).findings(["replicas_differ", "rank_outlier"])) if case.scene.world > 1 else []
        return bool(found) and not alarms, str(alarms[0]) if alarms else "same" if found else str(found.cause)
    cause, answer = found.cause, case.answer
    if cause is None:
        return False, "nothing found"
    right = cause.kind in answer.kinds and cause.step == answer.step and answer.rank in (None, cause.rank)
    if answer.group:
        return right and _same_group(answer.group, cause.sites, out / reference_name(case.scene)), str(cause)
    modules = (answer.module,) if isinstance(answer.module, str) else answer.module
    return right and cause.module in modules, str(cause)


def _same_group(pattern: str, sites: Sequence[str], run: Path) -> bool:
    known = {site.rpartition(":")[0] for site in tt.open(run).sites if site.endswith(":param")}
    wanted = {name for name in known if re.fullmatch(pattern, name)}
    named = {site.rpartition(":")[0] for site in sites}
    return named <= wanted and len(named) >= MOST * len(wanted)


def _by_replicas(answer: Answer, run: Path) -> tuple[bool, str]:
    found = list(tt.open(run).findings(["replicas_differ"]))
    if not found:
        return False, "nothing found"
    first = found[0]
    right = str(first.site).startswith(f"{answer.module}.") and first.steps.first == answer.step
    return right and first.evidence.get("rank") == answer.rank, str(first)
