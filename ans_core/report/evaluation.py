"""One model on one benchmark: figures, the table of samples and pictures of answers -> a folder with `page.html` and `overlays`."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ans_core.benchmarks.public.asked import Item
from ans_core.benchmarks.public.scored import scores_of
from ans_core.pictures import overlay, transforms
from ans_core.report import page
from ans_core.report.files import data_uri
from ans_core.report.panels import FRAMES, at, shrunk
from ans_core.types import RLE, Masklet, Prediction

EACH = 8
"""Pictures of the best, of the worst, and at random."""
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
    scores = by_item(scores_of(table), predictions)
    chosen = choose(scores)
    pictures = draw_chosen(items, predictions, chosen, scores, out / "overlays")
    text = page.render_page(
        "evaluation.html.j2",
        head=head,
        metrics=scored.metrics,
        printed=scored.published,
        intervals=intervals,
        missing=scored.missing,
        notes=scored.notes,
        published=published,
        pictures=[picture | {"source": data_uri(out / "overlays" / picture["file"])} for picture in pictures],
    )
    (out / "page.html").write_text(text, encoding="utf-8")
    return out / "page.html"


def by_item(scores: Mapping[str, float], items: Container[str]) -> dict[str, float]:
    """Return each item's mean over its samples, which are named as the item or `<item>/...` (the objects of a clip)."""
    found: dict[str, list[float]] = defaultdict(list)
    for sample, score in scores.items():
        name = sample
        while name and name not in items:
            name = name.rpartition("/")[0]
        found[name or sample].append(score)
    return {name: sum(own) / len(own) for name, own in found.items()}


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
    frames, truth = item.request.frames, item.right_answer()
    steps = range(0, len(frames), math.ceil(len(frames) / FRAMES))
    sheets = [_sheet(item, truth, record, index) for index in steps]
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


def _sheet(item: Item, right: Prediction | None, record: Mapping[str, Any], index: int) -> Image.Image:
    picture = transforms.open_image(item.request.frames[index])
    prompted: list[Masklet] = [(mask,) for mask in item.request.mask_prompts]
    true = list(right.masks) if right and right.masks else prompted
    shown, truth, drawn = shrunk(picture, at(true, index), at(masks_of(record) or prompted, index))
    return overlay.side_by_side(
        shown,
        truth=truth,
        prediction=drawn,
        question=item.request.text.removeprefix("<image>").strip()[:200],
        truth_text=(right.text if right else "(not public)")[:200],
        prediction_text=str(record.get("text", ""))[:200],
    )
