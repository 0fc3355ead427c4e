"""Some versions of Prefect's dependencies break its server or scheduler without a word: start it, deploy, see scheduled runs."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from flows.launch import POOL, wait_for
from tasks.stages import STAGES
from tests.workspace import environment, executed, make, run

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def flow_runs(api: str, deployment: str) -> list[str]:
    """States of the deployment's runs."""
    body = {"deployments": {"name": {"any_": [deployment]}}}
    answer = httpx.post(f"{api}/flow_runs/filter", json=body, timeout=30)
    answer.raise_for_status()
    return [found["state"]["type"] for found in answer.json()]


def until(condition: Callable[[], object], what: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(1)


def test_deployments_are_scheduled_and_run_by_a_worker(tmp_path: Path) -> None:
    for name in ("checkout", "home"):
        (tmp_path / name).mkdir()
    workspace, home = make(tmp_path / "checkout"), tmp_path / "home"
    api = f"http://127.0.0.1:{(port := free_port())}/api"
    extra = {"PREFECT_API_URL": api, "PREFECT_HOME": str(home), "ANS_HOME": str(workspace), "PREFECT_CLI_PROMPT": "false"}
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        with (tmp_path / f"{words[0]}.log").open("wb") as log:
            command = [sys.executable, "-m", "prefect", *words]
            started.append(
                subprocess.Popen(
                    command, cwd=workspace, env=environment(workspace, **extra), stdout=log, stderr=log, start_new_session=True
                )
            )

    try:
        start("server", "start", "--host", "127.0.0.1", "--port", str(port))
        wait_for(f"{api}/health")
        run(workspace, "-m", "prefect", "work-pool", "create", POOL, "--type", "process", **extra)
        run(workspace, "-m", "prefect", "--no-prompt", "deploy", "--all", **extra)
        until(lambda: "SCHEDULED" in flow_runs(api, "nightly"), "no nightly run was scheduled", 90)
        start("worker", "start", "--pool", POOL, "--limit", "1")
        run(workspace, "-m", "prefect", "deployment", "run", "full-pipeline/smoke", **extra)
        until(lambda: set(flow_runs(api, "smoke")) & {"COMPLETED", "FAILED", "CRASHED"}, "the deployment did not end", 300)
        assert flow_runs(api, "smoke") == ["COMPLETED"], (tmp_path / "worker.log").read_text()
        assert len(executed(workspace)) == len(STAGES)
        assert "Data and pipelines are up to date" in run(workspace, "-m", "dvc", "repro")
    finally:
        for process in reversed(started):  # the worker is gone before its server: without one it waits long for an answer
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)
