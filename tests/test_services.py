"""The services of docker/compose.yaml without containers: PostgreSQL, an S3 server, Prefect and MLflow with
the commands, variables and secrets of the compose file, and a worker that runs a stage, pushes to the bucket
and pulls from it."""

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml

from tests.ports import free_port
from tests.workspace import LIMIT_S, ROOT, end_all, environment, executed, make

POSTGRES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"))), Path())
PACKAGES = ("psycopg2", "boto3", "dvc_s3", "flask_wtf")
LACKING = [
    *([] if (POSTGRES / "initdb").exists() else ["PostgreSQL (Debian: postgresql)"]),
    *(
        []
        if shutil.which("moto_server")
        else ["moto_server (pip install 'moto[server]', in an environment of its own)"]
    ),
    *(f"{name} (requirements/services.txt)" for name in PACKAGES if importlib.util.find_spec(name) is None),
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}"),
]
PASSWORDS = {
    f"{name}_password": f"{name}'s p@ss:w/rd %#?" for name in ("postgres", "minio", "prefect", "mlflow")
}
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=60).status_code < 500
    except httpx.TransportError:
        return False


@contextmanager
def program(command: list[str], log: Path, **settings: object) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, **settings)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


class Services:
    """Addresses of the compose file in, those of this machine out: `here` replaces them in any text of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("postgres", "minio", "prefect", "mlflow")}
        entrypoint = SimpleNamespace(**runpy.run_path(str(ROOT / "docker/entrypoint.py")))
        self.variables = entrypoint.variables
        self.auth = folder / "mlflow-auth.ini"
        with self.auth.open("w") as file:
            entrypoint.mlflow_auth(
                self.of_secrets(["postgres_password"])["MLFLOW_BACKEND_STORE_URI"],
                PASSWORDS["mlflow_password"],
            ).write(file)

    def here(self, text: str) -> str:
        for name, port in {"postgres": 5432, "minio": 9000, "prefect": 4200, "mlflow": 5000}.items():
            for host in (f"{name}:{port}", f"127.0.0.1:{port}", f"localhost:{port}"):
                text = text.replace(host, f"127.0.0.1:{self.ports[name]}")
            text = text.replace(f"--port={port}", f"--port={self.ports[name]}")
        return text.replace("0.0.0.0", "127.0.0.1").replace("4200", str(self.ports["prefect"]))

    def of_secrets(self, names: list[str]) -> dict[str, str]:
        found = self.variables({name: PASSWORDS[name] for name in names if name in PASSWORDS})
        return {key: self.here(value) for key, value in found.items()} | {
            "MLFLOW_AUTH_CONFIG_PATH": str(getattr(self, "auth", ""))
        }

    def environment(self, name: str, folder: Path) -> dict[str, str]:
        """What the service's container would get, of compose and of the entrypoint."""
        service = COMPOSE["services"][name]
        given = {
            key: self.here(str(value)) for key, value in service["environment"].items()
        } | self.of_secrets(service["secrets"])
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        home = {"PREFECT_HOME": str(self.folder / f"{name}-home"), "ANS_HOME": str(folder)}
        return environment(folder, **given, **home) | {
            "PYTHONPATH": path,
            "JUDGE_KEY_VARIABLE": "OPENAI_API_KEY",
        }

    def command(self, name: str) -> list[str]:
        program, *words = [self.here(word) for word in COMPOSE["services"][name]["command"]]
        return [str(Path(sys.executable).with_name(program)), *words]


@contextmanager
def postgres(services: Services) -> Iterator[None]:
    """A cluster of its own, with the password and databases that the image's variables and compose's SQL
    make."""
    folder = Path(tempfile.mkdtemp(prefix="ans-postgres-"))
    as_user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    try:
        (folder / "password").write_text(PASSWORDS["postgres_password"])
        if as_user:
            shutil.chown(folder, "postgres", "postgres")
            shutil.chown(folder / "password", "postgres", "postgres")
        data = folder / "data"
        made = [
            str(POSTGRES / "initdb"),
            "-D",
            str(data),
            "-U",
            "ans",
            "--auth=scram-sha-256",
            f"--pwfile={folder / 'password'}",
        ]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL, cwd=folder, **as_user)  # type: ignore[call-overload]
        port = services.ports["postgres"]
        served = [
            str(POSTGRES / "postgres"),
            "-D",
            str(data),
            "-k",
            str(folder),
            "-h",
            "127.0.0.1",
            "-p",
            str(port),
        ]
        with program(served, services.folder / "postgres.log", cwd=folder, **as_user):
            until(lambda: sql(services, "SELECT 1") == 0, (services.folder / "postgres.log").read_text())
            assert sql(services, "CREATE DATABASE prefect") == 0
            assert sql(services, COMPOSE["configs"]["create_mlflow_database"]["content"]) == 0
            yield
    finally:
        shutil.rmtree(folder)


def sql(services: Services, text: str) -> int:
    words = [
        str(POSTGRES / "psql"),
        "-h",
        "127.0.0.1",
        "-p",
        str(services.ports["postgres"]),
        "-U",
        "ans",
        "-d",
        "postgres",
        "-c",
        text,
    ]
    return subprocess.run(
        words,
        env=os.environ | {"PGPASSWORD": PASSWORDS["postgres_password"]},
        capture_output=True,
        check=False,
    ).returncode


def dump(services: Services, database: str) -> str:
    words = [
        str(POSTGRES / "pg_dump"),
        "-h",
        "127.0.0.1",
        "-p",
        str(services.ports["postgres"]),
        "-U",
        "ans",
        "--inserts",
        database,
    ]
    return subprocess.run(
        words,
        env=os.environ | {"PGPASSWORD": PASSWORDS["postgres_password"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.fixture
def up(tmp_path: Path) -> Iterator[tuple[Services, Path]]:
    (tmp_path / "checkout").mkdir()
    services, workspace = Services(tmp_path), make(tmp_path / "checkout")
    shutil.rmtree(workspace / ".git")  # as in the image
    subprocess.run(
        [sys.executable, "-m", "dvc", "config", "--local", "core.no_scm", "true"], cwd=workspace, check=True
    )
    moto = str(shutil.which("moto_server"))
    without_path = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with ExitStack() as stack:
        stack.callback(end_all, workspace)
        stack.enter_context(postgres(services))
        stack.enter_context(
            program(
                [moto, "-H", "127.0.0.1", "-p", str(services.ports["minio"])],
                tmp_path / "s3.log",
                env=without_path,
            )
        )
        until(lambda: answers(f"http://127.0.0.1:{services.ports['minio']}"), "no S3")
        for bucket in ("mlflow", "dvc"):
            assert (
                httpx.put(f"http://127.0.0.1:{services.ports['minio']}/{bucket}", timeout=60).status_code
                == 200
            )
        for name in ("prefect", "mlflow"):
            environ = services.environment(name, workspace)
            stack.enter_context(
                program(services.command(name), tmp_path / f"{name}.log", env=environ, cwd=workspace)
            )
        for name, path in (("prefect", "api/health"), ("mlflow", "health")):
            until(
                lambda name=name, path=path: answers(f"http://127.0.0.1:{services.ports[name]}/{path}"),
                (tmp_path / f"{name}.log").read_text(),
            )
        yield services, workspace


def test_the_services_of_compose_run_a_stage_share_its_result_and_keep_their_secrets(
    up: tuple[Services, Path],
) -> None:
    services, workspace = up
    assert (
        httpx.post(
            f"http://127.0.0.1:{services.ports['prefect']}/api/flows/filter", json={}, timeout=60
        ).status_code
        == 401
    )
    experiments = f"http://127.0.0.1:{services.ports['mlflow']}/api/2.0/mlflow/experiments/search"
    assert httpx.post(experiments, json={"max_results": 5}, timeout=60).status_code == 401

    environ = services.environment("worker", workspace)
    script, *words = COMPOSE["services"]["worker"]["command"]
    text = services.here((ROOT / script).read_text())
    python = Path(sys.executable).parent
    with program(
        ["sh", "-c", text, script, *words], services.folder / "worker.log", env=environ, cwd=workspace
    ):
        until(lambda: "started!" in (services.folder / "worker.log").read_text(), "no worker")
        asked = [
            str(python / "prefect"),
            "deployment",
            "run",
            "full-pipeline/smoke",
            "-p",
            'stages=["prepare"]',
            "--watch",
        ]
        subprocess.run(asked, env=environ, cwd=workspace, check=True, stdout=subprocess.DEVNULL)
    assert executed(workspace) == ["prepare from 0"]

    account = ("ans", PASSWORDS["mlflow_password"])
    (experiment,) = (
        e
        for e in httpx.post(experiments, json={"max_results": 5}, auth=account, timeout=60).json()[
            "experiments"
        ]
        if e["name"] == "ans"
    )
    asked_runs = {"experiment_ids": [experiment["experiment_id"]]}
    runs = httpx.post(
        experiments.replace("experiments", "runs"), json=asked_runs, auth=account, timeout=60
    ).json()["runs"]
    assert {run["info"]["status"] for run in runs} == {"FINISHED"}
    assert len(runs) == 2
    listed = httpx.get(
        f"http://127.0.0.1:{services.ports['minio']}/mlflow", params={"list-type": 2}, timeout=60
    ).text
    assert "/artifacts/about.json</Key>" in listed  # of the stage's run

    def dvc(*command: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "dvc", *command],
            cwd=workspace,
            env=environ,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    dvc("push", "--run-cache")
    for gone in (".dvc/cache", "runs"):
        shutil.rmtree(workspace / gone)
    dvc("pull", "--run-cache", "prepare")
    assert "up to date" in dvc("repro", "prepare")
    assert executed(workspace) == []

    told = [
        path.read_text(errors="replace")
        for path in [
            *workspace.glob(".ans/logs/*"),
            *services.folder.glob("*.log"),
            workspace / "params.yaml",
        ]
    ]
    for text in [*told, dump(services, "prefect"), dump(services, "mlflow")]:
        assert not [name for name, password in PASSWORDS.items() if password in text]
