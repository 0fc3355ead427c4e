"""Files written by torch.save -> their tensors and plain values. No code that they name is ever run."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Ignored:
    """Placeholder for objects beside the tensors that are not needed: accepts any arguments and keeps
    nothing."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


# What mmengine's checkpoints hold beside the weights: curves in its own class, whose statistics are methods
# (found by getattr), of numpy's arrays and numbers. None of these is imported, let alone called.
IGNORED = (
    "mmengine.logging.history_buffer.HistoryBuffer",
    "__builtin__.getattr",
    "builtins.getattr",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    "numpy.ndarray",
    "numpy.dtype",
)


def read(file: Path, *, entry: str) -> Any:
    """Read a file. Raises ValueError if it holds code or is damaged; `entry` is the key of the tensors, named
    in the message."""
    remedy = (
        f'save its tensors alone where it was made: torch.save({{"{entry}": TENSORS_BY_NAME}}, {file.name!r})'
    )
    file.open("rb").close()  # an error that is the disk's speaks for itself
    try:
        with torch.serialization.safe_globals([(Ignored, name) for name in IGNORED]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = (
            f"names {named[1]}, code that is not run"
            if named
            else "holds something else than tensors, or is damaged"
        )
        raise ValueError(f"{file} {what}; {remedy}") from error
    except (
        RuntimeError,
        OSError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        AssertionError,
    ) as error:
        raise ValueError(
            f"{file} is no file that torch.save of torch 1.6 or newer wrote, or it is damaged or cut short; "
            f"copy it again, or {remedy}"
        ) from error


def tensors(file: Path, state: object) -> Iterable[tuple[str, Tensor]]:
    """Return the items of a state dict. Raises ValueError unless it is a dict of tensors by name."""
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} holds no state dict of tensors")
    return state.items()
