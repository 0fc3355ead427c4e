"""Check the installation and the workspace: a list of findings, each fault with its remedy."""

from __future__ import annotations

import fcntl
import re
import shutil
from importlib import metadata
from pathlib import Path

import psutil

from flows.preflight import Finding, preflight

MIN_FREE_GB = 5


BREAKS = (
    ("fastapi", (0, 151), "the Prefect server does not start (`unexpected keyword argument 'min_items'`)"),
    ("SQLAlchemy", (2, 1), "Prefect's cron schedules never fire, without a word"),
    ("omegaconf", (2, 4), "hydra-core 1.3, which sam2 and DVC need, refuses it"),
)
"""(package, first version that breaks, what then happens). `pip check` finds none of these."""


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def versions() -> list[Finding]:
    found = []
    for package, broken, consequence in BREAKS:
        version = metadata.version(package)
        ok = release(version) < broken
        bound = ".".join(map(str, broken))
        found.append(
            Finding(ok=ok, what=f"{package} {version}" + ("" if ok else f": {consequence}"), remedy=f'pip install "{package}<{bound}"')
        )
    return found


def locked(root: Path) -> Finding:
    """Compare installed versions with constraints.txt; an extra (requirements/) may have pinned another one."""
    pins: dict[str, list[str]] = {}
    for file in (root / "constraints.txt", *sorted((root / "requirements").glob("*.txt"))):
        for name, pin in re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), flags=re.MULTILINE):
            pins.setdefault(name.lower().replace("_", "-"), []).append(pin)
    installed = {(item.name or "").lower().replace("_", "-"): item.version.split("+")[0] for item in metadata.distributions()}
    other = [f"{name} {installed[name]} (lock: {pin[0]})" for name, pin in pins.items() if name in installed and installed[name] not in pin]
    what = f"{len(pins)} packages as locked" if not other else f"not as in constraints.txt: {', '.join(other[:5])}"
    return Finding(ok=not other, what=what, remedy="rm .venv/.stamp && make setup")


def machine(root: Path) -> Finding:
    free_gb = shutil.disk_usage(root).free / 1e9
    return Finding(
        ok=free_gb >= MIN_FREE_GB,
        what=f"{psutil.cpu_count()} CPU cores, {free_gb:.0f} GB of disk free",
        remedy="`dvc gc -w --all-commits` drops results that no commit names",
    )


def computes() -> Finding:
    """Name the processor or GPU, and the precision that `dtype: auto` is on it."""
    from ans_core import dist, precision

    return Finding(ok=True, what=f"dtype auto: {precision.described(dist.pick_device('auto'))}")


def settings(root: Path) -> list[Finding]:
    """Look at params.yaml, and at what the machine has for it."""
    from ans_core.config import ConfigError, load

    try:
        config = load(root / "params.yaml")
    except ConfigError as error:
        return [Finding(ok=False, what=str(error), remedy="`ans profile NAME --force` writes params.yaml anew")]
    return [Finding(ok=True, what=f"params.yaml: profile {config.profile}"), *preflight(config, root)]


def lock_file(root: Path) -> Finding:
    from flows.dvc_state import check_lock_file, lock_files

    try:
        for path in lock_files(root):
            check_lock_file(path)
    except ValueError as error:
        what, _, remedy = str(error).partition(": ")
        return Finding(ok=False, what=what, remedy=remedy)
    return Finding(ok=True, what="DVC's lock files can be read")


def locks(root: Path) -> list[Finding]:
    """Report locks. A lock held by a process is work in progress; leftover text in a lock file that nobody holds is harmless."""
    found = []
    for path in sorted((root / ".ans").glob("*.lock")):
        with path.open("a+") as file:
            file.seek(0)
            holder = file.read().strip()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(at_work(path.name, holder))
    return found or [Finding(ok=True, what="nothing is running in this workspace")]


def at_work(lock: str, holder: str) -> Finding:
    """Report a lock's holder; a stopped one holds it until somebody acts."""
    pid = re.search(r"pid (\d+)", holder)
    stopped = pid and psutil.pid_exists(int(pid[1])) and psutil.Process(int(pid[1])).status() == psutil.STATUS_STOPPED
    if pid and stopped:
        remedy = f"`kill -CONT {pid[1]}` lets it go on, `kill -9 {pid[1]}` ends it; the same command resumes"
        return Finding(ok=False, what=f"{lock}: held by a stopped process: {holder}", remedy=remedy)
    return Finding(ok=True, what=f"{lock}: at work: {holder}")


def cache(root: Path) -> list[Finding]:
    """Read every object of DVC's cache and compare it with its hash: `dvc checkout` would deliver a damaged one as it is."""
    from flows.dvc_state import damaged_objects

    found = [
        Finding(
            ok=False,
            what=f"DVC's cache: {path} is damaged ({', '.join(names[:3]) or 'no output of dvc.lock'})",
            remedy=f"rm -f {path}; then `dvc pull`, or `ans stage NAME --force` for the stage that made it",
        )
        for path, names in damaged_objects(root)
    ]
    return found or [Finding(ok=True, what="every object of DVC's cache is as its hash says")]


def stuck_runs(root: Path, *, repair: bool) -> Finding:
    if not (root / ".ans/mlflow.db").exists():
        return Finding(ok=True, what="no MLflow runs yet")
    from tasks.tracking import TrackingError, close_stuck_runs

    try:
        stuck = close_stuck_runs(root, repair=repair)
    except TrackingError as error:
        what, _, remedy = str(error).rpartition(": ")
        return Finding(ok=False, what=what, remedy=remedy)
    if not stuck:
        return Finding(ok=True, what="no MLflow run is stuck")
    done = "closed as FAILED" if repair else "marked RUNNING though their process is gone"
    return Finding(ok=repair, what=f"MLflow runs {done}: {', '.join(stuck)}", remedy="ans doctor")


def scratch(root: Path) -> Finding:
    folders = [path for path in (root / ".ans/scratch").glob("*/*/*") if path.is_dir() and not (path / "done").exists()]
    names = ", ".join(str(path.relative_to(root / ".ans/scratch")) for path in folders)
    return Finding(ok=True, what=f"unfinished stages that the same command resumes: {names or 'none'}")


def report(root: Path, *, repair: bool, deep: bool) -> int:
    """Print the findings; exit status 1 if one is a fault. `deep` reads DVC's whole cache."""
    findings = [
        *versions(),
        locked(root),
        machine(root),
        computes(),
        *settings(root),
        lock_file(root),
        *locks(root),
        scratch(root),
        stuck_runs(root, repair=repair),
        *(cache(root) if deep else []),
    ]
    for finding in findings:
        print("ok  " if finding.ok else "BAD ", finding.what, "" if finding.ok else f"-> {finding.remedy}")
    return 0 if all(finding.ok for finding in findings) else 1
