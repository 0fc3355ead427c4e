"""Check the installation and the workspace: a list of findings, each fault with its remedy."""

from __future__ import annotations

import fcntl
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

MIN_FREE_GB = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    ok: bool
    what: str
    remedy: str = ""


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
    """Compare installed versions with constraints.txt."""
    pins = [
        line.strip().split("==")
        for line in (root / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    ]
    installed = {(item.name or "").lower().replace("_", "-"): item.version.split("+")[0] for item in metadata.distributions()}
    names = {name.lower().replace("_", "-"): pin for name, pin in pins}
    other = [f"{name} {installed[name]} (lock: {pin})" for name, pin in names.items() if name in installed and installed[name] != pin]
    what = f"{len(names)} packages as locked" if not other else f"not as in constraints.txt: {', '.join(other[:5])}"
    return Finding(ok=not other, what=what, remedy="rm .venv/.stamp && make setup")


def machine(root: Path) -> list[Finding]:
    import psutil
    import torch

    free_gb = shutil.disk_usage(root).free / 1e9
    memory_gb = psutil.virtual_memory().available / 1e9
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [
        Finding(
            ok=free_gb >= MIN_FREE_GB,
            what=f"{free_gb:.0f} GB of disk free",
            remedy="`dvc gc -w --all-commits` drops results that no commit names",
        ),
        Finding(
            ok=memory_gb >= 6,
            what=f"{memory_gb:.1f} GB of memory available",
            remedy="the tiny profile needs 6 GB: end other programs",
        ),
        Finding(ok=True, what=f"{psutil.cpu_count()} CPU cores, GPUs: {', '.join(gpus) or 'none'}"),
    ]


def settings(root: Path) -> Finding:
    from ans_core.config import ConfigError, load

    try:
        return Finding(ok=True, what=f"params.yaml: profile {load(root / 'params.yaml').profile}")
    except ConfigError as error:
        return Finding(ok=False, what=str(error), remedy="`ans profile NAME --force` writes params.yaml anew")


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
                found.append(Finding(ok=True, what=f"{path.name}: at work: {holder}"))
    return found or [Finding(ok=True, what="nothing is running in this workspace")]


def stuck_runs(root: Path, *, repair: bool) -> Finding:
    if not (root / ".ans/mlflow.db").exists():
        return Finding(ok=True, what="no MLflow runs yet")
    from tasks.tracking import close_stuck_runs

    stuck = close_stuck_runs(root, repair=repair)
    if not stuck:
        return Finding(ok=True, what="no MLflow run is stuck")
    done = "closed as FAILED" if repair else "marked RUNNING though their process is gone"
    return Finding(ok=repair, what=f"MLflow runs {done}: {', '.join(stuck)}", remedy="ans doctor")


def scratch(root: Path) -> Finding:
    folders = [path for path in (root / ".ans/scratch").glob("*/*/*") if path.is_dir() and not (path / "done").exists()]
    names = ", ".join(str(path.relative_to(root / ".ans/scratch")) for path in folders)
    return Finding(ok=True, what=f"unfinished stages that the same command resumes: {names or 'none'}")


def report(root: Path, *, repair: bool) -> int:
    """Print the findings; exit status 1 if one is a fault."""
    findings = [
        *versions(),
        locked(root),
        *machine(root),
        settings(root),
        *locks(root),
        scratch(root),
        stuck_runs(root, repair=repair),
    ]
    for finding in findings:
        print("ok  " if finding.ok else "BAD ", finding.what, "" if finding.ok else f"-> {finding.remedy}")
    return 0 if all(finding.ok for finding in findings) else 1
