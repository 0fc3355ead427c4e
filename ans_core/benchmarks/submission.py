"""Write the lines of predictions.jsonl as the files that benchmark servers and public scorers take."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from PIL import Image

from ans_core.benchmarks.public import files
from ans_core.pictures import media, rle
from ans_core.pictures.overlay import index_picture


def video_zip(path: Path, records: Iterable[files.Record]) -> int:
    """Write MeViS val, Ref-YouTube-VOS: `Annotations/<video>/<expression>/<frame>.png`, grey, 0 or 255;
    return the number of expressions. A wrong record leaves no archive."""
    count, partial = 0, path.with_name(f"{path.name}.partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for record in records:
            if absent := {"video", "expression", "frames", "size", "prediction_masks"} - set(record):
                raise ValueError(
                    f"{record.where}: no {', '.join(sorted(absent))}; give the predictions.jsonl of "
                    "`ans eval mevis --model ...`"
                )
            frames = record.listed("frames", str)
            masks = record.masklet("prediction_masks", frames, record.size())
            for frame, mask in zip(frames, masks, strict=True):
                picture = Image.fromarray(rle.decode(mask) * np.uint8(255))
                name = f"Annotations/{record['video']}/{record['expression']}/{frame}.png"
                archive.writestr(name, media.png_as_is(picture))
            count += 1
    partial.rename(path)
    return count


def vos_pictures(record: files.Record) -> Iterator[tuple[str, Image.Image]]:
    """Yield (path, palette PNG) of a line of a run of video object segmentation: `<video>/<frame>.png`,
    object n is number n; or `<video>/<object>/<frame>.png` where objects may overlap (SA-V)."""
    keys = ("video", "objects", "overlap", "frames", "size", "masks")
    video, objects, overlap, frames, size, masks = map(record.value, keys)
    for t, frame in enumerate(frames):
        by_object = {
            name: rle.decode(masklet[t] or rle.empty(*size))
            for name, masklet in zip(objects, masks, strict=True)
        }
        if overlap:
            yield from (
                (f"{video}/{name}/{frame}.png", index_picture(mask.astype(np.uint8)))
                for name, mask in by_object.items()
            )
        else:
            labels = np.zeros(size, np.uint8)
            for name, mask in by_object.items():
                labels[mask] = int(name)
            yield f"{video}/{frame}.png", index_picture(labels)


def write_vos(path: Path, records: Iterable[files.Record]) -> int:
    """Write the PNGs of a run into a folder, or into a .zip for a server; return the number of videos."""
    count = 0
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) if path.suffix == ".zip" else nullcontext() as archive
    ):
        for record in records:
            for name, picture in vos_pictures(record):
                if archive is None:
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    picture.save(path / name)
                else:
                    archive.writestr(name, media.png_as_is(picture))
            count += 1
    return count


def gcg_folder(folder: Path, records: Iterable[files.Record]) -> int:
    """Write GranD-f: `<image_id>.json` {"image_id", "caption", "phrases", "pred_masks"}, one phrase a mask;
    return the number of images."""
    count = 0
    for record in records:
        image = {key: record.value(key) for key in ("image_id", "caption", "phrases", "pred_masks")}
        name = record.text("image_id")
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{record.where}: image id {name!r} is no file name")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(image), encoding="utf-8")
        count += 1
    return count
