"""Counts what makes a program wait for its GPU, on a CPU: values read one by one, and sizes that depend on
values."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "is_nonzero",
    "equal",
)
"""Operations that need a value on the host. Indexing with a mask is `nonzero` or stands under `index`."""


class DeviceReads(TorchDispatchMode):
    """Within it, `places` has the lines of the project (file:line operation) that read, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype.itemsize == 1 for index in args[1]
        )
        if name in READS or by_mask:
            self.places[f"{_line()} {name}"] += 1
        return func(*args, **(kwargs or {}))


def _line() -> str:
    """Return the innermost line of the project on the stack, else the innermost of a library."""
    frame = sys._getframe(2)
    lines = []
    while frame is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    own = [line for line in lines if "/ans_core/" in line]
    path, _, number = (own or [line for line in lines if "_python_dispatch" not in line])[0].rpartition(":")
    return f"{'/'.join(Path(path).parts[-2:])}:{number}"
