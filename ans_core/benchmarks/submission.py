"""Write the lines of predictions.jsonl as the files that benchmark servers and public scorers take."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ans_core.benchmarks.public import files
from ans_core.pictures import rle
from ans_core.pictures.overlay import index_picture
from ans_core.types import RLE

ADVICE = "give the predictions.jsonl of `ans eval {} --model ...`"


def video_zip_of_lines(path: Path, lines: Iterable[Any], *, where: str) -> int:
    """Write MeViS val, Ref-YouTube-VOS: `Annotations/<video>/<expression>/<frame>.png`, grey, 0 or 255;
    return the number of expressions. A wrong line leaves no archive."""
    count, partial = 0, path.with_name(f"{path.name}.partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for count, line in enumerate(lines, start=1):
            here = f"{where}, line {count}"
            if not isinstance(line, Mapping) or (
                absent := {"video", "expression", "frames", "size", "prediction_masks"} - set(line)
            ):
                lacking = "no record" if not isinstance(line, Mapping) else f"no {', '.join(sorted(absent))}"
                raise ValueError(f"{here}: {lacking}; " + ADVICE.format("mevis"))
            size = files.mask_size(line, where=here)
            frames, masks = (
                files.listed(line, "frames", where=here, of=str),
                files.listed(line, "prediction_masks", where=here),
            )
            if len(frames) != len(masks):
                raise ValueError(f"{here}: {len(masks)} masks for {len(frames)} frames")
            checked = [
                files.mask(m, height=size[0], width=size[1], where=f"{here}, frame {f}")
                for f, m in zip(frames, masks, strict=True)
            ]
            by_frame = dict(zip(frames, checked, strict=True))
            _write_masks(archive, f"Annotations/{line['video']}/{line['expression']}", by_frame, size=size)
    partial.rename(path)
    return count


def vos_pictures(record: Mapping[str, Any], *, where: str) -> Iterator[tuple[str, Image.Image]]:
    """Yield (path, palette PNG) of a line of a run of video object segmentation: `<video>/<frame>.png`,
    object n is number n; or `<video>/<object>/<frame>.png` where objects may overlap (SA-V)."""
    keys = ("video", "objects", "overlap", "frames", "size", "masks")
    video, objects, overlap, frames, size, masks = (files.value(record, key, where=where) for key in keys)
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


def write_vos(path: Path, lines: Iterable[Mapping[str, Any]], *, where: str) -> int:
    """Write the PNGs of a run into a folder, or into a .zip for a server; return the number of videos."""
    count = 0
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) if path.suffix == ".zip" else nullcontext() as archive
    ):
        for count, line in enumerate(lines, start=1):
            for name, picture in vos_pictures(line, where=f"{where}, line {count}"):
                if archive is None:
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    picture.save(path / name)
                else:
                    png = io.BytesIO()
                    picture.save(png, "PNG")
                    archive.writestr(name, png.getvalue())
    return count


def _write_masks(
    archive: zipfile.ZipFile, folder: str, masks: Mapping[str, RLE | None], *, size: tuple[int, int]
) -> None:
    """Masks by the frame's name; None = empty."""
    for name, mask in masks.items():
        png = io.BytesIO()
        Image.fromarray(rle.decode(mask or rle.empty(*size)) * np.uint8(255)).save(png, "PNG")
        archive.writestr(f"{folder}/{name}.png", png.getvalue())


def gcg_folder_of_lines(folder: Path, lines: Iterable[Mapping[str, Any]], *, where: str) -> int:
    """Write GranD-f: `<image_id>.json` {"image_id", "caption", "phrases", "pred_masks"}, one phrase a mask;
    return the number of images."""
    count = 0
    for count, line in enumerate(lines, start=1):
        here = f"{where}, line {count}"
        record = {
            key: files.value(line, key, where=here)
            for key in ("image_id", "caption", "phrases", "pred_masks")
        }
        _write_image(folder, record, where=here)
    return count


def _write_image(folder: Path, record: Mapping[str, Any], *, where: str) -> None:
    if not re.fullmatch(r"[\w.-]+", record["image_id"]):
        raise ValueError(f"{where}: image id {record['image_id']!r} is no file name")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{record['image_id']}.json").write_text(json.dumps(record), encoding="utf-8")
