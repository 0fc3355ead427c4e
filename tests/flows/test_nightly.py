"""Champion and challenger in a real MLflow registry, with DVC's cache as the place of their weights (tests/workspace.py)."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import registry
from tasks.tracking import client, experiment_id, find_runs
from tests.workspace import LIMIT_S, ans, dvc, end_all, executed, make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    yield make(tmp_path)
    end_all(tmp_path)


def test_the_newer_checkpoint_becomes_champion_only_if_it_is_better(workspace: Path) -> None:
    def night(score: str) -> str:
        return ans(workspace, "nightly", FAKE_SCORE=score).splitlines()[-1]

    def champion() -> str | None:
        found = registry.version_of(workspace, "smoke", "champion")
        return found and found.number

    assert "run the pipeline first" in ans(workspace, "nightly", status=2)
    ans(workspace, "run")
    executed(workspace)
    assert night("0.5") == "nightly-evals: first"
    assert executed(workspace) == ["evaluate@rl from 0"]
    mlflow = client(workspace)
    (recorded,) = find_runs(mlflow, experiment_id(mlflow, workspace), {"ans.kind": "nightly"}, limit=2)
    assert recorded.data.metrics == {"challenger/referring/val/gIoU_all": 0.5, "eval/referring/val/gIoU_all": 0.5}
    assert night("0.9") == "nightly-evals: same"  # known from last night
    assert executed(workspace) == []

    ans(workspace, "profile", "smoke", "rl.kl=0.5")
    ans(workspace, "run")
    executed(workspace)
    shutil.rmtree(workspace / ".ans/registry")  # the champion's weights are in no working folder any more
    assert night("0.505") == "nightly-evals: promoted"
    assert (executed(workspace), champion()) == (["evaluate@rl from 0"], "2")

    ans(workspace, "profile", "smoke", "rl.kl=0.25")
    dvc(workspace, "repro", "convert")  # registers nothing; the night does
    assert night("0.4") == "nightly-evals: kept"
    assert champion() == "2"
    assert registry.version_of(workspace, "smoke", "challenger") is not None


def test_a_sweep_runs_every_combination_and_leaves_the_workspace_as_it_was(workspace: Path) -> None:
    ans(workspace, "run")
    executed(workspace)
    before = {name: (workspace / name).read_text() for name in ("params.yaml", "dvc.lock")}
    assert "did you mean 'rl'" in ans(workspace, "sweep", "rll.kl=0.5", status=2)
    shown = ans(workspace, "sweep", "rl.kl=0.5,0.25", "--name", "kl")
    ran = executed(workspace)
    assert [line.split()[0] for line in ran if line.startswith(("rl", "sft"))] == ["rl", "rl"]
    assert "| | kl-1 | kl-2 |" in shown
    assert "| rl.kl | 0.5 | 0.25 |" in shown
    assert {name: (workspace / name).read_text() for name in before} == before
    assert "Data and pipelines are up to date" in dvc(workspace, "repro")
    assert executed(workspace) == []
