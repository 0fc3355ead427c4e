"""Check the installation and the workspace: a list of findings, each fault with its remedy."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ans_core.processes import cores
from flows.durations import demo_minutes
from flows.preflight import Finding, fault, fine, preflight
from tasks.process import holder_of
from tasks.surroundings import versions

MIN_FREE_GB = 5
CLONE = "work in a clone of your own; `dvc cache dir FOLDER` in both shares DVC's cache"
"""Remedy in another user's checkout."""


def locked(root: Path) -> Finding:
    """Compare installed versions with constraints.txt; an extra (requirements/) may have pinned another
    one."""
    pins: dict[str, list[str]] = {}
    for file in (root / "constraints.txt", *sorted((root / "requirements").glob("*.txt"))):
        for name, pin in re.findall(
            r"^([\w.-]+)==(\S+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE
        ):
            pins.setdefault(name.lower().replace("_", "-"), []).append(pin)
    installed = {
        (item.name or "").lower().replace("_", "-"): item.version.split("+")[0]
        for item in metadata.distributions()
    }
    other = [
        f"{name} {installed[name]} (lock: {pin[0]})"
        for name, pin in pins.items()
        if name in installed and installed[name] not in pin
    ]
    what = (
        f"{len(pins)} packages as locked"
        if not other
        else f"not as in constraints.txt: {', '.join(other[:5])}"
    )
    return Finding(ok=not other, what=what, remedy="rm .venv/.stamp && make setup")


def machine(root: Path) -> Finding:
    free_gb = shutil.disk_usage(root).free / 1e9
    return Finding(
        ok=free_gb >= MIN_FREE_GB,
        what=f"{cores()} CPU cores, {free_gb:.0f} GB of disk free",
        remedy="`dvc gc -w --all-commits` drops results that no commit names",
    )


def computes() -> Finding:
    """Name the processor or GPU, the precision that `dtype: auto` is on it, and what the demo will take."""
    from ans_core import dist, precision

    device = dist.pick_device("auto")
    what = f"dtype auto: {precision.described(device)}"
    if device.type == "cpu":
        what += f"; `make demo` takes about {demo_minutes(precision.fp32_ms()):.0f} minutes, set-up aside"
    return fine(what)


def settings(root: Path) -> list[Finding]:
    """Look at params.yaml, and at what the machine has for it."""
    from ans_core.config import ConfigError, load

    try:
        config = load(root / "params.yaml")
    except ConfigError as error:
        return [fault(str(error), "`ans profile NAME --force` writes params.yaml anew")]
    return [fine(f"params.yaml: profile {config.profile}"), *preflight(config, root)]


def lock_files(root: Path) -> Finding:
    from flows.dvc_state import check_lock_file
    from tasks.lock_file import paths

    for path in paths(root):
        check_lock_file(path)
    return fine("DVC's lock files can be read")


def writable(root: Path) -> Finding:
    """Report folders in which this user can't write: the workspace is another user's."""
    closed = [
        str(path)
        for path in (root, root / ".ans", root / ".dvc", root / "runs")
        if path.exists() and not os.access(path, os.W_OK)
    ]
    if not closed:
        return fine("this user can write in the workspace")
    return fault(f"this user can't write in {', '.join(closed)}", CLONE)


def repository(root: Path) -> Finding:
    from flows.dvc_state import check_git

    check_git(root)
    return fine("DVC finds its repository")


def locks(root: Path) -> list[Finding]:
    """Report locks. A lock held by a process is work in progress; leftover text in a lock file that nobody
    holds is harmless."""
    paths = sorted((root / ".ans").glob("*.lock"))
    findings = [at_work(path.name, holder) for path in paths if (holder := holder_of(path))]
    return findings or [fine("nothing is running in this workspace")]


def at_work(lock: str, holder: str) -> Finding:
    """Report a lock's holder; a stopped one holds it until somebody acts."""
    pid = re.search(r"pid (\d+)", holder)
    stopped = (
        pid
        and psutil.pid_exists(int(pid[1]))
        and psutil.Process(int(pid[1])).status() == psutil.STATUS_STOPPED
    )
    if pid and stopped:
        remedy = f"`kill -CONT {pid[1]}` lets it go on, `kill -9 {pid[1]}` ends it; the same command resumes"
        return fault(f"{lock}: held by a stopped process: {holder}", remedy)
    return fine(f"{lock}: at work: {holder}")


def cache(root: Path) -> list[Finding]:
    """Read every object of DVC's cache and compare it with its hash: `dvc checkout` would deliver a damaged
    one as it is."""
    from flows.dvc_state import damaged_objects

    findings = [
        fault(
            f"DVC's cache: {path} is damaged ({', '.join(names[:3]) or 'no output of dvc.lock'})",
            f"rm -f {path}; then `dvc pull`, or `ans stage NAME --force` for the stage that made it",
        )
        for path, names in damaged_objects(root)
    ]
    return findings or [fine("every object of DVC's cache is as its hash says")]


def stuck_runs(root: Path, *, repair: bool) -> Finding:
    if not (root / ".ans/mlflow.db").exists():
        return fine("no MLflow runs yet")
    from tasks.tracking import TrackingError, close_stuck_runs

    try:
        stuck = close_stuck_runs(root, repair=repair)
    except TrackingError as error:
        what, _, remedy = str(error).rpartition(": ")
        return fault(what, remedy)
    if not stuck:
        return fine("no MLflow run is stuck")
    done = "closed as FAILED" if repair else "marked RUNNING though their process is gone"
    return Finding(ok=repair, what=f"MLflow runs {done}: {', '.join(stuck)}", remedy="ans doctor")


def scratch(root: Path) -> Finding:
    """Name unfinished stages, and apart from them states that the same command does not go on with."""
    place = root / ".ans/scratch"
    folders = [path for path in sorted(place.glob("*/*/*")) if path.is_dir() and not (path / "done").exists()]
    others = [path for path in folders if not resumes(path, root)]
    names = ", ".join(str(path.relative_to(place)) for path in folders if path not in others)
    what = f"unfinished stages that the same command resumes: {names or 'none'}"
    if others:
        paths = " ".join(str(path.relative_to(root)) for path in others)
        what += f"; given up, of other settings, inputs or code than now: `rm -r {paths}` removes them"
    return fine(what)


def resumes(folder: Path, root: Path) -> bool:
    """Tell whether a stage that runs now would go on from this state. One of `ans eval` is taken to be: its
    settings are not known."""
    from ans_core.config import ConfigError, load
    from tasks.runner import state_key
    from tasks.stages import TABLE

    profile, name, key = folder.parts[-3:]
    stage = next((stage for stage in TABLE if stage.name == name), None)
    if stage is None:
        return True
    try:
        config = load(root / "params.yaml")
        return config.profile == profile and state_key(stage, config, root) == key
    except ConfigError:  # without settings, or without what the stage needs, none runs
        return False


def look(check: Callable[..., Finding | list[Finding]], *arguments: Any, **options: Any) -> list[Finding]:
    """Return a check's findings. An error in it becomes one too, so that the others are still made;
    ANS_TRACEBACK=1 shows where it was."""
    try:
        findings = check(*arguments, **options)
    except Exception as error:  # whatever is wrong with the machine: to find it is what this command is for
        if os.environ.get("ANS_TRACEBACK"):
            raise
        what, _, remedy = (
            str(error).partition(": ")
            if isinstance(error, ValueError)
            else (f"{type(error).__name__}: {error}", "", "")
        )
        remedy = CLONE if isinstance(error, PermissionError) else remedy
        return [fault(what.partition("\n")[0], remedy or "`ANS_TRACEBACK=1 ans doctor` shows where")]
    return findings if isinstance(findings, list) else [findings]


def cluster(root: Path) -> list[Finding]:
    """Check what a cluster and several people need."""
    from ans_core.config import load
    from flows import cluster_checks as checks

    config = load(root / "params.yaml")
    return [
        *look(checks.launcher, config), *look(checks.file_system, config, root),
        *look(checks.servers, config, root), *look(checks.dvc_cache, root), *look(checks.network),
    ]  # fmt: skip


def report(root: Path, *, repair: bool, deep: bool, of_cluster: bool) -> int:
    """Print the findings; exit status 1 if one is a fault. `deep` reads DVC's whole cache; `of_cluster` looks
    at what a cluster needs, too."""
    packages = ", ".join(map(" ".join, versions().items()))
    findings = [fine(packages), *look(computes)]
    for check in (locked, machine, writable, settings, repository, lock_files, locks, scratch):
        findings += look(check, root)
    findings += look(stuck_runs, root, repair=repair)
    findings += look(cache, root) if deep else []
    findings += look(cluster, root) if of_cluster else []
    for finding in findings:
        print("ok  " if finding.ok else "BAD ", finding.what, "" if finding.ok else f"-> {finding.remedy}")
    return 0 if all(finding.ok for finding in findings) else 1
