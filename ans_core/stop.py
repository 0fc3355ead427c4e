"""A signal that asks a process to end: at once, or, inside a training loop, after the step at work and a
state of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""TERM: a launcher, a scheduler or a person ends the process. USR1: a scheduler says that it soon will
(`--signal`)."""
LONGEST_S = 300
"""Most that the step at work and its state may take after a signal. A process that waits for one that is gone
ends then. (A state of 26 billion parameters takes 98 to 290 s.)"""


class Stopped(SystemExit):
    """Ends the process because of a signal, in a training loop after the state of `step` has been written.
    Its exit status is 128 + the signal's number."""

    def __init__(self, number: int, step: int | None = None) -> None:
        super().__init__(128 + number)
        self.number, self.step = number, step

    def __str__(self) -> str:
        after = "" if self.step is None else f" after step {self.step}, whose state is written"
        return f"ended by {signal.Signals(self.number).name}{after}: the same command goes on"


class _Request:
    """The signal that has come, and whether a training loop is going to look at it."""

    number = 0
    deferred = False


def exit_on_signals(numbers: Sequence[signal.Signals] = SIGNALS) -> None:
    """Make each of these signals end the process as an exception does, so that the run is closed; inside
    `deferred` it is only noted. Later ones are ignored: a group and a parent send one each."""

    def handler(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        _Request.number = number
        if not _Request.deferred:
            raise Stopped(number)
        signal.alarm(LONGEST_S)  # whose default action ends a process that is inside a collective, too

    for number in numbers:
        signal.signal(number, handler)


def ignore_signals(_worker: int = 0) -> None:
    """Leave the end of this process to the one that started it: a loader that is gone would end the step at
    work."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def deferred(on: bool = True) -> Iterator[None]:
    """Only note a signal inside, for `requested`. Raises Stopped on leaving where nobody has acted on one."""
    _Request.deferred = on
    try:
        yield
    finally:
        _Request.deferred = False
        signal.alarm(0)
    if on and _Request.number:  # it came after the last look at `requested`
        raise Stopped(_Request.number)


def requested() -> int:
    """Return the number of the signal that has come; 0 without one."""
    return _Request.number
