"""`ans up`, `ans status`, `ans down`: Prefect server with worker and MLflow's page on this machine, in the
background.

`python -m flows.services PORT` is MLflow's page alone.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ans_core.report.files import read_json
from flows.child import end_processes
from flows.doctor import locks, scratch
from flows.paths import environment, root
from flows.prefect_server import deployment_command, wait_for
from tasks.ports import HOST, free_port
from tasks.tracking import EXPERIMENT

UP_S = 300.0
DOWN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Service:
    name: str
    pid: int
    """Of the process group's leader."""
    created_s: float
    """When the process began: another process may have got its number since."""
    url: str
    key: str = ""

    def lives(self, here: Path) -> bool:
        """Tell whether it is at work for this checkout: a copy of the folder has the record of the original's
        services."""
        try:
            process = psutil.Process(self.pid)
            same_process = (
                abs(process.create_time() - self.created_s) < 1 and Path(process.cwd()) == here.resolve()
            )
            return same_process and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def record_file(here: Path) -> Path:
    return here / ".ans/services.json"


def recorded_services(here: Path) -> list[Service]:
    """Return the services that `ans up` started and nobody has taken down."""
    path = record_file(here)
    return [Service(**record) for record in read_json(path)] if path.exists() else []


def running(here: Path) -> list[Service]:
    """Return those that are at work."""
    return [service for service in recorded_services(here) if service.lives(here)]


def up(here: Path, *, port: int, ui_port: int) -> list[Service]:
    """Start what does not run yet; a port that is taken is replaced by a free one. Raises OSError if a
    service does not come up."""
    services = {service.name: service for service in running(here)}
    (here / ".ans/logs").mkdir(parents=True, exist_ok=True)
    for name, start, wanted in (("prefect", start_prefect, port), ("mlflow", start_mlflow, ui_port)):
        if name not in services:
            services[name] = start(here, free_port(wanted))
            write_record(here, list(services.values()))
    return list(services.values())


def write_record(here: Path, services: list[Service]) -> None:
    """Write the record, which holds Prefect's key: for this user alone."""
    path = record_file(here)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(json.dumps([asdict(service) for service in services]), encoding="utf-8")


def start_prefect(here: Path, port: int) -> Service:
    log = here / ".ans/logs/server.log"
    process = start([sys.executable, "-m", "flows.cli", "server", "--port", str(port)], here, log)
    deadline = time.monotonic() + UP_S
    while not (match := re.search(r"PREFECT_API_AUTH_STRING=(\S+)", log.read_text(encoding="utf-8"))):
        if process.poll() is not None or time.monotonic() > deadline:
            end_processes(process.pid, grace_s=DOWN_S)
            raise OSError(f"`ans server` did not come up; {log} says why")
        time.sleep(0.5)
    return service("prefect", process, f"http://{HOST}:{port}", key=match[1])


MLFLOW = {
    # one process instead of fifteen: nothing here needs its queue of jobs
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    # else its assistant runs commands as this user for every program of the machine
    "MLFLOW_ENABLE_ASSISTANT_SANDBOX": "true",
    "MLFLOW_ENABLE_AI_GATEWAY": "false",
}


def mlflow_command(here: Path, port: int) -> list[str]:
    """Return the command of a server that answers its own address alone."""
    hosts = [f"{name}:{port}" for name in (HOST, "localhost")]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        f"sqlite:///{here / '.ans/mlflow.db'}",
        "--host",
        HOST,
    ]
    command += ["--port", str(port), "--workers", "1", "--allowed-hosts", ",".join(hosts)]
    return [*command, "--cors-allowed-origins", ",".join(f"http://{host}" for host in hosts)]


def start_mlflow(here: Path, port: int) -> Service:
    process = start(mlflow_command(here, port), here, here / ".ans/logs/mlflow.log", **MLFLOW)
    try:
        wait_for(f"http://{HOST}:{port}/health", process)
    except OSError as error:
        end_processes(process.pid, grace_s=DOWN_S)
        raise OSError(
            f"MLflow did not come up ({error}); {here / '.ans/logs/mlflow.log'} says why"
        ) from error
    return service("mlflow", process, f"http://{HOST}:{port}")


def start(command: list[str], here: Path, log: Path, **extra: str) -> subprocess.Popen[bytes]:
    """Start a process group that outlives this command. Its log, which may hold Prefect's key, is for this user
    alone."""
    log.touch(mode=0o600)
    log.chmod(0o600)
    with log.open("wb") as file:
        return subprocess.Popen(
            command, cwd=here, env=environment() | {"PYTHONUNBUFFERED": "1"} | extra,
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip


def service(name: str, process: subprocess.Popen[bytes], url: str, key: str = "") -> Service:
    return Service(
        name=name, pid=process.pid, created_s=psutil.Process(process.pid).create_time(), url=url, key=key
    )


def down(here: Path) -> list[str]:
    """End what `ans up` started; return the names."""
    services = running(here)
    for service in services:
        end_processes(service.pid, grace_s=DOWN_S)
    record_file(here).unlink(missing_ok=True)
    return [service.name for service in services]


def runs_page(here: Path, url: str) -> str:
    """Return the address of the table of runs; at its bare address MLflow shows pages for prompts and traces,
    whatever the experiment's kind is."""
    row = None
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"{(here / '.ans/mlflow.db').as_uri()}?mode=ro", uri=True)) as store,
    ):
        row = store.execute("SELECT experiment_id FROM experiments WHERE name = ?", (EXPERIMENT,)).fetchone()
    return f"{url}/#/{f'experiments/{row[0]}/runs' if row else 'experiments'}?workflowType=machine_learning"


def address_lines(services: list[Service], here: Path) -> list[str]:
    """Return lines for a person: addresses, and how to start a deployment."""
    lines = []
    for service in services:
        address = service.url if service.key else runs_page(here, service.url)
        lines.append(f"{service.name:<8} {address}" + (f"  (key: {service.key})" if service.key else ""))
    for prefect in (service for service in services if service.key):
        lines.append(deployment_command(f"{prefect.url}/api", prefect.key))
    return lines


def status(here: Path) -> list[str]:
    """Return what is up, what is at work, and what waits to be resumed."""
    lines = address_lines(running(here), here)
    lines += [
        f"{service.name:<8} is gone; `ans up` starts it again"
        for service in recorded_services(here)
        if not service.lives(here)
    ]
    return [
        *(lines or ["no services: `ans up` starts them"]),
        *(finding.what for finding in [*locks(here), scratch(here)]),
    ]


if __name__ == "__main__":
    (root() / ".ans").mkdir(exist_ok=True)
    page = mlflow_command(root(), int(sys.argv[1]))
    print(f"MLflow: {runs_page(root(), f'http://{HOST}:{sys.argv[1]}')}", flush=True)
    os.execve(page[0], page, environment() | MLFLOW)
