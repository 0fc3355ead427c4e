"""A real HTTP server on the loopback interface that speaks as much of the chat protocol as the judge needs,
and misbehaves on demand."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One request as it arrived."""

    body: dict[str, Any]
    key: str
    at_s: float

    @property
    def asked(self) -> str:
        return str(self.body["messages"][-1]["content"])


class Server(ThreadingHTTPServer):
    """`script`: what is done with request 1, 2, ...; the last entry with all that follow."""

    daemon_threads = True

    def __init__(self, script: list[Callable[[Handler], None]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.seen: list[Seen] = []
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that have gone are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen = Seen(body=body, key=self.headers.get("Authorization", ""), at_s=time.monotonic())
        with self.server.lock:
            self.server.seen.append(self.seen)
            respond = self.server.script[min(len(self.server.seen), len(self.server.script)) - 1]
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
        try:
            respond(self)
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def send(
        self, status: int, text: str, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        payload = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(payload)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        pass


def completion(content: str | None, *, tokens: tuple[int, int] = (100, 10)) -> str:
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    return json.dumps(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": choices,
            "usage": usage,
        }
    )


def says(content: str | None, *, after_s: float = 0.0) -> Callable[[Handler], None]:
    def respond(handler: Handler) -> None:
        time.sleep(after_s)
        handler.send(200, completion(content))

    return respond


def body(text: str, kind: str = "application/json") -> Callable[[Handler], None]:
    """Status 200 and this instead of a completion."""
    return lambda handler: handler.send(200, text, kind)


def fails(status: int, message: str = "no", **headers: str) -> Callable[[Handler], None]:
    """Retried, where it is, at once: the client honours retry-after-ms."""
    told = {"retry-after-ms": "1"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.send(status, json.dumps({"error": {"message": message}}), headers=told)


def cuts_off(handler: Handler) -> None:
    """Promises more than it sends."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"id": "1", "cho')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def hangs(handler: Handler) -> None:
    time.sleep(3)
    handler.close_connection = True


@contextmanager
def serving(*script: Callable[[Handler], None]) -> Iterator[Server]:
    server = Server(list(script))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
