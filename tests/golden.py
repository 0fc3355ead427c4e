"""The reference data that parity tests compare with, found by ANS_REFERENCE (default: `shared` beside the
repository)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

REFERENCE = Path(os.environ.get("ANS_REFERENCE") or Path(__file__).resolve().parents[2] / "shared")
GOLDEN = REFERENCE / "golden"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"no reference outputs at {GOLDEN}; set ANS_REFERENCE to their folder"
)


def arrays(name: str) -> dict[str, Tensor]:
    """All arrays of `golden/<name>.npz`."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.from_numpy(np.asarray(file[key])) for key in file.files}


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference. Shapes must be equal: nothing is broadcast."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual.detach().float() - expected.float()).abs().max())
