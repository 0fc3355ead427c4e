"""A sweep that is stopped (real dvc and Prefect on cheap stages, tests/workspace.py)."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from ans_core.cli import main as cli
from ans_core.config import load, resolve
from flows import commands as commands_of_ans
from flows import launch, sweep
from flows.kept import words_of
from flows.results import experiment_refs
from flows.sweep import finished, plain_text, run_experiment, table
from tests.flows.test_pipeline import start_stalled, until
from tests.workspace import (
    LIMIT_S,
    ROOT,
    Commands,
    dvc,
    end_all,
    executed,
    is_stage,
    living,
    make,
    make_finished,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]
SWEEP = ("sweep", "rl.kl=0.5,0.02", "--name", "s")
"""The second combination has the workspace's own settings."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    # what a shell starts in the background ignores it, and hands that down
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield tmp_path
    end_all(tmp_path)


def test_a_stopped_sweep_gives_the_settings_back_and_goes_on_by_its_name(
    folder: Path, commands: Commands
) -> None:
    ans, workspace = commands.ans, make_finished(folder)
    executed(workspace)
    before = {
        name: (workspace / name).read_text() for name in ("params.yaml", "dvc.lock", "metrics/headline.json")
    }

    def now() -> dict[str, str]:
        return {name: (workspace / name).read_text() for name in before}

    process = start_stalled(workspace, ["-m", "flows.cli", *SWEEP], "rl:1", **commands.server)
    assert now() != before
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
    process.wait(LIMIT_S)
    assert now() == before

    process = start_stalled(workspace, ["-m", "flows.cli", *SWEEP], "rl:3", **commands.server)
    process.kill()
    process.wait()
    until(lambda: not living(workspace), "the sweep's processes outlive it")
    assert now() != before
    assert "a sweep was killed here" in ans(workspace, "run")
    assert now() == before
    executed(workspace)

    assert "did you mean 'rl'" in ans(workspace, "sweep", "rll.kl=0.5", status=2)
    shown = ans(workspace, *SWEEP)
    assert "sweep s: 2 of 2 to run" in shown
    assert [line.split()[0] for line in executed(workspace)] == ["rl", "convert", "evaluate@rl", "report"]
    page = workspace / ".ans/sweeps/s/page.html"
    assert str(page) in shown
    assert all(word in page.read_text() for word in ("s-1", "s-2", "rl.kl", "0.02", "gIoU"))
    shown = ans(workspace, *SWEEP)
    assert "sweep s: 0 of 2 to run" in shown
    assert re.search(r"^s +-1 +-2\nrl\.kl +0\.5 +0\.02\n", shown, re.MULTILINE)
    assert "|" not in shown
    assert "Data and pipelines are up to date" in dvc(workspace, "repro")
    assert executed(workspace) == []
    assert "an experiment s-1 with other settings" in ans(
        workspace, "sweep", "rl.kl=0.6", "--name", "s", status=None
    )
    assert now() == before


EXPERIMENT = """
stages:
  report:
    cmd: "mkdir -p metrics; echo '{}' | tee metrics/summary.json > metrics/headline.json"
    params: [rl.loops, judge.model]
    outs: [metrics/summary.json]
    metrics: [metrics/headline.json: {cache: false}]
"""


def test_a_member_may_have_tables_and_any_text_as_settings(tmp_path: Path) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "dvc.yaml").write_text(EXPERIMENT)
    for words in (
        "git init -q",
        "dvc init -q",
        "git add .",
        "git -c user.name=a -c user.email=a@b commit -qm a",
    ):
        subprocess.run(words.split(), cwd=tmp_path, check=True)
    # what Hydra's and YAML's syntax, or JSON's escapes, would make something else of
    overrides = {"rl.loops": {"caption": 1.0, "mask": 0.5}, "judge.model": "é, ${a}: 'b' = 😀 [1]"}
    settings = resolve(tmp_path / "params.yaml", words_of(overrides))
    assert (settings["rl"]["loops"], settings["judge"]["model"]) == tuple(overrides.values())
    assert run_experiment.fn("s-1", settings, tmp_path, dict) == {}
    assert load(tmp_path / "params.yaml").model_dump(mode="json") == settings
    assert experiment_refs("s-1", tmp_path)
    assert finished("s-1", settings, tmp_path) == {}  # and no other settings


def test_all_values_of_a_setting_that_is_named_twice_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[object] = []
    monkeypatch.setattr(launch, "prefect_api", nullcontext)
    monkeypatch.setattr(sweep, "sweep", lambda *, grid, name: grids.append(grid) or "")
    monkeypatch.setattr(sweep, "plain_text", str)
    assert commands_of_ans.sweep(cli.parse(["sweep", "seed=0,1", "rl.kl=0.1", "seed=2"])) == 0
    assert grids == [{"seed": [0, 1, 2], "rl.kl": [0.1]}]


def test_a_sweep_without_git_is_refused_before_anything_runs(folder: Path, commands: Commands) -> None:
    workspace = make(folder)
    shutil.rmtree(workspace / ".git")
    executed(workspace)
    assert "has no git commit" in commands.ans(workspace, *SWEEP, status=2)
    assert executed(workspace) == []


def test_a_terminal_gets_aligned_columns_and_the_path_of_the_page(tmp_path: Path) -> None:
    results = [("kl-1", {"rl.kl": 0.5}, {"rl/referring/gIoU": 0.25}), ("kl-2", {"seed": 1}, None)]
    page = tmp_path / "kl.md"
    page.write_text(table(results))
    lines = [
        "kl                     -1  -2",
        "rl.kl                 0.5    ",
        "seed                        1",
        "rl/referring/gIoU  0.2500   -",
    ]
    assert plain_text(page).splitlines() == lines
    page.write_text(table(results) + "\nAnswers and curves: [/a/page.html](file:///a/page.html)\n")
    assert plain_text(page).splitlines() == [*lines, "", "Answers and curves: /a/page.html"]


@pytest.mark.parametrize(
    ("setting", "next_stages"), [("rl.kl=0.3", ["base"]), ("seed=2", ["prepare", "base"])]
)
def test_settings_that_change_while_a_run_is_at_work_stop_it_before_the_next_stage(
    folder: Path, commands: Commands, setting: str, next_stages: list[str]
) -> None:
    """The stage at work has a result, unless they are its own: it would become that of the new ones."""
    ans, workspace = commands.ans, make(folder)
    process = start_stalled(workspace, ["-m", "flows.cli", "run"], "prepare:1", **commands.server)
    executed(workspace)
    assert f"note: full-pipeline (pid {process.pid}" in ans(workspace, "profile", "smoke", setting, "--force")
    (stage,) = [one for one in living(workspace) if is_stage(one, "prepare")]
    stage.send_signal(signal.SIGUSR1)
    assert process.wait(LIMIT_S) == 1
    assert executed(workspace) == []
    assert "stage base failed" in ans(workspace, "run", status=1, FAKE_STOP="base")
    assert [line.split()[0] for line in executed(workspace)][: len(next_stages)] == next_stages
