"""Write data sets to one self-contained HTML page: counts, sizes, mask areas, text lengths, and pictures with
their masks."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import numpy as np
from jaxtyping import UInt8
from matplotlib.figure import Figure
from PIL import Image

from ans_core.data import DatasetEntry
from ans_core.data.facts import Facts, facts, shown_frames
from ans_core.pictures import rle, transforms
from ans_core.types import ImageRef, Sample

TEMPLATE = Path(__file__).with_name("report.html.j2")
TITLE, HEAD = b"<title>Data report</title>", 200
"""What the page has in its first bytes."""
PICTURES = 8
TILE = 200
"""Pixels of a picture's longer side on the page."""
TINTS = ((255, 0, 255), (0, 255, 128), (255, 160, 0), (0, 200, 255), (255, 255, 255), (160, 120, 255))


def refuse_other_page(file: Path) -> None:
    """Raise ValueError where a file would be replaced that `write_report` did not write."""
    if file.exists() and (file.is_dir() or TITLE not in file.read_bytes()[:HEAD]):
        raise ValueError(f"{file} is no earlier report, and would be replaced; give another --out")


def write_report(
    file: Path,
    read: Mapping[DatasetEntry, Sequence[Sample]],
    *,
    errors: Sequence[str] = (),
    warnings: Sequence[str] = (),
    pictures: bool = True,
    collected: Mapping[DatasetEntry, Facts] | None = None,
) -> None:
    """Write the page; faults of data sets that can't be read, and warnings, come first. Without `pictures` no
    picture is opened. `collected`: the facts of `read` where they have been collected before."""
    facts_of = {entry: facts(samples) for entry, samples in read.items()} if collected is None else collected
    sets = []
    for name in dict.fromkeys(entry.name for entry in read):
        splits = {entry.split: samples for entry, samples in read.items() if entry.name == name}
        shown = splits.get("val") or next(iter(splits.values()))
        histograms = _histograms({entry.split: of for entry, of in facts_of.items() if entry.name == name})
        tiles = [_tile(sample) for sample in _spread(shown)] if pictures else []
        sets.append({"name": name, "histograms": histograms, "tiles": tiles})
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True)
    page = template.render(facts=facts_of, sets=sets, errors=errors, warnings=warnings, median=np.median)
    file.write_text(page, encoding="utf-8")


def _histograms(splits: Mapping[str, Facts]) -> str:
    """Draw mask areas and text lengths; return the picture's URL."""
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    areas, lengths = figure.subplots(1, 2)
    for split, of in splits.items():
        if of.areas:
            areas.hist(100 * np.array(of.areas), bins=40, histtype="step", density=True, label=split)
        lengths.hist(
            of.words,
            bins=np.arange(max(of.words, default=1) + 2) - 0.5,
            histtype="step",
            density=True,
            label=split,
        )
    areas.set(xlabel="mask area, % of the picture", ylabel="density")
    lengths.set(xlabel="words in a text", ylabel="density")
    if areas.has_data():
        areas.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    return _url(buffer.getvalue(), "png")


def _spread(samples: Sequence[Sample]) -> list[Sample]:
    """Choose PICTURES samples, evenly from first to last."""
    places = np.linspace(0, len(samples) - 1, min(PICTURES, len(samples))).astype(int)
    return [samples[place] for place in places.tolist()]


def panel(sample: Sample, side: int) -> UInt8[np.ndarray, "h w 3"]:
    """Draw the picture, `side` pixels long, with its masks tinted; for a clip the first, middle and last
    frame side by side, or all of several pictures."""
    parts = [
        _overlay(sample.frames[f], [masklet[f] for masklet in sample.masks], side)
        for f in shown_frames(sample)
    ]
    height = max(map(len, parts))
    return np.concatenate([np.pad(part, ((0, height - len(part)), (0, 0), (0, 0))) for part in parts], 1)


def _tile(sample: Sample) -> dict[str, object]:
    frames = len(shown_frames(sample))
    buffer = io.BytesIO()
    Image.fromarray(panel(sample, TILE)).save(buffer, "JPEG", quality=88)
    kind = sample.meta.get("kind", sample.task)
    return {
        "picture": _url(buffer.getvalue(), "jpeg"),
        "width": TILE * frames if frames > 1 else None,
        "text": sample.text if sample.question is None else f"{sample.question} {sample.text}",
        "about": f"{kind}, {len(sample.masks)} mask(s), {sample.sample_id}",
    }


def _overlay(image: ImageRef, masks: Sequence[rle.RLE | None], side: int) -> UInt8[np.ndarray, "h w 3"]:
    """Draw objects in their own colours with a coloured rim and dim the rest (unless there is no mask)."""
    opened = transforms.open_image(image)
    scale = side / max(opened.size)
    size = max(1, round(opened.width * scale)), max(1, round(opened.height * scale))
    picture = np.array(opened.resize(size, Image.Resampling.BICUBIC))
    shown = [
        np.array(Image.fromarray(rle.decode(mask)).resize(size, Image.Resampling.NEAREST))
        for mask in masks
        if mask is not None
    ]
    if shown:
        outside = ~np.any(shown, axis=0)
        picture[outside] = picture[outside] // 2
    for i, pixels in enumerate(shown):
        inner = np.all([np.roll(pixels, (dy, dx), (0, 1)) for dy in (-2, 0, 2) for dx in (-2, 0, 2)], axis=0)
        picture[pixels & ~inner] = TINTS[i % len(TINTS)]
    return picture


def _url(content: bytes, form: str) -> str:
    return f"data:image/{form};base64,{base64.b64encode(content).decode('ascii')}"
