"""A real Ray on this machine, of a head and further nodes, in an environment of its own.

python -m tests.ray_cluster      # makes it (720 MB, by pip) in ~/.cache/ans-ray, or the folder that ANS_RAY names
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError

import psutil

from tasks.launcher import free_port

ROOT = Path(os.environ.get("ANS_RAY", "~/.cache/ans-ray")).expanduser()
PYTHON = ROOT / "bin/python"
PACKAGES = ("ray[default,train]==2.60.*",)
START = (
    "--block",
    "--num-cpus=4",
    "--num-gpus=2",
    "--object-store-memory=100000000",
    "--disable-usage-stats",
)


def missing() -> str:
    """Return why no Ray can be started here; nothing if one can."""
    return "" if (ROOT / "bin/ray").exists() else f"no Ray in {ROOT}: `python -m tests.ray_cluster` makes one"


def make() -> None:
    subprocess.run([sys.executable, "-m", "venv", ROOT], check=True)
    subprocess.run([PYTHON, "-m", "pip", "install", "-q", *PACKAGES], check=True)


class Nodes:
    """A cluster's nodes, each with 4 cores and 2 GPUs that are not there."""

    def __init__(self, variables: dict[str, str], port: int, log: Path) -> None:
        self.variables, self._port, self._log = variables, port, log
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> None:
        ports = [f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={free_port()}"]
        address = [] if words else [f"--address=127.0.0.1:{self._port}"]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [ROOT / "bin/ray", "start", "--node-ip-address=127.0.0.1", "--min-worker-port=0", "--max-worker-port=0",
                 *START, *ports, *address, *words],
                env={**os.environ, **self.variables, "RAY_raylet_start_wait_time_s": "240"}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._processes.append(process)

    def kill(self) -> None:
        """End all of the node that came last, at once."""
        last = self._processes.pop()
        for process in [psutil.Process(last.pid), *psutil.Process(last.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        last.wait()

    def alive(self) -> int:
        words = "import ray; ray.init(log_to_driver=False); print(sum(node['Alive'] for node in ray.nodes()))"
        variables = {**os.environ, **self.variables, "RAY_ADDRESS": f"127.0.0.1:{self._port}"}
        done = subprocess.run(
            [PYTHON, "-c", words], env=variables, capture_output=True, text=True, check=False
        )
        return int(done.stdout or 0)

    def end(self) -> None:
        while self._processes:
            self.kill()


@contextmanager
def cluster() -> Iterator[Nodes]:
    """Start two nodes; yield them, with the variables by which clients find them. Ends all."""
    port, dashboard = free_port(), free_port()
    with tempfile.TemporaryDirectory(
        prefix="ray-", ignore_cleanup_errors=True
    ) as home:  # sockets want a short path
        variables = {
            "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        nodes = Nodes(variables, port, Path(home) / "nodes.log")
        try:
            nodes.start(
                "--head",
                f"--port={port}",
                f"--dashboard-port={dashboard}",
                f"--temp-dir={home}",
                f"--ray-client-server-port={free_port()}",
            )
            until_up(variables, Path(home) / "nodes.log")
            nodes.start()
            deadline_s = time.monotonic() + 300
            while nodes.alive() < 2:
                assert time.monotonic() < deadline_s, (Path(home) / "nodes.log").read_text()[-3000:]
            yield nodes
        finally:
            nodes.end()


def until_up(variables: dict[str, str], log: Path) -> None:
    headers = {"Authorization": f"Bearer {variables['RAY_AUTH_TOKEN']}"}
    request = urllib.request.Request(f"{variables['RAY_ADDRESS']}/api/jobs/", headers=headers)
    deadline_s = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return
        except (URLError, ConnectionError):
            assert time.monotonic() < deadline_s, log.read_text()[-3000:]
            time.sleep(1)


if __name__ == "__main__":
    make()
    sys.exit(missing())
