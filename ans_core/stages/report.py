"""report: outputs of the stages before (metrics, scores, curves, rewards, pictures) in; a self-contained report.html, summary.json,
headline.json out.

Read, per stage: `evaluate/<row>/metrics.json` {"referring/val/gIoU": .7}, `evaluate/<row>/predictions.jsonl` (benchmark, dataset,
sample_id, asked, score), `evaluate/<row>/overlays/index.json` [{file, benchmark, sample_id, text, truth, score, verdict: right|wrong}],
`<base|sft|rl>/curves.csv` (step,name,value), `rl/rewards.json` {name: [rewards of step 1, ...]}, `rl/samples/<rollout>-<loop>.png` and
`.json`, and the file `versions` (JSON: git, dvc_lock, ...). The report names what is missing.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import yaml

from ans_core.config import Config
from ans_core.report import figures, gallery, metrics, page
from ans_core.report.changes import VERDICTS, Answers, Change, changes, read_answers
from ans_core.report.files import read_json
from ans_core.report.metrics import ROWS, Summary
from ans_core.types import Log

TRAINED = ("base", "sft", "rl")
STEPS = (("RL", "sft", "rl"), ("SFT", "base", "sft"))
"""(name, row before, row after), most interesting first."""
CARDS = ("referring/gIoU", "region_caption/METEOR", "grounded_caption/mIoU_all_objects", "video/J&F", "loop1/IoU")
PACKAGES = ("torch", "transformers", "peft", "sam2", "numpy", "pycocotools", "pycocoevalcap", "nltk")


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. `inputs` by folder name under runs/<profile>: "evaluate/rl", "sft", ... `scratch` stays empty: nothing to resume."""
    evaluated = {row: inputs.get(f"evaluate/{row}") for row in ROWS}
    summary = {row: _metrics(folder) for row, folder in evaluated.items()}
    if not any(summary.values()):
        raise FileNotFoundError(f"no metrics.json in any of {[str(folder) for folder in evaluated.values() if folder]}: evaluate first")
    answers = {row: read_answers(folder) for row, folder in evaluated.items()}
    headline = metrics.headline(summary)
    out.mkdir(parents=True, exist_ok=True)
    text = page.render(
        profile=cfg.profile,
        rows=ROWS,
        trained=TRAINED,
        absent=[row for row in ROWS if not summary[row]],
        cards=_cards(summary),
        verdicts=_verdicts(summary, answers),
        order=VERDICTS,
        tables=metrics.tables(summary),
        curves={stage: figures.curves(inputs.get(stage)) for stage in TRAINED},
        rewards=figures.rewards(inputs.get("rl")),
        rollouts=gallery.rollouts(inputs.get("rl")),
        overlays=gallery.overlays(evaluated, answers, cfg.report.overlays),
        settings=yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False),
        versions=_versions(inputs.get("versions")),
    )
    (out / "report.html").write_text(text, encoding="utf-8")
    _write_json(out / "summary.json", {row: values for row, values in summary.items() if values})
    _write_json(out / "headline.json", headline)
    flat = {f"{row}/{name}": value for row, values in summary.items() for name, value in values.items()}
    log({f"{row}/{name}": values[name] for row, values in summary.items() for name in metrics.named(values)}, 0)
    return flat


def _metrics(folder: Path | None) -> dict[str, float]:
    path = folder / "metrics.json" if folder else None
    return {name: float(value) for name, value in read_json(path).items()} if path and path.exists() else {}


def _write_json(path: Path, values: Summary) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _cards(summary: Summary) -> list[dict[str, Any]]:
    """Return for each figure the last row that has it, and its difference to the row before."""
    of_row = {row: metrics.short(values) for row, values in summary.items()}
    cards = []
    for name in CARDS:
        having = [(row, of_row[row][name]) for row in ROWS if name in of_row[row]]
        if having:
            row, value = having[-1]
            before, start = having[-2] if len(having) > 1 else (None, value)
            task, _, metric = name.partition("/")
            cards.append(
                {"task": metrics.TASKS[task], "metric": metric, "row": row, "value": value, "before": before, "gain": value - start}
            )
    return cards


def _verdicts(summary: Summary, answers: dict[str, Answers]) -> list[dict[str, Any]]:
    found = []
    for name, before, after in STEPS:
        if changed := changes(summary, answers, before, after):
            sorted_out: dict[str, list[Change]] = {verdict: [c for c in changed if c.verdict == verdict] for verdict in VERDICTS}
            found.append({"name": name, "before": before, "after": after, "changes": changed, "by_verdict": sorted_out})
    return found


def _versions(path: Path | None) -> dict[str, str]:
    """Return versions of code and data (written by whoever started the run), then of the machine and the packages of this process."""
    given = {str(name): str(value) for name, value in read_json(path).items()} if path and path.exists() else {"code and data": "not there"}
    here = {"report made on": platform.platform(), "python": platform.python_version()}
    return given | here | {name: importlib.metadata.version(name) for name in PACKAGES if name not in given}
