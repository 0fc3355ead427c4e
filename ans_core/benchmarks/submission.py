"""Write the lines of predictions.jsonl as the files that benchmark servers and public scorers take: whole, or
after a wrong line not at all."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.vos_files import masks_of_record
from ans_core.pictures import media, rle
from ans_core.pictures.overlay import index_picture
from ans_core.written import atomic_folder, sync


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Yield an archive that gets its name, in place of an earlier one, when it is complete."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file, as {path}.zip")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            yield archive
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def video_zip(path: Path, records: Iterable[files.Record]) -> int:
    """Write MeViS val, Ref-YouTube-VOS: `Annotations/<video>/<expression>/<frame>.png`, grey, 0 or 255;
    return the number of expressions."""
    known = set[tuple[str, str]]()
    with _archive(path) as archive:
        for record in records:
            if absent := {"video", "expression", "frames", "size", "prediction_masks"} - set(record):
                raise ValueError(
                    f"{record.where}: no {', '.join(sorted(absent))}; give the predictions.jsonl of "
                    "`ans eval mevis --model ...`"
                )
            name = str(record["video"]), str(record["expression"])
            if name in known:
                raise ValueError(f"{record.where}: video {name[0]}, expression {name[1]} comes twice")
            known.add(name)
            frames = record.listed("frames", str)
            masks = record.masklet("prediction_masks", frames, record.size())
            for frame, mask in zip(frames, masks, strict=True):
                picture = Image.fromarray(rle.decode(mask) * np.uint8(255))
                archive.writestr(f"Annotations/{'/'.join(name)}/{frame}.png", media.png_as_is(picture))
    return len(known)


def vos_pictures(record: files.Record) -> Iterator[tuple[str, Image.Image]]:
    """Yield (path, palette PNG) of a line of a run of video object segmentation: `<video>/<frame>.png`,
    object n is number n; or `<video>/<object>/<frame>.png` where objects may overlap (SA-V)."""
    video, frames = record.text("video"), record.listed("frames", str)
    for one in record.listed("objects", str) if record.value("overlap") else [None]:
        folder = f"{video}/{one}" if one else video
        for frame, labels in zip(frames, masks_of_record(record, one, frames), strict=True):
            yield f"{folder}/{frame}.png", index_picture(labels)


def write_vos(path: Path, records: Iterable[files.Record]) -> int:
    """Write the PNGs of a run into a folder, which they replace, or into a .zip for a server; return the
    number of videos."""
    count = 0
    with _archive(path) if path.suffix == ".zip" else atomic_folder(path) as out:
        for record in records:
            for name, picture in vos_pictures(record):
                if isinstance(out, Path):
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    picture.save(out / name)
                else:
                    out.writestr(name, media.png_as_is(picture))
            count += 1
    return count


def gcg_folder(path: Path, records: Iterable[files.Record]) -> int:
    """Write GranD-f into a folder, which they replace: `<image_id>.json` {"image_id", "caption", "phrases",
    "pred_masks"}, one phrase a mask; return the number of images."""
    count = 0
    with atomic_folder(path) as folder:
        for record in records:
            image = {key: record.value(key) for key in ("image_id", "caption", "phrases", "pred_masks")}
            name = record.text("image_id")
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"{record.where}: image id {name!r} is no file name")
            (folder / f"{name}.json").write_text(json.dumps(image), encoding="utf-8")
            count += 1
    return count
