"""The server over real connections: whom it answers, and what it reads before it does."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from PIL import Image

from ans_core.cli import agent as agent_command
from ans_core.online import server as servers
from ans_core.online.engine import Engine, Query, Reply
from ans_core.online.server import LARGEST, listening, server_of
from ans_core.pictures import rle
from tests import tiny
from tests.browser import found_by_probe
from tests.online.test_practice import PICTURE
from tests.online.test_store import experience, opened

BODY = json.dumps({"question": "Which pattern?", "image": PICTURE})


class Answers(Engine):
    """Has one answer, and no store. It answers once `free` is set."""

    def __init__(self) -> None:
        self.version, self.trouble, self.read_only, self.store = 0, "", True, None  # type: ignore[assignment]
        self.free, self.batch = threading.Event(), 8
        self.asked: list[list[str]] = []
        self.kept: int | None = None
        self.free.set()

    def answer(self, asked: Sequence[Query]) -> list[Reply]:
        self.asked.append([query.question for query in asked])
        self.free.wait()
        if "a damaged picture" in self.asked[-1]:
            raise ValueError("the picture is cut")
        reply = Reply(answer="checked", version=0, confidence=None, experience=self.kept, turns=("one look",))
        return [reply for _ in asked]


class Running:
    """A server in a thread."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.engine = Answers()
        self.bound = listening("127.0.0.1", 0)
        self.port: int = self.bound.getsockname()[1]
        self.server = server_of(self.engine, host=host, wait_s=0.0)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.bound]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self.engine.free.set()
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(servers.overview, "counts", lambda store: {})
    made = Running(host="gpu.lan")
    yield made
    made.close()


def reply(
    server: Running, method: str = "POST", body: str = BODY, path: str = "/ask", **headers: str
) -> tuple[int, dict[str, Any]]:
    """Send a request with the server's own address as its host, unless `headers` (of which _ is -) name
    another."""
    told = {"Content-Type": "application/json", "Host": f"127.0.0.1:{server.port}"}
    told |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(
        method, path if method == "POST" else "/status", body if method == "POST" else None, told
    )
    found = connection.getresponse()
    read = found.read()
    connection.close()
    return found.status, json.loads(read) if read.startswith(b"{") else {}


def test_a_question_is_answered_and_a_status_told(server: Running) -> None:
    status, values = reply(server)
    assert (status, values["answer"], values["why_not_kept"]) == (200, "checked", "")
    assert reply(server, "GET") == (200, {"version": 0, "trouble": "", "read_only": True, "store": {}})


def test_what_a_person_says_of_an_answer_reaches_the_store(server: Running, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        number = store.add(experience(0), np.ones(4, np.float32))
        server.engine.store = store

        def send(**values: object) -> tuple[int, str]:
            status, answered = reply(server, body=json.dumps(values), path="/feedback")
            return status, answered.get("error", "")

        assert send(experience=number, right=True) == (400, "this server keeps nothing (--read-only)")
        server.engine.read_only = False
        assert send(experience=number, right=False, answer="diagonal") == (200, "")
        assert store.tasks([number])[0].true_answer == "diagonal"
        assert send(experience=number, right=True, answer="x")[0] == 400
        marked = io.BytesIO()
        Image.fromarray(rle.decode(tiny.square(8, 8, 24, 24))).save(marked, "PNG")
        assert send(experience=number, mask=base64.b64encode(marked.getvalue()).decode()) == (200, "")
        assert store.tasks([number])[0].mask is not None
        assert "is no base64" in send(experience=number, mask="?")[1]
        clear = io.BytesIO()
        Image.new("RGBA", (tiny.SIDE, tiny.SIDE)).save(clear, "PNG")
        sent = base64.b64encode(clear.getvalue()).decode()
        assert "the mask has transparent parts" in send(experience=number, mask=sent)[1]
        assert "there is no experience 7" in send(experience=7, right=True)[1]
        assert "say whether the answer was right, or show" in send(experience=number)[1]


def test_a_store_that_cannot_be_read_is_told_in_a_status(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(store: object) -> dict[str, int]:
        raise OSError("the store is damaged; put a backup in its place")

    monkeypatch.setattr(servers.overview, "counts", damaged)
    assert reply(server, "GET") == (500, {"error": "the store is damaged; put a backup in its place"})


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_only_who_names_the_servers_own_address_is_answered(server: Running, method: str) -> None:
    for name in ("127.0.0.1", "LocalHost", "[::1]", "gpu.lan"):
        assert reply(server, method, Host=f"{name}:{server.port}")[0] == 200
    for host in (
        f"evil.example:{server.port}",
        "127.0.0.1",
        f"127.0.0.1:{server.port + 1}",
        f"127.0.0.1:{server.port}@evil.example",
        "",
    ):
        status, values = reply(server, method, Host=host)
        assert (status, f"127.0.0.1:{server.port}" in values["error"]) == (403, True)


def test_a_page_of_another_site_is_not_answered(server: Running) -> None:
    assert reply(server, Origin=f"http://localhost:{server.port}")[0] == 200
    for origin in ("http://evil.example", "null", f"https://localhost:{server.port}"):
        status, values = reply(server, Origin=origin)
        assert (status, "page of another site" in values["error"]) == (403, True)


def test_too_many_requests_are_turned_away(server: Running) -> None:
    server.engine.free.clear()
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(reply(server)[0]))
        for _ in range(2 * servers.MOST_WAITING)
    ]
    for thread in threads:
        thread.start()
    while not statuses:
        time.sleep(0.01)
    assert set(statuses) == {503}
    server.engine.free.set()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 503}
    assert statuses.count(200) <= servers.MOST_WAITING
    assert reply(server)[0] == 200


def test_connections_that_say_nothing_turn_nobody_away(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do requests whose body never comes, once their time is up."""
    monkeypatch.setattr(servers, "READ_S", 0.1)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2 * servers.MOST_WAITING)]
    begun = f"POST /ask HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 9\r\n\r\n".encode()
    for connection in silent[: servers.MOST_WAITING]:
        connection.sendall(begun)
    assert {connection.recv(12)[-3:] for connection in silent[: servers.MOST_WAITING]} == {b"408"}
    assert reply(server)[0] == 200
    for connection in silent:
        connection.close()


def test_a_body_in_chunks_is_not_read_whatever_length_it_has(server: Running) -> None:
    for length in ({}, {"Content_Length": "10"}):
        status, values = reply(server, body="1\r\n{\r\n", Transfer_Encoding="chunked", **length)
        assert (status, "no chunks" in values["error"]) == (400, True)
    assert server.engine.asked == []


def test_every_bad_request_has_a_reply(server: Running) -> None:
    file = io.BytesIO()
    Image.new("L", (7000, 7000)).save(file, "PNG")
    large = base64.b64encode(file.getvalue()).decode()
    for body in (
        "{",
        json.dumps({"question": "q", "image": "éééééééé"}),
        '{"question": "\\ud800", "image": ""}',
    ):
        assert reply(server, body=body)[0] == 400
    for field, value, said in (
        ("frames", [PICTURE] * 129, "frames: List should have at most 128 items"),
        ("frames", [large] * 3, "the pictures have 147 million pixels, at most 128 are taken"),
    ):
        status, values = reply(server, body=json.dumps({"question": "q", field: value}))
        assert (status, said in values["error"]) == (400, True), values
    assert reply(server, Content_Type="text/plain")[0] == 400
    for length in ("", str(LARGEST + 1)):
        status, values = reply(server, body="", Content_Length=length)
        assert (status, "send Content-Length" in values.get("error", "send Content-Length")) == (400, True)


PROBE = f"""<script>
(async () => {{
  const until = async done => {{ while (!done()) await new Promise(go => setTimeout(go, 50)); }};
  const bytes = Uint8Array.from(atob("{PICTURE}"), letter => letter.charCodeAt(0));
  const found = [];
  const asked = [["One?", 1, "right"], ["A clip?", 3, "a <b>zebra</b>"], ["There?", 1, "box"], ["Here?", 1, "wrong"], ["Bad?", 1, null]];
  for (const [question, frames, said] of asked) {{
    const picked = new DataTransfer();
    for (let i = 0; i < frames; i++) picked.items.add(new File([bytes], `${{i}}.png`));
    const form = document.querySelector(".ask");
    form.pictures.files = picked.files;
    form.question.value = question === "Bad?" ? "a damaged picture" : question;
    form.requestSubmit();
    const item = document.querySelector("#answers li");
    await until(() => item.querySelector(".answer").textContent.length > 1);
    const feedback = item.querySelector(".feedback");
    if (said === "right") feedback.querySelector("[value=right]").click();
    else if (said === "box" || said === "wrong") {{
      const image = item.querySelector("img");
      await until(() => image.complete && image.naturalWidth && !feedback.hidden);
      const {{ left, top, width, height }} = image.getBoundingClientRect();
      const at = (x, y) => ({{ clientX: left + x * width, clientY: top + y * height }});
      image.dispatchEvent(new PointerEvent("pointerdown", at(0.75, 0.25)));
      image.dispatchEvent(new PointerEvent("pointerup", at(0.25, 0.5)));
      feedback.querySelector(`[value=${{said}}]`).click();
    }}
    else if (said) {{ feedback.truth.value = said; feedback.requestSubmit(); }}
    if (said) await until(() => feedback.hidden);
    found.push([".answer", ".note", "pre"].map(name => item.querySelector(name).textContent));
  }}
  document.body.insertAdjacentHTML("beforeend", '<pre id="found"></pre>');
  document.getElementById("found").textContent = JSON.stringify(found);
}})();
</script>"""


@pytest.mark.slow
def test_a_person_asks_and_judges_answers_on_the_page(server: Running, tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        number = store.add(experience(0), np.ones(4, np.float32))
        server.engine.store, server.engine.read_only, server.engine.kept = store, False, number
        probed = servers.PAGE.read_text().replace("</body>", f"{PROBE}</body>")
        assert isinstance(server.server.config.app, FastAPI)
        server.server.config.app.add_api_route("/probed", lambda: HTMLResponse(probed))
        found = found_by_probe(f"http://127.0.0.1:{server.port}/probed", tmp_path)
        (task,) = store.tasks([number])  # what was said last counts
        assert task.wrong_answer == "vertical"  # the box went with it
        assert task.mask is not None
        rows, columns = np.nonzero(rle.decode(task.mask))
        box = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) / tiny.SIDE
        assert np.allclose(box, [0.25, 0.25, 0.75, 0.5], atol=0.03)
    assert found == [
        ["checked", f"version 0, experience {number}; you said: right", "one look"],
        ["checked", f"version 0, experience {number}; you said: a <b>zebra</b>", "one look"],
        ["checked", f"version 0, experience {number}; you said: it is in the box", "one look"],
        ["checked", f"version 0, experience {number}; you said: wrong", "one look"],
        ["the picture is cut", "", ""],
    ]
    assert server.engine.asked == [["One?"], ["A clip?"], ["There?"], ["Here?"], ["a damaged picture"]]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/")
    reply_of_page = connection.getresponse()
    assert reply_of_page.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    connection.close()


@pytest.mark.slow
def test_the_command_says_where_it_answers_and_ends_by_term(tmp_path: Path) -> None:
    """`ans agent serve` in a process of its own, with an engine that needs no model."""
    script = f"""
import contextlib, types
import ans_core.stages.online_parts as parts
from flows import cli
from tests.online.test_server import Answers, servers

servers.overview.counts = lambda store: {{}}
made = types.SimpleNamespace(engine=lambda read_only: Answers())
parts.opened = lambda *given, **named: contextlib.nullcontext(made)
words = ["agent", "serve", "--port", "0", "--model", {str(tmp_path)!r}, "--adapter", {str(tmp_path)!r}]
arguments = cli.parse([*words, "--store", {str(tmp_path / "store")!r}])
arguments.function(arguments)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = child.stdout.readline()
    found = re.search(r"answers on http://127\.0\.0\.1:(\d+)/ask", told)
    assert found, told
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=120)
    connection.request("POST", "/ask", BODY, {"Content-Type": "application/json"})
    assert json.loads(connection.getresponse().read())["answer"] == "checked"
    connection.close()
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=120) == 128 + signal.SIGTERM


def test_a_worker_without_questions_that_its_agent_learned_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"name": "mine", "format": "annotations", "path": "mine"}
    (tmp_path / "params.yaml").write_text(
        json.dumps({"profile": "mine", "agent": {"families": [], "sources": [source]}})
    )
    monkeypatch.setattr(agent_command, "root", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"agent\.families is empty, so there are no questions"):
        agent_command.worker(Namespace(store=None))
