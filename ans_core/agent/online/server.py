"""An engine as an HTTP server of JSON: questions with pictures in, answers out.

    POST /ask     {"question": "...", "image": "<base64>"}  (or "frames": ["<base64>", ...] of a clip; "request": a name of your own)
    GET  /status

Pictures come in the request, never as paths of this machine. A request must say that it is JSON: pages of other sites can't send one.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
import uuid
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ans_core.agent.online import overview
from ans_core.agent.online.engine import Asked, Engine

LARGEST = 64 * 2**20
"""Bytes of a request."""
MOST_WAITING = 32
"""Requests that wait for the model; further ones are turned away with 503."""
LONGEST_QUESTION = 4000


class BadRequest(Exception):
    """What is wrong with a request, for whoever sent it."""


def asked_of(body: bytes) -> Asked:
    """Read a request. Raises BadRequest."""
    try:
        values = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the request is no JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("question"), str) or not 0 < len(values["question"]) <= LONGEST_QUESTION:
        raise BadRequest(f'"question" is a text of 1 to {LONGEST_QUESTION} characters')
    if unknown := values.keys() - {"question", "image", "frames", "request"}:
        raise BadRequest(f"unknown: {', '.join(sorted(unknown))}; there are question, image, frames, request")
    if ("image" in values) == ("frames" in values):
        raise BadRequest('give either "image" or "frames"')
    encoded = [values["image"]] if "image" in values else values["frames"]
    if not isinstance(encoded, list) or not encoded or not all(isinstance(one, str) for one in encoded):
        raise BadRequest('"image" is a text in base64, "frames" a list of such texts')
    try:
        frames = tuple(base64.b64decode(one, validate=True) for one in encoded)
    except binascii.Error as error:
        raise BadRequest(f"a picture is no base64 ({error})") from None
    request = values.get("request", str(uuid.uuid4()))
    if not isinstance(request, str) or not 0 < len(request) <= 200:
        raise BadRequest('"request" is a text of 1 to 200 characters')
    return Asked(request=request, question=values["question"], frames=frames, clip="frames" in values)


class Server(ThreadingHTTPServer):
    """One engine, asked by one request at a time."""

    daemon_threads = True

    def __init__(self, engine: Engine, *, host: str, port: int) -> None:
        super().__init__((host, port), Handler)
        self.engine, self.turn = engine, threading.Lock()
        self.room = threading.Semaphore(MOST_WAITING)

    def status(self) -> dict[str, Any]:
        engine = self.engine
        counts = overview.counts(engine.store)
        return {"version": engine.version, "trouble": engine.trouble, "read_only": engine.read_only, "store": counts}


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 60.0
    """Seconds for a request to arrive."""

    def do_GET(self) -> None:
        if self.path != "/status":
            self._tell(HTTPStatus.NOT_FOUND, {"error": "there are POST /ask and GET /status"})
            return
        self._tell(HTTPStatus.OK, self.server.status())

    def do_POST(self) -> None:
        try:
            asked = asked_of(self._body())
        except BadRequest as error:
            self._tell(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        if not self.server.room.acquire(blocking=False):
            self._tell(HTTPStatus.SERVICE_UNAVAILABLE, {"error": f"{MOST_WAITING} requests wait; ask again later"})
            return
        try:
            with self.server.turn:
                (reply,) = self.server.engine.answer([asked])
            self._tell(HTTPStatus.OK, asdict(reply))
        except ValueError as error:  # a picture that can't be read
            self._tell(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        finally:
            self.server.room.release()

    def _body(self) -> bytes:
        if self.path != "/ask":
            raise BadRequest("there are POST /ask and GET /status")
        if self.headers.get_content_type() != "application/json":
            raise BadRequest("send Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST:
            raise BadRequest(f"send Content-Length, at most {LARGEST}")
        return self.rfile.read(int(length))

    def _tell(self, status: HTTPStatus, values: dict[str, Any]) -> None:
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: questions are nobody's business."""
