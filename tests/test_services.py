"""docker/services.py where it can run: as root, with the image of this commit, Debian's PostgreSQL and moto's S3
server."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.workspace import LIMIT_S, ROOT

IMAGE = "localhost/ans:0.1.0"


def revision() -> str:
    described = ["git", "describe", "--always", "--abbrev=40", "--dirty"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def revision_of_image() -> str:
    """Return what docker/build.sh noted; nothing without an image."""
    label = '{{index .Docker.Config.Labels "org.opencontainers.image.revision"}}'
    inspected = ["buildah", "inspect", "--type", "image", "--format", label, IMAGE]
    return subprocess.run(inspected, capture_output=True, text=True, check=False).stdout.strip()


def lacking() -> list[str]:
    missing = [] if os.geteuid() == 0 else ["root"]
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        missing.append("PostgreSQL (Debian: postgresql)")
    if not shutil.which("moto_server"):
        missing.append("moto_server (pip install 'moto[server]', in an environment of its own)")
    if not shutil.which("buildah") or revision_of_image() != revision():
        missing.append(f"{IMAGE} of this commit (docker/build.sh with buildah)")
    return missing


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_run_through_the_services_of_compose_outlives_the_restart_of_each() -> None:
    """The script fails where PostgreSQL's health check or those of the services on it pass without it, somebody
    gets in without a password, a run or its files are missing, a pull doesn't bring them back, or a password is
    in a log."""
    if missing := lacking():
        pytest.skip(f"not there: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own lets PostgreSQL's user not through
        Path(folder).chmod(0o755)
        words = [sys.executable, str(ROOT / "docker/services.py"), f"{folder}/services"]
        subprocess.run(words, check=True)
