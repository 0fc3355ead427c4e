"""A server on this machine that speaks the Hugging Face hub's protocol, as far as fetching and sending (large
files by LFS) need it, and fails where a test asks for it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = 1000
"""Files from this many bytes on are stored by their SHA-256 (LFS), as the hub stores large ones."""


@dataclass
class Hub:
    files: dict[str, bytes]
    repo: str = "org/set"
    licence: str | None = None
    gated: bool = False
    token: str = "hf_good"
    cuts: list[int] = field(default_factory=list)
    """The next answers with content stop after so many bytes, and the connection is closed."""
    damaged: set[str] = field(default_factory=set)
    """Files that are served with a wrong byte."""
    ranges: list[str | None] = field(default_factory=list)
    """The Range of every request for content, in order."""
    url: str = ""
    exists: bool = True
    private: bool = False
    large: dict[str, bytes] = field(default_factory=dict)
    """Contents that were sent by LFS, by SHA-256."""
    broken_sends: int = 0
    """So many sends of large files fail."""
    sends: list[str] = field(default_factory=list)
    """Checksum of every large file that was sent."""

    @property
    def revision(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def info(self) -> dict[str, Any]:
        card = {"license": self.licence} if self.licence else {}
        return {
            "id": self.repo,
            "sha": self.revision,
            "gated": "manual" if self.gated else False,
            "cardData": card,
            "siblings": [],
            "private": self.private,
        }

    def tree(self) -> list[dict[str, Any]]:
        return [self._entry(path, content) for path, content in self.files.items()]

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": blob,
            **({"lfs": lfs} if len(content) >= LARGE else {}),
        }


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        hub = self.hub
        if path.startswith("api/"):
            about = path.removeprefix("api/datasets/").removeprefix("api/models/")
            if not (hub.exists and about.startswith(hub.repo)):
                self.refuse(401, "RepoNotFound")  # the hub says so to whoever has no token
            elif "/tree/" in about:
                self.answer(json.dumps(hub.tree()).encode())
            else:
                self.answer(json.dumps(hub.info()).encode())
            return
        name = path.partition(f"/resolve/{hub.revision}/")[2]
        if hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.refuse(401, "GatedRepo")
        elif name not in hub.files:
            self.refuse(404, "EntryNotFound")
        else:
            self.send(name)

    def do_HEAD(self) -> None:
        """Tell what a file is, as `snapshot_download` asks before it fetches one."""
        name = self.path.partition("?")[0].strip("/").partition(f"/resolve/{self.hub.revision}/")[2]
        if name not in self.hub.files:
            self.refuse(404, "EntryNotFound")
            return
        content = self.hub.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.hub.revision)
        self.end_headers()

    def do_POST(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.refuse(401, "")
        elif path == "/api/repos/create":
            asked = json.loads(body)
            status = 409 if hub.exists else 200
            if not hub.exists:
                hub.exists, hub.private = (
                    f"{asked['organization']}/{asked['name']}" == hub.repo,
                    asked["visibility"] == "private",
                )
            self.answer(json.dumps({"url": f"{hub.url}/{hub.repo}"}).encode(), status)
        elif path == "/api/validate-yaml":
            self.answer(json.dumps({"warnings": [], "errors": []}).encode())
        elif path == f"/api/models/{hub.repo}/preupload/main":
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular"}
                for f in json.loads(body)["files"]
            ]
            self.answer(json.dumps({"files": [mode | {"shouldIgnore": False} for mode in modes]}).encode())
        elif path == f"/{hub.repo}.git/info/lfs/objects/batch":
            self.answer(
                json.dumps(
                    {"transfer": "basic", "objects": [self.lfs(one) for one in json.loads(body)["objects"]]}
                ).encode()
            )
        elif path == f"/api/models/{hub.repo}/commit/main":
            self.commit([json.loads(line) for line in body.splitlines()])
        else:
            self.refuse(404, "")

    def lfs(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.hub.large:
            return asked
        return asked | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        hub = self.hub
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                hub.files[value["path"]] = hub.large[value["oid"]]
            elif key == "deletedFile":
                del hub.files[value["path"]]
        self.answer(
            json.dumps(
                {"commitUrl": f"{hub.url}/{hub.repo}/commit/{hub.revision}", "commitOid": hub.revision}
            ).encode()
        )

    def do_PUT(self) -> None:
        content, oid = self.rfile.read(int(self.headers["Content-Length"])), self.path.rpartition("/")[2]
        if self.hub.broken_sends:
            self.hub.broken_sends -= 1
            self.refuse(400, "")
            return
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.large[oid] = content
        self.hub.sends.append(oid)
        self.answer(b"{}")

    def send(self, name: str) -> None:
        hub, content = self.hub, self.hub.files[name]
        if name in hub.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = self.headers.get("Range")
        hub.ranges.append(asked)
        first = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        until = hub.cuts.pop(0) if hub.cuts else len(content)
        self.wfile.write(content[first:until])
        self.close_connection = True

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve it on a free port of the loopback device until the end of the block."""
    handler = type("OwnHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
