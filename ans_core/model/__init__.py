"""The network alone. `from ans_core.model import Sa2VA` gives the model with its front, which lies above
(ans_core/inference/sa2va.py)."""

import gc
import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Import Sa2VA where it is asked for: it is built on this package."""
    if name != "Sa2VA":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    is_collecting = gc.isenabled()
    gc.disable()  # it would look through a million new objects again and again, for a sixth of the time
    try:
        return importlib.import_module("ans_core.inference.sa2va").Sa2VA
    finally:
        if is_collecting:
            gc.enable()
