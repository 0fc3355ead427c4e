"""Stages as TrainJobs, by Kubernetes' own client, on a double of the API server whose pods are processes
(tests/kubernetes_cluster.py)."""

from __future__ import annotations

import shutil
import signal
import site
from collections.abc import Iterator
from pathlib import Path

import pytest

from ans_core.config import Launch
from tasks import kubernetes_jobs
from tasks.jobs import Job
from tests import kubernetes_cluster
from tests.job_workspace import (
    RESULT,
    again,
    check_an_evaluation_of_two_processes,
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
from tests.workspace import LIMIT_S, ROOT, ans, end_all, executed

TWO_NODES = (
    "launch.launcher=kubernetes",
    "launch.processes=2",
    "launch.device=cpu",
    "launch.resources={sft: {nodes: 2}}",
)
BOTH = ["process 0 of 2 on 0", "process 1 of 2 on 0"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.skipif(
        bool(kubernetes_cluster.missing()), reason=kubernetes_cluster.missing() or "there is one"
    ),
]
Cluster = tuple[kubernetes_cluster.Api, dict[str, str]]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = trained_by_jobs(tmp_path_factory.mktemp("jobs"), *TWO_NODES)
    shutil.copytree(ROOT / "docker/kubernetes", folder / "docker/kubernetes")
    yield folder
    end_all(folder)


@pytest.fixture(scope="module")
def uninterrupted(workspace: Path) -> str:
    return result_of_torchrun(workspace, *TWO_NODES)


@pytest.fixture
def cluster(workspace: Path, uninterrupted: str, tmp_path: Path) -> Iterator[Cluster]:
    forget(workspace)
    pods = variables_of(workspace, {}, FAKE_PAUSE="1", FAKE_SAVE="2")
    with kubernetes_cluster.cluster(workspace, tmp_path, pods) as cluster:
        yield cluster
        end_all(workspace)


def test_two_nodes_give_the_bytes_of_one_and_a_killed_submitter_never_leads_to_two_jobs(
    workspace: Path, cluster: Cluster, uninterrupted: str
) -> None:
    process = start(workspace, cluster[1], NCCL_DEBUG="WARN", OPENAI_API_KEY="secret")
    (name,) = cluster[0].submitted
    environment = cluster[0].jobs[name].body["spec"]["trainer"]["env"]
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in environment
    assert "secret" not in str(environment)
    submitter(workspace).kill()
    process.wait()
    lines = again(workspace, cluster[1])
    assert f"job {name[-8:]} goes on" in lines
    assert "sft: 100%" in lines  # the job's own bar
    assert cluster[0].submitted == [name]
    assert sorted(executed(workspace)) == BOTH
    assert (workspace / RESULT).read_text() == uninterrupted


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_pod_leads_to_a_start_from_the_last_state_and_to_the_same_bytes(
    workspace: Path, cluster: Cluster, uninterrupted: str, rank: int
) -> None:
    before = len(logs_of_starts(workspace))
    process = start(workspace, cluster[1])
    until(lambda: saved_steps(workspace), "no state is written")
    (job,) = cluster[0].jobs.values()
    job.lose(rank)
    lines, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, lines
    assert len(cluster[0].submitted) == 1
    assert sorted(executed(workspace)) == sorted(2 * BOTH)
    lost, resumed = [steps(path.read_text()) for path in logs_of_starts(workspace)[before:]]
    assert 1 < resumed[0] <= lost[-1] + 1
    assert lost[-1] - 2 <= resumed[0]
    assert (workspace / RESULT).read_text() == uninterrupted


def test_a_term_to_the_submitter_deletes_its_job_and_a_new_one_goes_on_from_its_state(
    workspace: Path, cluster: Cluster, uninterrupted: str
) -> None:
    process = start(workspace, cluster[1])
    submitter(workspace).send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) != 0
    again(workspace, cluster[1])  # at once, while the pods may still be ending
    assert "ended by SIGTERM after step" in logs(workspace)
    assert len(cluster[0].submitted) == 2
    assert (workspace / RESULT).read_text() == uninterrupted


def test_a_deleted_job_a_wrong_setting_and_a_refused_one_are_a_sentence_each_and_not_tried_again(
    workspace: Path, cluster: Cluster
) -> None:
    process = start(workspace, cluster[1])
    (job,) = cluster[0].jobs.values()
    job.body["metadata"]["deletionTimestamp"] = "now"
    lines, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert "ended as deleted" in lines
    cluster[0].environment["FAKE_SETTINGS"] = "1"
    lines = ans(workspace, "run", status=None, **variables_of(workspace, cluster[1]))
    assert "sft.lora.rank is 7, no multiple of 4; set 8" in lines
    assert "ended as Complete (its log: " in lines
    assert len(cluster[0].submitted) == 2
    settings = ("launch.resources={sft: {nodes: 2, gpus: 8}}", "sft.optim.batch=16")
    refused = ans(workspace, "run", *settings, status=None, **variables_of(workspace, cluster[1]))
    assert "Kubernetes refuses to create TrainJobs in lab (403 Forbidden): exceeded quota: gpus" in refused
    assert len(cluster[0].submitted) == 2
    ans(workspace, "profile", "smoke", *TWO_NODES)
    nobody = variables_of(workspace, cluster[1] | {"KUBECONFIG": "/nowhere"})
    assert "no cluster is named" in ans(workspace, "stage", "sft", "--force", status=None, **nobody)


def test_an_evaluation_outside_of_the_pipeline_is_a_job_of_one_pod(workspace: Path, cluster: Cluster) -> None:
    again(workspace, cluster[1])
    executed(workspace)
    check_an_evaluation_of_two_processes(workspace, variables_of(workspace, cluster[1]))


def test_prepare_shares_the_pods_that_resources_give_it(workspace: Path, cluster: Cluster) -> None:
    check_that_prepare_shares_two_nodes(workspace, variables_of(workspace, cluster[1]), *TWO_NODES)


def test_kubeflows_own_local_backend_runs_what_a_pod_runs(
    workspace: Path, uninterrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That backend runs a function in an environment that it makes, on one node; it takes no manifest."""
    kubeflow = pytest.importorskip(
        "kubeflow.trainer",
        reason="no Kubeflow client: pip install --no-deps --target DIR kubeflow==0.5.0, and PYTHONPATH=DIR",
    )
    one_node = {"launcher": "kubernetes", "processes": 2, "device": "cpu"}
    ans(workspace, "profile", "smoke", *(f"launch.{name}={value}" for name, value in one_node.items()))
    forget(workspace)
    launch = Launch.model_validate(one_node).of("sft")
    job = Job(
        name="ans-sft-local", task="sft", words=("-m", "tasks", "sft"), launch=launch, processes=2,
        distributed=True, root=workspace,
    )  # fmt: skip
    trainer = kubernetes_jobs.manifest(job, "0", {})["spec"]["trainer"]
    node = kubernetes_cluster.environment_of(workspace, trainer) | {"PET_NODE_RANK": "0"}
    path = {"PYTHONPATH": f"{workspace}:{site.getsitepackages()[0]}"}

    def pod(command: list[str]) -> None:
        import subprocess
        import sys

        sys.exit(subprocess.run(command).returncode)

    job.notes.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(workspace)  # Kubeflow changes the folder, and comes back
    client = kubeflow.TrainerClient(kubeflow.LocalProcessBackendConfig())
    runtime = client.get_runtime("torch-distributed")
    runtime.trainer.framework = "python"  # starts the function as it stands; `torch` installs a torchrun
    command = ["env", f"--chdir={workspace}", *trainer["command"], *trainer["args"]]
    own = kubeflow.CustomTrainer(func=pod, func_args=command, env=variables_of(workspace, node | path))
    name = client.train(runtime=runtime, trainer=own)
    ended = client.wait_for_job_status(name, {"Complete", "Failed"}, timeout=int(LIMIT_S))
    assert ended.status == "Complete", "\n".join(client.get_job_logs(name))
    assert Path(f"{job.notes}-0.exit").read_text() == "0", job.log("0").read_text()
    assert sorted(executed(workspace)) == ["process 0 of 2 on 0", "process 1 of 2 on 1"]
    assert (workspace / RESULT).read_text() == uninterrupted
