"""Operations that go wrong. In a module of their own: the process that runs them imports it, and should not
import torch's networks."""

from __future__ import annotations

import os
import signal
import time

from ans_core.agent.operations.base import Arguments, Result, Tools
from ans_core.agent.workspace import Workspace


class Nothing(Arguments):
    pass


def never_ends(workspace: Workspace, arguments: Nothing, tools: Tools) -> Result:
    while True:
        sum(range(1000))


def dies(workspace: Workspace, arguments: Nothing, tools: Tools) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def is_broken(workspace: Workspace, arguments: Nothing, tools: Tools) -> Result:
    raise KeyError("a defect")


LOADED: list[str] = []
"""Of this process."""


def loads_slowly(tools: Tools) -> None:
    time.sleep(1.5)
    LOADED.append(tools.ocr)


def tells_what_is_loaded(workspace: Workspace, arguments: Nothing, tools: Tools) -> Result:
    return Result(text=" ".join(LOADED), values={})
