"""The checkout's folder, and the environment of its commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def root() -> Path:
    """Return the checkout around the working directory, else the one that this package was installed from."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").exists() and (folder / "profiles").is_dir():
            return folder
    return Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Return the current environment, with `python` as this interpreter and without telemetry."""
    quiet = {
        "DVC_NO_ANALYTICS": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    # Not resolved: a virtual environment's interpreter is a link to a file outside of it.
    return {**os.environ, **quiet, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
