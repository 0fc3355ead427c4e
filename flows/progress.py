"""A stage's bars in, its progress in Prefect out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from queue import SimpleQueue
from threading import Thread
from typing import Any

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from flows.child import Say

BAR = re.compile(r"(?P<what>.*?)(: )? *(?P<percent>\d+)%\|[^|]*\| *(?P<rest>.*)")
"""As tqdm draws it: `sft:  45%|####     | 90/200 [12:33<15:20, loss=0.2]`."""
State = tuple[float, str]
"""Percent, and what is being done."""


def state_of(line: str) -> State | None:
    """Return the state that a line of output tells; None for a line that is no bar."""
    match = BAR.fullmatch(line.strip())
    return (float(match["percent"]), f"{match['what']} {match['rest']}".strip()) if match else None


def key_of(name: str) -> str:
    """Return a stage's name as Prefect wants an artifact's key."""
    return re.sub("[^a-z0-9]", "-", name.lower())


@contextmanager
def shown(name: str, say: Say) -> Iterator[Say]:
    """Show a stage's progress as an artifact of its task; yield what takes the stage's output instead of
    `say`. Of several bars it is that of the last. A thread sends it: a stage waits for no server."""
    artifact: Any = None
    with suppress(httpx.HTTPError):  # the server is away, and no stage fails for that
        artifact = create_progress_artifact(0.0, key=f"progress-{key_of(name)}", description=f"{name} begins")
    states: SimpleQueue[State | None] = SimpleQueue()

    def update(state: State) -> None:
        with suppress(httpx.HTTPError):
            if artifact:
                update_progress_artifact(artifact, *state)

    def send() -> None:
        while state := states.get():
            if states.empty():  # nothing newer waits
                update(state)

    def take(lines: str) -> None:
        say(lines)
        for state in filter(None, map(state_of, lines.splitlines())):
            states.put(state)

    sender = Thread(target=copy_context().run, args=(send,), daemon=True)
    sender.start()
    try:
        yield take
    finally:
        states.put(None)
        sender.join()
    update((100.0, f"{name} is done"))
