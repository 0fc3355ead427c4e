"""One model on one benchmark: figures, the table of samples and pictures of answers -> a folder with
`page.html` and `overlays`."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public.asked import Item
from ans_core.benchmarks.public.scored import scores_of
from ans_core.report import page, panels
from ans_core.report.files import data_uri
from ans_core.types import RLE

EACH = 8
"""Pictures of the best, of the worst, and at random."""


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
    """Return each item's mean over its samples, which are named as the item or `<item>/...` (the objects of a
    clip)."""
    grouped: dict[str, list[float]] = defaultdict(list)
    for sample, score in scores.items():
        name = sample
        while name and name not in items:
            name = name.rpartition("/")[0]
        grouped[name or sample].append(score)
    return {name: sum(of_item) / len(of_item) for name, of_item in grouped.items()}


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
    entries: dict[str, dict[str, Any]] = {}
    for item in items():
        if item.name in chosen and item.name in predictions and item.request.frames:
            record = predictions[item.name]
            file = f"sample{len(entries):04d}.webp"
            (folder / file).write_bytes(picture(item, [record])[0])
            about = {
                "sample": item.name,
                "why": chosen[item.name],
                "score": scores[item.name],
                "text": str(record.get("text", "")),
            }
            question = item.request.text.removeprefix("<image>").strip()
            entries[item.name] = about | {
                "file": file,
                "asked": question,
                "truth": item.truth.text if item.truth else "",
            }
    shown = [entries[name] for name in chosen if name in entries]
    (folder / "index.json").write_text(json.dumps(shown, indent=1))
    return shown


def picture(item: Item, records: Sequence[Mapping[str, Any]]) -> tuple[bytes, dict[str, int]]:
    """Draw the truth and each record's answer side by side, a clip as an animation; return the WebP file and
    its size."""
    right = item.right_answer()
    regions = [(mask,) for mask in item.request.mask_prompts]
    return panels.webp(
        item.request.frames,
        right.masks if right else (),
        [masks_of(record) for record in records],
        regions=regions,
    )


def masks_of(record: Mapping[str, Any]) -> list[Sequence[RLE | None]]:
    """Return the masklets of a record, under whichever name its benchmark has for them."""
    if "prediction_masks" in record:
        return [record["prediction_masks"]]
    return [[mask] for mask in record["pred_masks"]] if "pred_masks" in record else record.get("masks", [])
