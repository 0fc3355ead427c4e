"""Select overlays of `evaluate` and rollouts of `rl` for the page, with the fields that its filters need."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ans_core.report.changes import Answers, Key
from ans_core.report.files import data_uri, read_json
from ans_core.report.metrics import ROWS, parse

RIGHT = 0.5
"""Scores from here on count as right in `evaluate`."""
DRAWN_TASKS = ("referring", "video")
"""Tasks whose answer is masks; none if nothing is meant."""
UNCHECKED = "No mask was due and none was drawn, which counts as right. The words are not the denial that was trained; no score reads them."
ROLLOUTS_PER_LOOP = 5


def overlays(folders: Mapping[str, Path | None], answers: Mapping[str, Answers], limit: int) -> dict[str, list[dict[str, Any]]]:
    """Return pictures by row, the last row first: about `limit` each, as even as possible over benchmarks and verdicts; those whose verdict
    the row changed go first."""
    return {row: _of_row(row, folders.get(row), answers, limit) for row in reversed(ROWS)}


def _of_row(row: str, folder: Path | None, answers: Mapping[str, Answers], limit: int) -> list[dict[str, Any]]:
    path = folder / "overlays" / "index.json" if folder else None
    if not path or not path.exists():
        return []
    keys: dict[tuple[str, str], list[Key]] = defaultdict(list)
    for benchmark, scored in answers.get(row, {}).items():
        for key in scored:
            keys[benchmark, key[1]].append(key)
    queues: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for entry in read_json(path):
        picture = entry | _history(row, entry, keys, answers) | {"row": row, "title": parse(entry["benchmark"]).title, "note": ""}
        if text_unchecked(entry):
            picture |= {"verdict": "unchecked", "note": UNCHECKED}
        elif parse(entry["benchmark"]).task == "region_caption":
            same = _words(entry["text"]) == _words(entry["truth"])
            picture["note"] = "Word for word." if same else "Not word for word."
        queues[entry["benchmark"], picture["verdict"]].append(picture)
    share = max(1, limit // max(1, len(queues)))
    chosen = [picture for queue in queues.values() for picture in sorted(queue, key=lambda p: not p["changed"])[:share]]
    return [picture | {"source": data_uri(path.parent / picture["file"])} for picture in chosen]


def text_unchecked(entry: Mapping[str, Any]) -> bool:
    """Tell whether an answer counts as right for predicting no mask where nothing is meant, although its text says something else."""
    nothing_meant = parse(entry["benchmark"]).task in DRAWN_TASKS and "[SEG]" not in entry["truth"]
    return nothing_meant and entry["verdict"] == "right" and _words(entry["text"]) != _words(entry["truth"])


def _history(
    row: str, entry: Mapping[str, Any], keys: Mapping[tuple[str, str], list[Key]], answers: Mapping[str, Answers]
) -> dict[str, Any]:
    """Return the question, every row's score of the sample, and `changed`: "better" or "worse" if the row before had another verdict."""
    benchmark = entry["benchmark"]
    own = answers.get(row, {}).get(benchmark, {})
    alike = [key for key in keys.get((benchmark, entry["sample_id"]), ()) if abs(own[key].score - entry["score"]) < 1e-3]
    if not alike:
        return {"asked": "", "scores": {row: entry["score"]}, "changed": ""}
    scores = {name: scored[alike[0]].score for name in ROWS if alike[0] in (scored := answers.get(name, {}).get(benchmark, {}))}
    earlier = [scores[name] >= RIGHT for name in ROWS[: ROWS.index(row)] if name in scores]
    right = entry["score"] >= RIGHT
    changed = "" if not earlier or earlier[-1] == right else "better" if right else "worse"
    return {"asked": own[alike[0]].asked, "scores": scores, "changed": changed}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def rollouts(folder: Path | None) -> list[dict[str, Any]]:
    """Return rollouts in the order of training; of each loop at most as many as fit on a page: first, last, and evenly between."""
    shown = []
    paths = sorted((folder / "samples").glob("*.png")) if folder else []
    for loop in sorted({path.stem.partition("-")[2] for path in paths}):
        own = [path for path in paths if path.stem.partition("-")[2] == loop]
        count = min(len(own), ROLLOUTS_PER_LOOP)
        for path in (own[i * (len(own) - 1) // max(count - 1, 1)] for i in range(count)):
            record = read_json(path.with_suffix(".json"))
            step = path.stem.partition("-")[0].lstrip("0") or "0"
            shown.append(record | {"loop": loop, "step": step, "source": data_uri(path)})
    return shown
