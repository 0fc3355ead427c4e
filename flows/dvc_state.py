"""Tell whether DVC would run a stage; as a program, run `dvc repro --single-item NAME` with exit codes that tell what happened.

The only module that uses DVC's internals.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

from tasks.process import leave_note

BUSY = 75
"""Exit code if another dvc command is at work (EX_TEMPFAIL)."""


def is_up_to_date(name: str, root: Path) -> bool:
    """Tell what `dvc status NAME` tells, 20 times as fast. Call it only after everything upstream ran. Raises BlockingIOError while DVC is
    busy."""
    return are_up_to_date([name], root)


def are_up_to_date(names: Iterable[str], root: Path) -> bool:
    """Tell whether running all of these would do nothing. Raises ValueError if dvc.lock or dvc.yaml can't be read."""
    check_lock_file(root / "dvc.lock")
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo

    quiet_dvc()
    try:
        with Repo(str(root)) as repo, repo.lock:
            return not any(repo.stage.load_one(name=name).changed() for name in names)
    except LockError as error:
        raise BlockingIOError(f"another dvc command is at work in {root}") from error
    except DvcException as error:
        raise ValueError(f"dvc can't tell what is up to date: {error}") from error


def output_hash(path: str, root: Path) -> str | None:
    """Return the hash that dvc.lock has for an output of a stage, or None."""
    lock = root / "dvc.lock"
    check_lock_file(lock)
    stages = yaml.safe_load(lock.read_text(encoding="utf-8"))["stages"] if lock.exists() else {}
    return next((out["md5"] for stage in stages.values() for out in stage.get("outs", []) if out["path"] == path), None)


def check_out(md5: str, folder: Path, root: Path) -> None:
    """Write the folder that has this hash from DVC's cache, or from the default remote where the cache lacks it. Raises ValueError if
    neither has all of it."""
    from dvc.exceptions import DvcException
    from dvc.fs import LocalFileSystem
    from dvc.repo import Repo
    from dvc_data.hashfile import load
    from dvc_data.hashfile.checkout import CheckoutError, checkout
    from dvc_data.hashfile.hash_info import HashInfo

    quiet_dvc()
    wanted, partial = HashInfo("md5", md5), folder.with_name(folder.name + ".partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Repo(str(root)) as repo:
        try:
            if not repo.cache.local.exists(md5) and repo.config["core"].get("remote"):
                repo.cloud.pull([wanted])
            checkout(str(partial), LocalFileSystem(), load(repo.cache.local, wanted), repo.cache.local, force=True)
        except (FileNotFoundError, CheckoutError, DvcException) as error:
            raise ValueError(
                f"DVC's cache and remote lack {md5} ({error}): `dvc pull` from where it was made, or run the pipeline"
            ) from error
    partial.rename(folder)


def quiet_dvc() -> None:
    """Silence DVC's advice for people who type commands."""
    logging.getLogger("dvc").setLevel(logging.WARNING)


def check_lock_file(path: Path) -> None:
    """Raise ValueError for a dvc.lock that a merge or a full disk has damaged; DVC takes an empty one for a new project."""
    remedy = f"`git checkout {path.name}` takes the committed one back; without the file, every stage is looked up in the run cache"
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {"stages": {}}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"{path}{f', line {mark.line + 1}' if mark else ''} is no YAML (a merge conflict?): {remedy}") from error
    if not isinstance(read, dict) or not isinstance(read.get("stages"), dict):
        raise ValueError(f"{path} is empty or cut, it lists no stages: {remedy}")


def main(name: str, force: bool = False) -> None:
    """Run a stage; with `force` also if it is up to date. Exit codes: 0 done, BUSY, 1 failed. The stage finds this process in
    ANS_PARENT_PID, and ends with it."""
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo
    from dvc.stage.exceptions import StageCmdFailedError

    os.environ["ANS_PARENT_PID"] = str(os.getpid())
    quiet_dvc()
    try:
        with Repo(".") as repo:
            repo.reproduce(name, single_item=True, force=force)
    except DvcException as error:
        cause = error.__cause__ or error
        if isinstance(cause, LockError):
            sys.exit(BUSY)
        if not isinstance(cause, StageCmdFailedError):  # the stage has reported its own failure
            leave_note(message=f"dvc: {cause}")
            print(f"dvc: {cause}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], force="--force" in sys.argv)
