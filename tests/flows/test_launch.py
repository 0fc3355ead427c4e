"""What `ans run` says at its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from flows.kept import FILES
from flows.launch import before_a_pull
from flows.result_tables import memory_figures, print_result
from tasks.stages import SUMMARY

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t")


def git(folder: Path, *words: str, status: int = 0) -> None:
    assert subprocess.run([*GIT, *words], cwd=folder, check=False).returncode == status


def write(folder: Path, profile: str) -> None:
    """Write what a run of this profile leaves in git's files."""
    (folder / "metrics").mkdir(exist_ok=True)
    for name in FILES:
        (folder / name).write_text(f"profile: {profile}\n")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of a checkout whose committed run is of the profile tiny."""
    origin = tmp_path / "origin"
    origin.mkdir()
    write(origin, "tiny")
    git(origin, "init", "-q")
    git(origin, "add", "-A")
    git(origin, "commit", "-qm", "start")
    git(tmp_path, "clone", "-q", "origin", "clone")
    return tmp_path / "clone"


def test_after_a_run_the_line_about_git_lets_a_pull_work(clone: Path):
    assert before_a_pull(clone) == []
    write(clone, "smoke")
    write(clone.parent / "origin", "tiny, newer")
    git(clone.parent / "origin", "commit", "-qam", "newer")
    git(clone, "pull", "-q", status=1)
    (line,) = before_a_pull(clone)
    command = re.search(r"`(git .*)` first", line)
    assert command
    # as in a container
    nobody = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(command[1].split(), cwd=clone, check=True, env=nobody)
    git(clone, "pull", "-q")
    assert [(clone / name).read_text() for name in FILES] == ["profile: tiny, newer\n"] * 3
    assert before_a_pull(clone) == []


def test_without_git_nothing_is_said_of_it(tmp_path: Path):
    write(tmp_path, "smoke")
    assert before_a_pull(tmp_path) == []


@pytest.mark.parametrize(("profile", "comparable"), [("tiny", True), ("smoke", False)])
def test_figures_are_compared_with_the_last_commits_where_these_are_of_the_same_profile(
    clone: Path, profile: str, comparable: bool, capsys: pytest.CaptureFixture[str]
):
    (clone / SUMMARY).write_text(json.dumps({"rl": {"referring/val/gIoU": 0.5}}))
    print_result([("report", "ran", 1.0)], clone, profile, 1.0)
    assert ("dvc metrics diff" in capsys.readouterr().out) == comparable


def test_a_memory_that_is_only_measured_has_the_figures_of_the_base(tmp_path: Path):
    folder = tmp_path / "runs/mine/memory"
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps({"J&F": 0.4, "J_at_1": 0.5, "J&F_without_memory": 0.5}))
    _, figures, _, remarks = memory_figures(tmp_path, "mine")
    assert figures == {"base": {"J&F with memory": 0.4, "J&F without memory": 0.5}}
    assert str(folder / "metrics.json") in remarks[0]
