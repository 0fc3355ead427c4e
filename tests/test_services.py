"""docker/services.py where it can run: as root, with the built image, Debian's PostgreSQL and moto's S3 server."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.workspace import LIMIT_S, ROOT

IMAGE = "localhost/ans:0.1.0"


def lacking() -> list[str]:
    missing = [] if os.geteuid() == 0 else ["root"]
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        missing.append("PostgreSQL (Debian: postgresql)")
    if not shutil.which("moto_server"):
        missing.append("moto_server (pip install 'moto[server]', in an environment of its own)")
    inspected = ["buildah", "inspect", "--type", "image", IMAGE]
    if not shutil.which("buildah") or subprocess.run(inspected, capture_output=True, check=False).returncode:
        missing.append(f"{IMAGE} (docker/build.sh with buildah)")
    return missing


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_run_through_the_services_of_compose_outlives_the_restart_of_each() -> None:
    """The script fails where a health check passes without its service, somebody gets in without a password, a run
    or its files are missing, a pull doesn't bring them back, or a password is in a log."""
    if missing := lacking():
        pytest.skip(f"not there: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own lets PostgreSQL's user not through
        Path(folder).chmod(0o755)
        words = [sys.executable, str(ROOT / "docker/services.py"), f"{folder}/services"]
        subprocess.run(words, check=True)
