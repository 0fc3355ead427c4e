"""Write data sets to one self-contained HTML page: counts, sizes, mask areas, text lengths, and pictures with
their masks."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from matplotlib.figure import Figure
from PIL import Image

from ans_core.data import DatasetEntry
from ans_core.data.facts import Facts, facts, shown_frames
from ans_core.pictures import rle, transforms
from ans_core.types import ImageRef, Sample

PICTURES = 8
TILE = 200
"""Pixels of a picture's longer side on the page."""
TINTS = ((255, 0, 255), (0, 255, 128), (255, 160, 0), (0, 200, 255), (255, 255, 255), (160, 120, 255))
STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1080px;padding:0 1em;color:#222}
table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}
.tiles{display:flex;flex-wrap:wrap;gap:14px}.tiles figure{margin:0;width:200px}.tiles img{width:100%}
figcaption{font-size:12.5px;color:#333}figcaption b{color:#777;font-weight:normal}"""


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
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Data "
        f"report</title><style>{STYLE}</style><h1>Data report</h1>",
        *(
            f"<p><b>{kind}</b> {html.escape(line)}</p>"
            for kind, lines in (("error", errors), ("warning", warnings))
            for line in lines
        ),
        _table(facts_of),
    ]
    for name in dict.fromkeys(entry.name for entry in read):
        splits = {entry.split: samples for entry, samples in read.items() if entry.name == name}
        shown = splits.get("val") or next(iter(splits.values()))
        parts += [
            f"<h2>{html.escape(name)}</h2>",
            _histograms({entry.split: of for entry, of in facts_of.items() if entry.name == name}),
            f"<div class=tiles>{''.join(map(_tile, _spread(shown) if pictures else []))}</div>",
        ]
    file.write_text("\n".join([*parts, "</html>"]), encoding="utf-8")


def _table(facts_of: Mapping[DatasetEntry, Facts]) -> str:
    rows = []
    for entry, of in facts_of.items():
        sizes = [f"{width}x{height}" for width, height in sorted(of.sizes)]
        cells = (
            f"{entry.name} / {entry.split}", entry.format, f"{of.samples:,}", f"{len(of.images):,}",
            " to ".join(dict.fromkeys((sizes[0], sizes[-1]))),
            f"{len(of.areas):,}", f"{np.median(of.areas):.1%}" if of.areas else "-",
            ", ".join(f"{kind} {n:,}" for kind, n in sorted(of.kinds.items())),
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    heads = (
        "data set / split",
        "format",
        "samples",
        "images",
        "width x height",
        "masks",
        "median mask area",
        "kinds",
    )
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{''.join(rows)}</table>"


def _histograms(splits: Mapping[str, Facts]) -> str:
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
    return f'<img alt="histograms of mask areas and text lengths" src="{_figure_url(figure)}">'


def _figure_url(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    return _url(buffer.getvalue(), "png")


def _spread(samples: Sequence[Sample]) -> list[Sample]:
    """Choose PICTURES samples, evenly from first to last."""
    return (
        [samples[i] for i in sorted(set(np.linspace(0, len(samples) - 1, PICTURES).astype(int).tolist()))]
        if samples
        else []
    )


def panel(sample: Sample, side: int) -> UInt8[np.ndarray, "h w 3"]:
    """Draw the picture, `side` pixels long, with its masks tinted; for a clip the first, middle and last
    frame side by side, or all of several pictures."""
    parts = [
        _overlay(sample.frames[f], [masklet[f] for masklet in sample.masks], side)
        for f in shown_frames(sample)
    ]
    height = max(map(len, parts))
    return np.concatenate([np.pad(part, ((0, height - len(part)), (0, 0), (0, 0))) for part in parts], 1)


def _tile(sample: Sample) -> str:
    frames = shown_frames(sample)
    buffer = io.BytesIO()
    Image.fromarray(panel(sample, TILE)).save(buffer, "JPEG", quality=88)
    kind = html.escape(str(sample.meta.get("kind", sample.task)))
    wide = f' style="width:{TILE * len(frames)}px"' if len(frames) > 1 else ""
    words = sample.text if sample.question is None else f"{sample.question} {sample.text}"
    text, about = html.escape(words), f"{kind}, {len(sample.masks)} mask(s), {html.escape(sample.sample_id)}"
    label = f"<figcaption>{text} <b>{about}</b></figcaption>"
    return f'<figure{wide}><img alt="{text}" src="{_url(buffer.getvalue(), "jpeg")}">{label}</figure>'


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
