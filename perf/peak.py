"""Bytes of this process that are no file's, watched while something runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY_S = 0.002


class Peak:
    grown = 0
    """Most bytes over those at the start."""


def anonymous() -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


@contextmanager
def watched() -> Iterator[Peak]:
    found, before, done = Peak(), anonymous(), threading.Event()

    def look() -> None:
        while not done.wait(EVERY_S):
            found.grown = max(found.grown, anonymous() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
