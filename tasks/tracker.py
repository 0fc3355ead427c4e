"""The process that logs to MLflow: what stages log in, their runs (tasks/stage_run.py) out. A flow has one
for all its stages, a stage that runs without a flow its own: importing MLflow takes 2.5 s of processor
time."""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.managers import BaseManager, DictProxy
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from ans_core import stop
from tasks import provenance
from tasks.stage_run import IMPORT, StageRun
from tasks.tracking import warn, works_since

CHECKOUT = Path(__file__).resolve().parents[1]
AT = "ANS_TRACKER"
"""Names the flow's tracker to its stages: socket and key."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks for stages that were killed."""
END_S = 120.0
"""For what is left to be sent: a store that does not answer costs half a minute."""


class TrackedRun:
    """A StageRun as the stage uses it. A thread opens it and hands over what is logged, so that the stage
    waits for no answer; if the tracker's process was killed, the stage goes on and its curves are lost."""

    def __init__(self, open_remote: Callable[[], StageRun]) -> None:
        self._open_remote = open_remote
        self._calls: SimpleQueue[Callable[[StageRun], str | None] | None] = SimpleQueue()
        self._fault: Exception | None = None
        self._thread = Thread(target=self._hand_over, daemon=True)
        self._thread.start()

    def log(self, metrics: dict[str, float], step: int) -> None:
        copied = dict(metrics)
        self._calls.put(lambda remote: remote.log(copied, step))

    def log_result(self, metrics: dict[str, float], folder: Path) -> None:
        self._calls.put(lambda remote: remote.log_result(metrics, folder.resolve()))

    def end(self, *, ok: bool) -> None:
        """Wait until the tracker has sent or kept everything. Raises what went wrong on the way, but for a
        killed tracker."""
        self._calls.put(lambda remote: remote.end(ok=ok))
        self._calls.put(None)
        self._thread.join()
        if self._fault:
            raise self._fault

    def _hand_over(self) -> None:
        # A stopped process that goes on gives its signals to any thread, and Python's main thread would sleep
        # on (LOG).
        signal.pthread_sigmask(signal.SIG_BLOCK, {*stop.SIGNALS, signal.SIGINT})
        try:
            remote = self._open_remote()
            while call := self._calls.get():
                if message := call(remote):
                    warn(message)
        except (OSError, EOFError):
            warn(
                "the process that logs to MLflow was killed: the stage goes on without it, later curves are "
                "lost"
            )
        except Exception as error:  # noqa: BLE001  of another thread and process; `end` raises it
            self._fault = error


class Tracker(BaseManager):
    """The tracker's process, as a stage sees it. `open` starts a StageRun in it, `facts` is what
    `provenance` reads."""


class Opened:
    """The runs that a tracker's process has open."""

    def __init__(self) -> None:
        self._runs: list[StageRun] = []

    def open(self, root: Path, **values: Any) -> StageRun:
        run = StageRun(root, **values)
        self._runs.append(run)
        return run

    def close_killed(self) -> bool:
        """Close the runs of stages that were killed, and tell whether any is open still."""
        for run in list(self._runs):
            if not run.finished and not works_since(run.pid, run.record.start_ms / 1000):
                run.end(ok=False)
            if run.finished:
                self._runs.remove(run)
        return bool(self._runs)


@contextmanager
def started() -> Iterator[dict[str, str]]:
    """Start a tracker and yield the variable that names it. It ends with the block or with this process,
    however that ends, after it has closed the runs of its stages, and sent or kept what they logged."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.tracker"], cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the stage, which closes its run
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    key = secrets.token_hex(32)
    try:
        process.stdin.write(f"{key}\n")
        process.stdin.flush()
        yield {AT: f"{process.stdout.readline().strip()} {key}"}
    finally:
        process.stdout.close()
        try:
            process.stdin.close()
            process.wait(END_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            process.kill()
            process.wait()


def connected(environ: Mapping[str, str]) -> Tracker:
    """Return the tracker that the environment names. Raises OSError or EOFError if it does not answer."""
    socket, _, key = environ[AT].rpartition(" ")
    tracker = Tracker(address=socket, authkey=bytes.fromhex(key))
    tracker.connect()
    return tracker


def facts(keys: dict[str, str], root: Path) -> dict[str, dict[str, str]]:
    """Return `provenance.facts`, by the flow's tracker where there is one: it has imported MLflow."""
    try:
        return dict(connected(os.environ).facts(keys, root.resolve()).copy())  # type: ignore[attr-defined]
    except (KeyError, OSError, EOFError):
        return provenance.facts(keys, root)


@contextmanager
def stage_run(root: Path, **values: Any) -> Iterator[TrackedRun]:
    """Start a stage's run, which ends with the block, as failed if the block raises. It is in the flow's
    tracker; without a flow, or where the flow's was killed, in one of this process's own."""
    pipeline = {
        name: value
        for name, value in os.environ.items()
        if name in {"ANS_PIPELINE", "ANS_PIPELINE_PID", "ANS_STORE_AWAY"}
    }
    with ExitStack() as stack:

        def open_remote() -> StageRun:
            try:
                tracker = connected(os.environ)
            except (KeyError, OSError, EOFError):
                tracker = connected(stack.enter_context(started()))
            remote: StageRun = tracker.open(root.resolve(), pid=os.getpid(), pipeline=pipeline, **values)  # type: ignore[attr-defined]
            return remote

        run, ok = TrackedRun(open_remote), False
        try:
            yield run
            ok = True
        finally:
            run.end(ok=ok)


def watch(opened: Opened, gone: Event, parent: int) -> None:
    """Close the runs of killed stages; return when the process that started this one is gone and no run is
    open."""
    while True:
        ending = gone.wait(LOOK_EVERY_S) or os.getppid() != parent
        if not opened.close_killed() and ending:
            return
        if ending:  # then nothing above waits
            time.sleep(LOOK_EVERY_S)


def main() -> None:
    """Run the tracker's process: read the key, print the socket, end when the input does."""
    # else it takes most of a second to end, for which a stage without a flow waits
    atexit.register(gc.freeze)
    parent, gone, opened = os.getppid(), Event(), Opened()
    for number in (*stop.SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Tracker.register("open", opened.open, exposed=("log", "log_result", "end"))
    Tracker.register("facts", provenance.facts, proxytype=DictProxy)
    server = Tracker(authkey=bytes.fromhex(sys.stdin.readline())).get_server()
    with suppress(BrokenPipeError):  # the process that started this one is gone already
        print(server.address, flush=True)
    IMPORT.start()

    def read_to_the_end() -> None:
        sys.stdin.read()
        gone.set()

    Thread(target=read_to_the_end, daemon=True).start()
    Thread(target=server.serve_forever, daemon=True).start()
    watch(opened, gone, parent)


Tracker.register("open", exposed=("log", "log_result", "end"))
Tracker.register("facts", proxytype=DictProxy)

if __name__ == "__main__":
    main()
