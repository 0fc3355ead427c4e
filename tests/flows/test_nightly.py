"""Champion and challenger in a real MLflow registry, with DVC's cache as the place of their weights
(tests/workspace.py)."""

import re
import shutil
from pathlib import Path

import pytest

from flows.kept import settings_of_run
from tasks import registry
from tasks.tracking import client, experiment_id, find_runs
from tests.workspace import LIMIT_S, Commands, ans, dvc, executed, make, make_finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]


def test_the_newer_checkpoint_becomes_champion_only_if_it_is_better(
    tmp_path: Path, commands: Commands
) -> None:
    workspace = make(tmp_path / "new")
    assert "run the pipeline first" in commands.ans(workspace, "nightly", status=2)
    workspace = make_finished(tmp_path / "finished")

    def night(score: str) -> str:
        return commands.ans(workspace, "nightly", FAKE_SCORE=score).splitlines()[-1]

    def version(alias: str) -> str | None:
        found = registry.version_of(workspace, "smoke", alias)
        return found and found.number

    executed(workspace)
    assert (version("champion"), version("challenger")) == (None, "1")
    assert night("0.5") == "nightly-evals: first"
    assert executed(workspace) == ["evaluate@rl from 0"]
    mlflow = client(workspace)
    (recorded,) = find_runs(mlflow, experiment_id(mlflow, workspace), {"ans.kind": "nightly"}, limit=2)
    assert recorded.data.metrics == {
        "challenger/referring/val/gIoU_all": 0.5,
        "eval/referring/val/gIoU_all": 0.5,
    }
    before = (workspace / "params.yaml").read_text()
    killed = settings_of_run(workspace, overrides={"evaluate.limit": 3})
    killed.__enter__()  # and nothing after it: a run with settings of its own was killed here
    assert (workspace / "params.yaml").read_text() != before
    assert night("0.9") == "nightly-evals: same"  # known from last night
    assert executed(workspace) == []
    assert (workspace / "params.yaml").read_text() == before

    ans(workspace, "profile", "smoke", "convert.max_shard=4GB")
    dvc(workspace, "repro", "convert")  # registers nothing; the night does
    executed(workspace)
    shutil.rmtree(workspace / ".ans/registry")  # the champion's weights are in no working folder any more
    shown = commands.ans(workspace, "nightly", FAKE_SCORE="0.505")
    assert shown.splitlines()[-1] == "nightly-evals: promoted"
    assert "challenger: version 2, " in shown
    assert re.search(r"gIoU_all  0\.500  0\.505  \+0\.005 .* better", shown)
    page = re.search(r"^page: (.*)$", shown, flags=re.MULTILINE)
    assert page
    assert "gIoU" in Path(page[1]).read_text()
    assert (executed(workspace), version("champion")) == (["evaluate@rl from 0"], "2")

    ans(workspace, "profile", "smoke", "convert.max_shard=3GB")
    dvc(workspace, "repro", "convert")
    assert night("0.4") == "nightly-evals: kept"
    assert (version("champion"), version("challenger")) == ("2", "3")

    ans(workspace, "profile", "smoke", "seed=1")
    shutil.rmtree(workspace / "runs/smoke/data")  # as an interrupted `prepare` leaves it
    shown = commands.ans(workspace, "nightly", status=2)
    assert "runs/smoke/data: the benchmarks of params.yaml need" in shown
    assert len(shown.splitlines()) < 4
