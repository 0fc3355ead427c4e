"""What the readers make of damaged data sets: mutations of small drawn ones in every format, each read in a
process that may die.

    python -m tests.data.fuzz_readers [--mutations 4000] [--seed 0]

A mutation is wrong by construction: a value of another type, a number nobody can mean, cut or foreign counts,
a key that is missing or comes twice, bytes cut or overwritten, a picture that can't be decoded. Only what a
reader uses is mutated, so that nothing may be accepted. Counted: refused by name (DataError that names the
file), refused without, left out and counted (by the readers of published sets), tracebacks, crashes,
accepted.
"""

from __future__ import annotations

import argparse
import copy
import logging
import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image
from tqdm import tqdm

from ans_core.data.formats import FORMATS
from ans_core.data.formats.checks import DataError
from ans_core.data.formats.plain import split_by_image
from ans_core.data.pictures import check_pictures
from tests.data.fuzz_sets import FILES, FORMAT_OF, SPLIT_OF, UNREAD, draw, load, store

IGNORED = {
    "kind", "obj_id", "area", "bbox", "iscrowd", "category_id", "raw", "tokens", "sent_ids", "sent_id",
    "colour", "shape", "texture",
    "from", "video_id", "no_target", "ref_id", "split", "id", "categories", "label", "is_sentence",
    "place", "bboxes", "length", "short_caps", "frame_id", "instance_id", "is_det_keyframe", "masklet_id",
}  # fmt: skip
"""Keys whose values a reader does not use, or may be any of several things."""
ODD: tuple[Any, ...] = (
    None, True, -1, 10**30, -(10**30), 1e308, -1e308, float("nan"), float("inf"), 0.5, "", "\u200b", "x\x00y",
    "../../../etc/passwd",
    [], {}, [[]], [None], {"size": None}, "é" * 300,
)  # fmt: skip
Place = tuple[Any, ...]


def places(value: Any, at: Place = ()) -> list[Place]:
    """Of everything below a value that a reader uses."""
    inner = list(
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    found = [(*at, key) for key, _ in inner if key not in IGNORED]
    return found + [
        place for key, child in inner if key not in IGNORED for place in places(child, (*at, key))
    ]


def used(which: str, values: Any, root: Path) -> list[Place]:
    """Places of values; of annotations and masks those that something refers to."""
    found = places(values)
    if which == "instances":
        ids = {ref["ann_id"] for ref in load(root / "refcoco/refs(unc).p")}
        found = [
            p
            for p in found
            if p[0] == "annotations" and len(p) > 2 and values["annotations"][p[1]]["id"] in ids
        ]
    if which == "mask_dict":
        clips = load(root / "mevis/train/meta_expressions.json")["videos"]
        ids = {
            str(n)
            for clip in clips.values()
            for expression in clip["expressions"].values()
            for n in expression["anno_id"]
        }
        found = [p for p in found if p[0] in ids]
    if which == "region_arrow":  # whose captions are asked for in our words
        found = [p for p in found if p[1:] != ("conversations", 0, "value")]
    if which == "finetune":
        found = [p for p in found if split_by_image(f"images/{values[p[0]]['image']}") == "train"]
    # in a record itself
    unused = {"refcoco": "file_name", "grefcoco": "file_name", "region_arrow": "size"}.get(which)
    return [p for p in found if len(p) != 2 or p[-1] != unused]


def mutate(which: str, values: Any, root: Path, rng: Random) -> str | None:
    """Changes one value in place; says which, None where the change would not be wrong."""
    at = rng.choice([p for p in used(which, values, root) if len(p) > 1])
    parent = values
    for key in at[:-1]:
        parent = parent[key]
    old = parent[at[-1]]
    if at[-1] == "counts" and rng.random() < 0.7:
        cut, letter = rng.randrange(len(old)), rng.choice("0o~\x01é P")
        new: Any = rng.choice(
            [old[:cut], old + old[cut:], old[:cut] + letter * 9 + old[cut:], old + "oooooooo"]
        )
    elif at[-1] in NEEDED and rng.random() < 0.2:
        del parent[at[-1]]
        return f"{at}: deleted"
    else:
        new = rng.choice(ODD)
    if not wrong(at, old, new):
        return None
    parent[at[-1]] = new
    return f"{at}: {str(old)[:40]!r} -> {str(new)[:40]!r}"


NEEDED = {"image", "text", "masks", "question", "answer", "size", "counts", "sentences", "sent", "ann_id", "segmentation", "caption",
          "groundings", "token_positives", "rle_masks", "file_name", "frames", "exp", "anno_id", "mask_rle",
          "conversations", "value", "objects", "masks_file", "file", "mask", "shapes", "points", "sentence",
          "refs", "img_file_name", "tokens_positive", "sam_mask", "annotation", "category_id", "images",
          "annotations", "masklet", "segmentations", "file_names", "type_id", "video_path",
          "anno_path", "formated", "video", "videos"}  # fmt: skip
TEXTS = {
    "text",
    "question",
    "answer",
    "sent",
    "caption",
    "exp",
    "name",
    "sentence",
    "value",
    "description",
    "formated",
}
POLYGONS = {"masks", "mask", "segmentation", "points"}
EMPTY = {"masks": [], "regions": [], "anno_id": [], "groundings": {}, "expressions": {}, "height": None, "width": None, "image_id": None,
         "video_height": None, "video_width": None}  # fmt: skip
"""What may be empty, or left out."""


def wrong(at: Place, old: Any, new: Any) -> bool:
    """Whether a reader has to refuse `new` where `old` was. None where a frame's mask was says that there is
    none."""
    if TEXTS & set(at[-2:]) and isinstance(new, str):
        return new in (("", "\u200b") if "conversations" in at else ("", "\u200b", "x\x00y"))
    if isinstance(old, dict) and "token_positives" in old and new is None:
        return False
    if at[-1] in EMPTY and EMPTY[at[-1]] == new:
        return False
    if isinstance(old, dict) and "counts" in old and new is None and isinstance(at[-1], int):
        return False
    point = (isinstance(old, float) and POLYGONS & set(at)) or (isinstance(old, int) and "masks" in at)
    if point and type(new) in (int, float):
        return not -6 <= new <= 70
    return not (at[-1] == "ann_id" and old == [new])


def damage(file: Path, rng: Random) -> bytes:
    """Bytes that are no longer a file of their kind. (A text that is cut, or has other letters, is one.)"""
    content = file.read_bytes()
    cut = rng.randrange(1, max(2, len(content) - 8))
    kinds: list[Callable[[], bytes]] = [
        lambda: content[:cut], lambda: content.decode("latin-1").encode("utf-16"), lambda: b"[" * 100_000,
        lambda: b"", lambda: b"9" * 5000,
        lambda: content[:cut] + b"\x00" * 9 + content[cut + 9 :],
        lambda: content[:cut] + b"\xe9\xff" + content[cut:],
    ]  # fmt: skip
    return rng.choice(kinds[1:-1] if file.suffix == ".txt" else kinds)()


def damage_picture(file: Path, rng: Random) -> str:
    content = file.read_bytes()
    file.unlink()
    kinds = ["cut", "empty", "text", *(["flip", "huge"] if file.suffix == ".png" else [])]
    # whose annotations state none
    kind = rng.choice(kinds if "ReasonSeg" in file.parts else [*kinds, "size"])
    if kind == "cut":
        file.write_bytes(content[: rng.randrange(1, len(content) - 12)])
    elif kind == "flip":
        at = rng.randrange(8, len(content) - 13)
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :])
    elif kind == "huge":
        header = content[:16] + (30_000).to_bytes(4) * 2 + content[24:]
        file.write_bytes(header)
    elif kind == "size":
        Image.new("RGB", (60, 64)).save(file)
    else:
        file.write_bytes(b"" if kind == "empty" else b"no picture")
    return f"{file.name}: {kind}"


def attempt(root: Path, form: str, folder: str) -> tuple[str, str]:
    split = SPLIT_OF.get(form, "train")
    left_out = LeftOut()
    logging.getLogger().addHandler(left_out)
    try:
        check_pictures(list(FORMATS[form](root / folder, name="d", split=split)), where=str(root / folder))
    except DataError as error:
        return ("refused by name", "") if str(root) in str(error) else ("refused without a name", str(error))
    except Exception:  # noqa: BLE001 - what is counted
        return "traceback", traceback.format_exc()
    return ("left out and counted" if left_out.told else "accepted"), ""


class LeftOut(logging.Handler):
    """Whether a reader has told of records that it leaves out (ans_core/data/formats/checks.py)."""

    told = False

    def emit(self, record: logging.LogRecord) -> None:
        self.told = self.told or "are left out" in record.getMessage()


def trial(root: Path, which: str, seed: int, pipe: Any) -> None:
    """One mutation; tells what it was before the reader is asked, so that it is known if that kills the
    process."""
    rng = Random(seed)
    folder, name = FILES[which]
    file, form = root / folder / name, FORMAT_OF.get(which, which)
    told: str | None = None
    while told is None:
        way = rng.random()
        if (way < 0.1 and not file.is_dir()) or file.suffix == ".txt":
            content = damage(file, rng)
            file.unlink()
            file.write_bytes(content)
            told = "bytes"
        elif way < 0.2 or (not name and file.is_dir()):
            pictures = sorted(p for p in root.rglob("*.[pj][np]g") if in_use(p, root, folder))
            told = damage_picture(rng.choice(pictures), rng) if pictures else None
        else:
            values = copy.deepcopy(load(file))
            told = mutate(which, values, root, rng)
            if told is not None and not store(values, file):
                pipe.send((f"{which} {told}", "skipped", ""))
                return
    pipe.send((f"{which} {told}", "crash", ""))
    pipe.send((f"{which} {told}", *attempt(root, form, folder)))


def in_use(picture: Path, root: Path, folder: str) -> bool:
    if folder == "grefcoco":  # which does not show every picture
        return False
    own = root / folder
    if UNREAD in picture.parts:
        return False
    return (
        picture.parent == root / "images"
        if folder in ("refcoco", "region_captions", "grounded")
        else own in picture.parents
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutations", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        valid = Path(folder) / "valid"
        draw(valid)
        for form, where in sorted(
            {(FORMAT_OF.get(which, which), folder) for which, (folder, _) in FILES.items()}
        ):
            assert attempt(valid, form, where) == ("accepted", ""), (form, attempt(valid, form, where))
        for number in tqdm(range(arguments.mutations), desc="damage"):
            which = list(FILES)[number % len(FILES)]
            root = Path(folder) / "mutated"
            shutil.copytree(valid, root, copy_function=os.link)  # what is damaged gets a file of its own
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=trial, args=(root, which, arguments.seed + number, theirs))
            process.start()
            theirs.close()
            told = ("before the reader", "crash", "")
            try:
                while True:
                    told = ours.recv()
            except EOFError:
                process.join()
            counts[told[1]] += 1
            if told[1] not in ("refused by name", "left out and counted", "skipped"):
                print(number, *told, flush=True)
            shutil.rmtree(root)
    print(dict(counts))


if __name__ == "__main__":
    main()
