"""A real Ray on this machine, of a head and further nodes, in an environment of its own.

python -m tests.ray_cluster      # makes it (720 MB, by pip) in ~/.cache/ans-ray, or the folder that ANS_RAY names
"""

from __future__ import annotations

import json
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
from typing import Any

import psutil

from tests.ports import free_ports

ROOT = Path(os.environ.get("ANS_RAY", "~/.cache/ans-ray")).expanduser()
PYTHON = ROOT / "bin/python"
PACKAGES = ("ray[default,train]==2.60.*",)
START = (
    "--block", "--num-cpus=4", "--num-gpus=2", "--object-store-memory=100000000", "--disable-usage-stats",
    "--node-ip-address=127.0.0.1", "--min-worker-port=0", "--max-worker-port=0",
)  # fmt: skip


def missing() -> str:
    """Return why no Ray can be started here; nothing if one can."""
    return "" if (ROOT / "bin/ray").exists() else f"no Ray in {ROOT}: `python -m tests.ray_cluster` makes one"


def make() -> None:
    subprocess.run([sys.executable, "-m", "venv", ROOT], check=True)
    subprocess.run([PYTHON, "-m", "pip", "install", "-q", *PACKAGES], check=True)


class Nodes:
    """A cluster's nodes, each with 4 cores and 2 GPUs that are not there."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._port, dashboard, client = free_ports(3)
        self.variables = {
            "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self._head = [
            "--head", f"--temp-dir={home}", f"--port={self._port}", f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={client}",
        ]  # fmt: skip
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start one more node. On a busy machine it may give up after 30 s, as its agents are not there."""
        count, deadline_s = len(self._processes) + 1, time.monotonic() + 600
        while self.alive() < count:
            assert time.monotonic() < deadline_s, (self._home / "nodes.log").read_text()[-3000:]
            if len(self._processes) == count and self._processes[-1].poll() is not None:
                self.kill()
            if len(self._processes) < count:
                self._processes.append(self._started())
            time.sleep(2)

    def _started(self) -> subprocess.Popen[bytes]:
        kinds = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
        ports = [f"--{kind}-port={port}" for kind, port in zip(kinds, free_ports(len(kinds)), strict=True)]
        place = [f"--address=127.0.0.1:{self._port}"] if self._processes else self._head
        with (self._home / "nodes.log").open("ab") as log:
            return subprocess.Popen(
                [ROOT / "bin/ray", "start", *START, *ports, *place], env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """End all of the node that came last, at once; return when the others know."""
        last = self._processes.pop()
        with suppress(psutil.NoSuchProcess):
            for process in [psutil.Process(last.pid), *psutil.Process(last.pid).children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        last.wait()
        while self.alive() > len(self._processes):
            time.sleep(1)

    def preempt(self) -> None:
        """Take the node that came last away as an autoscaler does: announced, and some seconds later ended."""
        while not (last := [node["node_id"] for node in self._alive() if not node["is_head_node"]]):
            time.sleep(1)  # the head is busy
        words = ["drain-node", f"--address=127.0.0.1:{self._port}", f"--node-id={last[0]}"]
        words += [
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=spot",
            "--deadline-remaining-seconds=5",
        ]
        while subprocess.run(
            [ROOT / "bin/ray", *words], env={**os.environ, **self.variables}, check=False
        ).returncode:
            time.sleep(1)
        time.sleep(5)
        self.kill()

    def alive(self) -> int:
        return len(self._alive())

    def _alive(self) -> list[dict[str, Any]]:
        try:
            nodes = self._answer("v0/nodes")["data"]["result"]["result"]
        except OSError:
            return []
        return [node for node in nodes if node["state"] == "ALIVE"]

    def take_jobs(self) -> bool:
        """Tell whether a node's agent starts jobs: on a busy machine a node may live without."""
        try:
            return bool(self._answer("jobs/", json.dumps({"entrypoint": "true"}).encode()))
        except OSError:
            return False

    def _answer(self, path: str, data: bytes | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self.variables['RAY_AUTH_TOKEN']}"}
        headers |= {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.variables['RAY_ADDRESS']}/api/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=90) as response:
            return json.load(response)

    def end(self) -> None:
        while self._processes:
            self.kill()


@contextmanager
def cluster() -> Iterator[Nodes]:
    """Start a head and a node; yield them, with the variables by which clients find them. Ends all."""
    # sockets want a short path
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as home:
        nodes = Nodes(Path(home))
        try:
            nodes.start()
            while not nodes.take_jobs():
                nodes.kill()
                nodes.start()
            nodes.start()
            yield nodes
        finally:
            nodes.end()


if __name__ == "__main__":
    make()
    sys.exit(missing())
