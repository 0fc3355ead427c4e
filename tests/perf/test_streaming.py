"""The two ways that follow boxes through a clip: both measure every frame."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ans_core.checkpoints import sam2 as sam2_files
from tests.checkpoints.test_sam2 import drawn

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_memory_of_ans_track_and_of_the_stock_predictor_is_measured_on_one_clip(tmp_path: Path) -> None:
    sam2_files.save(drawn(temporal=True), tmp_path / "sam2", metadata={})
    command = [
        sys.executable,
        "perf/streaming.py",
        "--model",
        str(tmp_path / "sam2"),
        "--frames",
        "3",
        "--ways",
        "track",
        "stock",
    ]
    words = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=words, check=True, capture_output=True, text=True).stdout
    for way in ("track", "stock"):
        [line] = [line for line in said.splitlines() if line.startswith(f"{way}, 3 frames: ")]
        assert "(6 masks" in line  # two boxes in three frames
