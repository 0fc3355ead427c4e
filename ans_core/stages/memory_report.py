"""memory_report: what the stage `memory` measured in; a self-contained page of its figures, curves and clips
out.

dvc repro memory/dvc.yaml:memory_report
"""

from __future__ import annotations

from pathlib import Path

from ans_core.config import Config
from ans_core.report import memory
from ans_core.types import Log


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: memory. Writes report.html."""
    figures = memory.figures_of(inputs["memory"])
    (out / "report.html").write_text(memory.render(cfg.profile, inputs["memory"], figures), encoding="utf-8")
    return figures
