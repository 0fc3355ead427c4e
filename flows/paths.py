"""The checkout's folder, its names on a Prefect server, and the environment of its commands."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from ans_core.places import root
from tasks.surroundings import user


def environment() -> dict[str, str]:
    """Return the current environment, with `python` as this interpreter, without telemetry, and with a home
    of Prefect in this checkout: in a common one, checkouts share a database and run each other's
    deployments."""
    quiet = {
        "DVC_NO_ANALYTICS": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_HOME": str(root() / ".ans/prefect"),
    }
    # Not resolved: a virtual environment's interpreter is a link to a file outside of it.
    return {
        **os.environ,
        **quiet,
        "LOGNAME": user(),  # DVC ends without one
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def deployment_names(here: Path, *, shared: bool) -> dict[str, str]:
    """Return what prefect.yaml asks for: folder, pool, and the suffix of deployments' names, empty on the
    checkout's own server."""
    # of a checkout on a server that several share
    name = f"{here.name}-{hashlib.sha256(str(here.resolve()).encode()).hexdigest()[:6]}"
    return {"ANS_HOME": str(here), "ANS_POOL": f"ans-{name}", "ANS_SUFFIX": f"@{name}" if shared else ""}
