"""`ans server` for real: whom it answers, that its deployments run, what is left when it ends. Some versions
of Prefect's dependencies break its server or scheduler without a word."""

import asyncio
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
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flows import services
from flows.paths import deployment_names
from flows.prefect_server import LocalAddressOnly
from tasks.ports import free_port
from tasks.stages import STAGES
from tests.ports import free_ports
from tests.workspace import ROOT, ans, end_all, environment, executed, is_stage, living, make, run, words_of

LIMIT_S = 1800.0
"""Of anything that is waited for here: a loaded machine is slow, and a fault ends the wait by itself where it
can."""


@dataclass(frozen=True, kw_only=True)
class Served:
    process: subprocess.Popen[bytes]
    workspace: Path
    port: int
    key: str

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def at_work(self, word: str) -> list[psutil.Process]:
        """Processes of this server with these words in their command."""
        home = psutil.Process(self.process.pid).environ()["PREFECT_HOME"]
        return [process for process in started_by(home) if word in " ".join(words_of(process))]

    def ask(self, path: str, body: object, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.api}/{path}", json=body, headers=headers, timeout=60)

    def authorized(self, path: str, body: object, method: str = "POST") -> Any:
        """Ask as Prefect's client does, which asks again where the database is locked (503)."""
        deadline = time.monotonic() + LIMIT_S
        auth = httpx.BasicAuth(*self.key.split(":", 1))
        while (
            answer := httpx.request(method, f"{self.api}/{path}", json=body, auth=auth, timeout=60)
        ).status_code == 503:
            assert time.monotonic() < deadline, answer.text
            time.sleep(1)
        answer.raise_for_status()
        return answer.json()

    def artifact(self, key: str) -> Any:
        (found,) = self.authorized("artifacts/filter", {"artifacts": {"key": {"any_": [key]}}})
        return found

    def flow_runs(self, deployment: str) -> list[str]:
        """States of the deployment's runs."""
        return [
            found["state"]["type"]
            for found in self.authorized(
                "flow_runs/filter", {"deployments": {"name": {"any_": [deployment]}}}
            )
        ]


def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def started_by(marker: str) -> list[psutil.Process]:
    """Live processes that carry `marker` in their environment's HOME of Prefect."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT_HOME") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    workspace, port, log = make(folder / "checkout"), free_port(), folder / "log"
    home = str(workspace / ".ans/prefect")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "server", "--port", str(port)], cwd=workspace, stdout=file,
            stderr=file, env=environment(workspace, PREFECT_HOME=home), start_new_session=True,
        )  # fmt: skip
    try:
        until(
            lambda: "PREFECT_API_URL=" in log.read_text() or process.poll() is not None,
            "ans server never came up",
        )
        assert process.poll() is None, log.read_text()
        said = re.search(r"PREFECT_API_AUTH_STRING=(\S+)", log.read_text())
        yield Served(process=process, workspace=workspace, port=port, key=said[1] if said else "no:key")
    finally:
        process.kill()
        process.wait()
        for left in started_by(home):
            left.kill()


FOREIGN = [
    {},
    {"Origin": "http://evil.example"},
    {"Host": "evil.example"},
    {"Origin": "http://evil.example:4200", "Host": "evil.example:4200"},
]


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_no_page_of_another_site_makes_a_deployment(served: Served, headers: dict[str, str]) -> None:
    """The attack: a flow and a deployment whose pull step is a shell script, which the worker would run."""
    made = served.ask("flows/", {"name": "attack"}, **headers)
    assert made.status_code == (403 if headers else 401)
    assert "access-control-allow-origin" not in made.headers
    with_key = httpx.post(
        f"{served.api}/flows/",
        json={"name": "attack"},
        headers=headers,
        auth=tuple(served.key.split(":", 1)),
        timeout=60,
    )
    assert not headers or with_key.status_code == 403
    asked = httpx.options(
        f"{served.api}/deployments/", timeout=60,
        headers={"Origin": FOREIGN[1]["Origin"], "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"},
    )  # fmt: skip
    assert asked.status_code == 403
    assert "access-control-allow-origin" not in asked.headers
    pool = deployment_names(served.workspace, shared=False)["ANS_POOL"]
    step = {"prefect.deployments.steps.run_shell_script": {"script": f"touch {served.workspace}/owned"}}
    deployment = {
        "name": "attack",
        "flow_id": "0" * 8 + "-0000-4000-8000-" + "0" * 12,
        "pull_steps": [step],
        "work_pool_name": pool,
    }
    assert served.ask("deployments/", deployment, **headers).status_code in {401, 403}
    assert "attack" not in {found["name"] for found in served.authorized("deployments/filter", {})}
    assert not (served.workspace / "owned").exists()


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_deployments_are_scheduled_and_run_by_the_worker(served: Served) -> None:
    until(lambda: "SCHEDULED" in served.flow_runs("nightly"), "no nightly run was scheduled")
    smoke = served.authorized("deployments/name/full-pipeline/smoke", None, method="GET")["id"]
    body = {"job_variables": {"env": {"FAKE_STALL": "prepare:1", "FAKE_BAR": "prepare"}}}
    run_id = served.authorized(f"deployments/{smoke}/create_flow_run", body)["id"]
    states = served.workspace / ".ans/scratch/smoke"
    until(
        lambda: [path for path in states.glob("prepare/*/step") if path.read_text() == "2"],
        "the stage never came to step 1",
    )
    until(
        lambda: served.artifact("progress-prepare")["description"].startswith("a bar 400/400 ["),
        "no progress while the stage works",
    )
    (server,) = served.at_work("flows.prefect_server")
    server.kill()  # in the middle of a stage; another one takes its place
    until(
        lambda: [process for process in served.at_work("flows.prefect_server") if process != server],
        "no server takes its place",
    )
    found = served.at_work("tasks prepare")  # and its tracker
    (stage,) = [process for process in found if process.ppid() not in {other.pid for other in found}]
    stage.send_signal(signal.SIGUSR1)  # goes on
    until(
        lambda: set(served.flow_runs("smoke")) & {"COMPLETED", "FAILED", "CRASHED"},
        "the deployment did not end",
    )
    assert served.flow_runs("smoke") == ["COMPLETED"]
    assert len(executed(served.workspace)) == len(STAGES)
    (name,) = {
        found["name"].split()[0]
        for found in served.authorized("flow_runs/filter", {"deployments": {"name": {"any_": ["smoke"]}}})
    }
    assert name == "smoke"
    page = served.artifact("pipeline-run")["data"]
    assert "| report | ran |" in page
    assert "report/report.html" in page
    for name in ("prepare", "evaluate-rl", "report"):
        done = served.artifact(f"progress-{name}")
        assert (done["type"], done["data"], done["description"].replace("@", "-")) == (
            "progress",
            100.0,
            f"{name} is done",
        )
        assert done["task_run_id"]
    assert {"metric": "eval/final/score", "value": 0.5} in json.loads(served.artifact("evaluate-rl")["data"])
    logged = served.authorized("logs/filter", {"logs": {"flow_run_id": {"any_": [run_id]}}})
    said = "\n".join(line["message"] for line in logged)  # before and after the server was killed
    assert "stage 1 of 12: prepare" in said
    assert "a bar: 100%" in said
    assert "Data and pipelines are up to date" in run(served.workspace, "-m", "dvc", "repro")
    late_nights_run_one_after_the_other(served)


def late_nights_run_one_after_the_other(served: Served) -> None:
    """As after a clock that jumped, or a machine that slept: the times of two scheduled runs are past. The
    second one has nothing to do."""
    is_nightly = {"deployments": {"name": {"any_": ["nightly"]}}, "sort": "EXPECTED_START_TIME_ASC"}
    nights = served.authorized("flow_runs/filter", is_nightly)[:2]
    for night, hours in zip(nights, (48, 24), strict=True):
        past = datetime.now(UTC) - timedelta(hours=hours)
        state = {
            "type": "SCHEDULED",
            "name": "Scheduled",
            "state_details": {"scheduled_time": past.isoformat()},
        }
        served.authorized(f"flow_runs/{night['id']}/set_state", {"state": state, "force": True})

    def states() -> list[str]:
        return [
            served.authorized(f"flow_runs/{night['id']}", None, method="GET")["state"]["type"]
            for night in nights
        ]

    until(lambda: not {"SCHEDULED", "PENDING", "RUNNING"} & set(states()), "the late nights do not run")
    assert states() == ["COMPLETED", "COMPLETED"]
    assert executed(served.workspace) == ["evaluate@rl from 0"]
    assert "SCHEDULED" in served.flow_runs("nightly")  # the nights to come


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_run_ends_when_cancelled_or_with_its_killed_worker_and_the_next_one_gets_its_place(
    served: Served,
) -> None:
    client = {"PREFECT_API_URL": served.api, "PREFECT_API_AUTH_STRING": served.key}
    before = served.flow_runs("smoke").count("COMPLETED")
    stalled = served.authorized("deployments/name/full-pipeline/smoke", None, method="GET")["id"]
    body: dict[str, Any] = {"name": "stalls", "job_variables": {"env": {"FAKE_STALL": "prepare:1"}}}
    run(served.workspace, "-m", "flows.cli", "profile", "smoke", "seed=7", "--force")
    cancelled = served.authorized(f"deployments/{stalled}/create_flow_run", body)["id"]
    until(lambda: (served.workspace / "executed.txt").exists(), "the stage never started")
    served.authorized(
        f"flow_runs/{cancelled}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    )
    until(lambda: not served.at_work("tasks prepare"), "the stage outlives its cancelled run")
    until(
        lambda: (
            served.authorized(f"flow_runs/{cancelled}", None, method="GET")["state"]["type"] == "CANCELLED"
        ),
        "it stays open",
    )
    executed(served.workspace)
    body["job_variables"]["env"]["FAKE_STALL"] = "prepare:3"
    run_id = served.authorized(f"deployments/{stalled}/create_flow_run", body)["id"]
    # as a flow leaves it that can't report its end
    running = {"state": {"type": "RUNNING", "name": "Running"}}
    orphan = served.authorized(f"deployments/{stalled}/create_flow_run", running)["id"]
    until(lambda: (served.workspace / "executed.txt").exists(), "the stage never started")
    (worker,) = [process for process in served.at_work("worker") if "start" in words_of(process)]
    worker.kill()
    until(lambda: not served.at_work("tasks prepare"), "the stage outlives its worker")

    def states() -> set[str]:
        return {
            served.authorized(f"flow_runs/{run}", None, method="GET")["state"]["type"]
            for run in (run_id, orphan)
        }

    until(lambda: states() == {"CRASHED"}, f"the runs stay {states()}")
    run(
        served.workspace,
        "-m",
        "prefect",
        "deployment",
        "run",
        "full-pipeline/smoke",
        "-p",
        'stages=["prepare"]',
        **client,
    )
    until(
        lambda: served.flow_runs("smoke").count("COMPLETED") == before + 1,
        "the next run does not get its place",
    )
    # each went on where the one before stood
    assert executed(served.workspace) == ["prepare from 2", "prepare from 4"]
    assert "no MLflow run is stuck" in ans(served.workspace, "doctor", "--look-only", status=None)


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_taken_port_is_said_at_once_and_term_leaves_nothing_behind(served: Served) -> None:
    start_s = time.monotonic()
    shown = run(served.workspace, "-m", "flows.cli", "server", "--port", str(served.port), status=2)
    assert f"ans: port {served.port} of 127.0.0.1 can't be had" in shown
    assert "Traceback" not in shown
    assert time.monotonic() - start_s < 60
    home = psutil.Process(served.process.pid).environ()["PREFECT_HOME"]
    assert len(started_by(home)) >= 3  # itself, server, worker
    served.process.send_signal(signal.SIGTERM)
    served.process.wait(LIMIT_S)
    assert started_by(home) == []


@pytest.mark.parametrize(
    ("scope", "headers", "answers"),
    [
        ("http", {"host": "127.0.0.1:4200"}, True),
        ("http", {"host": "localhost:4200", "origin": "http://127.0.0.1:4200"}, True),
        ("websocket", {"host": "127.0.0.1:4200", "origin": "http://localhost:4200"}, True),
        ("http", {"host": "127.0.0.1:4200", "origin": "null"}, False),  # a sandboxed frame
        # another program of this machine
        ("http", {"host": "127.0.0.1:4200", "origin": "http://127.0.0.1:8000"}, False),
        ("http", {"host": "localhost.evil.example:4200"}, False),
        ("http", {"host": "127.0.0.1"}, False),
        ("http", {}, False),
        ("websocket", {"host": "127.0.0.1:4200", "origin": "http://evil.example"}, False),
    ],
)
def test_only_the_servers_own_address_is_answered(scope: str, headers: dict[str, str], answers: bool) -> None:
    reached, sent = [], []

    async def app(*_words: object) -> None:
        reached.append(True)

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    raw = [(key.encode(), value.encode()) for key, value in headers.items()]
    asyncio.run(LocalAddressOnly(app, port=4200)({"type": scope, "headers": raw}, None, send))
    assert bool(reached) == answers
    refused = {"http": ("http.response.start", 403), "websocket": ("websocket.close", 1008)}[scope]
    assert answers or (sent[0]["type"], sent[0].get("status", sent[0].get("code"))) == refused


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_page_of_mlflow_answers_its_own_address_alone_and_is_few_processes(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "dvc.yaml").touch()  # a checkout
    (tmp_path / "bin").mkdir()
    agent = tmp_path / "bin/claude"  # MLflow's assistant starts one on the server's machine
    agent.write_text(f"#!/bin/sh\ntouch {tmp_path}/owned\n")
    agent.chmod(0o755)
    port = free_port()
    environ = environment(ROOT, HOME=str(tmp_path)) | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "flows.services", str(port)], cwd=tmp_path, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def status(path: str, **headers: str) -> int:
        try:
            return httpx.post(
                f"{url}/api/2.0/mlflow/{path}",
                json={"name": "x", "max_results": 1},
                headers=headers,
                timeout=60,
            ).status_code
        except httpx.TransportError:
            return 0

    try:
        until(
            lambda: status("experiments/search") == 200 or server.poll() is not None, "MLflow never came up"
        )
        assert status("experiments/create", Origin="http://evil.example") == 403
        # MLflow's default takes `10.*` for a private address
        assert status("experiments/create", Host="10.evil.example") == 403
        assert status("experiments/create") == 200
        assert len(psutil.Process(server.pid).children(recursive=True)) <= 4
        assert (tmp_path / ".ans/mlflow.db").exists()
        assistant = f"{url}/ajax-api/3.0/mlflow/assistant"
        asked = httpx.post(f"{assistant}/message", json={"message": "hello"}, timeout=60).json()
        assert "could not start" in httpx.get(f"{url}{asked['stream_url']}", timeout=60).text
        assert not (tmp_path / "owned").exists()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_the_log_of_a_service_which_may_hold_a_key_is_for_its_user_alone(tmp_path: Path) -> None:
    old, new = tmp_path / "server.log", tmp_path / "mlflow.log"
    old.write_text("of an earlier start")
    old.chmod(0o644)
    for log in (old, new):
        assert services.start([sys.executable, "-c", "print('key')"], tmp_path, log).wait() == 0
        assert (log.read_text(), log.stat().st_mode & 0o777) == ("key\n", 0o600)


@dataclass(frozen=True, kw_only=True)
class Up:
    """A checkout whose services are up."""

    workspace: Path
    ports: list[str]
    shown: str

    @property
    def record(self) -> list[dict[str, Any]]:
        """Prefect's server and MLflow's, as they were started."""
        services: list[dict[str, Any]] = json.loads((self.workspace / ".ans/services.json").read_text())
        return services


PROXY = {"HTTP_PROXY": "http://127.0.0.1:9"}
"""Nobody is there."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, Up]]:
    """Two checkouts of one user, both up; the tests below end them."""
    folder = tmp_path_factory.mktemp("up")
    workspaces = [make(folder / name) for name in ("one", "other")]
    one, two, three, four = map(str, free_ports(4))
    ports = [["--port", one, "--ui-port", two], ["--port", three, "--ui-port", four]]
    try:
        one, other = (
            Up(workspace=workspace, ports=words, shown=ans(workspace, "up", *words, **PROXY))
            for workspace, words in zip(workspaces, ports, strict=True)
        )
        yield one, other
    finally:
        for workspace in workspaces:
            end_all(workspace)


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_two_checkouts_up_at_once_run_their_own_and_ask_no_proxy(both: tuple[Up, Up]) -> None:
    one, other = both
    for checkout in both:
        command = checkout.shown.splitlines()[-1]
        assert "full-pipeline/current" in command
        deployment(f"""{command} -p 'stages=["prepare"]' --watch""", checkout, check=True)
        assert [executed(up.workspace) for up in both] == [
            ["prepare from 0"] if up is checkout else [] for up in both
        ]
    deployment(f"""{command} -p 'overrides={{"rll.kl": 1}}' --watch""", other, check=False)
    log = (other.workspace / ".ans/logs/server.log").read_text()
    assert "did you mean 'rl'" in log
    # a sentence, no traceback through our code; Prefect's server writes its own where SQLite is locked for long
    assert not re.search(r'File ".*/ans_core/', log)
    # on the server that is up
    assert "stage base failed" in ans(other.workspace, "run", status=1, FAKE_STOP="base", **PROXY)
    assert [flow_runs_of(up.record[0]) for up in both] == [1, 3]
    # with the record of the services of the first
    copy = shutil.copytree(one.workspace, other.workspace.with_name("copy"))
    assert ans(copy, "down").strip() == "ended: nothing was up"
    assert ans(other.workspace, "down").strip() == "ended: prefect, mlflow"


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_up_status_and_down(both: tuple[Up, Up]) -> None:
    one = both[0]
    workspace = one.workspace
    assert (workspace / ".ans/services.json").stat().st_mode & 0o077 == 0
    prefect, mlflow = (
        httpx.get(f"{service['url']}/{path}", timeout=60)
        for service, path in zip(one.record, ("api/health", ""), strict=True)
    )
    assert (prefect.status_code, mlflow.status_code) == (200, 200)
    was_up = one.record
    assert was_up[0]["url"] in ans(workspace, "up")
    assert one.record == was_up  # what runs is left alone
    mlflow_away_for_a_while(one)
    os.killpg(one.record[1]["pid"], signal.SIGKILL)
    shown = ans(workspace, "status")
    assert "mlflow   is gone" in shown
    assert "nothing is running in this workspace" in shown
    assert ans(workspace, "down").strip() == "ended: prefect"
    assert not living(workspace)
    assert "nothing was up" in ans(workspace, "down")


def deployment(command: str, of: Up, *, check: bool) -> None:
    """Run what `ans up` says."""
    environ = environment(of.workspace, **PROXY)
    subprocess.run(command, shell=True, check=check, cwd=of.workspace, env=environ, timeout=LIMIT_S)


def flow_runs_of(server: dict[str, str]) -> int:
    """Return how many runs of the pipeline a server has seen."""
    asked = {"flows": {"name": {"any_": ["full-pipeline"]}}}
    auth = httpx.BasicAuth(*server["key"].split(":", 1))
    return int(
        httpx.post(f"{server['url']}/api/flow_runs/count", json=asked, auth=auth, timeout=60)
        .raise_for_status()
        .text
    )


def mlflow_away_for_a_while(up: Up) -> None:
    """Kill MLflow's server in the middle of a stage, which ends meanwhile; the next stage, on a new server,
    brings all of its metrics."""
    workspace, server = up.workspace, up.record[1]
    environ = environment(workspace, MLFLOW_TRACKING_URI=server["url"], FAKE_STALL="base:2")
    with (workspace / "away.log").open("w") as file:
        dvc = subprocess.Popen(
            [sys.executable, "-m", "dvc", "repro", "base"],
            cwd=workspace,
            env=environ,
            stdout=file,
            stderr=file,
        )
    until(
        lambda: list((workspace / ".ans/scratch/smoke").glob("base/*/step")) or dvc.poll() is not None,
        "the stage never started",
    )
    # of its curve: a server that dies between making the run and saying so leaves two of them
    until(
        lambda: stage_runs(workspace).get("base", ("", 0))[1] > 0 or dvc.poll() is not None,
        "MLflow never heard of the stage",
    )
    os.killpg(server["pid"], signal.SIGKILL)
    for process in living(workspace):
        if is_stage(process, "base") and process.ppid() == dvc.pid:
            process.send_signal(signal.SIGUSR1)
    assert dvc.wait(LIMIT_S) == 0
    assert "MLflow takes nothing at present" in (workspace / "away.log").read_text()
    assert stage_runs(workspace)["base"][0] == "RUNNING"
    assert "/runs?workflowType=machine_learning" in ans(workspace, "up", *up.ports)
    run(workspace, "-m", "dvc", "repro", "memory", MLFLOW_TRACKING_URI=server["url"])
    assert stage_runs(workspace) == dict.fromkeys(("prepare", "base", "memory"), ("FINISHED", 6))


def stage_runs(workspace: Path) -> dict[str, tuple[str, int]]:
    """Status of each stage's run, and how many steps its curve has."""
    with sqlite3.connect(workspace / ".ans/mlflow.db") as database:
        found = database.execute(
            "SELECT value, status, (SELECT COUNT(*) FROM metrics WHERE metrics.run_uuid = runs.run_uuid AND metrics.key = 'loss') "
            "FROM runs JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = 'ans.stage'"
        ).fetchall()
    return {stage: (status, steps) for stage, status, steps in found}
