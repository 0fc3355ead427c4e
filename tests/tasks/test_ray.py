"""Stages as jobs of a real Ray with two nodes (tests/ray_cluster.py)."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import ray_cluster
from tests.job_workspace import (
    RESULT,
    again,
    check_an_evaluation_of_two_processes,
    check_that_an_evaluation_shares_two_nodes,
    check_that_prepare_is_a_job_on_one_core,
    check_that_prepare_shares_two_nodes,
    forget,
    logs,
    newest_log,
    result_of_torchrun,
    start,
    steps,
    submitter,
    trained_by_jobs,
    trainings,
    until,
    variables_of,
)
from tests.workspace import LIMIT_S, ans, end_all, executed

TWO_NODES = (
    "launch.launcher=ray",
    "launch.processes=2",
    "launch.device=cpu",
    "launch.resources={sft: {nodes: 2}}",
    f"launch.ray_python={ray_cluster.PYTHON}",
)
BOTH = ["process 0 of 2 on 0", "process 1 of 2 on 1"]
"""With local ranks: both nodes have one address."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.skipif(bool(ray_cluster.missing()), reason=ray_cluster.missing() or "there is one"),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = trained_by_jobs(tmp_path_factory.mktemp("jobs"), *TWO_NODES)
    yield folder
    end_all(folder)


@pytest.fixture(scope="module")
def nodes() -> Iterator[ray_cluster.Nodes]:
    with ray_cluster.cluster() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def uninterrupted(workspace: Path) -> str:
    return result_of_torchrun(workspace, *TWO_NODES)


@pytest.fixture(autouse=True)
def fresh(workspace: Path, uninterrupted: str) -> Iterator[None]:
    """A training begins anew, and what a failed test leaves running is no other test's."""
    forget(workspace)
    yield
    end_all(workspace)


def jobs(folder: Path) -> set[str]:
    """The jobs that were submitted, in this workspace."""
    return {path.name for path in (folder / ".ans/logs").glob("ans-sft-*.log")}


def test_two_nodes_give_the_bytes_of_one_and_a_killed_submitter_never_leads_to_two_jobs(
    workspace: Path, nodes: ray_cluster.Nodes, uninterrupted: str
) -> None:
    before = jobs(workspace)
    process = start(workspace, nodes.variables, FAKE_PAUSE="1", OPENAI_API_KEY="secret")
    workers = [psutil.Process(p.ppid()) for p in trainings(workspace) if "ANS_JOB" in p.environ()]
    assert len({worker.ppid() for worker in workers}) == 2  # raylets
    submitter(workspace).kill()
    process.wait()
    lines = again(workspace, nodes.variables)
    (name,) = jobs(workspace) - before
    assert re.search(rf"job {name[-12:-4]} goes on", lines)
    assert "sft: 100%" in lines  # the job's own bar
    assert sorted(executed(workspace)) == BOTH
    assert (workspace / RESULT).read_text() == uninterrupted
    assert not [*(workspace / ".ans/jobs").glob("*.job")]  # which has the submitter's keys


@pytest.mark.parametrize("killed", ["worker", "process", "node", "preempted node"])
def test_a_killed_part_of_a_job_leads_to_a_start_from_the_last_state_and_to_the_same_bytes(
    workspace: Path, nodes: ray_cluster.Nodes, uninterrupted: str, killed: str
) -> None:
    before = jobs(workspace)
    process = start(workspace, nodes.variables, FAKE_PAUSE="1", FAKE_SAVE="2")
    (name,) = jobs(workspace) - before
    begun = workspace / ".ans/jobs" / name.replace(".log", ".begun")
    until(lambda: [*(workspace / ".ans/scratch").glob("*/sft/**/step-*[0-9]")], "no state is written")
    (second,) = [p for p in trainings(workspace) if p.environ().get("RANK") == "1"]
    if killed == "preempted node":  # of which Ray does not tell callbacks
        nodes.preempt()
        nodes.start()
    elif killed == "node":
        nodes.kill()
        until(lambda: not begun.exists(), "the job does not wait for a node")
        nodes.start()
    else:
        (psutil.Process(second.ppid()) if killed == "worker" else second).kill()
    lines, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, lines
    assert sorted(executed(workspace)) == sorted(2 * BOTH)
    assert steps(newest_log(workspace))[0] > 1
    assert (workspace / RESULT).read_text() == uninterrupted


def test_a_term_to_the_submitter_stops_its_job_after_a_state_and_a_new_one_goes_on(
    workspace: Path, nodes: ray_cluster.Nodes, uninterrupted: str
) -> None:
    process = start(workspace, nodes.variables, FAKE_PAUSE="1")
    submitter(workspace).send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) != 0
    again(workspace, nodes.variables)  # at once, while the job may still be ending
    assert "ended by SIGTERM after step" in logs(workspace)
    assert (workspace / RESULT).read_text() == uninterrupted


def test_what_no_node_can_meet_and_a_wrong_setting_are_one_sentence_each_and_not_tried_again(
    workspace: Path, nodes: ray_cluster.Nodes
) -> None:
    before = jobs(workspace)
    variables = variables_of(workspace, nodes.variables, FAKE_SETTINGS="1")
    lines = ans(workspace, "run", status=None, **variables)
    assert "sft.lora.rank is 7, no multiple of 4; set 8" in lines
    assert "ended as FAILED (its log: " in lines
    begin_s = time.monotonic()
    settings = ("launch.resources={sft: {nodes: 2, gpus: 8}}", "sft.optim.batch=16")
    refused = ans(workspace, "run", *settings, status=None, **variables_of(workspace, nodes.variables))
    assert "the stage wants 16 x 1 CPU, 1 GPU, and Ray's nodes have 4 CPU, 2 GPU; 4 CPU, 2 GPU" in refused
    assert time.monotonic() - begin_s < 180
    assert len(jobs(workspace) - before) == 2
    wrong = variables_of(workspace, nodes.variables, RAY_AUTH_TOKEN="0" * 64)
    assert "Invalid authentication token" in ans(workspace, "stage", "sft", "--force", status=None, **wrong)


def test_an_evaluation_outside_of_the_pipeline_is_a_job_of_one_worker(
    workspace: Path, nodes: ray_cluster.Nodes
) -> None:
    again(workspace, nodes.variables)
    executed(workspace)
    check_an_evaluation_of_two_processes(workspace, variables_of(workspace, nodes.variables))


def test_prepare_is_a_job_where_resources_name_it(workspace: Path, nodes: ray_cluster.Nodes) -> None:
    check_that_prepare_is_a_job_on_one_core(workspace, variables_of(workspace, nodes.variables), *TWO_NODES)


def test_prepare_shares_the_nodes_that_resources_give_it(workspace: Path, nodes: ray_cluster.Nodes) -> None:
    check_that_prepare_shares_two_nodes(workspace, variables_of(workspace, nodes.variables), *TWO_NODES)


def test_an_evaluation_shares_the_nodes_that_resources_give_it(
    workspace: Path, nodes: ray_cluster.Nodes
) -> None:
    check_that_an_evaluation_shares_two_nodes(
        workspace, variables_of(workspace, nodes.variables), *TWO_NODES, second="1"
    )
