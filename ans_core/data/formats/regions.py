"""A folder with `manifest.jsonl` of masks on photographs -> for every region a region_caption sample and a referring one.

Text is the caption or, where there is none, `<category> <place>`. Regions of one image with the same text make one referring
sample for all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ans_core.data.formats import checks
from ans_core.data.formats.plain import split_by_image
from ans_core.data.scene_text import place_words
from ans_core.types import RLE, Sample


def read(path: Path, *, name: str, split: str) -> list[Sample]:
    file = path / "manifest.jsonl"
    records = checks.load_json_lines(file)
    checks.known_split(split, ("train", "val"), path=file)
    checks.indexed((record for _, record in records), "id", where=str(file))
    sizes: dict[str, tuple[int, int]] = {}
    captions: list[Sample] = []
    said: dict[tuple[str, str], list[tuple[str, RLE]]] = {}
    for line, record in records:
        where = f"{file}: line {line} (id {record['id']})"
        image = checks.field(record, "image", where=where)
        if split_by_image(image) != split:
            continue
        if image not in sizes:
            sizes[image] = checks.image_size(path / image, where=where)
        height, width = sizes[image]
        mask = checks.mask(checks.field(record, "segmentation", where=where), height=height, width=width, where=where)
        text = _text(record, height=height, width=width, where=where)
        said.setdefault((image, text), []).append((record["id"], mask))
        meta = {"category": record["category"]} if record.get("category") else {}
        captions.append(_sample(path, name, image, sizes[image], f"{record['id']}_caption", "region_caption", text, [mask], meta))
    referring = [
        _sample(path, name, image, sizes[image], f"{regions[0][0]}_referring", "referring", text, [m for _, m in regions], {})
        for (image, text), regions in said.items()
    ]
    return captions + referring


def splits(path: Path) -> list[str]:
    return sorted({split_by_image(record["image"]) for _, record in checks.load_json_lines(path / "manifest.jsonl")})


def _text(record: dict[str, Any], *, height: int, width: int, where: str) -> str:
    if record.get("caption"):
        return checks.text(record["caption"], where=where)
    category = checks.text(record.get("category"), where=f"{where}: no caption, and as category")
    x, y, w, h = checks.field(record, "bbox", where=where)
    return f"{category} {place_words((x + w / 2) / width, (y + h / 2) / height)}"


def _sample(
    path: Path,
    name: str,
    image: str,
    size: tuple[int, int],
    sample_id: str,
    task: Any,
    text: str,
    masks: list[RLE],
    meta: dict[str, str],
) -> Sample:
    return Sample(
        sample_id=sample_id,
        dataset=name,
        image_id=image,
        frames=(path / image,),
        height=size[0],
        width=size[1],
        task=task,
        text=text,
        masks=tuple((mask,) for mask in masks),
        meta=meta,
    )
