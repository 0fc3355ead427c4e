"""Stages as jobs of a real Slurm with two nodes (tests/slurm_cluster.py), and what is submitted, word by
word."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from ans_core.config import PROFILES, ConfigError, Launch, dump, resolve
from ans_core.config.names import DISTRIBUTED, GPU_STAGES, SEVERAL_NODES
from flows.eval_command import job_words
from tasks import jobs as jobs_module
from tasks import slurm, slurm_late, slurm_task
from tasks.jobs import Job
from tasks.stages import TABLE
from tests import slurm_cluster
from tests.job_workspace import (
    RESULT,
    again,
    check_an_evaluation_of_two_processes,
    check_that_an_evaluation_shares_two_nodes,
    check_that_prepare_is_a_job_on_one_core,
    check_that_prepare_shares_two_nodes,
    forget,
    logs,
    logs_of_starts,
    result_of_torchrun,
    saved_steps,
    start,
    steps,
    submitter,
    trained_by_jobs,
    until,
    variables_of,
)
from tests.workspace import LIMIT_S, ROOT, ans, end_all, executed, is_stage, run, words_of

TWO_NODES = (
    "launch.launcher=slurm",
    "launch.processes=2",
    "launch.resources={sft: {nodes: 2}}",
    "launch.slurm=[--ntasks-per-node=1]",
)


def test_what_is_submitted_has_the_stages_name_and_resources() -> None:
    launch = Launch.model_validate(
        {
            "launcher": "slurm",
            "slurm": ["--partition=gpu", "--nodes=2"],
            "resources": {"sft": {"nodes": 4, "gpus": 8, "options": ["--time=9"]}},
        }
    )

    job = Job(
        name="ans-sft-k", task="sft", words=("-m", "tasks", "sft"), launch=launch, processes=32, distributed=True,
        root=Path("/shared/a b"),
    )  # fmt: skip
    assert slurm.options(job)[1:] == (
        "--partition=gpu",
        "--nodes=2",
        "--nodes=4",
        "--gpus-per-node=8",
        "--time=9",
    )
    assert slurm.options(replace(job, task="rl"))[1:] == ("--partition=gpu", "--nodes=2")
    one_node = replace(job, task="base", distributed=False)
    assert slurm.options(one_node)[1:] == ("--partition=gpu", "--nodes=2", "--nodes=1")
    assert launch.of("sft").processes == 32
    assert launch.of("rl").processes == 1
    words = slurm.sbatch_words(job)
    assert words[:3] == ["sbatch", "--parsable", "--requeue"]
    assert {
        "--job-name=ans-sft-k",
        "--chdir=/shared/a b",
        "--output=/shared/a b/.ans/logs/ans-sft-k-%j.log",
        "--nodes=4",
    } <= {*words}
    script = words[-1]
    assert f"{sys.executable} -m tasks.slurm_task -m tasks sft\n" in script
    assert (
        subprocess.run(["sh", "-n"], input=script.removeprefix("--wrap="), text=True, check=False).returncode
        == 0
    )


def test_a_node_that_was_told_to_stop_says_so_whenever_slurm_ends_it() -> None:
    """srun sends TERM to a node as soon as another has ended: also to one that is just ending."""
    words = [
        "-c",
        "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: exit(1)); print(flush=True); time.sleep(60)",
    ]
    task = subprocess.Popen(
        [sys.executable, "-m", "tasks.slurm_task", *words], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert task.stdout
    task.stdout.readline()
    (child,) = psutil.Process(task.pid).children()
    task.send_signal(signal.SIGUSR1)
    child.send_signal(signal.SIGUSR1)
    child.wait(LIMIT_S)
    while task.poll() is None:
        task.send_signal(signal.SIGTERM)
    assert task.returncode == slurm_task.LATE


def test_processes_that_the_nodes_cannot_share_are_refused(tmp_path: Path) -> None:
    launch = Launch.model_validate({"launcher": "slurm", "resources": {"sft": {"nodes": 2}}})
    job = Job(name="j", task="sft", words=(), launch=launch, processes=2, distributed=True, root=tmp_path)
    with pytest.raises(ConfigError, match=r"asks for 2 nodes, and launch\.processes is 3"):
        replace(job, processes=3)


LOST = """#!/bin/sh
echo "$0" >> calls
[ -e submitted ] && { echo 8; exit; }
touch submitted
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""


def test_a_job_whose_submission_had_no_answer_is_looked_for_before_another_one_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text(LOST)
    (tmp_path / "squeue").write_text(f'#!/bin/sh\n[ -e submitted ] && echo "7|PENDING|{tmp_path}"\nexit 0\n')
    for name in ("sbatch", "squeue"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(jobs_module, "POLL_S", 0.01)
    monkeypatch.chdir(tmp_path)
    launch = Launch.model_validate({"launcher": "slurm"})
    job = Job(name="j", task="sft", words=(), launch=launch, processes=1, distributed=True, root=tmp_path)
    assert slurm.submit(job, dict(os.environ)) == "7"
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_a_start_that_waits_for_an_ending_job_obeys_a_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho asked >> calls; echo '7|COMPLETING|{tmp_path}'\n")
    (tmp_path / "scancel").write_text("#!/bin/sh\necho cancelled >> calls\n")
    for name in ("squeue", "scancel"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def term(seconds: float) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(time, "sleep", term)
    launch = Launch.model_validate({"launcher": "slurm"})
    job = Job(name="j", task="sft", words=(), launch=launch, processes=1, distributed=True, root=tmp_path)
    with pytest.raises(SystemExit):
        jobs_module.run(job, slurm)
    assert (tmp_path / "calls").read_text().split() == ["asked"]


def test_a_node_whose_process_is_killed_says_so_and_keeps_a_reason_that_is_there(tmp_path: Path) -> None:
    note = tmp_path / "note.json"
    words = ["-c", "import os; os.kill(os.getpid(), 9)"]
    for before, message in (
        ({}, "a process of node n7 ended without a word"),
        ({"status": 2, "message": "no"}, "no"),
    ):
        note.write_text(json.dumps(before))
        done = subprocess.run(
            [sys.executable, "-m", "tasks.slurm_task", *words], cwd=ROOT, check=False,
            env={**os.environ, "ANS_NOTE": str(note), "SLURMD_NODENAME": "n7"},
        )  # fmt: skip
        assert done.returncode == slurm_task.FAILED
        assert json.loads(note.read_text())["message"].startswith(message)


def test_a_job_whose_time_is_over_goes_on_while_it_makes_steps(tmp_path: Path) -> None:
    note = tmp_path / "job-7.json"
    goes_on = []
    for step in (None, None, 4, 4, 9, None, 9, 9):
        note.write_text(json.dumps({"log": "l"} | ({} if step is None else {"step": step})))
        goes_on.append(slurm_late.goes_on(note))
    assert goes_on == [True] * 7 + [False]
    assert json.loads(note.read_text())["status"] == 2
    assert "was over 3 times without a step in between" in note.read_text()


def test_the_stages_that_are_jobs_are_those_of_the_table() -> None:
    assert {stage.task for stage in TABLE if stage.gpu} == {*GPU_STAGES}
    assert {stage.task for stage in TABLE if stage.distributed} == {*DISTRIBUTED}
    sharing = {stage.task for stage in TABLE if stage.inference}
    assert {*SEVERAL_NODES} - {*DISTRIBUTED} == sharing - {"online"}


real = pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "there is one")


def of_slurm(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs Slurm's daemons, and minutes."""
    return real(pytest.mark.slow(pytest.mark.timeout(3 * LIMIT_S)(test)))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm") / "home") as variables:
        yield variables


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = trained_by_jobs(tmp_path_factory.mktemp("jobs"), *TWO_NODES)
    yield folder
    end_all(folder)


def jobs(variables: dict[str, str], *options: str) -> list[str]:
    return slurm_cluster.slurm(variables, "squeue", "--noheader", "--format=%A", *options).split()


ON_BOTH = ["process 0 of 2 on n1", "process 1 of 2 on n2"]


@pytest.fixture(scope="module")
def uninterrupted(workspace: Path, cluster: dict[str, str]) -> str:
    return result_of_torchrun(workspace, *TWO_NODES)


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """A training begins anew, and what a failed test leaves running is no other test's."""
    if "workspace" not in request.fixturenames:
        yield
        return
    folder = request.getfixturevalue("workspace")
    forget(folder)
    yield
    end_all(folder)


@of_slurm
def test_two_nodes_give_the_bytes_of_one_and_a_killed_submitter_never_leads_to_two_jobs(
    workspace: Path, cluster: dict[str, str], uninterrupted: str
) -> None:
    process = start(workspace, cluster, FAKE_PAUSE="1")
    (number,) = jobs(cluster)
    submitter(workspace).kill()
    process.wait()
    assert jobs(cluster) == [number]
    told = again(workspace, cluster)
    assert f"job {number} goes on" in told
    assert "sft: 100%" in told  # the job's own bar
    assert sorted(executed(workspace)) == ON_BOTH
    assert (workspace / RESULT).read_text() == uninterrupted
    assert jobs(cluster, "--states=all") == [number]


@of_slurm
def test_a_job_that_is_preempted_writes_a_state_and_goes_on_to_the_same_bytes(
    workspace: Path, cluster: dict[str, str], uninterrupted: str
) -> None:
    process = start(workspace, cluster, FAKE_PAUSE="1")
    slurm_cluster.slurm(
        cluster,
        "sbatch",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 5",
    )
    told, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, told
    assert "waits (" in told
    assert sorted(executed(workspace)) == sorted(2 * ON_BOTH)
    stopped = re.search(r"ended by SIGTERM after step (\d+)", logs(workspace))
    assert stopped
    assert 0 < int(stopped[1]) < 20
    assert (workspace / RESULT).read_text() == uninterrupted


@of_slurm
def test_a_job_goes_on_where_slurm_kills_a_node_that_waits_for_one_that_it_asked_to_end(
    workspace: Path, cluster: dict[str, str], uninterrupted: str
) -> None:
    process = start(workspace, cluster, FAKE_PAUSE="1", FAKE_SAVE="2")
    until(lambda: saved_steps(workspace), "no state is written")
    first, second = (
        next(p for p in slurm_cluster.processes(cluster, "python", node) if "tasks.slurm_task" in words_of(p))
        for node in slurm_cluster.NODES
    )
    second.send_signal(signal.SIGTERM)
    first.kill()  # as Slurm does where a process does not end within KillWait
    lines, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, lines
    assert "task 0: Killed" in logs(workspace)
    assert sorted(executed(workspace)) == sorted(2 * ON_BOTH)
    assert (workspace / RESULT).read_text() == uninterrupted


@of_slurm
def test_a_job_whose_time_is_nearly_over_is_queued_again_and_goes_on(
    workspace: Path, cluster: dict[str, str], uninterrupted: str
) -> None:
    process = start(workspace, cluster, FAKE_PAUSE="1")
    (number,) = jobs(cluster)
    slurm_cluster.slurm(cluster, "scancel", "--signal=USR1", number)  # as Slurm does for --signal
    told, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, told
    assert sorted(executed(workspace)) == sorted(2 * ON_BOTH)
    assert "ended by SIGUSR1 after step" in logs(workspace)
    assert (workspace / RESULT).read_text() == uninterrupted


@of_slurm
def test_a_cancelled_job_keeps_its_state_and_is_not_submitted_again(
    workspace: Path, cluster: dict[str, str], uninterrupted: str
) -> None:
    process = start(workspace, cluster, FAKE_PAUSE="1")
    (number,) = jobs(cluster)
    slurm_cluster.slurm(cluster, "scancel", number)
    told, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert re.search(rf"job {number} ended as CANCELLED", told), told
    assert jobs(cluster) == []
    executed(workspace)
    again(workspace, cluster)
    assert sorted(executed(workspace)) == ON_BOTH
    assert "ended by SIGTERM after step" in logs(workspace)
    assert (workspace / RESULT).read_text() == uninterrupted


@of_slurm
def test_a_start_right_after_a_job_was_cancelled_waits_for_its_state_and_goes_on(
    workspace: Path, cluster: dict[str, str], uninterrupted: str
) -> None:
    process = start(workspace, cluster, FAKE_PAUSE="1")
    (number,) = jobs(cluster)
    submitter(workspace).kill()
    process.wait()
    slurm_cluster.slurm(cluster, "scancel", number)
    told = again(workspace, cluster)
    assert "waits for the job before, which is ending" in told
    assert "ended by SIGTERM after step" in logs(workspace)
    assert (workspace / RESULT).read_text() == uninterrupted


@of_slurm
@pytest.mark.parametrize(("node", "silent"), [("n1", False), ("n2", True)], ids=["killed", "silent"])
def test_a_job_whose_node_dies_goes_on_from_its_last_state_once_there_is_one_again(
    workspace: Path, cluster: dict[str, str], uninterrupted: str, node: str, silent: bool
) -> None:
    """A process that is killed closes its connections, and the others fail. A machine without power does not,
    and they wait."""
    before = len(logs_of_starts(workspace))
    process = start(workspace, cluster, FAKE_PAUSE="1", FAKE_SAVE="2")
    (number,) = jobs(cluster)
    until(lambda: saved_steps(workspace), "no state is written")
    lost = slurm_cluster.processes_on(cluster, node)
    assert any(is_stage(part, "sft") for part in lost)
    for part in (*lost[1:], lost[0]):
        with suppress(psutil.NoSuchProcess):  # it ended with one that was killed before it
            part.suspend() if silent and part != lost[0] else part.kill()
    until(lambda: state_of(cluster, node).startswith("down"), "nobody misses the node")
    shown = ("squeue", "--noheader", "--format=%T", f"--jobs={number}")
    until(
        lambda: process.poll() is not None or slurm_cluster.slurm(cluster, *shown).strip() == "PENDING",
        "the job is not queued again",
    )
    for part in lost:
        with suppress(psutil.NoSuchProcess):
            part.kill()
    until(
        lambda: not [p for n in slurm_cluster.NODES for p in slurm_cluster.processes(cluster, node=n)],
        "one lives",
    )
    saved = saved_steps(workspace)[-1]
    slurm_cluster.start_node(cluster, node)
    lines, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, lines
    assert "waits (" in lines
    assert "ended as" not in lines
    # Slurm's TERM to the lost node may reach the job's next start there, which then starts once more
    assert set(executed(workspace)) == set(ON_BOTH)
    made = [steps(path.read_text()) for path in logs_of_starts(workspace)[before:]]
    lost_start, *others = [start for start in made if start]  # one may be ended before its first step
    assert saved >= max(1, lost_start[-1] - 2)
    assert (others[0][0], others[-1][-1]) == (saved, 19)
    # each begins after the last or, if that was killed, at its last state
    assert all(-2 <= after[0] - before[-1] <= 1 for before, after in pairwise(others))
    assert all(other == [*range(other[0], other[-1] + 1)] for other in others)
    assert (workspace / RESULT).read_text() == uninterrupted
    assert jobs(cluster, "--states=all").count(number) == 1


def state_of(variables: dict[str, str], node: str) -> str:
    return slurm_cluster.slurm(variables, "sinfo", "--noheader", f"--nodes={node}", "--format=%T").strip()


@of_slurm
def test_a_term_to_the_submitter_cancels_its_job(workspace: Path, cluster: dict[str, str]) -> None:
    process = start(workspace, cluster, FAKE_PAUSE="1")
    submitter(workspace).send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) != 0
    until(lambda: jobs(cluster) == [], "the job outlives its submitter")


@of_slurm
def test_a_wrong_setting_is_told_once_and_not_retried_and_what_slurm_refuses_is_one_sentence(
    workspace: Path, cluster: dict[str, str]
) -> None:
    variables = variables_of(workspace, cluster, FAKE_SETTINGS="1")
    told = ans(workspace, "run", "launch.processes=2", status=None, **variables)
    assert "sft.lora.rank is 7, no multiple of 4; set 8" in told
    assert "ended as FAILED (its log: " in told
    assert len(re.findall(r"job \d+ is submitted", told)) == 1
    refused = ans(
        workspace,
        "stage",
        "sft",
        "--force",
        status=None,
        **variables_of(workspace, cluster, SBATCH_PARTITION="nowhere"),
    )
    assert "invalid partition specified: nowhere" in refused
    assert "correct launch.slurm or launch.resources" in refused


@of_slurm
def test_an_evaluation_outside_of_the_pipeline_is_a_job_of_one_node(
    workspace: Path, cluster: dict[str, str]
) -> None:
    run(workspace, "-m", "dvc", "repro", "--single-item", "sft", **variables_of(workspace, cluster))
    executed(workspace)
    check_an_evaluation_of_two_processes(workspace, variables_of(workspace, cluster))


def test_ans_eval_is_a_job_where_the_settings_say_so_and_stays_here_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("profiles", "below"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dvc.yaml").touch()
    (tmp_path / "params.yaml").write_text(
        dump(
            resolve(
                ROOT / PROFILES / "smoke.yaml",
                ("launch.launcher=slurm", "launch.resources={evaluate: {gpus: 8}}"),
            )
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ans", "eval", "refcoco", "--model", "mine"])
    words = job_words(argparse.Namespace(device=None, processes=None))
    assert words is not None
    assert words[:2] == ["-m", "tasks.launcher"]
    assert words[2].startswith("ans-eval-")
    # one for each GPU
    assert words[3:] == [
        "evaluate",
        "-m",
        "flows.cli",
        "eval",
        "refcoco",
        "--model",
        "mine",
        "--processes",
        "8",
    ]
    named = job_words(argparse.Namespace(device=None, processes=2))
    assert named is not None
    assert "8" not in named
    assert job_words(argparse.Namespace(device="cpu", processes=None)) is None
    monkeypatch.setenv("ANS_JOB", "1")
    assert job_words(argparse.Namespace(device=None, processes=None)) is None
    monkeypatch.delenv("ANS_JOB")
    monkeypatch.chdir(tmp_path / "below")
    with pytest.raises(ValueError, match="call `ans eval` there, or give --device cpu"):
        job_words(argparse.Namespace(device=None, processes=None))


@of_slurm
def test_prepare_is_a_job_where_resources_name_it(workspace: Path, cluster: dict[str, str]) -> None:
    check_that_prepare_is_a_job_on_one_core(workspace, variables_of(workspace, cluster), *TWO_NODES)


@of_slurm
def test_prepare_shares_the_nodes_that_resources_give_it(workspace: Path, cluster: dict[str, str]) -> None:
    check_that_prepare_shares_two_nodes(workspace, variables_of(workspace, cluster), *TWO_NODES)


@of_slurm
def test_an_evaluation_shares_the_nodes_that_resources_give_it(
    workspace: Path, cluster: dict[str, str]
) -> None:
    run(workspace, "-m", "dvc", "repro", "--single-item", "sft", **variables_of(workspace, cluster))
    executed(workspace)
    check_that_an_evaluation_shares_two_nodes(
        workspace, variables_of(workspace, cluster), *TWO_NODES, second="0"
    )


@of_slurm
def test_a_stage_whose_time_is_over_three_times_without_a_step_ends_with_the_reason(
    workspace: Path, cluster: dict[str, str]
) -> None:
    stage = workspace / "ans_core/stages/prepare.py"
    content = stage.read_text()
    at_work = 'open("at_work", "a").close(); import time; time.sleep(600)'
    stage.write_text(content.replace("    name =", f"    {at_work}\n    name =", 1))
    resources = "launch.resources={prepare: {cpus: 1}, sft: {nodes: 2}}"
    ans(workspace, "profile", "smoke", *TWO_NODES, resources)
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro", "--single-item", "--force", "prepare"], cwd=workspace,
        start_new_session=True, text=True, env=variables_of(workspace, cluster), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    for _ in range(1 + slurm_late.MOST):
        until((workspace / "at_work").exists, "prepare does not begin")
        (workspace / "at_work").unlink()
        (number,) = jobs(cluster)
        slurm_cluster.slurm(cluster, "scancel", "--signal=USR1", number)  # as Slurm does for --signal
    lines, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert "was over 3 times without a step in between" in lines
    stage.write_text(content)
    ans(workspace, "profile", "smoke", *TWO_NODES)
