"""An engine as an HTTP server of JSON: questions with pictures in, answers out.

    POST /ask     {"question": "...", "image": "<base64>"}  (or "frames": ["<base64>", ...] of a clip; "request": a name of your own)
    GET  /status

Pictures come in the request, never as paths of this machine. A request must name one of the server's own
addresses as its host, and no other site's page as its origin: a page of another site can neither send one nor
have its own name point here. A question must say that it is JSON.
"""

from __future__ import annotations

import base64
import json
import math
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ans_core.agent import asking
from ans_core.online import overview
from ans_core.online.engine import Engine, Query
from ans_core.pictures import transforms

LARGEST = 64 * 2**20
"""Bytes of a request."""
MOST_FRAMES = 128
"""Of a clip, as many as TRACK_OBJECT follows."""
MOST_PIXELS = 128_000_000
"""Of all pictures of a request: they are decoded, and written anew."""
MOST_WAITING = 32
"""Requests that are read or wait for the model; further ones are turned away with 503."""
CHUNK = 2**16
LOOPBACK = ("127.0.0.1", "localhost", "::1")
REQUEST = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Names of requests. They are kept as they come, so there is no room for an address or a sentence in them."""


class BadRequest(Exception):
    """What is wrong with a request, for whoever sent it."""


def query_of(body: bytes) -> Query:
    """Read a request. Raises BadRequest."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is no JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("question"), str):
        raise BadRequest('"question" is a text of an object')
    try:
        question = asking.checked(values["question"])
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if unknown := values.keys() - {"question", "image", "frames", "request"}:
        raise BadRequest(f"unknown: {', '.join(sorted(unknown))}; there are question, image, frames, request")
    if ("image" in values) == ("frames" in values):
        raise BadRequest('give either "image" or "frames"')
    encoded = [values["image"]] if "image" in values else values["frames"]
    if not isinstance(encoded, list) or not encoded or not all(isinstance(one, str) for one in encoded):
        raise BadRequest('"image" is a text in base64, "frames" a list of such texts')
    if len(encoded) > MOST_FRAMES:
        raise BadRequest(f"{len(encoded)} frames; a clip has at most {MOST_FRAMES}, so leave some out")
    try:
        frames = tuple(base64.b64decode(one, validate=True) for one in encoded)
    except ValueError as error:  # also of texts that are not ASCII
        raise BadRequest(f"a picture is no base64 ({error})") from None
    try:
        pixels = sum(math.prod(transforms.image_size(frame)) for frame in frames)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if pixels > MOST_PIXELS:
        raise BadRequest(
            f"the pictures have {pixels / 1e6:.0f} million pixels, at most {MOST_PIXELS / 1e6:.0f} are "
            "taken; make them smaller"
        )
    request = values.get("request", str(uuid.uuid4()))
    if not isinstance(request, str) or not REQUEST.fullmatch(request):
        raise BadRequest(
            '"request" is a name of 1 to 128 letters, digits and . _ : -, since it is kept as it comes'
        )
    return Query(request=request, question=question, frames=frames, clip="frames" in values)


def check_address(host: str, port: int) -> None:
    """Raise ValueError where no server can listen at an address: to be found out before a model is loaded."""
    try:
        with socket.create_server((host, port), family=_family(host)):
            pass
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"nobody can listen on {host}, port {port} ({error}); give another --port or --host"
        ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Server(ThreadingHTTPServer):
    """One engine, asked by one request at a time."""

    daemon_threads = True

    def __init__(self, engine: Engine, *, host: str, port: int) -> None:
        self.address_family = _family(host)
        super().__init__((host, port), Handler)
        self.host = host.lower()
        self.engine, self.turn = engine, threading.Lock()
        self.room = threading.Semaphore(MOST_WAITING)

    def hosts(self, reached: str) -> set[str]:
        """Return what a request may name as its host, if it reached the server at this address of the
        machine."""
        names = {*LOOPBACK, self.host, reached.removeprefix("::ffff:")}
        bare = {f"[{name}]" if ":" in name else name for name in names}
        # browsers leave :80 out
        return {f"{name}:{self.server_port}" for name in bare} | (bare if self.server_port == 80 else set())

    def status(self) -> dict[str, Any]:
        engine = self.engine
        counts = overview.counts(engine.store)
        return {
            "version": engine.version,
            "trouble": engine.trouble,
            "read_only": engine.read_only,
            "store": counts,
        }


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 60.0
    """Seconds for a request to arrive, its head included."""

    def setup(self) -> None:
        super().setup()
        self.late = False
        self.clock = threading.Timer(self.timeout, self._end_reading)
        self.clock.daemon = True
        self.clock.start()

    def finish(self) -> None:
        self.clock.cancel()
        super().finish()

    def _end_reading(self) -> None:
        """End what the request sends, as if it had hung up: each of its parts may come in time, and all of
        them never."""
        self.late = True
        with suppress(OSError):  # it has
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        with self._admitted() as admitted:
            if not admitted:
                return
            if self.path != "/status":
                self._tell(HTTPStatus.NOT_FOUND, {"error": "there are POST /ask and GET /status"})
                return
            try:
                self._tell(HTTPStatus.OK, self.server.status())
            except OSError as error:  # the store can't be read
                self._tell(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)})

    def do_POST(self) -> None:
        with self._admitted() as admitted:
            if not admitted:
                return
            if error := self._unreadable():
                self._turn_away(HTTPStatus.BAD_REQUEST, error)
                return
            try:
                query = query_of(self._body())
                with self.server.turn:
                    (reply,) = self.server.engine.answer([query])
                self._tell(HTTPStatus.OK, asdict(reply))
            except (BadRequest, ValueError) as error:  # ValueError: a picture that can't be read
                self._tell(HTTPStatus.BAD_REQUEST, {"error": str(error)})

    @contextmanager
    def _admitted(self) -> Iterator[bool]:
        """Count a request while it is read and answered. One that may not be made, or finds no room, is told
        so; its body is not kept."""
        if error := self._foreign():
            self._turn_away(HTTPStatus.FORBIDDEN, error)
            yield False
        elif not self.server.room.acquire(blocking=False):
            self._turn_away(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_WAITING} requests wait; ask again later")
            yield False
        else:
            try:
                yield True
            finally:
                self.server.room.release()

    def _foreign(self) -> str:
        """Say why a request is not for this server; empty if it is. A site's name may point here (DNS
        rebinding), its page may send."""
        hosts = self.server.hosts(str(self.connection.getsockname()[0]))
        named = [name.lower() for name in self.headers.get_all("Host", [])]
        if len(named) != 1 or named[0] not in hosts:
            return f"the request's Host is none of this server's addresses; ask {' or '.join(sorted(hosts))}"
        origins = [origin.lower() for origin in self.headers.get_all("Origin", [])]
        if any(origin not in {f"http://{host}" for host in hosts} for origin in origins):
            return (
                "the request's Origin is a page of another site; this server answers its own address and "
                "programs alone"
            )
        return ""

    def _length(self) -> int | None:
        """Return how long the body is said to be; None if that is missing, no number or too much."""
        length = self.headers.get("Content-Length", "")
        return int(length) if re.fullmatch(r"[0-9]{1,12}", length) and int(length) <= LARGEST else None

    def _turn_away(self, status: HTTPStatus, error: str) -> None:
        """Tell an error, and read past the body: who is still sending when the connection closes never reads
        the reply."""
        self._tell(status, {"error": error})
        left = self._length() or 0
        while left > 0 and (read := self.rfile.read(min(left, CHUNK))):
            left -= len(read)

    def _unreadable(self) -> str:
        """Say why a question's body is not even read; empty if it is."""
        if self.path != "/ask":
            return "there are POST /ask and GET /status"
        if self.headers.get_content_type() != "application/json":
            return "send Content-Type: application/json"
        return f"send Content-Length, at most {LARGEST}" if self._length() is None else ""

    def _body(self) -> bytes:
        """Read the body. Raises BadRequest for one that ends too early, or takes too long."""
        length = self._length() or 0
        read = self.rfile.read(length)
        if len(read) < length:
            raise BadRequest(
                f"{len(read)} of {length} bytes came{f' in {self.timeout:g} s' if self.late else ''}"
            )
        self.clock.cancel()
        return read

    def _tell(self, status: HTTPStatus, values: dict[str, Any]) -> None:
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: questions are nobody's business."""
