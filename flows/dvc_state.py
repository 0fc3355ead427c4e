"""Tell whether DVC would run a stage; as a program, run `dvc repro --single-item TARGET` with exit codes that
tell what happened.

The only module that uses DVC's internals.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import yaml

from ans_core.written import write_atomically
from tasks import code, lock_file
from tasks.process import leave_note

BUSY = 75
"""Exit code if another dvc command is at work (EX_TEMPFAIL)."""


def check_git(root: Path) -> None:
    """Raise ValueError for a checkout without .git (a zip from GitHub, an image) whose DVC was not told to go
    without."""
    from dvc.repo import Repo
    from dvc.scm import SCMError

    try:
        with Repo(str(root)):
            return
    except SCMError as error:
        raise no_git(root) from error


def no_git(root: Path) -> ValueError:
    return ValueError(
        f"DVC finds no git repository in {root}: `dvc config core.no_scm true` goes on without git; or `git "
        "init`"
    )


def are_up_to_date(targets: Iterable[str], root: Path) -> bool:
    """Tell whether `dvc status` calls all of these up to date, 20 times as fast. Call it after everything upstream
    ran. Raises BlockingIOError while DVC is busy, and ValueError if dvc.lock or dvc.yaml can't be read."""
    parsed = [(path or "dvc.yaml", name) for path, _, name in (target.rpartition(":") for target in targets)]
    for file in dict.fromkeys(path for path, _ in parsed):
        check_lock_file(root / file.replace(".yaml", ".lock"))
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo, lock_repo
    from dvc.scm import SCMError

    quiet_dvc()
    try:
        with Repo(str(root)) as repo:  # to open one takes a third of a second
            if hash_is_stale(repo):
                hash_code(root)
            with lock_repo(repo):
                return not any(
                    repo.stage.load_one(path=str(root / path), name=name).changed() for path, name in parsed
                )
    except LockError as error:
        raise BlockingIOError(f"another dvc command is at work in {root}") from error
    except SCMError as error:
        raise no_git(root) from error
    except DvcException as error:
        raise ValueError(f"dvc can't tell what is up to date: {error}") from error


def hash_is_stale(repo: Any) -> bool:
    """Tell whether the code may be another than the one that was hashed last."""
    from dvc.repo import lock_repo

    with lock_repo(repo):
        return bool(repo.stage.load_one(path=str(Path(repo.root_dir, "dvc.yaml")), name=code.NAME).changed())


def hash_code(root: Path) -> None:
    """Run the stage that hashes the code, in a process of its own, which finds this interpreter as `python`.
    Raises BlockingIOError while DVC is busy, and ValueError if the stage fails."""
    from flows.child import run_once  # it starts this module

    status = run_once(
        ["-m", "flows.dvc_state", code.NAME],
        root=root,
        timeout_s=600,
    )
    if status == BUSY:
        raise BlockingIOError(f"another dvc command is at work in {root}")
    if status:
        raise ValueError(f"the stage {code.NAME} failed (status {status}): `dvc repro {code.NAME}` shows why")


def accept_code(target: str, root: Path) -> str:
    """Record in dvc.lock that the present code of a stage gives the result that is there; return a line that
    says so. Raises ValueError if anything else changed: an input, a setting, the output, the stage's
    version."""
    from dvc.repo import Repo

    quiet_dvc()
    write_files_atomically()
    path, _, name = target.rpartition(":")
    hash_code(root)
    with Repo(str(root)) as repo:
        stage = repo.stage.load_one(path=str(root / (path or "dvc.yaml")), name=name)
        of_code = next(dep for dep in stage.deps if dep.fs_path == str((root / code.FILE).resolve()))
        recorded, present = ((hash_info.value or {}) for hash_info in (of_code.hash_info, of_code.get_hash()))
        others = {
            str(entry) for entry in (*stage.deps, *stage.outs) if entry is not of_code and entry.status()
        }
        if versions(recorded) != versions(present):
            others.add("its version")
        if others:
            raise ValueError(
                f"{target}: not its code alone is another than dvc.lock says, but "
                f"{', '.join(sorted(others))}: it must run"
            )
        if recorded == present:
            return f"{target}: its code is that of dvc.lock"
        repo.commit(target, force=True)
    return (
        f"{target}: dvc.lock says that its present code gives the result that is there; commit it with the "
        "reason"
    )


def versions(codes: dict[str, str]) -> list[str]:
    """Return the versions in what `tasks.code` writes: version and hash by task."""
    return [code.partition(" ")[0] for code in codes.values()]


def output_hash(path: str, root: Path) -> str | None:
    """Return the hash that dvc.lock has for an output of a stage, or None."""
    lock = root / "dvc.lock"
    check_lock_file(lock)
    return lock_file.outputs(lock.read_text(encoding="utf-8")).get(path) if lock.exists() else None


def check_out(md5: str, folder: Path, root: Path) -> None:
    """Write the folder that has this hash from DVC's cache, or from the default remote where the cache lacks
    it. Raises ValueError if neither has all of it."""
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
            checkout(
                str(partial), LocalFileSystem(), load(repo.cache.local, wanted), repo.cache.local, force=True
            )
        except (FileNotFoundError, CheckoutError, DvcException) as error:
            raise ValueError(
                f"DVC's cache and remote lack {md5} ({error}): `dvc pull` from where it was made, or run "
                "the pipeline"
            ) from error
    partial.rename(folder)


def damaged_objects(root: Path) -> list[tuple[Path, list[str]]]:
    """Return the objects of DVC's cache whose bytes are not those of their name, each with the outputs of
    dvc.lock that hold it."""
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        folder = Path(repo.cache.local.path)
    damaged = []
    for path in sorted(folder.glob("??/*")):
        with path.open("rb") as file:
            if hashlib.file_digest(file, "md5").hexdigest() != path.parent.name + path.name.removesuffix(
                ".dir"
            ):
                damaged.append(path)
    return [(path, outputs_with(path, folder, root)) for path in damaged]


def outputs_with(wanted: Path, cache: Path, root: Path) -> list[str]:
    """Return the files (or folders) that the recorded outputs have of this object."""
    md5, paths = wanted.parent.name + wanted.name, []
    for path, recorded in lock_file.all_outputs(root).items():
        listing = cache / recorded[:2] / recorded[2:]
        text = listing.read_text(encoding="utf-8") if listing.suffix == ".dir" and listing.exists() else ""
        if recorded == md5:
            paths.append(path)
        elif md5 in text:
            paths += [f"{path}/{entry['relpath']}" for entry in json.loads(text) if entry["md5"] == md5]
    return paths


def file_in_cache(md5: str, name: str, root: Path) -> Path | None:
    """Return the place in DVC's cache of one file of the output folder with this hash; None if the cache
    lacks it."""
    from dvc.repo import Repo

    quiet_dvc()
    with Repo(str(root)) as repo:
        listing = Path(repo.cache.local.oid_to_path(md5))
        listed = json.loads(listing.read_text(encoding="utf-8")) if listing.exists() else []
        paths = [
            Path(repo.cache.local.oid_to_path(entry["md5"])) for entry in listed if entry["relpath"] == name
        ]
    return next((path for path in paths if path.exists()), None)


def write_files_atomically() -> None:
    """Let DVC write a file beside the old one and rename it: it cuts the old one first, so that Ctrl-C has
    left a dvc.lock of no bytes."""
    from dvc.utils.serialize import _common, _yaml

    def dump(path: str, data: Any, dumper: Callable[[Any, TextIO], Any], fs: object = None) -> None:
        text = StringIO()
        dumper(data, text)
        write_atomically(Path(path), text.getvalue())

    _common._dump_data = _yaml._dump_data = dump


def quiet_dvc() -> None:
    """Silence DVC's advice for people who type commands."""
    logging.getLogger("dvc").setLevel(logging.WARNING)


def check_lock_file(path: Path) -> None:
    """Raise ValueError for a dvc.lock that a merge or a full disk has damaged; DVC takes an empty one for a
    new project."""
    remedy = (
        f"`git checkout {path}` takes the committed one back; without the file, every stage is looked up in "
        "the run cache"
    )
    try:
        read = lock_file.parse(path.read_text(encoding="utf-8")) if path.exists() else {"stages": {}}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(
            f"{path}{f', line {mark.line + 1}' if mark else ''} is no YAML (a merge conflict?): {remedy}"
        ) from error
    if not isinstance(read, dict) or not isinstance(read.get("stages"), dict):
        raise ValueError(f"{path} is empty or cut, it lists no stages: {remedy}")


def end_all(number: int, frame: FrameType | None) -> None:
    """End with the flow, however that ended, and the stage with it; a stopped one must go on to see its
    signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    os.killpg(0, signal.SIGCONT)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def main(target: str, *, force: bool = False, hashed: bool = False) -> None:
    """Run a stage; with `force` also if it is up to date. `hashed`: the code was just hashed. Exit codes: 0
    done, BUSY, 1 failed. The stage finds this process in ANS_PARENT_PID, and ends with it."""
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo
    from dvc.stage.exceptions import StageCmdFailedError

    os.environ["ANS_PARENT_PID"] = str(os.getpid())
    signal.signal(signal.SIGTERM, end_all)
    quiet_dvc()
    write_files_atomically()
    try:
        with Repo(".") as repo:
            if target != code.NAME and not hashed and hash_is_stale(repo):
                repo.reproduce(code.NAME, single_item=True)
            repo.reproduce(target, single_item=True, force=force)
    except DvcException as error:
        cause = error.__cause__ or error
        if isinstance(cause, LockError):
            sys.exit(BUSY)
        if not isinstance(cause, StageCmdFailedError):  # the stage has reported its own failure
            leave_note(message=f"dvc: {cause}")
            print(f"dvc: {cause}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], force="--force" in sys.argv, hashed="--hashed" in sys.argv)
