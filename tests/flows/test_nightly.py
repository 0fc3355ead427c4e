"""Champion and challenger in a real MLflow registry, with DVC's cache as the place of their weights, and sweeps (tests/workspace.py)."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import registry
from tasks.tracking import client, experiment_id, find_runs
from tests.workspace import LIMIT_S, ans, dvc, end_all, environment, executed, make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]
COMMANDS = """
import os, sys
from pathlib import Path
from flows.launch import prefect_api
with prefect_api(Path.cwd()):
    from flows.cli import main
    for line in sys.stdin:
        os.environ["FAKE_SCORE"], *sys.argv[1:] = line.split()
        try:
            main()
        except SystemExit as end:
            print(f"exit status {end.code}", flush=True)
"""
"""One process for all commands of `ans`: a Prefect server for each of them would take most of the time."""


class Commands:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMANDS], cwd=folder, env=environment(folder), text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ans(self, *words: str, score: str = "0.5", status: int = 0) -> str:
        """Run `ans WORDS`, with the score of every evaluation; return what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(score, *words, file=self._process.stdin, flush=True)
        told = ""
        for line in self._process.stdout:
            if line.startswith("exit status "):
                assert line == f"exit status {status}\n", told
                return told
            told += line
        raise AssertionError(f"the commands ended: {told}")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = make(tmp_path_factory.mktemp("nightly"))
    yield Commands(folder)
    end_all(folder)


def test_the_newer_checkpoint_becomes_champion_only_if_it_is_better(commands: Commands) -> None:
    workspace = commands.folder

    def night(score: str) -> str:
        return commands.ans("nightly", score=score).splitlines()[-1]

    def version(alias: str) -> str | None:
        found = registry.version_of(workspace, "smoke", alias)
        return found and found.number

    assert "run the pipeline first" in commands.ans("nightly", status=2)
    commands.ans("run")
    executed(workspace)
    assert (version("champion"), version("challenger")) == (None, "1")
    assert night("0.5") == "nightly-evals: first"
    assert executed(workspace) == ["evaluate@rl from 0"]
    mlflow = client(workspace)
    (recorded,) = find_runs(mlflow, experiment_id(mlflow, workspace), {"ans.kind": "nightly"}, limit=2)
    assert recorded.data.metrics == {"challenger/referring/val/gIoU_all": 0.5, "eval/referring/val/gIoU_all": 0.5}
    assert night("0.9") == "nightly-evals: same"  # known from last night
    assert executed(workspace) == []

    ans(workspace, "profile", "smoke", "convert.max_shard=4GB")
    dvc(workspace, "repro", "convert")  # registers nothing; the night does
    executed(workspace)
    shutil.rmtree(workspace / ".ans/registry")  # the champion's weights are in no working folder any more
    assert night("0.505") == "nightly-evals: promoted"
    assert (executed(workspace), version("champion")) == (["evaluate@rl from 0"], "2")

    ans(workspace, "profile", "smoke", "convert.max_shard=3GB")
    dvc(workspace, "repro", "convert")
    assert night("0.4") == "nightly-evals: kept"
    assert (version("champion"), version("challenger")) == ("2", "3")


def test_a_sweep_runs_every_combination_and_leaves_the_workspace_as_it_was(commands: Commands) -> None:
    workspace = commands.folder
    ans(workspace, "profile", "smoke", "--force")
    commands.ans("run")
    executed(workspace)
    before = {name: (workspace / name).read_text() for name in ("params.yaml", "dvc.lock")}
    assert "did you mean 'rl'" in commands.ans("sweep", "rll.kl=0.5", status=2)
    shown = commands.ans("sweep", "rl.kl=0.5,0.02", "--name", "kl")
    ran = [line.split()[0] for line in executed(workspace)]
    assert ran == ["rl", "convert", "evaluate@rl", "report"]  # of the first: the second has the workspace's own settings
    assert "| | kl-1 | kl-2 |" in shown
    assert "| rl.kl | 0.5 | 0.02 |" in shown
    page = workspace / ".ans/sweeps/kl/page.html"
    assert page.as_uri() in shown
    assert all(word in page.read_text() for word in ("kl-1", "kl-2", "rl.kl", "0.02", "gIoU"))
    assert {name: (workspace / name).read_text() for name in before} == before
    assert "Data and pipelines are up to date" in dvc(workspace, "repro")
    assert executed(workspace) == []
