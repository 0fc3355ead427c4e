"""Stores on the loopback: an S3 server (moto), and an HTTP server of a folder whose faults a test chooses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ans_core import storage

BUCKET = "pictures"


@contextmanager
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a client of an S3 server with an empty bucket, which the usual variables name. Skips where moto or s3fs
    is not installed."""
    pytest.importorskip("s3fs", reason="s3fs is missing: pip install -c constraints.txt -e '.[s3]'")
    server = pytest.importorskip(
        "moto.server", reason="moto is missing (requirements/dev.txt)"
    ).ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    import boto3
    import s3fs

    server.start()
    s3fs.S3FileSystem.clear_instance_cache()  # with the address of another server
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    try:
        yield client
    finally:
        server.stop()


def upload(client: Any, folder: Path, prefix: str) -> str:
    """Copy a folder's files; return its URL."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            client.upload_file(str(file), BUCKET, f"{prefix}/{file.relative_to(folder)}")
    return f"s3://{BUCKET}/{prefix}"


@dataclass
class Faulty:
    """The files of a folder. `faults`: what the next requests for a name meet, "503", "cut" or "slow"; one that ends in
    "*" meets all."""

    folder: Path
    url: str = ""
    faults: dict[str, list[str]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)

    def fault(self, name: str) -> str:
        self.requests[name] += 1
        faults = self.faults.get(name, [])
        return (
            faults[0].rstrip("*") if faults and faults[0].endswith("*") else faults.pop(0) if faults else ""
        )


@contextmanager
def http(folder: Path) -> Iterator[Faulty]:
    faulty = Faulty(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            fault = faulty.fault(name)
            if fault == "503":
                self.send_error(503)
                return
            if not (folder / name).is_file():
                self.send_error(404)
                return
            if fault == "slow":
                time.sleep(2)
            content = (folder / name).read_bytes()
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[: len(part) // 2] if fault == "cut" else part)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    faulty.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield faulty
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, *, gigabytes: str = "1") -> Iterator[None]:
    """Cache ranges in `folder`, and wait little."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv(storage.CACHE_GB, gigabytes)
    monkeypatch.setattr(storage, "WAIT_S", 0.01)
    storage._cache.cache_clear()
    yield
    storage._cache.cache_clear()
