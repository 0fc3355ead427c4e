"""agent_report: figures and episodes of every row in; agent.json and a self-contained page of episodes, turn
by turn, out.

dvc repro agent/dvc.yaml:agent_report
"""

from __future__ import annotations

import json
from pathlib import Path

from ans_core.config import Config
from ans_core.report import episodes
from ans_core.report.files import read_json
from ans_core.types import Log

FOLDER = "agent/evaluate/"
"""Input folders of rows begin with it; their order is that of the page."""


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: agent/evaluate/<row>. Writes agent.json and episodes.html."""
    folders = {
        name.removeprefix(FOLDER): folder for name, folder in inputs.items() if name.startswith(FOLDER)
    }
    figures = {
        row: {str(k): float(v) for k, v in read_json(folder / "metrics.json").items()}
        for row, folder in folders.items()
    }
    albums = {row: episodes.album(folder / "episodes") for row, folder in folders.items()}
    (out / "episodes.html").write_text(episodes.render(cfg.profile, figures, albums), encoding="utf-8")
    (out / "agent.json").write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    flat = {
        f"{row}/{name}": value for row, row_figures in figures.items() for name, value in row_figures.items()
    }
    log(flat, 0)
    return flat
