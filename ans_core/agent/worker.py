"""A process that runs functions for another one, and is killed when one of them takes too long."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from ans_core.agent.refusal import Refused
from ans_core.processes import forks_with

PRELOADED = "ans_core.agent.operations"
STARTING_S = 600.0
"""For the first start, imports included: on a busy machine 120 were too few. One that dies is noticed at
once."""


class Worker:
    """Starts with the first call; started anew after it was killed or died."""

    def __init__(self) -> None:
        self._loaded: set[Callable[..., Any]] = set()
        self.process: ForkServerProcess | None = None
        self.pipe: Connection | None = None

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        """What `function(*arguments)` returns there; what it raises is raised here. Both must pickle.

        Raises Refused where it takes longer than `seconds` (the process is killed) or the process dies."""
        if self.process is None or not self.process.is_alive():
            self._start()
        assert self.pipe is not None
        try:
            self.pipe.send((function, arguments))
            if not self.pipe.poll(seconds):
                self.close()
                raise Refused("time_limit", f"stopped after {seconds:g} s; try a smaller part")
            ok, value = self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.close()
            raise Refused("crashed", "the operation crashed; try another one") from None
        if not ok:
            raise value
        return value

    def load(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call `function(*arguments)` once in each process, under the limit of a start. What it raises is
        raised here."""
        if self.process is None or not self.process.is_alive():
            self._start()
        if function not in self._loaded:
            self.call(function, *arguments, seconds=STARTING_S)
            self._loaded.add(function)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self.pipe is not None:
            self.pipe.close()
        self.process = self.pipe = None
        self._loaded.clear()

    def _start(self) -> None:
        self.close()
        context = forks_with(PRELOADED)
        self.pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        self.process = process
        theirs.close()
        if not self.pipe.poll(STARTING_S):
            self.close()
            raise RuntimeError(f"the process for operations did not start within {STARTING_S:g} s")
        try:
            self.pipe.recv()
        except EOFError:
            self.close()
            advice = 'a script that runs operations has to begin its work under `if __name__ == "__main__":`, since this process imports it'
            raise RuntimeError(
                f"the process for operations ended as it started; its message is above ({advice})"
            ) from None


def serve(pipe: Connection) -> None:
    """Until the other end is closed."""
    pipe.send("ready")
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            reply = (True, function(*arguments))
        except Exception as error:  # noqa: BLE001  it is raised in the other process
            reply = (False, error)
        pipe.send(reply)
