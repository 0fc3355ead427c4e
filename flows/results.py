"""Names of results (folders, checkpoints, git revisions, DVC experiments) in, what can be compared out:
folders, settings, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ans_core.report.runs import TRAINED, Run
from tasks import lock_file
from tasks.stages import HEADLINE, ROWS, stage_named
from tasks.surroundings import git
from tasks.tracking import flat

KEPT = ("metrics.json", "predictions.jsonl")
"""What a comparison reads of an evaluation."""
NOT_SETTINGS = ("launch", "profile")


def results(names: Iterable[str], root: Path) -> list[Run]:
    """Return the results by name; equal short names get numbers. Raises FileNotFoundError for a name that is
    nothing."""
    runs: list[Run] = []
    for name in names:
        run = result(name, root)
        same = sum(other.name.partition(" #")[0] == run.name for other in runs)
        runs.append(run if not same else replace(run, name=f"{run.name} #{same + 1}"))
    return runs


def result(name: str, root: Path) -> Run:
    path = Path(name)
    if is_checkpoint(path):
        return of_checkpoint(path.resolve(), root)
    if path.is_dir():
        return of_folder(path.resolve())
    if revision := revision_of(name, root):
        return of_revision(name, revision, root)
    raise FileNotFoundError(f"{name!r} is no folder, no git revision and no DVC experiment")


def flat_metrics(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    metrics: dict[str, float] = {}
    for key, value in values.items():
        metrics |= (
            flat_metrics(value, f"{prefix}{key}/")
            if isinstance(value, dict)
            else {prefix + key: float(value)}
        )
    return metrics


def of_folder(folder: Path) -> Run:
    """Return runs/<profile> of any checkout, with the settings of its dvc.lock; or one evaluation."""
    checkout = next((parent.parent for parent in folder.parents if parent.name == "runs"), None)
    if checkout is None:
        return Run(name=folder.name, description=str(folder), folder=folder, settings={})
    label, lock = folder.relative_to(checkout / "runs"), checkout / "dvc.lock"
    text = lock.read_text(encoding="utf-8") if lock.exists() else ""
    return Run(
        name=label.as_posix(),
        description=str(folder),
        folder=folder,
        settings=settings_of(text, label.parts[0]),
    )


def is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file() and not (path / "metrics.json").exists()


def of_checkpoint(path: Path, root: Path) -> Run:
    """Return the evaluation of a checkpoint on the benchmarks of params.yaml, which is made now unless `ans
    eval` made it. The settings that trained it are not known."""
    from ans_core.config import load
    from flows.checkpoint_eval import content_of, evaluated, with_fingerprints

    out = evaluated(path, content_of(path), root, with_fingerprints(load(root / "params.yaml"), root))
    return Run(
        name="/".join(path.parts[-2:]),
        description=f"checkpoint {path}, evaluated into {out}",
        folder=out,
        settings={},
    )


def settings_of(lock: str, profile: str) -> dict[str, str]:
    """Return the settings that dvc.lock recorded when it wrote runs/<profile>; empty if it is of another
    profile."""
    recorded: dict[str, Any] = {}
    for stage in lock_file.stages(lock):
        if any(out["path"].startswith(f"runs/{profile}/") for out in stage.get("outs", [])):
            recorded |= flat(stage.get("params", {}).get("params.yaml", {}))
    return {key: value for key, value in recorded.items() if key.partition(".")[0] not in NOT_SETTINGS}


def revision_of(name: str, root: Path) -> str | None:
    """Return the commit of a git revision, or of a DVC experiment of this name."""
    for one in (name, *experiment_refs(name, root)):
        if commit := git(root, "rev-parse", "--quiet", "--verify", f"{one}^{{commit}}"):
            return commit
    return None


def experiment_refs(name: str, root: Path) -> list[str]:
    """Return git's references of DVC's experiments of this name."""
    refs = git(root, "for-each-ref", "--format=%(refname)", "refs/exps").split()
    return [ref for ref in refs if ref.rpartition("/")[2] == name]


def of_revision(name: str, revision: str, root: Path) -> Run:
    """Return what DVC's cache has of a revision, linked into a folder of its own."""
    from flows.dvc_state import file_in_cache

    lock = git(root, "show", f"{revision}:dvc.lock")
    outs = lock_file.outputs(lock)
    profile = next(
        (path.split("/")[1] for path in outs if path.startswith("runs/") and path.count("/") > 1), ""
    )
    folder = root / ".ans/compare" / revision[:12]
    wanted = [(stage_named(f"evaluate@{row}"), KEPT) for row in ROWS] + [
        (stage_named(name), ("curves.csv",)) for name in TRAINED
    ]
    for stage, files in wanted:
        out = stage.out_path(profile)
        for file in files if out.as_posix() in outs else ():
            if source := file_in_cache(outs[out.as_posix()], file, root):
                link(source, folder / out.relative_to(f"runs/{profile}") / file)
    run = Run(
        name=name[:24],
        description=f"git {revision[:12]}, profile {profile}",
        folder=folder,
        settings=settings_of(lock, profile),
    )
    # what git keeps where the cache has nothing
    if not run.evaluated and (shown := git(root, "show", f"{revision}:{HEADLINE}")):
        run = replace(run, recorded=flat_metrics(json.loads(shown)))
    return run


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.symlink_to(source)
