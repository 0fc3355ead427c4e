"""Where the checkout is, and the environment that its commands run in."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def root() -> Path:
    """The checkout around the working directory, else the one that this package was installed from."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").exists() and (folder / "profiles").is_dir():
            return folder
    return Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """The present one, where `python` means this interpreter and nothing phones home."""
    quiet = {
        "DVC_NO_ANALYTICS": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    # Not resolved: the interpreter of a virtual environment is a link out of it.
    return {**os.environ, **quiet, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
