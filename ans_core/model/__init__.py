"""The network alone. `from ans_core.model import Sa2VA` gives the model with its front, which lies above
(ans_core/inference/sa2va.py)."""

import importlib
from typing import Any

from ans_core.processes import without_collector


def __getattr__(name: str) -> Any:
    """Import Sa2VA where it is asked for: it is built on this package."""
    if name != "Sa2VA":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with without_collector():
        return importlib.import_module("ans_core.inference.sa2va").Sa2VA
