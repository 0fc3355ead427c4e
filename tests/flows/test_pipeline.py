"""The real dvc, Prefect and MLflow on cheap stages (tests/workspace.py)."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tasks.stages import AGENT, STAGES, TABLE
from tests.workspace import (
    LIMIT_S,
    TOLD,
    Commands,
    ans,
    dvc,
    end_all,
    environment,
    executed,
    is_stage,
    living,
    make,
    make_finished,
    run,
    template,
    words_of,
)

NAMES = [stage.name for stage in STAGES]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A workspace after `ans run`, and what that printed."""
    folder = make_finished(tmp_path_factory.mktemp("finished"))
    yield folder, (folder / TOLD).read_text()
    end_all(folder)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    yield make(tmp_path)
    end_all(tmp_path)


@pytest.fixture(scope="module")
def before_sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be copied: a workspace in which all ran that SFT needs."""
    folder = make(tmp_path_factory.mktemp("before_sft"))
    dvc(folder, "repro", "memory")
    executed(folder)
    return folder


@pytest.fixture
def workspace_before_sft(before_sft: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(
        before_sft, tmp_path, ignore=lambda folder, names: {".ans"} & set(names), dirs_exist_ok=True
    )
    # MLflow's database names the folder that it was made in
    shutil.copytree(template() / ".ans", tmp_path / ".ans")
    yield tmp_path
    end_all(tmp_path)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def mlflow_runs(folder: Path) -> list[dict[str, str]]:
    """Tags and status of every run, oldest first."""
    with sqlite3.connect(folder / ".ans/mlflow.db") as database:
        runs = database.execute("SELECT run_uuid, status FROM runs ORDER BY start_time").fetchall()
        tags = database.execute("SELECT run_uuid, key, value FROM tags").fetchall()
    return [
        {"id": run, "status": status, **{key: value for owner, key, value in tags if owner == run}}
        for run, status in runs
    ]


def logged(folder: Path, run: str) -> tuple[dict[str, str], dict[str, float]]:
    """Parameters and latest metrics of a run."""
    with sqlite3.connect(folder / ".ans/mlflow.db") as database:
        params = database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run,)).fetchall()
        metrics = database.execute(
            "SELECT key, value FROM latest_metrics WHERE run_uuid = ?", (run,)
        ).fetchall()
    return dict(params), dict(metrics)


def start_stalled(folder: Path, words: list[str], at: str, **extra: str) -> subprocess.Popen[bytes]:
    """Starts a command whose stage stalls at step `at`, and waits until it stands there."""
    process = subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment(folder, FAKE_STALL=at, **extra),
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    name, _, step = at.partition(":")

    def stands_there() -> bool:
        return any(
            path.read_text() == str(int(step) + 1)
            for path in (folder / ".ans/scratch/smoke").glob(f"{name}/*/step")
        )

    until(lambda: stands_there() or process.poll() is not None, f"{name} never came to step {step}")
    assert process.poll() is None
    return process


def test_the_flow_and_dvc_share_one_cache_and_mlflow_shows_a_parent_with_nested_runs(
    finished: tuple[Path, str], commands: Commands
) -> None:
    workspace, shown = finished
    assert [line.split()[0] for line in executed(workspace)] == NAMES
    assert "report/report.html" in shown
    runs = mlflow_runs(workspace)
    parents = [run for run in runs if run["ans.kind"] == "pipeline"]
    assert [run["status"] for run in runs] == ["FINISHED"] * (1 + len(NAMES))
    assert len(parents) == 1
    assert {run["ans.stage"] for run in runs if run.get("mlflow.parentRunId") == parents[0]["id"]} == set(
        NAMES
    )
    params, metrics = logged(workspace, parents[0]["id"])
    assert (params["profile"], params["rl.kl"], metrics["rl/final/score"]) == ("smoke", "0.02", 0.5)
    assert {f"wall_s/{name.replace('@', '/')}" for name in NAMES} <= metrics.keys()
    assert not next(iter(metrics)).startswith("wall_s/")  # MLflow compares the first one by default
    (versions,) = (workspace / ".ans/scratch/smoke/report").glob("*/versions.json")
    assert list(json.loads(versions.read_text())["stages"]) == NAMES[:-1]

    assert "Data and pipelines are up to date" in dvc(workspace, "repro")
    used_s = os.times()
    # nobody there: what is cached needs no server
    again = ans(workspace, "run", PREFECT_API_URL="http://127.0.0.1:9/api")
    now_s = os.times()
    # of processor time; was 25
    assert (now_s.children_user + now_s.children_system) - (used_s.children_user + used_s.children_system) < 8
    assert again.count("cached") == len(NAMES)
    assert not re.search(r"^stage \d", again, flags=re.MULTILINE)
    assert len(mlflow_runs(workspace)) == len(runs)
    assert executed(workspace) == []

    shutil.rmtree(workspace / "runs/smoke/report")  # the run cache has it: the flow finds every stage cached
    commands.ans(workspace, "run")
    assert executed(workspace) == []
    newest = [run for run in mlflow_runs(workspace) if run["ans.kind"] == "pipeline"][-1]
    by_stage = {run["ans.stage"]: run["id"] for run in runs if run["ans.kind"] == "stage"}
    assert {
        key.removeprefix("cached.").replace("/", "@"): value
        for key, value in newest.items()
        if key.startswith("cached.")
    } == by_stage
    # the pipelines can be compared, whichever ran the stages
    assert logged(workspace, newest["id"]) == (params, metrics)
    assert newest["mlflow.note.content"].count(": cached, ") == len(NAMES)


def test_a_file_gets_a_line_of_a_bar_each_half_minute_and_one_of_each_stage(
    finished: tuple[Path, str],
) -> None:
    _, shown = finished
    assert 1 <= shown.count("a bar:") <= 3  # 400 steps of a millisecond or two
    stages = [
        re.match(r"stage (\d+) of (\d+)", line) for line in shown.splitlines() if line.startswith("stage ")
    ]
    assert [found and found.groups() for found in stages] == [
        (str(i), str(len(NAMES))) for i in range(1, len(NAMES) + 1)
    ]


def test_a_fresh_clone_beside_the_checkout_pulls_what_it_pushed_and_runs_nothing(
    finished: tuple[Path, str],
) -> None:
    workspace, _ = finished
    dvc(workspace, "push", "--run-cache")
    clone = workspace.with_name("clone")
    for words in (
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "ran"],
        ["clone", "-q", ".", str(clone)],
    ):
        subprocess.run(["git", *words], cwd=workspace, check=True)
    dvc(clone, "pull", "--run-cache", "dvc.yaml")  # without the name it wants the agent's outputs too
    dvc(clone, "repro")
    assert executed(clone) == []


def test_an_edited_sentence_runs_nothing_an_edited_line_what_imports_it_and_code_can_be_accepted(
    finished: tuple[Path, str], commands: Commands
) -> None:
    workspace, _ = finished
    file = workspace / "ans_core/stages/rl.py"
    text = file.read_text()
    executed(workspace)
    for edited in (f"# A sentence.\n{text}", f"{text}\nMORE = 1\n"):
        file.write_text(edited)
        dvc(workspace, "repro")
        ran = executed(workspace)
        # it writes what it wrote
        assert [line.split()[0] for line in ran] == ([] if edited.startswith("#") else ["rl"])
        assert "Data and pipelines are up to date" in dvc(workspace, "repro")
    file.write_text(f"{text}\nMORE = 2\n")
    assert "its present code gives the result that is there" in commands.ans(
        workspace, "stage", "rl", "--accept-code"
    )
    dvc(workspace, "repro")
    assert executed(workspace) == []
    ans(workspace, "profile", "smoke", "rl.kl=0.3")
    refused = commands.ans(workspace, "stage", "rl", "--accept-code", status=2)
    assert "rl: not its code alone is another than dvc.lock says, but params.yaml: it must run" in refused
    ans(workspace, "profile", "smoke", "--force")
    file.write_text(text)
    dvc(workspace, "repro")
    executed(workspace)


def test_a_bare_dvc_repro_has_one_mlflow_parent_and_switching_profiles_back_executes_nothing(
    finished: tuple[Path, str],
) -> None:
    workspace, _ = finished
    known = {run["id"] for run in mlflow_runs(workspace)}
    first = (workspace / "dvc.lock").read_text()
    executed(workspace)
    ans(workspace, "profile", "tiny", "launch.inference_processes=1")
    dvc(workspace, "repro", "memory")
    assert [line.split()[0] for line in executed(workspace)] == ["prepare", "base", "memory"]
    runs = [run for run in mlflow_runs(workspace) if run["id"] not in known]
    assert [run["ans.kind"] for run in runs].count("pipeline") == 1
    assert {run["status"] for run in runs} == {"FINISHED"}

    ans(workspace, "profile", "smoke")
    dvc(workspace, "repro")
    assert executed(workspace) == []
    assert yaml.safe_load((workspace / "dvc.lock").read_text()) == yaml.safe_load(first)
    assert (workspace / "runs/tiny/memory/result.txt").is_file()
    dvc(workspace, "exp", "run", "-S", "rl.kl=0.5", "rl")
    assert executed(workspace) == ["rl from 0"]


def test_a_damaged_object_of_the_cache_is_found_and_its_remedy_mends_it(
    finished: tuple[Path, str], commands: Commands
) -> None:
    """`dvc checkout` delivers damaged bytes without a word; weights are checked where they are read, pictures
    are not."""
    workspace, _ = finished
    lock = yaml.safe_load((workspace / "dvc.lock").read_text())["stages"]["prepare"]["outs"][0]["md5"]
    listing = json.loads((workspace / f".dvc/cache/files/md5/{lock[:2]}/{lock[2:]}").read_text())
    md5 = next(entry["md5"] for entry in listing if entry["relpath"] == "result.txt")
    damaged = workspace / f".dvc/cache/files/md5/{md5[:2]}/{md5[2:]}"
    damaged.chmod(0o644)
    damaged.write_text("x" + damaged.read_text()[1:])
    shown = next(
        line for line in commands.ans(workspace, "doctor", "--deep", status=1).splitlines() if "cache" in line
    )
    assert "is damaged (runs/smoke/data/result.txt)" in shown
    assert f"rm -f {damaged}" in shown
    damaged.unlink()
    ans(workspace, "stage", "prepare", "--force")
    assert "every object of DVC's cache is as its hash says" in commands.ans(
        workspace, "doctor", "--deep", status=None
    )
    executed(workspace)
    assert "Data and pipelines are up to date" in dvc(workspace, "repro", "base")
    assert executed(workspace) == []


def test_a_stage_killed_at_any_step_resumes_there_and_gives_the_same_result(
    workspace_before_sft: Path,
) -> None:
    workspace = workspace_before_sft
    process = start_stalled(workspace, ["-m", "dvc", "repro", "sft"], "sft:2")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not living(workspace), "the stage outlives dvc")
    executed(workspace)
    dvc(workspace, "repro", "sft")
    assert executed(workspace) == ["sft from 3"]
    assert "RUNNING" not in {run["status"] for run in mlflow_runs(workspace)}  # the killed one's was closed
    resumed = (workspace / "runs/smoke/sft/result.txt").read_text()
    dvc(workspace, "repro", "--single-item", "--force", "--no-run-cache", "sft")
    assert (workspace / "runs/smoke/sft/result.txt").read_text() == resumed


def test_settings_given_to_ans_run_are_of_that_run_and_the_same_command_resumes_a_killed_one(
    workspace_before_sft: Path, commands: Commands
) -> None:
    workspace, words = workspace_before_sft, ["run", "rl.kl=0.5"]
    before = (workspace / "params.yaml").read_text()
    process = start_stalled(workspace, ["-m", "flows.cli", *words], "rl:2")
    process.kill()
    process.wait()
    until(lambda: not living(workspace), "stage, tracker or temporary server outlive their flow")
    assert yaml.safe_load((workspace / "params.yaml").read_text())["rl"]["kl"] == 0.5
    executed(workspace)
    assert "params.yaml is again as before" in ans(workspace, *words)
    assert executed(workspace)[0] == "rl from 3"
    assert (workspace / "params.yaml").read_text() == before
    assert (
        yaml.safe_load((workspace / "dvc.lock").read_text())["stages"]["rl"]["params"]["params.yaml"]["rl"][
            "kl"
        ]
        == 0.5
    )
    parent = [run for run in mlflow_runs(workspace) if run["ans.kind"] == "pipeline"][-1]
    assert logged(workspace, parent["id"])[0]["rl.kl"] == "0.5"
    assert commands.ans(workspace, *words).count("cached") == len(NAMES)
    assert executed(workspace) == []


# dvc starts a stage by the shell; Debian's sh stays between them where bash does not
@pytest.mark.parametrize(("shell", "worse"), [("/bin/bash", False), ("/bin/sh", True)])
def test_a_killed_flow_leaves_no_stage_behind_and_doctor_closes_its_runs(
    workspace: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch, shell: str, worse: bool
) -> None:
    """Also where its server is killed with it, and the stage was stopped (SIGSTOP) before."""
    monkeypatch.setenv("SHELL", shell)
    process = start_stalled(workspace, ["-m", "flows.cli", "run"], "base:1")
    stages = [other for other in living(workspace) if is_stage(other, "base")]
    assert stages
    if worse:
        (server,) = [other for other in living(workspace) if "flows.prefect_server" in words_of(other)]
        for stage in stages:
            stage.suspend()
        server.kill()
    pids = [other.pid for other in living(workspace)]
    process.kill()
    process.wait()
    until(lambda: not living(workspace), "stage, tracker or temporary server outlive their flow")
    # until then DVC takes its lock for one that is held
    until(lambda: not any(map(psutil.pid_exists, pids)), "nobody reaps them")
    shown = commands.ans(workspace, "doctor", status=None)
    assert "resumes: smoke/base" in shown
    ans(workspace, "profile", "smoke", "seed=5")
    assert "resumes: none; given up, of other settings" in ans(workspace, "status")
    ans(workspace, "profile", "smoke")
    assert "RUNNING" not in {run["status"] for run in mlflow_runs(workspace)}
    executed(workspace)
    dvc(workspace, "repro", "base")
    assert executed(workspace) == ["base from 2"]


def test_a_failing_stage_is_tried_again_from_its_last_state_and_the_message_is_shown(
    workspace: Path, commands: Commands
) -> None:
    shown = commands.ans(workspace, "run", status=1, FAKE_FAIL="base:3", FAKE_STOP="sft")
    assert "refs.json:7: no mask of ref 12; delete the line" in shown
    assert "stage sft failed" in shown
    assert executed(workspace) == [
        "prepare from 0",
        "base from 0",
        "base from 4",
        "memory from 0",
        "sft from 0",
        "sft from 6",
    ]
    statuses = [run["status"] for run in mlflow_runs(workspace) if run.get("ans.stage") == "base"]
    assert statuses == ["FAILED", "FINISHED"]


def test_dvc_killed_just_as_a_stage_starts_leaves_nothing_behind(workspace: Path) -> None:
    """The stage is not yet far enough to have asked for the signal of its parent's death."""
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "dvc", "repro", "base"], cwd=workspace,
            env=environment(workspace, FAKE_STALL="prepare:0"), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(
            lambda: [p for p in living(workspace) if is_stage(p, "prepare")],
            "the stage never started",
        )
        process.kill()
        process.wait()
        until(lambda: not living(workspace), "the stage outlives dvc")


def test_a_killed_tracker_costs_the_curves_and_not_the_training(workspace: Path) -> None:
    ans(workspace, "profile", "smoke", "launch.processes=1")
    process = start_stalled(workspace, ["-m", "dvc", "repro", "prepare"], "prepare:1")
    (stage,) = [p for p in living(workspace) if is_stage(p, "prepare") and p.ppid() == process.pid]
    until(stage.children, "the stage starts no tracker")  # a thread does
    (tracker,) = stage.children()
    assert "tasks.tracker" in words_of(tracker)
    tracker.kill()
    stage.send_signal(signal.SIGUSR1)  # wakes it
    assert process.wait(LIMIT_S) == 0
    assert (workspace / "runs/smoke/data/result.txt").exists()
    dvc(workspace, "repro", "base")
    assert "RUNNING" not in {run["status"] for run in mlflow_runs(workspace)}


def test_a_spoiled_lock_file_is_one_sentence(workspace: Path) -> None:
    (workspace / "dvc.lock").write_text("stages:\n<<<<<<< HEAD\n  a: {}\n=======\n")
    shown = ans(workspace, "run", status=2)
    assert "is no YAML (a merge conflict?)" in shown
    assert "Traceback" not in shown
    assert shown.count("\n") < 5
    assert executed(workspace) == []


RUN_PREPARE = """
from pathlib import Path
from flows.launch import prefect_api
with prefect_api(Path.cwd()):
    from flows.pipeline import full_pipeline
    full_pipeline(stages=["prepare"])
"""


def test_a_store_of_runs_that_is_away_or_damaged_stops_nothing_and_gets_the_runs_later(
    workspace: Path, commands: Commands
) -> None:
    shown = run(workspace, "-c", RUN_PREPARE, MLFLOW_TRACKING_URI="http://127.0.0.1:9", **commands.server)
    assert "MLflow at http://127.0.0.1:9 does not answer" in shown
    assert shown.count("MLflow takes nothing at present") == 1
    damaged = workspace / ".ans/mlflow.db"
    damaged.write_bytes(b"SQLite format 3\0" + b"x" * 9000)
    shown = dvc(workspace, "repro", "base")
    assert "mlflow.db is damaged" in shown
    assert "Traceback" not in shown
    assert executed(workspace) == ["prepare from 0", "base from 0"]
    assert len(list((workspace / ".ans/unsent").iterdir())) == 2

    damaged.unlink()
    dvc(workspace, "repro", "memory")
    assert not list((workspace / ".ans/unsent").iterdir())
    runs = mlflow_runs(workspace)
    assert [run.get("ans.stage") for run in runs if run["ans.kind"] == "stage"] == [
        "prepare",
        "base",
        "memory",
    ]
    assert [run["status"] for run in runs] == ["FINISHED"] * 6


def test_a_mistake_in_the_settings_stops_before_work_and_is_not_tried_again(workspace: Path) -> None:
    path = workspace / "params.yaml"
    path.write_text(path.read_text().replace("  temperature:", "  temprature:"))
    shown = dvc(workspace, "repro", status=None)
    assert "rl.temprature: unknown setting (did you mean 'temperature'?)" in shown
    assert "ans: " in (shown := ans(workspace, "run", status=2))
    assert "rl.temprature" in shown
    assert "Traceback" not in shown
    assert executed(workspace) == []


def test_a_server_that_is_away_is_said_before_work(workspace: Path) -> None:
    shown = ans(workspace, "run", status=2, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert shown.startswith("ans: PREFECT_API_URL names http://127.0.0.1:9/api: ")
    assert "start it (`ans server`), or unset PREFECT_API_URL" in shown
    assert shown.count("\n") == 1
    assert executed(workspace) == []


def test_a_second_run_in_one_workspace_waits_and_says_so(workspace: Path, commands: Commands) -> None:
    process = start_stalled(workspace, ["-m", "flows.cli", "run"], "prepare:1", **commands.server)
    second = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run"], cwd=workspace, env=environment(workspace), text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert second.stderr is not None
    seen = next(line for line in second.stderr if "waits:" in line)
    assert f"full-pipeline waits: full-pipeline (pid {process.pid}" in seen
    second.kill()
    second.wait()
    process.terminate()
    assert process.wait(LIMIT_S) != 0
    until(lambda: not living(workspace), "the stage outlives its flow")
    commands.ans(workspace, "doctor", status=None)


def test_two_processes_of_a_stage_are_one_run_in_mlflow(workspace_before_sft: Path) -> None:
    workspace = workspace_before_sft
    ans(workspace, "profile", "smoke", "launch.processes=2")
    dvc(workspace, "repro", "--single-item", "--force", "sft")
    assert executed(workspace) == ["sft from 0", "sft from 0"]
    assert [run["status"] for run in mlflow_runs(workspace) if run.get("ans.stage") == "sft"] == ["FINISHED"]
    ans(workspace, "profile", "smoke")
    assert "up to date" in dvc(workspace, "repro", "sft")
    assert executed(workspace) == []


def test_the_agents_stages_run_beside_the_pipeline_and_leave_it_alone(
    finished: tuple[Path, str], commands: Commands
) -> None:
    workspace, _ = finished
    ans(workspace, "profile", "smoke", "--force")
    dvc(workspace, "repro")  # an experiment before may have left its settings and outputs
    lock = (workspace / "dvc.lock").read_bytes()
    executed(workspace)
    told = commands.ans(workspace, "run", "--agent")
    assert [line.split()[0] for line in executed(workspace)] == [
        stage.name for stage in TABLE if stage.group == AGENT
    ]
    assert "needed/accuracy" in told
    assert "agent/report/episodes.html" in told
    assert (workspace / "dvc.lock").read_bytes() == lock
    assert "Data and pipelines are up to date" in dvc(workspace, "repro", "agent/dvc.yaml")
    assert "agent" not in dvc(workspace, "repro")
    assert "labels_right" in commands.ans(workspace, "run", "--online")
    assert [line.split()[0] for line in executed(workspace)] == ["online"]
    assert "Data and pipelines are up to date" in dvc(workspace, "repro", "online/dvc.yaml")
    ans(workspace, "run", "--agent", PREFECT_API_URL="http://127.0.0.1:9/api")  # nobody there
    ans(workspace, "stage", "agent_sft@tools", "--force")
    assert [line.split()[0] for line in executed(workspace)] == ["agent_sft@tools"]


def test_the_pipeline_of_a_sam2_alone_ends_with_the_figures_of_its_memory(
    workspace: Path, commands: Commands
) -> None:
    commands.ans(workspace, "profile", "sam2-memory", "--force")
    told = commands.ans(workspace, "run")
    assert [line.split()[0] for line in executed(workspace)] == ["prepare", "base", "memory"]
    assert re.search(r"J&F without memory .* 0\.200 .* 0\.300", told)
    assert "runs/sam2-memory/memory/metrics.json" in told
    assert "up to date" in dvc(workspace, "repro", "memory")


def test_an_agent_that_starts_from_a_folder_of_ones_own_needs_no_model_of_the_pipeline(
    finished: tuple[Path, str], commands: Commands
) -> None:
    workspace, _ = finished
    own = workspace / "own/sa2va"
    own.mkdir(parents=True)
    (own / "result.txt").write_text("1")
    ans(workspace, "profile", "smoke", "--force", "agent.base=own/sa2v")
    assert "agent.base = 'own/sa2v' is no folder" in commands.ans(workspace, "run", "--agent", status=2)
    ans(workspace, "profile", "smoke", "--force", "agent.base=own/sa2va")
    shutil.rmtree(workspace / "runs/smoke/model")
    executed(workspace)
    agents = [stage.name for stage in TABLE if stage.group == AGENT]
    commands.ans(workspace, "run", "--agent")
    assert [line.split()[0] for line in executed(workspace)] == agents
    assert not (workspace / "runs/smoke/model").exists()
    (own / "result.txt").write_text("2")
    assert "cota failed: ValueError: stopped here" in commands.ans(
        workspace, "run", "--agent", status=1, FAKE_STOP="cota"
    )
    assert {line.split()[0] for line in executed(workspace)} == {"cota"}
