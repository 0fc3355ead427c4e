"""Stages as jobs of a real Slurm with two nodes (tests/slurm_cluster.py), and what is submitted, word by
word."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ans_core.config import PROFILES, Launch, dump, resolve
from ans_core.config.names import JOB_STAGES, SEVERAL_NODES
from flows.eval_job import job_words
from tasks import slurm, slurm_task
from tasks.stages import TABLE
from tests import slurm_cluster
from tests.workspace import LIMIT_S, ROOT, ans, dvc, end_all, environment, executed, living, make, run

TRAINING = '''
"""A training of a few steps on gloo, in place of sft."""

import os
import time

import torch
from torch import nn

from ans_core import dist
from ans_core.config import ConfigError
from ans_core.train import loop, states


class Batch:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return self


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, batch):
        loss = self.layer(batch.x).pow(2).mean() + torch.rand(())
        return loss, {}


def run(cfg, *, inputs, out, scratch, log, row=None):
    if "FAKE_SETTINGS" in os.environ:
        raise ConfigError("sft.lora.rank is 7, no multiple of 4; set 8")
    machine = loop.Machine(device=torch.device("cpu"))
    loop.let_processes_talk(machine)
    with open("executed.txt", "a") as file:
        file.write(f"process {dist.rank()} of {dist.world_size()} on {os.environ.get('SLURMD_NODENAME')}\\n")

    def make(step, micro):
        time.sleep(float(os.environ.get("FAKE_PAUSE", "0")))
        return Batch(torch.full((2, 4), step + dist.rank() + 1.0))

    schedule = loop.Schedule(steps=20, lr=0.01, weight_decay=0.0, warmup=0.0, clip_grad=1.0, accumulate=1, save_every=1000)
    module = Squares()
    curves = loop.train(module, make, name="sft", schedule=schedule, machine=machine, seed=1, scratch=scratch, log=log)
    if dist.rank() == 0:
        (out / "result.txt").write_text(str([p.tolist() for p in module.parameters()]) + str(curves))
    dist.wait_for_all()
    return {"final/score": 0.5}
'''
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
    assert slurm.options(launch, "sft", several=True)[1:] == (
        "--partition=gpu",
        "--nodes=2",
        "--nodes=4",
        "--gpus-per-node=8",
        "--time=9",
    )
    assert slurm.options(launch, "rl", several=True)[1:] == ("--partition=gpu", "--nodes=2")
    assert slurm.options(launch, "base", several=False)[1:] == ("--partition=gpu", "--nodes=2", "--nodes=1")
    assert launch.of("sft").processes == 32
    assert launch.of("rl").processes == 1
    job = slurm.Job(
        name="ans-sft-k", words=("-m", "tasks.sft"), options=("--nodes=4",), root=Path("/shared/a b")
    )
    words = slurm.sbatch_words(job)
    assert words[:3] == ["sbatch", "--parsable", "--requeue"]
    assert {
        "--job-name=ans-sft-k",
        "--chdir=/shared/a b",
        "--output=/shared/a b/.ans/logs/ans-sft-k-%j.log",
        "--nodes=4",
    } <= {*words}
    script = words[-1]
    assert f"{sys.executable} -m tasks.slurm_task -m tasks.sft\n" in script
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
    assert task.returncode == slurm_task.ASKED


def test_the_stages_that_are_jobs_are_those_of_the_table() -> None:
    assert {stage.task for stage in TABLE if stage.gpu} == {*JOB_STAGES}
    assert {stage.task for stage in TABLE if stage.distributed} == {*SEVERAL_NODES}


real = pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "there is one")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm") / "home") as variables:
        yield variables


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace in which all ran that sft needs, whose sft trains for two seconds on two processes."""
    folder = make(tmp_path_factory.mktemp("jobs"))
    dvc(folder, "repro", "memory")
    (folder / "ans_core/stages/sft.py").write_text(TRAINING)
    ans(folder, "profile", "smoke", *TWO_NODES)
    executed(folder)
    yield folder
    end_all(folder)


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.2)


def begun(folder: Path) -> bool:
    path = folder / "executed.txt"
    return path.exists() and len(path.read_text().splitlines()) == 2


def start(folder: Path, variables: dict[str, str], **extra: str) -> subprocess.Popen[str]:
    """Start sft by `dvc repro`; return once both of its processes have begun."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro", "--single-item", "--force", "sft"], cwd=folder,
        start_new_session=True, text=True, env=variables_of(folder, variables, **extra),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    until(lambda: begun(folder) or process.poll() is not None, "sft does not begin")
    assert process.poll() is None, process.communicate()[0]
    until(lambda: "step 2 " in newest_log(folder), "sft makes no step")
    return process


def variables_of(folder: Path, variables: dict[str, str], **extra: str) -> dict[str, str]:
    of_workspace = environment(folder)
    return {
        **of_workspace,
        **variables,
        "PATH": f"{Path(sys.executable).parent}:{variables['PATH']}",
        **extra,
    }


def jobs(variables: dict[str, str], *options: str) -> list[str]:
    return slurm_cluster.slurm(variables, "squeue", "--noheader", "--format=%A", *options).split()


def submitter(folder: Path) -> psutil.Process:
    (found,) = [
        p
        for p in living(folder)
        if p.cmdline()[-2:] == ["-m", "tasks.sft"] and "SLURM_JOB_ID" not in p.environ()
    ]
    return found


RESULT = "runs/smoke/sft/result.txt"
ON_BOTH = ["process 0 of 2 on n1", "process 1 of 2 on n2"]


@pytest.fixture(scope="module")
def uninterrupted(workspace: Path, cluster: dict[str, str]) -> str:
    """The result of torchrun on one node: that of two nodes is the same, byte for byte."""
    ans(workspace, "profile", "smoke", "launch.processes=2")
    dvc(workspace, "repro", "--single-item", "--force", "--no-run-cache", "sft")
    found = (workspace / RESULT).read_text()
    ans(workspace, "profile", "smoke", *TWO_NODES)
    executed(workspace)
    return found


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    """Each test trains anew: a finished training computes nothing."""
    if "workspace" in request.fixturenames:
        folder = request.getfixturevalue("workspace")
        for scratch in (folder / ".ans/scratch").glob("*/sft"):
            subprocess.run(["rm", "-r", str(scratch)], check=True)
        executed(folder)


@real
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_two_nodes_give_the_bytes_of_one_and_a_killed_submitter_never_leads_to_two_jobs(
    workspace: Path, cluster: dict[str, str], uninterrupted: str
) -> None:
    process = start(workspace, cluster, FAKE_PAUSE="1")
    (number,) = jobs(cluster)
    submitter(workspace).kill()
    process.wait()
    assert jobs(cluster) == [number]
    told = run(
        workspace, "-m", "dvc", "repro", "--single-item", "--force", "sft", **variables_of(workspace, cluster)
    )
    assert f"job {number} goes on" in told
    assert "sft: 100%" in told  # the job's own bar
    assert sorted(executed(workspace)) == ON_BOTH
    assert (workspace / RESULT).read_text() == uninterrupted
    assert jobs(cluster, "--states=all") == [number]


@real
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
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


@real
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
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


@real
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
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
    run(
        workspace, "-m", "dvc", "repro", "--single-item", "--force", "sft", **variables_of(workspace, cluster)
    )
    assert sorted(executed(workspace)) == ON_BOTH
    assert "ended by SIGTERM after step" in logs(workspace)
    assert (workspace / RESULT).read_text() == uninterrupted


@real
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_term_to_the_submitter_cancels_its_job(workspace: Path, cluster: dict[str, str]) -> None:
    process = start(workspace, cluster, FAKE_PAUSE="1")
    submitter(workspace).send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) != 0
    until(lambda: jobs(cluster) == [], "the job outlives its submitter")


@real
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_wrong_setting_is_told_once_and_not_retried_and_what_slurm_refuses_is_one_sentence(
    workspace: Path, cluster: dict[str, str]
) -> None:
    variables = variables_of(workspace, cluster, FAKE_SETTINGS="1")
    told = ans(workspace, "run", "launch.processes=2", status=None, **variables)
    assert "sft.lora.rank is 7, no multiple of 4; set 8" in told
    assert "ended as FAILED (Slurm's log: " in told
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


@real
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_an_evaluation_outside_of_the_pipeline_is_a_job_of_one_node(
    workspace: Path, cluster: dict[str, str]
) -> None:
    run(workspace, "-m", "dvc", "repro", "--single-item", "sft", **variables_of(workspace, cluster))
    executed(workspace)
    (workspace / "mine").mkdir()
    (workspace / "mine/result.txt").write_text("a checkpoint")
    script = (
        "from pathlib import Path; from ans_core.config import load; from flows.checkpoint_eval import evaluated;"
        "print(evaluated(Path('mine'), 'content', Path.cwd(), load(Path('params.yaml'))))"
    )
    told = run(workspace, "-c", script, **variables_of(workspace, cluster))
    assert "ans-eval-mine-" in told
    assert json.loads((Path(told.strip().splitlines()[-1]) / "metrics.json").read_text())
    assert executed(workspace) == ["evaluate@rl from 0"] * 2  # two processes of one node


def newest_log(folder: Path) -> str:
    """The log of the first process of the stage's last start."""
    found = [path for path in (folder / ".ans/logs").glob("smoke-sft-*.log") if "process" not in path.name]
    return max(found, key=lambda path: path.stat().st_mtime).read_text() if found else ""


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / ".ans/logs").glob("*.log"))


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
    assert words[:2] == ["-m", "tasks.slurm"]
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
