"""A stage's name in, whether DVC would run it out. The one module that uses DVC's internals."""

from __future__ import annotations

from pathlib import Path


def is_up_to_date(name: str, root: Path) -> bool:
    """As `dvc status NAME` says, 20 times as fast. Ask only after everything upstream ran."""
    from dvc.repo import Repo

    with Repo(str(root)) as repo, repo.lock:
        return not repo.stage.load_one(name=name).changed()
