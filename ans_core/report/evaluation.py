"""One model on one benchmark: figures, the table of samples and pictures of answers -> a folder with `page.html` and `overlays`."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ans_core import overlay, rle, transforms
from ans_core.benchmarks.public import Item
from ans_core.report import page
from ans_core.report.files import data_uri
from ans_core.types import RLE, Masklet

EACH = 8
"""Pictures of the best, of the worst, and at random."""
WIDTH = 360
"""Pixels of a panel."""
FRAMES = 16
"""Of a clip, at equal steps."""
FPS = 4.0


def write(
    out: Path,
    head: Mapping[str, Any],
    scored: Any,
    intervals: Mapping[str, tuple[float, float]],
    published: Sequence[Any],
    *,
    items: Callable[[], Iterator[Item]],
    predictions: Mapping[str, Mapping[str, Any]],
    table: Sequence[Mapping[str, Any]],
) -> Path:
    """Return the page. `predictions`: records by item."""
    scores = scores_of(table)
    chosen = choose(scores)
    pictures = draw_chosen(items, predictions, chosen, scores, out / "overlays")
    text = page.render_page(
        "evaluation.html.j2",
        head=head,
        metrics={name: float(value) for name, value in scored.metrics.items()},
        printed=scored.published,
        intervals=intervals,
        missing=scored.missing,
        notes=scored.notes,
        published=published,
        pictures=[picture | {"source": data_uri(out / "overlays" / picture["file"])} for picture in pictures],
    )
    (out / "page.html").write_text(text, encoding="utf-8")
    return out / "page.html"


def scores_of(table: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each sample's value of the main metric: the first one that is a mean over samples."""
    metric = main_metric(table)
    return {} if metric is None else {row["sample"]: row["terms"][metric][0] / row["terms"][metric][1] for row in table}


def main_metric(table: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first metric to which every sample contributes a value of its own."""
    terms: Mapping[str, Any] = table[0].get("terms", {}) if table else {}
    means = [name for name in terms if all(row["terms"][name][1] == 1 for row in table)]
    return next(iter(means or [name for name in terms if all(row["terms"][name][1] > 0 for row in table)]), None)


def choose(scores: Mapping[str, float]) -> dict[str, str]:
    """Return sample -> why it is shown: among the best, among the worst, at random. Each sample once."""
    order = sorted(scores, key=lambda name: (-scores[name], name))
    chosen = dict.fromkeys(order[:EACH], "best")
    chosen |= dict.fromkeys([name for name in reversed(order) if name not in chosen][:EACH], "worst")
    rest = [name for name in order if name not in chosen]
    return chosen | dict.fromkeys(random.Random(0).sample(rest, min(EACH, len(rest))), "random")


def draw_chosen(
    items: Callable[[], Iterator[Item]],
    predictions: Mapping[str, Mapping[str, Any]],
    chosen: Mapping[str, str],
    scores: Mapping[str, float],
    folder: Path,
) -> list[dict[str, Any]]:
    """Draw the chosen samples and list them in index.json, in the order of `chosen`."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("sample*"):
        old.unlink()
    found: dict[str, dict[str, Any]] = {}
    for item in items():
        if item.name in chosen and item.name in predictions and item.request.frames:
            record = predictions[item.name]
            file = draw(item, record, folder / f"sample{len(found):04d}")
            about = {"sample": item.name, "why": chosen[item.name], "score": scores[item.name], "text": str(record.get("text", ""))}
            asked = item.request.text.removeprefix("<image>").strip()
            found[item.name] = about | {"file": file, "asked": asked, "truth": item.truth.text if item.truth else ""}
    shown = [found[name] for name in chosen if name in found]
    (folder / "index.json").write_text(json.dumps(shown, indent=1))
    return shown


def draw(item: Item, record: Mapping[str, Any], path: Path) -> str:
    """Draw truth and prediction side by side, a clip as an animation; return the file's name. `path` has no suffix."""
    frames = item.request.frames
    steps = range(0, len(frames), math.ceil(len(frames) / FRAMES))
    sheets = [_sheet(item, record, index) for index in steps]
    if len(sheets) == 1:
        path = path.with_suffix(".png")
        sheets[0].save(path)
    else:
        path = path.with_suffix(".gif")
        overlay.save_animation(sheets, path, sample=sheets[:: math.ceil(len(sheets) / 4)], fps=FPS)
    return path.name


def masks_of(record: Mapping[str, Any]) -> list[Sequence[RLE | None]]:
    """Return the masklets of a record, under whichever name its benchmark has for them."""
    if "prediction_masks" in record:
        return [record["prediction_masks"]]
    return [[mask] for mask in record["pred_masks"]] if "pred_masks" in record else record.get("masks", [])


def _sheet(item: Item, record: Mapping[str, Any], index: int) -> Image.Image:
    picture = transforms.open_image(item.request.frames[index])
    prompted: list[Masklet] = [(mask,) for mask in item.request.mask_prompts]
    true = list(item.truth.masks) if item.truth and item.truth.masks else prompted
    shown, truth, drawn = shrunk(picture, _at(true, index), _at(masks_of(record) or prompted, index))
    return overlay.side_by_side(
        shown,
        truth=truth,
        prediction=drawn,
        question=item.request.text.removeprefix("<image>").strip()[:200],
        truth_text=(item.truth.text if item.truth else "(not public)")[:200],
        prediction_text=str(record.get("text", ""))[:200],
    )


def _at(masklets: Sequence[Sequence[RLE | None]], index: int) -> list[RLE | None]:
    return [masklet[index] if index < len(masklet) else None for masklet in masklets]


def shrunk(picture: Image.Image, *masks: Sequence[RLE | None]) -> tuple[Any, ...]:
    """Return the picture and its masks at WIDTH pixels, if they are wider."""
    if picture.width <= WIDTH:
        return picture, *masks
    size = (WIDTH, max(1, round(picture.height * WIDTH / picture.width)))

    def small(mask: RLE) -> RLE:
        return rle.encode(np.asarray(Image.fromarray(rle.decode(mask)).resize(size)))

    return picture.resize(size), *([mask and small(mask) for mask in listed] for listed in masks)
