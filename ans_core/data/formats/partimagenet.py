"""PartImageNet (`annotations/train.json` in COCO's form, `images/train/<synset>/*.JPEG`) -> one referring
sample per picture and part.

The released archive without these two folders, `train.json` beside `train/`, is read as well. A category is
`Quadruped Head`; the expression is `the head of the quadruped`, and means all of the picture's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ans_core.data.formats import coco
from ans_core.data.formats.files import ImageFolders
from ans_core.types import Sample

SPLITS = ("train", "val", "test")
WHOLES = (
    "quadruped",
    "biped",
    "fish",
    "bird",
    "snake",
    "reptile",
    "car",
    "bicycle",
    "boat",
    "aeroplane",
    "bottle",
)
"""Names of the eleven super-categories, with which a category begins."""
LAYOUT = "annotations/train.json and no train.json; give the folder of PartImageNet's release"


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split. Left out and counted: parts without a pixel."""
    files = splits(path)
    images = ImageFolders(path, [f"images/{split}", split, "images"])

    def located(file_name: str) -> str:
        leaf = file_name.rpartition("/")[2]
        inner = f"{leaf.partition('_')[0]}/{leaf}"
        return inner if any((folder / inner).is_file() for folder in images.folders) else file_name

    return coco.instances(files[split], images, text=expression, located=located)


def splits(path: Path) -> dict[str, Path]:
    places = (
        (split, folder / f"{split}.json") for split in SPLITS for folder in (path / "annotations", path)
    )
    files = {split: file for split, file in reversed(list(places)) if file.is_file()}
    return {split: files[split] for split in SPLITS if split in files}


def expression(category: str) -> str:
    """`Quadruped Head` -> `the head of the quadruped`; a name of another form stays."""
    holder, _, part = category.lower().partition(" ")
    return f"the {part} of the {holder}" if part and holder in WHOLES else category
