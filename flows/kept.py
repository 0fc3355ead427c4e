"""The files that a sweep's members overwrite, and git's index, kept on disk: they come back after each member, and after a sweep that was
killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ans_core.config import ConfigError, load
from flows.child import run_once
from tasks.stages import HEADLINE
from tasks.surroundings import git

FOLDER = Path(".ans/sweep-kept")
FILES = ("params.yaml", "dvc.lock", HEADLINE)
"""What DVC does not bring back by itself."""
MEMBER, INDEX = "member.json", "index.txt"


def keep(here: Path) -> None:
    """Copy the files and note what is staged, whole or not at all."""
    partial = here / FOLDER.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in FILES:
        if (here / name).exists():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(here / name, partial / name)
    (partial / INDEX).write_text(git(here, "write-tree"), encoding="utf-8")
    partial.rename(here / FOLDER)


def note_member(here: Path, settings: dict[str, Any]) -> None:
    """Write down the settings that a member is about to put into params.yaml."""
    (here / FOLDER / MEMBER).write_text(json.dumps(settings), encoding="utf-8")


def put_back(here: Path) -> None:
    for name in FILES:
        if (here / FOLDER / name).exists():
            shutil.copyfile(here / FOLDER / name, here / name)
        else:
            (here / name).unlink(missing_ok=True)
    if tree := (here / FOLDER / INDEX).read_text(encoding="utf-8"):  # a member that was stopped leaves its settings staged
        git(here, "read-tree", tree)
        git(here, "update-index", "-q", "--refresh")


def end(here: Path) -> None:
    """Put everything back, the results in runs/ too, and forget what was kept."""
    put_back(here)
    run_once(["-m", "dvc", "checkout", "--force", "--quiet"], root=here, timeout_s=3600, extra_environment={})
    shutil.rmtree(here / FOLDER)


def recover(here: Path) -> list[str]:
    """Undo what a killed sweep left, and say so. Call it under the lock that a sweep holds. Settings that somebody wrote after the sweep
    had died stay."""
    folder = here / FOLDER
    if not folder.exists():
        return []
    left = json.loads((folder / MEMBER).read_text(encoding="utf-8")) if (folder / MEMBER).exists() else None
    if left is None or settings_of(here / "params.yaml") in (left, settings_of(folder / "params.yaml")):
        end(here)
        return ["a sweep was killed here: params.yaml, dvc.lock and the results in runs/ are again as before it"]
    shutil.rmtree(folder)
    return ["a sweep was killed here, and params.yaml was written since: it stays as it is"]


def settings_of(path: Path) -> dict[str, Any] | None:
    try:
        return load(path).model_dump(mode="json")
    except ConfigError:
        return None
