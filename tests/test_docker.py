"""The container files, as far as they can be tried without an engine."""

import configparser
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from sqlalchemy import make_url

from tests.workspace import ROOT, dvc, executed, make

# `docker` is a package of that name
entrypoint = SimpleNamespace(**runpy.run_path(str(ROOT / "docker/entrypoint.py")))
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
IMAGES = {
    name: service for name, service in COMPOSE["services"].items() if service["image"].startswith("ans:")
}


def test_any_password_reaches_its_service_through_files_alone() -> None:
    odd = "p@ss:w/rd %#?&'\""
    found = entrypoint.variables(
        {f"{name}_password": odd for name in ("postgres", "minio", "prefect", "mlflow")} | {"judge_key": "k"}
    )
    for name in ("PREFECT_API_DATABASE_CONNECTION_URL", "MLFLOW_BACKEND_STORE_URI"):
        url = make_url(found[name])
        assert (url.username, url.password, url.host, url.port) == ("ans", odd, "postgres", 5432)
    assert found["PREFECT_API_AUTH_STRING"] == found["PREFECT_SERVER_API_AUTH_STRING"] == f"ans:{odd}"
    assert (found["AWS_SECRET_ACCESS_KEY"], found["MLFLOW_TRACKING_PASSWORD"], found["OPENAI_API_KEY"]) == (
        odd,
        odd,
        "k",
    )
    assert entrypoint.variables({"judge_key": ""}) == {}
    written = io.StringIO()
    entrypoint.mlflow_auth(found["MLFLOW_BACKEND_STORE_URI"], odd).write(written)
    read = configparser.ConfigParser()  # as MLflow does
    read.read_string(written.getvalue())
    assert (read["mlflow"]["admin_password"], read["mlflow"]["database_uri"]) == (
        odd,
        found["MLFLOW_BACKEND_STORE_URI"],
    )
    assert "PASSWORD:" not in (ROOT / "docker/compose.yaml").read_text()


def test_a_command_gets_its_variables_and_mlflow_a_file_that_only_its_user_reads(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    for name in ("postgres_password", "mlflow_password", "judge_key"):
        (tmp_path / "secrets" / name).write_text("" if name == "judge_key" else "p@ss%\n")
    script = (
        "import pathlib, runpy, sys; main = runpy.run_path(sys.argv[1])['main']; here = pathlib.Path(sys.argv[2]); "
        "main.__globals__.update(SECRETS=here / 'secrets', MLFLOW_AUTH=here / 'auth.ini'); main(['env'])"
    )
    words = [sys.executable, "-c", script, str(ROOT / "docker/entrypoint.py"), str(tmp_path)]
    variables = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env={}).stdout
    assert "MLFLOW_TRACKING_PASSWORD=p@ss%\n" in variables
    assert "OPENAI_API_KEY" not in variables
    assert (tmp_path / "auth.ini").stat().st_mode & 0o777 == 0o600
    assert "admin_password = p@ss%%\n" in (tmp_path / "auth.ini").read_text()


def test_nothing_secret_is_sent_to_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {
        "docker/.env",
        "docker/secrets",
        ".dvc/config.local",
        ".git",
        "**/*.env",
        "data",
        "weights",
    } <= set(ignored)


def test_compose_takes_the_version_that_is_built() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ANS_VERSION={version}\n" in (ROOT / "docker/env.example").read_text()


def test_every_service_that_stays_has_a_health_check() -> None:
    lacking = {name for name, service in COMPOSE["services"].items() if "healthcheck" not in service}
    assert lacking == {"bucket"}


def test_every_service_is_bound_to_this_host_pinned_and_given_only_secrets_that_exist() -> None:
    for name, service in COMPOSE["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert not service["image"].endswith(":latest"), name
        assert ":" in service["image"], name
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"]), name
    assert re.search(
        r"^ARG BASE=\S+:\d+\.\d+\.\d+", (ROOT / "docker/Dockerfile").read_text(), flags=re.MULTILINE
    )


def test_every_volume_of_the_image_has_a_folder_there_whose_owner_it_takes() -> None:
    made = re.search(r"mkdir -p (.+)", (ROOT / "docker/Dockerfile").read_text())
    assert made is not None
    folders = {str(Path("/app", folder)) for folder in made[1].split()}
    mounted = {
        volume.split(":")[1]
        for service in IMAGES.values()
        for volume in service.get("volumes", [])
        if volume.split(":")[0] in COMPOSE["volumes"]
    }
    assert mounted == folders


def test_each_worker_has_a_pool_of_its_own_which_its_deployments_name() -> None:
    pools = set()
    for name in ("worker", "worker-gpu"):
        script, pool, deployments = COMPOSE["services"][name]["command"]
        assert (ROOT / script).stat().st_mode & 0o111
        found = {
            deployment["work_pool"]["name"]
            for deployment in yaml.safe_load((ROOT / deployments).read_text())["deployments"]
        }
        assert found in ({pool}, {"{{ $ANS_POOL }}"})  # which the script sets to it
        pools.add(pool)
    assert len(pools) == 2


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_dvc_works_without_git_as_in_the_image(tmp_path: Path) -> None:
    workspace = make(tmp_path)
    shutil.rmtree(workspace / ".git")
    assert "not a git repository" in dvc(workspace, "status", status=None)
    dvc(workspace, "config", "--local", "core.no_scm", "true")
    for line in (ROOT / "docker/worker.sh").read_text().splitlines():
        if line.startswith("dvc "):
            dvc(workspace, *line.split()[1:])
    assert "s3://dvc" in dvc(workspace, "remote", "list")
    dvc(workspace, "repro", "prepare")
    assert executed(workspace) == ["prepare from 0"]


@pytest.mark.parametrize("script", ["setup.sh", "docker/worker.sh", "docker/build.sh"])
def test_the_shell_scripts_parse(script: str) -> None:
    subprocess.run(["sh", "-n", str(ROOT / script)], check=True)


@pytest.mark.slow
def test_setup_works_in_a_folder_with_a_blank_and_after_one_that_was_ended_half_way(tmp_path: Path) -> None:
    """Without a network it goes as far as the first package that venv does not bring along."""
    folder = tmp_path / "a b"
    folder.mkdir()
    shutil.copy(ROOT / "setup.sh", folder)
    (folder / "constraints.txt").write_text("torch==2.13.0\n")
    python = [sys.executable, "-m", "venv", "--without-pip", folder / ".venv"]
    subprocess.run(python, check=True)
    offline = {
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
    }
    done = subprocess.run(
        [folder / "setup.sh"], env=os.environ | offline, capture_output=True, text=True, check=False
    )
    assert "No matching distribution found for" in done.stderr, done.stderr
    subprocess.run([folder / ".venv/bin/python", "-m", "pip", "--version"], check=True)
