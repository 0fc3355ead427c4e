"""A Prefect server for this machine alone: a loopback port and a key in, the environment that its clients
need out.

Anyone who can talk to Prefect's API can run commands (a deployment's pull steps), and by default it answers
every page that the user's browser shows. This server requires a key, and answers only requests for its own
address that no other site's page has sent.
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.request import getproxies_environment

from flows.paths import environment
from tasks.ports import HOST
from tasks.process import die_with_parent, imports_without_collector, write_error

NAMES = (HOST, "localhost")
START_S = 300.0
END_S = 10.0
MIN_LIFE_S = 5.0
"""A server that lived shorter does not start at all; another one would not either."""


class LocalAddressOnly:
    """ASGI middleware: refuse a foreign Host (DNS rebinding) and a foreign Origin (a page of another site),
    also for WebSockets."""

    def __init__(self, app: Any, *, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}".encode() for name in NAMES}
        self.origins = {b"http://" + host for host in self.hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        local = headers.get(b"host") in self.hosts and headers.get(b"origin") in {None, *self.origins}
        if scope["type"] == "lifespan" or local:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            from fastapi.responses import PlainTextResponse

            refusal = PlainTextResponse("not this server's address, or a page of another site", 403)
            await refusal(scope, receive, send)


@contextmanager
def prefect_server(here: Path, *, port: int = 0, temporary: bool = False) -> Iterator[dict[str, str]]:
    """Start a server (port 0: any free one), yield PREFECT_API_URL and PREFECT_API_AUTH_STRING for its
    clients, and end it.

    It also ends when this process is killed; if it ends by itself, another one takes its place, with the same
    address, key and history. A temporary one has no UI and no scheduler. Raises OSError if the port is taken.
    """
    try:
        listening = socket.create_server((HOST, port))
    except OSError as error:
        raise OSError(
            f"port {port} of {HOST} can't be had ({error.strerror}): end what uses it, or give another --port"
        ) from error
    with listening:
        address = f"http://{HOST}:{listening.getsockname()[1]}"
        key = os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or f"ans:{secrets.token_urlsafe(24)}"
        client = {"PREFECT_API_URL": f"{address}/api", "PREFECT_API_AUTH_STRING": key}
        server = {
            "PREFECT_SERVER_API_AUTH_STRING": key,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(
                f"http://{name}:{listening.getsockname()[1]}" for name in NAMES
            ),
            "ANS_PARENT_PID": str(os.getpid()),
            **({"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_UI_ENABLED": "0"} if temporary else {}),
        }
        environ = environment() | client | server
        Path(environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
        supervisor = Supervisor(listening, here, environ)
        try:
            wait_for(f"{address}/api/health", supervisor.process)
            yield client
        finally:
            supervisor.end()


class Supervisor:
    """A server's process on a bound socket, replaced if it ends: clients wait in the socket's queue
    meanwhile."""

    def __init__(self, listening: socket.socket, here: Path, environ: dict[str, str]) -> None:
        self._listening, self._here, self._environ = listening, here, environ
        self._ending, started = Event(), Event()
        # The kernel ends the process with the thread that started it (die_with_parent), so one thread starts
        # them all.
        self._thread = Thread(target=self._keep, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    def _keep(self, started: Event) -> None:
        while not self._ending.is_set():
            start_s = time.monotonic()
            self.process = self._start()
            started.set()
            status = self.process.wait()
            if self._ending.is_set() or time.monotonic() - start_s < MIN_LIFE_S:
                return
            write_error(f"the Prefect server ended (status {status}), another one takes its place\n")

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = self._listening.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "flows.prefect_server", str(descriptor)], pass_fds=[descriptor],
            cwd=self._here, env=self._environ,
            start_new_session=True,  # Ctrl-C is for the flow, which closes its run before the server goes
        )  # fmt: skip

    def end(self) -> None:
        self._ending.set()
        self.process.terminate()
        self._thread.join(END_S)
        if self._thread.is_alive():
            self.process.kill()
            self._thread.join()


def deployment_command(api: str, key: str) -> str:
    """Return a command for the user's shell that starts a run on this machine's server, past a proxy if the
    shell has one."""
    direct = (
        f"no_proxy={shlex.quote(os.environ['no_proxy'])} "
        if getproxies_environment().keys() & {"http", "https", "all"}
        else ""
    )
    return (
        f"{direct}PREFECT_API_URL={api} PREFECT_API_AUTH_STRING={key} prefect deployment run "
        "full-pipeline/current"
    )


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise OSError(
                f"the server at {url} ended with status {process.returncode} as it started; its message is above"
            )
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise OSError(f"no server answered at {url} within {START_S:.0f} s; is the machine that busy?")


def main(descriptor: int) -> None:
    """Run the server's process on a socket that is already bound."""
    die_with_parent()
    atexit.register(gc.freeze)  # else the interpreter walks through all that was imported as it ends: 0.9 s
    bound = socket.socket(fileno=descriptor)
    with imports_without_collector():
        import uvicorn
        from prefect.server.api.server import create_app

        app = LocalAddressOnly(create_app(final=True), port=bound.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=3)).run(sockets=[bound])


if __name__ == "__main__":
    main(int(sys.argv[1]))
