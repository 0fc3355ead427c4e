"""The manifests of docker/kubernetes: against the schemas of Kubeflow's and Kubernetes' APIs, and a TrainJob's command as two
nodes on this machine."""

import importlib
import json
import os
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.templating import apply_values

from tests.ports import free_port
from tests.workspace import ROOT, ans, dvc, end_all, environment, executed, make

FOLDER = ROOT / "docker/kubernetes"


def train_job(**values: object) -> dict[str, Any]:
    """Fill in the template as `envsubst '$STAGE $NODES $GPUS'` does, which leaves other `$` alone."""
    text = (FOLDER / "trainjob.yaml").read_text()
    job: dict[str, Any] = yaml.safe_load(string.Template(text).safe_substitute(values))
    return job


def without_nones(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nones(item) for key, item in value.items() if item is not None}
    return [without_nones(item) for item in value] if isinstance(value, list) else value


def model(module: str, name: str) -> Any:
    pytest.importorskip(
        "kubeflow_trainer_api",
        reason="no Kubeflow: pip install --no-deps --target DIR kubeflow-trainer-api==2.3.0, and PYTHONPATH=DIR",
    )
    return getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), name)


def pool_manifest() -> dict[str, Any]:
    """The job of a flow, as Prefect's worker fills in the template."""
    pool = json.loads((FOLDER / "pool.json").read_text())
    defaults = {
        key: value["default"] for key, value in pool["variables"]["properties"].items() if "default" in value
    }
    run = {"name": "run", "command": ["prefect", "flow-run", "execute"], "env": [{"name": "A", "value": "b"}]}
    job: dict[str, Any] = apply_values(pool["job_configuration"]["job_manifest"], defaults | run)
    return job


@pytest.mark.parametrize(
    ("manifest", "module", "name"),
    [
        (train_job(STAGE="sft", NODES=2, GPUS=8), "trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
        (
            yaml.safe_load((FOLDER / "runtime.yaml").read_text()),
            "trainer_v1alpha1_training_runtime",
            "TrainerV1alpha1TrainingRuntime",
        ),
        (
            yaml.safe_load((FOLDER / "workspace.yaml").read_text()),
            "io_k8s_api_core_v1_persistent_volume_claim",
            "IoK8sApiCoreV1PersistentVolumeClaim",
        ),
        (pool_manifest(), "io_k8s_api_batch_v1_job", "IoK8sApiBatchV1Job"),
    ],
    ids=["trainjob", "runtime", "workspace", "pool"],
)
def test_a_manifest_holds_nothing_that_its_schema_does_not_have(
    manifest: dict[str, Any], module: str, name: str
) -> None:
    """The models drop a field that they don't have, and refuse values of another type."""
    if (
        name == "IoK8sApiBatchV1Job"
    ):  # Prefect wants these two in the pod, where Kubernetes has no such fields
        for field in ("completions", "parallelism"):
            del manifest["spec"]["template"]["spec"][field]
    read = model(module, name).from_dict(manifest)
    assert without_nones(json.loads(read.to_json())) == without_nones(manifest)


def test_job_and_flow_share_claim_secret_image_and_user() -> None:
    pods = [
        yaml.safe_load((FOLDER / "runtime.yaml").read_text())["spec"]["template"]["spec"]["replicatedJobs"][
            0
        ],
        pool_manifest(),
    ]
    specs = [(pod.get("template") or pod)["spec"]["template"]["spec"] for pod in pods]
    node, flow = (spec["containers"][0] for spec in specs)
    assert node["image"] == flow["image"]
    assert node["envFrom"] == flow["envFrom"] == [{"secretRef": {"name": "ans"}}]
    for spec in specs:
        assert spec["securityContext"]["runAsUser"] == 1000
        claim, shm = spec["volumes"]
        assert claim["persistentVolumeClaim"] == {"claimName": "ans"}
        assert shm["emptyDir"]["medium"] == "Memory"
    assert train_job(STAGE="sft", NODES=1, GPUS=1)["spec"]["runtimeRef"]["name"] == "ans"


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    workspace = make(tmp_path)
    yield workspace
    end_all(workspace)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_job_of_two_nodes_trains_once_and_the_flow_finds_it_done(workspace: Path) -> None:
    """Both nodes run the manifest's own command, with the variables of Kubeflow's torch runtime."""
    ans(workspace, "profile", "smoke", "launch.processes=2")
    dvc(workspace, "repro", "memory")
    executed(workspace)
    job = train_job(STAGE="sft", NODES=2, GPUS=1)["spec"]["trainer"]
    command = [*job["command"], *(word.replace("/workspace", str(workspace)) for word in job["args"])]
    port = str(free_port())
    nodes = []
    for rank in ("0", "1"):
        torch_runtime = {
            "PET_NNODES": str(job["numNodes"]), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": rank,
            "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port,
        }  # fmt: skip
        nodes.append(subprocess.Popen(command, env=environment(workspace, **torch_runtime), cwd=os.sep))
    assert [node.wait() for node in nodes] == [0, 0]
    assert sorted(executed(workspace)) == ["sft from 0"] * 2
    ans(workspace, "stage", "sft")
    assert executed(workspace) == []
