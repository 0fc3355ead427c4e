"""The server over real connections: whom it answers, and what it reads before it does."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from PIL import Image

from ans_core.online import server as servers
from ans_core.online.engine import Engine, Query, Reply
from ans_core.online.server import LARGEST, Server
from tests.online.test_practice import PICTURE

BODY = json.dumps({"question": "Which pattern?", "image": PICTURE})


class Answers(Engine):
    """Has one answer, and no store."""

    def __init__(self) -> None:
        self.version, self.trouble, self.read_only, self.store = 0, "", True, None  # type: ignore[assignment]

    def answer(self, asked: Sequence[Query]) -> list[Reply]:
        return [Reply(answer="checked", version=0, confidence=None, experience=None) for _ in asked]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(servers.overview, "counts", lambda store: {})
    with Server(Answers(), host="127.0.0.1", port=0) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def reply(
    server: Server, method: str = "POST", body: str = BODY, **headers: str
) -> tuple[int, dict[str, Any]]:
    """Send a request with the server's own address as its host, unless `headers` (of which _ is -) name
    another."""
    told = {"Content-Type": "application/json", "Host": f"127.0.0.1:{server.server_port}"}
    told |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(
        method, "/ask" if method == "POST" else "/status", body if method == "POST" else None, told
    )
    found = connection.getresponse()
    values: dict[str, Any] = json.loads(found.read())
    connection.close()
    return found.status, values


def test_a_store_that_cannot_be_read_is_told_in_a_status(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(store: object) -> dict[str, int]:
        raise OSError("the store is damaged; put a backup in its place")

    monkeypatch.setattr(servers.overview, "counts", damaged)
    assert reply(server, "GET") == (500, {"error": "the store is damaged; put a backup in its place"})


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_only_who_names_the_servers_own_address_is_answered(server: Server, method: str) -> None:
    for name in ("127.0.0.1", "LocalHost", "[::1]"):
        assert reply(server, method, Host=f"{name}:{server.server_port}")[0] == 200
    for host in (
        f"evil.example:{server.server_port}",
        "127.0.0.1",
        f"127.0.0.1:{server.server_port + 1}",
        f"127.0.0.1:{server.server_port}@evil.example",
        "",
    ):
        status, values = reply(server, method, Host=host)
        assert (status, f"ask 127.0.0.1:{server.server_port}" in values["error"]) == (403, True)
    assert server.room._value == servers.MOST_WAITING


def test_a_page_of_another_site_is_not_answered(server: Server) -> None:
    assert reply(server, Origin=f"http://localhost:{server.server_port}")[0] == 200
    for origin in ("http://evil.example", "null", f"https://localhost:{server.server_port}"):
        status, values = reply(server, Origin=origin)
        assert (status, "page of another site" in values["error"]) == (403, True)


def test_a_named_host_may_be_asked_for_and_at_port_80_without_the_port(server: Server) -> None:
    server.host, server.server_port = "gpu.lan", 80
    assert {"gpu.lan", "gpu.lan:80", "10.0.0.7", "[::1]:80"} <= server.hosts("::ffff:10.0.0.7")
    assert "evil.example" not in server.hosts("10.0.0.7")


def test_a_request_is_counted_before_its_body_is_read(server: Server) -> None:
    server.room = threading.Semaphore(1)
    waiting = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    waiting.putrequest("POST", "/ask")
    waiting.putheader("Content-Type", "application/json")
    waiting.putheader("Content-Length", str(len(BODY)))
    waiting.endheaders()
    while server.room._value:  # the server has read the head alone
        threading.Event().wait(0.001)
    assert reply(server, "GET")[0] == 503
    status, values = reply(server, body=" " * 2**22 + BODY)
    assert (status, "requests wait; ask again later" in values["error"]) == (503, True)
    waiting.send(BODY.encode())
    assert waiting.getresponse().status == 200
    waiting.close()


def test_every_bad_request_has_a_reply(server: Server) -> None:
    file = io.BytesIO()
    Image.new("L", (7000, 7000)).save(file, "PNG")
    large = base64.b64encode(file.getvalue()).decode()
    for body in (
        "[" * 100_000,
        json.dumps({"question": "q", "image": "éééééééé"}),
        '{"question": "\\ud800", "image": ""}',
    ):
        assert reply(server, body=body)[0] == 400
    for field, value, said in (
        ("frames", [PICTURE] * 129, "129 frames; a clip has at most 128"),
        ("frames", [large] * 3, "the pictures have 147 million pixels, at most 128 are taken"),
    ):
        status, values = reply(server, body=json.dumps({"question": "q", field: value}))
        assert (status, said in values["error"]) == (400, True), values
    # told although much is still to come
    status, values = reply(server, body=" " * 2**23 + BODY, Content_Type="text/plain")
    assert (status, values["error"]) == (400, "send Content-Type: application/json")
    for length in ("9" * 5000, "-1", str(LARGEST + 1), "²"):
        status, values = reply(server, body="", Content_Length=length)
        assert (status, "send Content-Length" in values["error"]) == (400, True)


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_request_that_comes_byte_by_byte_ends_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Each byte comes long before the time of a read is over."""
    monkeypatch.setattr(servers.Handler, "timeout", 0.5)
    head = f"POST /ask HTTP/1.0\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n"
    start, answer = time.monotonic(), bytearray()
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall((head + ("X-Slow: " if part == "head" else "\r\n")).encode())
        connection.settimeout(0.05)
        while time.monotonic() - start < 20:
            try:
                connection.sendall(b"x")
                if not (told := connection.recv(4096)):
                    break
                answer += told
            except TimeoutError:
                continue
            except OSError:  # closed
                break
    assert 0.4 < time.monotonic() - start < 10
    if part == "body":
        assert b"of 9999 bytes came in 0.5 s" in answer
