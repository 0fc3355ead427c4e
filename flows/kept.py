"""What runs overwrite and give back, kept on disk: params.yaml under a run with settings of its own; files
and git's index under a sweep, after each member too. After a killed one the next run brings it back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ans_core.config import PROFILES, ConfigError, load, resolve
from ans_core.report.files import read_json
from ans_core.written import write_atomically
from flows.child import run_once
from flows.params import insert_fingerprints, insert_sources, render, watch_sources
from tasks.process import held, holder_of
from tasks.runner import STAGE_LOCK, drop_partial_outputs
from tasks.stages import HEADLINE
from tasks.surroundings import git

FOLDER = Path(".ans/sweep-kept")
FILES = ("params.yaml", "dvc.lock", HEADLINE)
"""What DVC does not bring back by itself."""
FLOW_LOCK = ".ans/flow.lock"
RUN = Path(".ans/run-kept.json")
"""params.yaml as it was, and the settings of the run that it makes way for."""
MEMBER, INDEX = "member.json", "index.txt"


def words_of(overrides: dict[str, Any]) -> tuple[str, ...]:
    """Return settings as `ans profile` takes them."""
    return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in overrides.items())


@contextmanager
def settings_of_run(
    here: Path,
    *,
    profile: str | None = None,
    overrides: dict[str, Any] | None = None,
    data: list[str] | None = None,
) -> Iterator[None]:
    """Have params.yaml hold what a flow's parameters ask for, and give it back at the end, unless somebody
    has written it meanwhile.

    The settings are those of params.yaml where it holds this profile (or none is asked for), else the
    profile's; then overrides and data.
    """
    path = here / "params.yaml"
    is_there = profile is None or (path.exists() and load(path).profile == profile)
    if is_there:
        print_lines(watch_sources(here))  # which also writes what a file of an older version lacks
        if not (overrides or data):
            yield
            return
    words = words_of(overrides or {})
    values = resolve(path if is_there else here / PROFILES / f"{profile}.yaml", words)
    print_lines(insert_sources(values, [Path(folder).resolve() for folder in data or ()], None))
    insert_fingerprints(values, here)
    if path.exists():
        (here / RUN).parent.mkdir(exist_ok=True)
        record = {"before": path.read_text(encoding="utf-8"), "run": values}
        write_atomically(here / RUN, json.dumps(record))
    try:
        write_atomically(path, render(values, words))
        load(path)  # raises ConfigError for data sets that the settings can't have
        yield
    finally:
        give_back(here)


def settle(here: Path) -> None:
    """Give params.yaml back after a killed run, for a command that reads or writes it. Raises ConfigError
    while a run with settings of its own is at work: what stands there is not the user's."""
    if not (here / RUN).exists():
        return
    if holder := holder_of(here / FLOW_LOCK):
        raise ConfigError(
            f"params.yaml holds the settings of a run at work, {holder}, and is as before when it ends; "
            "wait for it"
        )
    with held(here / FLOW_LOCK, "tidying up"):
        print_lines(give_back(here))


def print_lines(lines: list[str]) -> None:
    for line in lines:
        print(line, flush=True)


def give_back(here: Path) -> list[str]:
    """Undo what `settings_of_run` did to params.yaml; return a line that says so. Settings that somebody
    wrote since stay."""
    if not (here / RUN).exists():
        return []
    record = read_json(here / RUN)
    is_of_run = settings_of(here / "params.yaml") == record["run"]
    if is_of_run:
        write_atomically(here / "params.yaml", record["before"])
    (here / RUN).unlink()
    return (
        ["a run with settings of its own was killed here: params.yaml is again as before it"]
        if is_of_run
        else []
    )


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
    # a member that was stopped leaves its settings staged
    if tree := (here / FOLDER / INDEX).read_text(encoding="utf-8"):
        git(here, "read-tree", tree)
        git(here, "update-index", "-q", "--refresh")


def end(here: Path) -> None:
    """Put everything back, the results in runs/ too, and forget what was kept."""
    put_back(here)
    run_once(["-m", "dvc", "checkout", "--force", "--quiet"], root=here, timeout_s=3600)
    shutil.rmtree(here / FOLDER)


@contextmanager
def at_work(here: Path, name: str) -> Iterator[None]:
    """Hold the checkout's lock for the flow of this name. What a killed run or sweep left is undone first, and
    said: the flow would read its settings."""
    with held(here / FLOW_LOCK, name):
        print_lines(recover(here))
        yield


def recover(here: Path) -> list[str]:
    """Undo what a killed run or sweep left, and return lines that say so. Call it under the lock that they
    hold. Settings that somebody wrote after it had died stay."""
    if not holder_of(here / STAGE_LOCK):
        with held(here / STAGE_LOCK, "tidying up"):
            drop_partial_outputs(here)
    return [*recover_sweep(here), *give_back(here)]  # the sweep is inside of the run


def recover_sweep(here: Path) -> list[str]:
    folder = here / FOLDER
    if not folder.exists():
        return []
    left = read_json(folder / MEMBER) if (folder / MEMBER).exists() else None
    if left is None or settings_of(here / "params.yaml") in (left, settings_of(folder / "params.yaml")):
        end(here)
        return [
            "a sweep was killed here: params.yaml, dvc.lock and the results in runs/ are again as before it"
        ]
    shutil.rmtree(folder)
    return ["a sweep was killed here, and params.yaml was written since: it stays as it is"]


def settings_of(path: Path) -> dict[str, Any] | None:
    try:
        return load(path).model_dump(mode="json")
    except ConfigError:
        return None
