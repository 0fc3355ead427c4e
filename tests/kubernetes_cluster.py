"""A double of Kubernetes with Kubeflow Trainer, for what tasks/kubernetes_jobs.py asks of it: the API of TrainJobs, whose bodies
the models of kubeflow-trainer-api check, and pods that are processes of this machine.

pip install --target DIR --no-deps -r requirements/kubernetes.txt kubeflow-trainer-api==2.3.0 kubeflow==0.5.0; PYTHONPATH=DIR
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import yaml

from tasks.ports import free_port
from tests.workspace import ROOT

PLACE = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/lab/trainjobs"
QUOTA = 8
"""GPUs of a TrainJob; more are refused, as by a quota."""
RUNTIME = yaml.safe_load((ROOT / "docker/kubernetes/runtime.yaml").read_text())["spec"]["template"]["spec"]
(POD,) = RUNTIME["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]


def missing() -> str:
    """Return why no TrainJob can be submitted here; nothing if one can."""
    there = all(find_spec(name) for name in ("kubernetes", "kubeflow_trainer_api"))
    return "" if there else f"no client or no models: {__doc__.splitlines()[-1]}"  # type: ignore[union-attr]


def without_nones(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nones(item) for key, item in value.items() if item is not None}
    return [without_nones(item) for item in value] if isinstance(value, list) else value


def refusal(body: dict[str, Any]) -> str:
    """Return why a TrainJob is no TrainJob; nothing if it is one."""
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    try:
        read = TrainerV1alpha1TrainJob.from_dict(body)
    except ValueError as error:
        return str(error)
    return "" if without_nones(json.loads(read.to_json())) == without_nones(body) else "unknown fields"


def environment_of(folder: Path, trainer: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a TrainJob's pods that work in this folder: the runtime's, its own, and those of Trainer's torch plugin."""
    runtime = {one["name"]: one["value"] for one in POD["env"] if one["name"] != "MLFLOW_TRACKING_URI"}
    runtime = {key: value.replace("/workspace", str(folder)) for key, value in runtime.items()}
    own = {one["name"]: one["value"] for one in trainer["env"]}
    place = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "auto",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    return runtime | own | place


class TrainJob:
    """A TrainJob and its pods: as JobSet does, all of them start again after one that failed, so often as the runtime allows."""

    def __init__(self, body: dict[str, Any], folder: Path, environment: dict[str, str]) -> None:
        self.body, self._folder, self._environment = body, folder, environment
        self._pods: list[subprocess.Popen[bytes]] = []
        self._restarts, self._ending = -1, False
        self.body["status"] = {}

    def step(self) -> bool:
        """Do what is due; return whether the TrainJob is gone."""
        codes = [pod.poll() for pod in self._pods]
        deleted = "deletionTimestamp" in self.body["metadata"]
        failed = any(codes)
        if (deleted or failed) and not self._ending:
            self._ending = True
            for pod in self._pods:
                pod.terminate()
        if None in codes:
            return False
        if deleted or self.ended():
            return deleted
        if not codes or (failed and self._restarts < RUNTIME["failurePolicy"]["maxRestarts"]):
            self._start()
        else:
            kind = "Failed" if failed else "Complete"
            condition = {
                "type": kind,
                "status": "True",
                "message": "a pod failed too often" if failed else "",
            }
            self.body["status"]["conditions"] = [condition]
        return False

    def ended(self) -> bool:
        return "conditions" in self.body["status"]

    def _start(self) -> None:
        trainer = self.body["spec"]["trainer"]
        self._restarts, self._ending = self._restarts + 1, False
        environment = self._environment | environment_of(self._folder, trainer)
        self._pods = [
            subprocess.Popen(
                [*trainer["command"], *trainer["args"]], cwd=POD["workingDir"].replace("/workspace", str(self._folder)),
                env=environment | {"PET_NODE_RANK": str(rank)},
            )
            for rank in range(trainer["numNodes"])
        ]  # fmt: skip
        self.body["status"]["jobsStatus"] = [{"name": "node", "ready": 1}]

    def lose(self, rank: int) -> None:
        """End all of a pod at once, as with its node."""
        pod = psutil.Process(self._pods[rank].pid)
        for process in [*pod.children(recursive=True), pod]:
            process.kill()


class Api(ThreadingHTTPServer):
    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.jobs: dict[str, TrainJob] = {}
        self.submitted: list[str] = []
        self.folder, self.environment = folder, environment


class Handler(BaseHTTPRequestHandler):
    server: Api

    def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, message: str) -> None:
        self.reply(status, {"kind": "Status", "status": "Failure", "message": message, "code": status})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        trainer, name = body["spec"]["trainer"], body["metadata"]["name"]
        if not self.path.startswith(PLACE):
            self.refuse(404, "the server could not find the requested resource")
        elif why := refusal(body):
            self.refuse(422, why)
        elif trainer["numNodes"] * trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] > QUOTA:
            self.refuse(403, f"exceeded quota: gpus, limited: requests.nvidia.com/gpu={QUOTA}")
        elif name in self.server.jobs:
            self.refuse(409, f'trainjobs "{name}" already exists')
        else:
            self.server.jobs[name] = TrainJob(body, self.server.folder, self.server.environment)
            self.server.submitted.append(name)
            self.reply(201, body)

    def do_GET(self) -> None:
        job = self.server.jobs.get(self.path.partition("?")[0].rpartition("/")[2])
        if self.path.partition("?")[0] == PLACE:
            self.reply(200, {"items": [job.body for job in [*self.server.jobs.values()]]})
        elif job:
            self.reply(200, job.body)
        else:
            self.refuse(404, "not found")

    def do_DELETE(self) -> None:
        job = self.server.jobs.get(self.path.partition("?")[0].rpartition("/")[2])
        if not job:
            self.refuse(404, "not found")
            return
        assert "propagationPolicy=Foreground" in self.path
        job.body["metadata"]["deletionTimestamp"] = "now"
        self.reply(200, {"status": "Success"})

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def cluster(folder: Path, home: Path, environment: dict[str, str]) -> Iterator[tuple[Api, dict[str, str]]]:
    """Serve a Kubernetes whose pods work in this folder; yield it, and the variables by which clients find it."""
    import kubernetes

    api = Api(folder, environment)
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me", "namespace": "lab"}}],
    }  # fmt: skip
    (home / "kubeconfig").write_text(yaml.safe_dump(config))
    over = threading.Event()

    def control() -> None:
        while not over.wait(0.2):
            for name, job in [*api.jobs.items()]:
                if job.step():
                    del api.jobs[name]

    threads = [threading.Thread(target=run) for run in (control, api.serve_forever)]
    for thread in threads:
        thread.start()
    try:
        client = Path(kubernetes.__file__).parents[1]
        yield api, {"KUBECONFIG": str(home / "kubeconfig"), "PYTHONPATH": f"{folder}:{client}"}
    finally:
        over.set()
        api.shutdown()
        for thread in threads:
            thread.join()
        api.server_close()
