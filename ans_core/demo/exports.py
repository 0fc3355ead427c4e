"""An answer's masks -> the files that the page offers: PNG (zipped), RLE and COCO JSON."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from ans_core.demo.chat import Answer
from ans_core.demo.sources import Source
from ans_core.pictures import media, rle


def write_all(source: Source, question: str, answer: Answer, folder: Path) -> dict[str, Path]:
    """Write every form, whether masks are switched on or off; return the files by form."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"PNG": folder / "masks.zip", "RLE": folder / "answer.json", "COCO": folder / "coco.json"}
    with zipfile.ZipFile(files["PNG"], "w") as packed:
        for name, content in _pngs(answer):
            packed.writestr(name, content)
    record: dict[str, Any] = {
        "source": source.name,
        "asked": question,
        "text": answer.text,
        "masks": answer.masks,
    }
    files["RLE"].write_text(json.dumps(record), encoding="utf-8")
    files["COCO"].write_text(json.dumps(coco(source, answer)), encoding="utf-8")
    return files


def _pngs(answer: Answer) -> Iterator[tuple[str, bytes]]:
    """Name the files as `ans predict` does."""
    for number, masklet in enumerate(answer.masks, start=1):
        for frame, mask in enumerate(masklet):
            content = media.png_as_is(Image.fromarray(rle.decode(mask)))
            yield f"object{number}_frame{frame:05d}.png", content


def coco(source: Source, answer: Answer) -> dict[str, Any]:
    """Return COCO's instances of a picture, or YouTube-VIS' of a clip, as `ans data` reads both. Objects of
    one phrase share a category; empty masks are left out of a picture and null in a clip."""
    width, height = source.size
    names = list(dict.fromkeys(answer.names))
    instances: dict[str, Any] = {
        "categories": [{"id": n, "name": name} for n, name in enumerate(names, start=1)],
        "annotations": [],
    }
    for name, masklet in zip(answer.names, answer.masks, strict=True):
        entry: dict[str, Any] = {
            "id": len(instances["annotations"]) + 1,
            "category_id": names.index(name) + 1,
            "iscrowd": 0,
        }
        if source.is_clip:
            entry |= {"video_id": 1, "segmentations": [mask if rle.area(mask) else None for mask in masklet]}
        elif rle.area(masklet[0]):
            x1, y1, x2, y2 = rle.box(masklet[0])
            box = [round(x1 * width), round(y1 * height), round((x2 - x1) * width), round((y2 - y1) * height)]
            entry |= {"image_id": 1, "segmentation": masklet[0], "area": rle.area(masklet[0]), "bbox": box}
        else:
            continue
        instances["annotations"].append(entry)
    size = {"id": 1, "height": height, "width": width}
    if source.is_clip:
        # a video file has no names of frames
        paths = source.frames if isinstance(source.frames, tuple) else ()
        files = [path.name for path in paths if isinstance(path, Path)] or [
            f"{frame:05d}.png" for frame in range(answer.followed)
        ]
        files = files[: answer.followed]
        return instances | {"videos": [size | {"file_names": files, "length": len(files)}]}
    return instances | {"images": [size | {"file_name": source.name}]}
