"""What can be wrong with a call: kinds, which are counted, and the exception by which an operation
refuses."""

from __future__ import annotations

from typing import Literal

ErrorKind = Literal[
    "broken_call",
    "several_calls",
    "call_limit",
    "unknown_operation",
    "unknown_argument",
    "wrong_type",
    "bad_box",
    "unknown_handle",
    "not_a_clip",
    "nothing_found",
    "time_limit",
    "crashed",
]
"""`crashed`: the process that ran the operation died. `call_limit`: the episode's calls are used up."""


class Refused(Exception):
    """A call that can't be done, in words for the model."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(kind, message)  # both, so that it survives the way between processes
        self.kind, self.message = kind, message
