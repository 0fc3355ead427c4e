"""A job of tasks/jobs.py as a TrainJob of Kubeflow Trainer v2, by Kubernetes' own client;
tasks/kubernetes_task.py runs in its pods."""

from __future__ import annotations

import json
import os
import re
import string
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from urllib3.exceptions import HTTPError

from ans_core.config import ConfigError
from tasks.jobs import IN_JOB, Job, State, answer, unless_ending

GROUP, VERSION, KIND = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
MANIFEST = "docker/kubernetes/trainjob.yaml"
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PASSED = re.compile(r"ANS_(CORES|PIPELINE(_PID)?|STORE_AWAY|MEDIA_CACHE_GB|TRACEBACK)|(NCCL|TORCH)_.*")
"""Variables of the submitter that pods get, which anyone can read in the TrainJob; the runtime brings the
others, with the keys."""
TIMEOUT_S = 60.0


def find(job: Job) -> str | None:
    """Return the number of the live job; one that is deleted, and writes its state, is waited for."""

    def live() -> list[dict[str, Any]]:
        there = ask("list", waits=False)["items"]
        runtime = manifest(job, "", {})["spec"]["runtimeRef"]["name"]  # another one is another workspace
        return [
            other
            for other in there
            if other["metadata"].get("annotations", {}).get("ans/job") == job.name
            and other["spec"]["runtimeRef"]["name"] == runtime
            and not ends(other).keys() & {"Complete", "Failed"}
        ]

    other = unless_ending(job, live, lambda other: "deletionTimestamp" in other["metadata"])
    return str(other["metadata"]["name"]).rpartition("-")[2] if other else None


def submit(job: Job, environment: dict[str, str]) -> str:
    number = uuid.uuid4().hex[:8]
    ask("create", manifest(job, number, environment), field_validation="Strict")
    return number


def manifest(job: Job, number: str, environment: dict[str, str]) -> dict[str, Any]:
    """Fill in the workspace's TrainJob. Paths in it are those in the workspace, which pods have elsewhere."""
    paths = (f"{job.notes}-{number}", job.log(number))
    variables = {k: v for k, v in environment.items() if PASSED.fullmatch(k)} | {IN_JOB: "1"}
    values = {
        "NAME": name(job, number), "JOB": job.name, "NODES": job.resources.nodes,
        "GPUS": job.gpus, "REQUESTS": json.dumps({"cpu": job.resources.cpus} if job.resources.cpus else {}),
        "WORDS": json.dumps([*(os.path.relpath(path, job.root) for path in paths), *job.words]),
        "VARIABLES": json.dumps([{"name": k, "value": v} for k, v in variables.items()]),
    }  # fmt: skip
    filled: dict[str, Any] = yaml.safe_load(
        string.Template((job.root / MANIFEST).read_text(encoding="utf-8")).substitute(values)
    )
    return filled


def name(job: Job, number: str) -> str:
    """Return the TrainJob's name: small letters, digits and hyphens, so few that the pods' names have room."""
    return f"{re.sub('[^a-z0-9]+', '-', job.name.lower())[:40].strip('-')}-{number}"


def cancel(job: Job, number: str) -> None:
    """Delete the TrainJob, which is there until its pods have ended."""
    with suppress(LookupError):
        ask("delete", name(job, number), waits=False, propagation_policy="Foreground")


def state(job: Job, number: str) -> State:
    try:
        there = ask("get", name(job, number))
    except LookupError:
        return State(name="deleted", ended=True, cancelled=True)
    ended = ends(there)
    if "Complete" in ended:
        return State(name="Complete", ended=True, by_itself=True)
    if "Failed" in ended:
        return State(name=f"Failed ({ended['Failed']})", ended=True)
    running = any(part["ready"] for part in there.get("status", {}).get("jobsStatus", []))
    return State(
        name="", waits_for="" if running else ended.get("Suspended", "its pods have no node yet, or no image")
    )


def ends(there: dict[str, Any]) -> dict[str, str]:
    """Return why a TrainJob does not run, by the kinds of conditions that hold."""
    conditions = there.get("status", {}).get("conditions", [])
    return {one["type"]: one.get("message", "") for one in conditions if one["status"] == "True"}


class Away(Exception):
    """The API server does not answer."""


def ask(verb: str, *words: Any, waits: bool = True, **options: Any) -> Any:
    """Return what the API server answers about TrainJobs; wait while it does not. Raises ConfigError where it
    refuses or, unless it `waits`, is away, and LookupError for a TrainJob that it does not have."""
    client, namespace = connected()
    call = getattr(client.CustomObjectsApi(), f"{verb}_namespaced_custom_object")

    def once() -> Any:
        try:
            return call(GROUP, VERSION, namespace, KIND, *words, _request_timeout=TIMEOUT_S, **options)
        except client.ApiException as error:
            if error.status == 404 and verb in {"get", "delete"}:
                raise LookupError(words[0]) from None
            if error.status == 409 and verb == "create":
                return None  # its number is this one's alone: the answer to the first request was lost
            if error.status == 429 or error.status >= 500:
                raise Away(f"{error.status} {error.reason}") from None
            raise ConfigError(
                f"Kubernetes refuses to {verb} TrainJobs in {namespace} ({error.status} {error.reason}): {message(error)}; "
                f"correct launch.resources, {MANIFEST} or what the service account may do"
            ) from None
        except HTTPError as error:
            if not waits:
                raise ConfigError(f"the API server of Kubernetes does not answer: {error}") from None
            raise Away(str(error)) from None

    return answer(once, Away, "Kubernetes")


def message(error: Any) -> str:
    """Return the API server's own words, which it sends as a Status."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.body)


@cache
def connected() -> tuple[Any, str]:
    """Return Kubernetes' client, which knows the cluster, and the namespace."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise ConfigError(
            "launch.launcher is kubernetes, whose client is not installed: pip install -c constraints.txt -c "
            "requirements/kubernetes.txt -e '.[kubernetes]'"
        ) from None
    try:
        if NAMESPACE.exists():
            config.load_incluster_config()
            return client, NAMESPACE.read_text(encoding="utf-8").strip()
        config.load_kube_config()
        return client, config.list_kube_config_contexts()[1]["context"].get("namespace", "default")
    except config.ConfigException as error:
        raise ConfigError(
            f"launch.launcher is kubernetes, and no cluster is named ({error}): set KUBECONFIG, or start in a pod"
        ) from None
