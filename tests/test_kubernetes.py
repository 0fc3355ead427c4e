"""The manifests of docker/kubernetes, against the schemas of Kubeflow's and Kubernetes' APIs."""

import importlib
import json
from typing import Any

import pytest
import yaml
from prefect.utilities.templating import apply_values

from ans_core.config import Launch
from tasks import kubernetes_jobs
from tasks.jobs import Job
from tests.kubernetes_cluster import without_nones
from tests.workspace import ROOT

FOLDER = ROOT / "docker/kubernetes"
PASSED = {
    "NCCL_DEBUG": "WARN",
    "TORCH_X": "${a: b}",
    "ANS_PIPELINE": "flow-1",
    "ANS_PIPELINE_PID": "12",  # with it a stage leaves the pipeline's run to the flow
}


def train_job(**resources: object) -> dict[str, Any]:
    launch = Launch.model_validate({"launcher": "kubernetes", "resources": {"sft": resources}}).of("sft")
    job = Job(
        name="ans-sft-k", task="sft", words=("-m", "tasks", "sft"), launch=launch, processes=launch.processes,
        distributed=True, root=ROOT,
    )  # fmt: skip
    return kubernetes_jobs.manifest(
        job, "0123abcd", PASSED | {"MLFLOW_TRACKING_PASSWORD": "secret", "ANS_TRACKER": "socket key"}
    )


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
        (train_job(nodes=2, gpus=8), "trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
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
    runtime = yaml.safe_load((FOLDER / "runtime.yaml").read_text())
    pods = [runtime["spec"]["template"]["spec"]["replicatedJobs"][0], pool_manifest()]
    specs = [(pod.get("template") or pod)["spec"]["template"]["spec"] for pod in pods]
    node, flow = (spec["containers"][0] for spec in specs)
    assert node["image"] == flow["image"]
    assert node["envFrom"] == flow["envFrom"] == [{"secretRef": {"name": "ans"}}]
    for spec in specs:
        assert spec["securityContext"]["runAsUser"] == 1000
        claim, shm = spec["volumes"]
        assert claim["persistentVolumeClaim"] == {"claimName": "ans"}
        assert shm["emptyDir"]["medium"] == "Memory"
    assert train_job()["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    account, role, binding = yaml.safe_load_all((FOLDER / "submitter.yaml").read_text())
    assert specs[1]["serviceAccountName"] == account["metadata"]["name"] == binding["subjects"][0]["name"]
    assert role["rules"][0]["resources"] == [kubernetes_jobs.KIND]


def test_a_stage_is_a_train_job_with_its_resources_words_and_no_keys() -> None:
    job = train_job(nodes=2, gpus=8)
    assert job["metadata"] == {"name": "ans-sft-k-0123abcd", "annotations": {"ans/job": "ans-sft-k"}}
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    assert trainer["resourcesPerNode"] == {
        "requests": {},
        "limits": {"nvidia.com/gpu": 8},
    }
    assert train_job(cpus=16)["spec"]["trainer"]["resourcesPerNode"]["requests"] == {"cpu": 16}
    notes, log = ".ans/jobs/ans-sft-k-0123abcd", ".ans/logs/ans-sft-k-0123abcd.log"
    assert trainer["args"] == [notes, log, "-m", "tasks", "sft"]
    values = {one["name"]: one["value"] for one in trainer["env"]}
    assert values == PASSED | {"ANS_JOB": "1"}
    assert train_job()["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 1
