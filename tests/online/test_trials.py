"""Safety trials: real processes of `ans agent`, killed at random moments; publishing that is cut anywhere;
what people do with a store."""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from ans_core.online import overview
from ans_core.online.snapshots import Snapshots
from ans_core.online.store import FILE, Store
from flows import cli
from tasks.ports import free_port
from tests import tiny
from tests.online.conftest import config
from tests.online.test_store import experience, opened
from tests.online.test_worker import QUESTION, Start

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600.0
MOMENTS = 9


class Children:
    """Processes of `ans agent` that start at once, and are killed as -9 does it."""

    def __init__(self, workspace: Path) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.workspace = workspace
        self.host = subprocess.Popen(
            [sys.executable, "-m", "tests.online.forks"], cwd=workspace, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pids: dict[str, int] = {}

    def start(self, name: str, *words: str) -> None:
        assert self.host.stdin is not None
        assert self.host.stdout is not None
        self.host.stdin.write(json.dumps([["agent", *words], str(self.out(name))]) + "\n")
        self.host.stdin.flush()
        self.pids[name] = int(self.host.stdout.readline())

    def out(self, name: str) -> Path:
        return self.workspace / f"{name}.txt"

    def lives(self, name: str) -> bool:
        try:
            os.kill(self.pids[name], 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self, name: str, by: signal.Signals = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pids[name], by)
        while self.lives(name):
            time.sleep(0.01)

    def close(self) -> None:
        for name in self.pids:
            self.kill(name)
        self.host.kill()
        self.host.wait()


@contextmanager
def children(start: Start, folder: Path) -> Iterator[Children]:
    """In a checkout of settings alone, whose base and adapter know nothing."""
    (folder / "profiles").mkdir(parents=True)
    (folder / "dvc.yaml").touch()
    settings = config(release={"canary": 1}, keeping={"queue": 60}).model_copy(update={"profile": "trial"})
    (folder / "params.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    made = Children(folder)
    try:
        yield made
    finally:
        made.close()


def post(port: int, request: str) -> dict[str, Any]:
    number = int(request.removeprefix("r"))
    body = {
        "question": QUESTION,
        "image": base64.b64encode(tiny.picture(number)).decode(),
        "request": request,
    }
    url = f"http://127.0.0.1:{port}/ask"
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


class Client(threading.Thread):
    """Asks one question after the other, each until it has its answer."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.end = port, False
        self.replies: dict[str, dict[str, Any]] = {}
        self.slowest_s: list[float] = []

    def run(self) -> None:
        number = 0
        while not self.end:
            try:
                start = time.monotonic()
                self.replies[f"r{number}"] = post(self.port, f"r{number}")
                self.slowest_s.append(time.monotonic() - start)
                number += 1
            except (OSError, urllib.error.URLError, ValueError):  # nobody there, or killed while answering
                time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_engine_and_worker_killed_at_nine_moments_lose_nothing(start: Start, tmp_path: Path) -> None:
    """No acknowledged experience is lost, none is there twice, answers go on, and the worker ends the
    queue."""
    base, adapter = start
    store, port, rng = tmp_path / "store", free_port(), random.Random(0)
    serve = (
        "serve",
        "--store",
        str(store),
        "--model",
        str(base),
        "--adapter",
        str(adapter),
        "--port",
        str(port),
    )
    work = ("worker", "--store", str(store), "--model", str(base))
    with children(start, tmp_path / "workspace") as made:
        made.start("engine", *serve)
        client = Client(port)
        client.start()
        wait(lambda: len(client.replies) >= 4 or not made.lives("engine"))
        assert made.lives("engine"), made.out("engine").read_text()
        made.start("worker", *work)
        for moment in range(MOMENTS):
            before = len(client.replies)
            time.sleep(rng.uniform(0, 2))
            for name in (("engine",), ("worker",), ("engine", "worker"))[moment % 3]:
                made.kill(name)
                made.start(name, *(serve if name == "engine" else work))
            wait(lambda before=before: len(client.replies) >= before + 2 or not made.lives("engine"))
            assert made.lives("engine"), made.out("engine").read_text()
        wait(lambda: Snapshots(Store(store), base_hash="").served() > 0)
        client.end = True
        client.join(PATIENCE_S)
        for name in ("engine", "worker"):
            made.kill(name)
        made.start("last", *work, "--until-idle")
        wait(lambda: not made.lives("last"))
        assert "nothing more to do" in made.out("last").read_text()
    kept = {
        request: reply["experience"]
        for request, reply in client.replies.items()
        if reply["experience"] is not None
    }
    assert len(kept) >= 2 * MOMENTS
    assert len(set(kept.values())) == len(kept)
    with Store(store) as left:
        rows = dict(left.rows("SELECT request, id FROM experiences"))
        assert kept.items() <= rows.items()
        counts = overview.counts(left)
        assert counts["experiences"] == counts["vectors"] == len(rows) <= len(client.replies) + 1
        assert counts["waiting"] == counts["learned, weights not on disk"] == 0
    print(f"{len(client.replies)} answers, p99 {np.quantile(client.slowest_s, 0.99):.2f} s")


def wait(ready: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < end, "nothing happened for too long"
        time.sleep(0.05)


class _PowerCut(BaseException):
    pass


LASTING = ((os, "fsync"), (Path, "rename"), (Store, "set_meta"))
"""What makes something last."""


def cut_at(left: Iterator[int], real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `real`, but for the call at which the common count of calls is 0."""

    def call(*given: Any, **named: Any) -> Any:
        if next(left) == 0:
            raise _PowerCut
        return real(*given, **named)

    return call


def test_publishing_cut_anywhere_leaves_the_last_whole_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut before each call that makes something last, one after the other, until none is left to cut."""
    with opened(tmp_path) as store:
        snapshots = Snapshots(store, base_hash="b")
        assert snapshots.publish({"w": torch.zeros(3)}, after=None, update=0, about={}, measured={}) == 0
        cuts = 0
        for last in range(20):
            with monkeypatch.context() as patch:
                left = itertools.count(last, -1)
                for module, name in LASTING:
                    patch.setattr(module, name, cut_at(left, getattr(module, name)))
                try:
                    snapshots.publish({"w": torch.ones(3)}, after=0, update=1, about={}, measured={})
                    break
                except _PowerCut:
                    cuts += 1
            assert snapshots.served() == 0
            assert snapshots.load(0).tensors["w"].tolist() == [0, 0, 0]
        assert cuts >= 4
        served = snapshots.served()
        assert served > 0
        assert snapshots.load(served).tensors["w"].tolist() == [1, 1, 1]
        assert not list((tmp_path / "snapshots").glob(".*"))
        # another one is served by now
        assert snapshots.publish({"w": torch.ones(3)}, after=0, update=1, about={}, measured={}) is None
        assert snapshots.served() == served


def agent(*words: str) -> int:
    arguments = cli.parse(["agent", *words])
    code: int = arguments.function(arguments)
    return code


def test_status_rollback_export_and_forget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "store", tmp_path / "out"
    where = ("--store", str(folder))
    with Store(folder, encoder="b: kind") as store:
        snapshots = Snapshots(store, base_hash="b")
        for number in range(3):
            store.add(experience(number), np.ones(4, np.float32))
            snapshots.publish(
                {"w": torch.full((3,), float(number))}, after=None if number == 0 else number - 1, update=number, about={},
                measured={},
            )  # fmt: skip
        store.note("alert", kind="flips", told="42% of the labels change")
    assert agent("status", *where) == 0
    told = capsys.readouterr().out
    assert "version 2 of [0, 1, 2]" in told
    assert "42% of the labels change" in told
    assert agent("rollback", *where) == 0
    assert capsys.readouterr().out == "version 1 is served instead of 2\n"
    with pytest.raises(ValueError, match=r"there is no version 7 in .*; there are \[0, 1, 2\]"):
        agent("rollback", "7", *where)
    own = out.with_name(f"{out.name}.partial")
    own.mkdir()  # somebody's own
    assert agent("export", str(out), *where) == 0
    assert own.is_dir()
    records = [json.loads(line) for line in (out / "experiences.jsonl").read_text().splitlines()]
    assert [record["id"] for record in records] == [1, 2, 3]
    assert all((out / name).is_file() for record in records for name in record["pictures"])
    with pytest.raises(ValueError, match="exists; name a new folder"):
        agent("export", str(out), *where)
    with pytest.raises(ValueError, match=r"there is no experience 10{30} in"):
        agent("forget", "1" + "0" * 30, *where)
    with Store(folder) as store:
        picture = store.tasks([2])[0].frames[0]
    picture.rename(tmp_path / "away")
    with pytest.raises(
        ValueError, match=r"experience 2 has lost its picture .*`ans agent forget 2`\), and export again"
    ):
        agent("export", str(tmp_path / "second"), *where)
    assert not list(tmp_path.glob("second*"))
    (tmp_path / "away").rename(picture)
    assert agent("export", str(tmp_path / "second"), *where) == 0
    assert agent("forget", "2", *where) == 0
    with Store(folder) as store:
        assert (store.ids(), len(store.vectors()[0])) == ({1, 3}, 2)
        Path(store.tasks([1])[0].frames[0]).touch()
    (folder / FILE).write_bytes(b"")
    with pytest.raises(ValueError, match="is no store of the agent's experiences"):
        agent("status", *where)


def test_a_roll_back_follows_what_was_served_not_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody took 2 back; what was learned from 0 then does not lead back to it."""
    where = ("--store", str(tmp_path))
    with Store(tmp_path, encoder="b: kind") as store:
        snapshots = Snapshots(store, base_hash="b", keep=9)

        def publish(after: int | None) -> None:
            snapshots.publish({"w": torch.zeros(3)}, after=after, update=0, about={}, measured={})

        for after in (None, 0, 1):
            publish(after)
        snapshots.roll_back(0, why="by hand")
        publish(0)
        snapshots.roll_back(3, why="a refused release")
        publish(3)
        shutil.rmtree(snapshots.path(3))  # as old versions go
    assert agent("rollback", *where) == 0
    assert capsys.readouterr().out == "version 0 is served instead of 4\n"
    with pytest.raises(ValueError, match="version 0 is the first; there is none before it"):
        agent("rollback", *where)


def test_a_new_store_needs_an_agent_to_begin_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ans_core.stages.online_parts.opened", lambda *args, **kwargs: pytest.fail("a store was opened")
    )
    with pytest.raises(
        ValueError,
        match=r"no agent .*nope for a new store to begin with: `ans run --agent` trains one, or name one",
    ):
        agent(
            "serve",
            "--model",
            str(tmp_path),
            "--store",
            str(tmp_path / "store"),
            "--adapter",
            str(tmp_path / "nope"),
            "--port",
            "0",
        )
    assert not (tmp_path / "store").exists()


def test_a_server_that_keeps_nothing_needs_a_store_that_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ans_core.stages.online_parts.opened", lambda *args, **kwargs: pytest.fail("a store was opened")
    )
    where = ("--read-only", "--model", str(tmp_path), "--store", str(tmp_path / "store"))
    with pytest.raises(
        ValueError, match=r"has no snapshot to answer from; run `ans agent serve` once without --read-only"
    ):
        agent("serve", *where)
    assert not (tmp_path / "store").exists()
    Store(tmp_path / "store", encoder="b: kind").close()
    with pytest.raises(ValueError, match="has no snapshot to answer from"):
        agent("serve", *where)


def test_an_address_that_no_server_can_have_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ans_core.stages.online_parts.opened", lambda *args, **kwargs: pytest.fail("a store was opened")
    )
    where = ("--model", str(tmp_path), "--store", str(tmp_path / "store"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70000):
            with pytest.raises(
                ValueError, match=rf"nobody can listen on 127\.0\.0\.1, port {port} \(.*; give another --port"
            ):
                agent("serve", *where, "--port", str(port))
    with pytest.raises(ValueError, match=r"nobody can listen on 203\.0\.113\.1, port 0"):
        agent("serve", *where, "--host", "203.0.113.1", "--port", "0")
