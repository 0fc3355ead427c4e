"""Secrets (files of /run/secrets) in, the environment of the command that follows out: `entrypoint.py
COMMAND...` becomes it.

A service gets the variables of the secrets that it was given. Passwords may hold any letter: in addresses
they are escaped.
"""

from __future__ import annotations

import configparser
import os
import sys
from pathlib import Path
from urllib.parse import quote

SECRETS = Path("/run/secrets")
MLFLOW_AUTH = Path("/tmp/mlflow-auth.ini")


def variables(secrets: dict[str, str]) -> dict[str, str]:
    """By the names of the files."""
    found: dict[str, str] = {}
    if password := secrets.get("postgres_password"):
        account = f"ans:{quote(password, safe='')}@postgres:5432"
        found["PREFECT_API_DATABASE_CONNECTION_URL"] = f"postgresql+asyncpg://{account}/prefect"
        found["MLFLOW_BACKEND_STORE_URI"] = f"postgresql://{account}/mlflow"
    if password := secrets.get("minio_password"):
        found |= {"AWS_ACCESS_KEY_ID": "ans", "AWS_SECRET_ACCESS_KEY": password}
    if password := secrets.get("prefect_password"):
        found |= dict.fromkeys(
            ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"), f"ans:{password}"
        )
    if password := secrets.get("mlflow_password"):
        found |= {"MLFLOW_TRACKING_USERNAME": "ans", "MLFLOW_TRACKING_PASSWORD": password}
        found |= {"MLFLOW_AUTH_CONFIG_PATH": str(MLFLOW_AUTH), "MLFLOW_FLASK_SERVER_SECRET_KEY": password}
    if key := secrets.get("judge_key"):
        found[os.environ.get("JUDGE_KEY_VARIABLE", "OPENAI_API_KEY")] = key
    return found


def mlflow_auth(database: str, password: str) -> configparser.ConfigParser:
    """Of `mlflow server --app-name basic-auth`: who is not `ans` sees nothing. MLflow reads a `%` as the
    start of a reference."""
    config = configparser.ConfigParser()
    values = {
        "default_permission": "NO_PERMISSIONS",
        "database_uri": database,
        "admin_username": "ans",
        "admin_password": password,
        "authorization_function": "mlflow.server.auth:authenticate_request_basic_auth",
    }
    config["mlflow"] = {key: value.replace("%", "%%") for key, value in values.items()}
    return config


def main(command: list[str]) -> None:
    """Compose creates a secret whose file is empty without a word; it is the same as none."""
    files = [path for path in SECRETS.iterdir() if path.is_file()] if SECRETS.is_dir() else []
    secrets = {path.name: path.read_text(encoding="utf-8").strip() for path in files}
    found = variables(secrets)
    os.environ.update(found)
    if {"postgres_password", "mlflow_password"} <= secrets.keys():
        MLFLOW_AUTH.touch(mode=0o600)
        with MLFLOW_AUTH.open("w", encoding="utf-8") as file:
            mlflow_auth(found["MLFLOW_BACKEND_STORE_URI"], secrets["mlflow_password"]).write(file)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
