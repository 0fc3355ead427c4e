"""What the stages before wrote (metrics, curves, rewards, overlays) -> one self-contained report.html, and summary.json.

Read, per stage: `evaluate/<row>/metrics.json` {"referring/val/gIoU": .7}, `evaluate/<row>/overlays/index.json` [{file, benchmark,
sample_id, text, truth, score, verdict: right|wrong}], `<base|sft|rl>/curves.csv` (step,name,value), `rl/rewards.json` {name:
[rewards of step 1, ...]}, `rl/samples/<rollout>-<loop>.png` and `.json`, and the file `versions` (JSON: git, dvc_lock, ...). What is
missing is named as not there.
"""

from __future__ import annotations

import base64
import csv
import importlib.metadata
import json
import platform
from collections import defaultdict
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from ans_core import charts
from ans_core.config import Config
from ans_core.types import Log

ROWS = ("untrained", "base", "sft", "rl")
TRAINED = ("base", "sft", "rl")
HEADLINE = (
    "referring/val/gIoU", "referring/val/cIoU", "referring/val/gIoU_shuffled_text", "referring/val/N_acc",
    "region_caption/val/METEOR", "region_caption/val/CIDEr", "region_caption/val/attribute_accuracy",
    "grounded_caption/val/mIoU", "grounded_caption/val/mIoU_all_objects", "grounded_caption/val/recall_token_f1",
    "video/val/J&F", "video/val/J", "video/val/F",
    "loop1/val/IoU", "loop1/val/IoU_of_truth", "loop2/val/METEOR", "loop2/val/METEOR_of_truth",
)  # fmt: skip
CARDS = ("referring/val/gIoU", "region_caption/val/METEOR", "video/val/J&F", "loop1/val/IoU", "loop2/val/METEOR")
NOT_A_GRADE = ("samples", "shuffled_text", "of_truth")
"""Metric names that hold one of these have no best stage."""
PACKAGES = ("torch", "transformers", "peft", "sam2", "numpy", "pycocotools", "pycocoevalcap", "nltk")
SKIPPED = "skipped"
"""Drawn where a step was skipped."""
OWN_CHART = ("grad_norm", SKIPPED)
"""Of sizes that would flatten the curves beside them."""
LINES_PER_CHART = 6
TRIED_PER_LOOP = 5


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """`inputs` by folder name under runs/<profile>: "evaluate/rl", "sft", ... Nothing to resume, so `scratch` stays empty."""
    summary = {row: _metrics(inputs.get(f"evaluate/{row}")) for row in ROWS}
    if not any(summary.values()):
        folders = [str(path) for name, path in inputs.items() if name.startswith("evaluate/")]
        raise FileNotFoundError(f"no metrics.json in any of {folders}: evaluate first")
    out.mkdir(parents=True, exist_ok=True)
    page = _template().render(
        profile=cfg.profile,
        rows=ROWS,
        trained=TRAINED,
        absent=[row for row in ROWS if not summary[row]],
        cards=_cards(summary),
        headline=_table(summary, HEADLINE),
        rest=_rest(summary),
        curves={stage: _curves(inputs.get(stage)) for stage in TRAINED},
        rewards=_rewards(inputs.get("rl")),
        tried=_tried(inputs.get("rl")),
        overlays={row: _overlays(inputs.get(f"evaluate/{row}"), cfg.report.overlays) for row in reversed(ROWS)},
        settings=yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False),
        versions=_versions(inputs.get("versions")),
    )
    (out / "report.html").write_text(page)
    there = {row: metrics for row, metrics in summary.items() if metrics}
    (out / "summary.json").write_text(json.dumps(there, indent=2, sort_keys=True) + "\n")
    flat = {f"{row}/{name}": value for row, metrics in summary.items() for name, value in metrics.items()}
    log({name: flat[name] for name in flat if name.partition("/")[2] in HEADLINE}, 0)
    return flat


def _template() -> jinja2.Template:
    source = resources.files("ans_core.stages").joinpath("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["figure"] = _figure
    return environment.from_string(source)


def _figure(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "–"
    if value == int(value) and abs(value) > 1:
        return f"{int(value):+d}" if signed else f"{int(value)}"
    return f"{value:+.3f}" if signed else f"{value:.3f}"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); run the stage that writes it again") from error


def _metrics(folder: Path | None) -> dict[str, float]:
    path = folder / "metrics.json" if folder else None
    return {name: float(value) for name, value in _json(path).items()} if path and path.exists() else {}


def _cards(summary: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The last stage that has the metric, and its distance to the first one."""
    cards = []
    for name in CARDS:
        having = [(row, summary[row][name]) for row in ROWS if name in summary[row]]
        if having:
            (first, start), (row, value) = having[0], having[-1]
            since = first if first != row else None
            cards.append({"name": name, "row": row, "value": value, "since": since, "gain": value - start})
    return cards


def _table(summary: dict[str, dict[str, float]], names: tuple[str, ...] | list[str]) -> list[dict[str, Any]]:
    """One line per metric; a cell holds the value, its gain on the stage before that has one, and whether it is the best."""
    table = []
    for name in names:
        values = [summary[row].get(name) for row in ROWS]
        present = [value for value in values if value is not None]
        graded = len(present) > 1 and not any(part in name for part in NOT_A_GRADE)
        cells: list[dict[str, Any]] = []
        before: float | None = None
        for value in values:
            gain = value - before if value is not None and before is not None and "samples" not in name else None
            cells.append({"value": value, "gain": gain, "best": graded and value == max(present), "graded": graded})
            before = before if value is None else value
        table.append({"name": name, "cells": cells})
    return table


def _rest(summary: dict[str, dict[str, float]]) -> dict[str, list[dict[str, Any]]]:
    """Every other metric, by benchmark."""
    names = sorted({name for metrics in summary.values() for name in metrics} - set(HEADLINE))
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[name.partition("/")[0]].append(name)
    return {benchmark: _table(summary, listed) for benchmark, listed in groups.items()}


def _curves(folder: Path | None) -> list[Markup]:
    """A chart per group of metrics: names with the same first part (`loss/text`, `loss/mask`) share one; the loop's own stand alone."""
    path = folder / "curves.csv" if folder else None
    if not path or not path.exists():
        return []
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                curves[row["name"]].append((float(row["step"]), float(row["value"])))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} line {number}: not a step,name,value row: {row}") from error
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(curves):
        group, _, last = name.rpartition("/")
        if last == SKIPPED and not any(value for _, value in curves[name]):
            continue
        groups[group if group and last not in OWN_CHART else name].append(name)
    drawn = []
    for group, names in sorted(groups.items()):
        for i in range(0, len(names), LINES_PER_CHART):
            part = names[i : i + LINES_PER_CHART]
            title = group if len(part) > 1 else part[0]
            drawn.append(Markup(charts.lines(title, {name.removeprefix(group + "/"): sorted(curves[name]) for name in part})))
    return drawn


def _rewards(folder: Path | None) -> list[Markup]:
    """Per reward: how its spread moves with the steps, and its histogram in the first and last quarter of them."""
    path = folder / "rewards.json" if folder else None
    if not path or not path.exists():
        return []
    drawn = []
    for name, per_step in _json(path).items():
        steps = [step if isinstance(step, list) else [step] for step in per_step]
        quarter = max(1, len(steps) // 4)
        ends = {
            "first quarter": [r for step in steps[:quarter] for r in step],
            "last quarter": [r for step in steps[-quarter:] for r in step],
        }
        drawn += [Markup(charts.band(f"{name}: reward, mean ± std", steps)), Markup(charts.histogram(f"{name}: rewards", ends))]
    return drawn


def _tried(folder: Path | None) -> list[dict[str, str]]:
    """Pictures of rollouts, in the order of training; of each loop at most as many as fit on a page: first, last, and evenly between."""
    shown = []
    paths = sorted((folder / "samples").glob("*.png")) if folder else []
    for loop in sorted({path.stem.partition("-")[2] for path in paths}):
        own = [path for path in paths if path.stem.partition("-")[2] == loop]
        count = min(len(own), TRIED_PER_LOOP)
        chosen = [own[i * (len(own) - 1) // max(count - 1, 1)] for i in range(count)]
        for path in chosen:
            asked = _json(path.with_suffix(".json"))["asked"]
            shown.append({"loop": loop, "step": path.stem.partition("-")[0].lstrip("0") or "0", "asked": asked, "source": _data_uri(path)})
    return shown


def _overlays(folder: Path | None, limit: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """benchmark -> right and wrong pictures; about `limit` of them, as even as can be over benchmarks and verdicts, in the order
    of the index."""
    path = folder / "overlays" / "index.json" if folder else None
    if not path or not path.exists():
        return {}
    queues: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for entry in _json(path):
        queues[entry["benchmark"], entry["verdict"]].append(entry)
    share = max(1, limit // max(1, len(queues)))
    shown: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for (benchmark, verdict), entries in queues.items():
        columns = shown.setdefault(benchmark, {"right": [], "wrong": []})
        columns[verdict] += [{**entry, "source": _data_uri(path.parent / entry["file"])} for entry in entries[:share]]
    return shown


def _data_uri(path: Path) -> str:
    kind = {".png": "png", ".gif": "gif"}[path.suffix]
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _versions(path: Path | None) -> dict[str, str]:
    """Of the code and data (written by whoever started the run), then of the packages this very process uses."""
    given = {str(name): str(value) for name, value in _json(path).items()} if path and path.exists() else {"code and data": "not there"}
    return (
        given | {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES if name not in given}
    )
