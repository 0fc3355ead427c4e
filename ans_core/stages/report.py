"""report: outputs of the stages before (metrics, scores, curves, rewards, pictures) in; a self-contained
report.html, summary.json, headline.json out.

Read, per stage: `evaluate/<row>/metrics.json` {"referring/val/gIoU": .7}, `evaluate/<row>/predictions.jsonl`
(benchmark, dataset, sample_id, asked, score, text, masks), `evaluate/<row>/skipped.json` {benchmark: why it
has no figures}, the data sets of `data` for pictures and truth, `<base|memory|sft|rl>/curves.csv`
(step,name,value), `memory/clips/*.gif`, `rl/rewards.json` {name: [rewards of step 1, ...]},
`rl/samples/<rollout>-<loop>.png` and `.json`, and the file `versions` (JSON: `versions` of code and data,
`stages` with times, `settings` that differ from the profile). The report names what is missing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from ans_core.checkpoints.trained import is_passed_through
from ans_core.config import Config
from ans_core.report import figures, files, gallery, metrics, page
from ans_core.report.changes import Answers, changes, read_answers, verdict
from ans_core.report.files import read_json
from ans_core.report.lookup import samples_of
from ans_core.report.metrics import ROWS, Summary
from ans_core.types import Log

STEPS = (("RL", "sft", "rl"), ("SFT", "base", "sft"))
"""(name, row before, row after), most interesting first."""
CARDS = (
    "referring/gIoU",
    "region_caption/METEOR",
    "grounded_caption/mIoU_all_objects",
    "video/J&F",
    "loop1/IoU",
)
PACKAGES = ("torch", "transformers", "peft", "sam2", "numpy", "pycocotools", "pycocoevalcap", "nltk")


def run(
    cfg: Config,
    *,
    inputs: dict[str, Path],
    out: Path,
    scratch: Path,
    log: Log,
    rows: Sequence[str] = ROWS,
    title: str = "",
) -> dict[str, float]:
    """Run the stage. `inputs` by folder name under runs/<profile>: "evaluate/rl", "sft", ... `scratch` stays
    empty: nothing to resume.

    rows: the models to speak of, in the order of training; the first one is where that began. title: of the
    page; "": the profile."""
    evaluated = {row: inputs.get(f"evaluate/{row}") for row in rows}
    summary = {row: _metrics(folder) for row, folder in evaluated.items()}
    if not any(summary.values()):
        raise FileNotFoundError(
            f"no metrics.json in any of {[str(folder) for folder in evaluated.values() if folder]}: "
            "evaluate first"
        )
    answers = {row: read_answers(folder) for row, folder in evaluated.items()}
    headline = metrics.headline(summary)
    galleries, lost = _galleries(cfg, inputs, answers, rows)
    provenance = read_json(inputs["versions"]) if "versions" in inputs else {}
    learned = _learned(rows, inputs)
    out.mkdir(parents=True, exist_ok=True)
    text = page.render_page(
        page.RUN,
        profile=cfg.profile,
        title=title or cfg.profile,
        trained=rows[1:],
        absent=[row for row in rows if not summary[row]],
        skipped=_skipped(evaluated.values()),
        cards=_cards(summary),
        verdicts=_verdicts(summary, answers),
        tables=metrics.tables(summary, rows),
        curves={stage: figures.curves(inputs.get(stage)) for stage in learned},
        clips=files.clips(inputs.get("memory")),
        rewards=figures.rewards(inputs.get("rl")),
        rollouts=gallery.rollouts(inputs.get("rl")),
        galleries=galleries,
        lost=lost,
        settings=yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False),
        differing=provenance.get("settings"),
        stages=provenance.get("stages", {}),
        versions=_versions(provenance.get("versions", {})),
    )
    (out / "report.html").write_text(text, encoding="utf-8")
    _write_json(out / "summary.json", {row: values for row, values in summary.items() if values})
    _write_json(out / "headline.json", headline)
    flat = {f"{row}/{name}": value for row, values in summary.items() for name, value in values.items()}
    log(
        {f"{row}/{name}": values[name] for row, values in summary.items() for name in metrics.named(values)},
        0,
    )
    return flat


def _learned(rows: Sequence[str], inputs: dict[str, Path]) -> list[str]:
    """List the stages with learning curves in order; `memory` and `sft` only if they trained."""
    memory = ["memory"] if "memory" in inputs and (inputs["memory"] / "curves.csv").exists() else []
    stages = [stage for row in rows[1:] for stage in (*(memory if row == "sft" else ()), row)]
    if "sft" in stages and "sft" in inputs and is_passed_through(inputs["sft"]):
        stages.remove("sft")
    return stages


def _metrics(folder: Path | None) -> dict[str, float]:
    path = folder / "metrics.json" if folder else None
    return {name: float(value) for name, value in read_json(path).items()} if path and path.exists() else {}


def _skipped(folders: Iterable[Path | None]) -> dict[str, str]:
    """Return the benchmarks and data sets without figures, and why."""
    paths = [folder / "skipped.json" for folder in folders if folder]
    return {name: reason for path in paths if path.exists() for name, reason in read_json(path).items()}


def _write_json(path: Path, values: Summary) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _cards(summary: Summary) -> list[dict[str, Any]]:
    """Return for each figure the last row that has it, and its difference to the row before."""
    of_row = {row: metrics.short(values) for row, values in summary.items()}
    cards = []
    for name in CARDS:
        having = [(row, row_figures[name]) for row, row_figures in of_row.items() if name in row_figures]
        if having:
            row, value = having[-1]
            before, start = having[-2] if len(having) > 1 else (None, value)
            task, _, metric = name.partition("/")
            cards.append(
                {
                    "task": metrics.TASKS[task],
                    "metric": metric,
                    "row": row,
                    "value": value,
                    "before": before,
                    "gain": value - start,
                }
            )
    return cards


def _verdicts(summary: Summary, answers: dict[str, Answers]) -> list[dict[str, Any]]:
    compared = [
        (name, before, after, changes(summary, answers, before, after)) for name, before, after in STEPS
    ]
    return [verdict(name, before, after, changed) for name, before, after, changed in compared if changed]


def _galleries(
    cfg: Config, inputs: dict[str, Path], answers: dict[str, Answers], rows: Sequence[str]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Return pictures by row, the last row first, each beside the row before; and by data set why there are
    none of it."""
    pairs = {row: rows[max(0, place - 1) : place + 1] for place, row in enumerate(rows) if answers[row]}
    chosen = {
        row: gallery.choose(answers[pair[0]] if len(pair) > 1 else {}, answers[row], cfg.report.overlays)
        for row, pair in pairs.items()
    }
    wanted = {key for row, listed in chosen.items() for key in gallery.wanted(listed, answers[row])}
    samples, lost = samples_of(
        wanted, prepared=inputs.get("data"), split=cfg.evaluate.split, sources=cfg.evaluate.sources
    )
    pictures = {
        row: gallery.pictures({name: inputs.get(f"evaluate/{name}") for name in pair}, chosen[row], samples)
        for row, pair in pairs.items()
    }
    return {row: pictures.get(row, []) for row in reversed(rows)}, lost


def _versions(recorded: dict[str, str]) -> dict[str, str]:
    """Return versions of code and data (written by whoever started the run), then of the machine and the
    packages of this process."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = f"{platform.platform()}, {os.cpu_count()} CPUs, {', '.join(gpus) or 'no GPU'}"
    packages = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    here = {
        "report made on": machine,
        "packages": ", ".join([f"python {platform.python_version()}", *packages]),
    }
    return (recorded or {"code and data": "not there"}) | here
