"""Annotation formats on disk -> Samples: one file and one line here per format.

A reader checks all it reads (ans_core/data/formats/checks.py) and raises DataError, a ValueError that names
the file and up to 20 wrong records. Extra keys of a record may go into meta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

from ans_core.data.formats import (
    chat_univi,
    checks,
    coco,
    coco_video,
    davis,
    ego4d,
    fineweb,
    flickr_gcg,
    grandf,
    layouts,
    llava,
    mathvista,
    mevis,
    osprey,
    partimagenet,
    plain,
    reasonseg,
    ref_davis17,
    ref_sav,
    ref_youtube_vos,
    refcoco,
    refcocog_gcg,
    region_arrow,
    regions,
    revos,
    sa1b,
    sav,
    shards,
    starqa,
    videos,
    virl39k,
)
from ans_core.data.formats.files import split_files
from ans_core.data.formats.media import upright
from ans_core.types import Sample

ALONE = (
    chat_univi, coco, coco_video, davis, ego4d, fineweb, flickr_gcg, grandf, llava, mathvista, mevis, osprey,
    partimagenet, reasonseg, ref_davis17, ref_sav, ref_youtube_vos, refcoco, refcocog_gcg, region_arrow, regions,
    revos, sa1b, sav, shards, starqa, videos, virl39k,
)  # fmt: skip
MODULES: dict[str, ModuleType] = {module.__name__.rpartition(".")[2]: module for module in ALONE}
MODULES |= {"annotations": plain, "grefcoco": refcoco, "youtube_vis": coco_video}
"""Name -> module with read(path, *, split), which yields samples of no data set one by one; what is wrong with
the set is raised once all are read. Masks may be of the stored pixels of pictures that an EXIF tag turns. A
module has splits(path), and in LAYOUT what a folder without any lacks; or a file a split, of the names FILES."""
LATE = ("annotations", "refcoco", "grefcoco", "regions")
"""Formats that tell their splits once all records are read; their readers check the split."""


def _samples(form: str, path: Path, *, name: str, split: str) -> Iterator[Sample]:
    if form not in LATE:
        checks.check_split(split, SPLITS[form](path), path=path)
    for sample in MODULES[form].read(path, split=split):
        # shards have been made of upright masks
        yield replace(sample if form == "shards" else upright(sample), dataset=name)


FORMATS = {form: partial(_samples, form) for form in MODULES}
"""The readers of splits that there are, whose samples' masks are of the pictures as `transforms.open_image`
returns them: upright."""


def _splits(module: ModuleType, path: Path) -> list[str]:
    names = list(module.splits(path) if hasattr(module, "splits") else split_files(path, module.FILES))
    if not names:
        raise checks.DataError(f"{path} holds no {module.LAYOUT}")
    return names


SPLITS: dict[str, Callable[[Path], list[str]]] = {
    name: partial(_splits, module) for name, module in MODULES.items()
}
"""Name -> splits(path): the splits that a data set on disk has."""

MARKERS: dict[str, str] = {
    "annotations.json": "annotations",
    "annotations.jsonl": "annotations",
    "refs(*).p": "refcoco",
    "grefs(*).json": "grefcoco",
    "dataset_info.json": "region_arrow",
    "*/dataset_info.json": "region_arrow",
    "davis_text_annotations": "ref_davis17",
    "Davis17_annot1.txt": "ref_davis17",
    "Ref-SAV.json": "ref_sav",
    "video_chat.json": "chat_univi",
    "meta_expressions_*_.json": "revos",
    "meta_expressions/*/meta_expressions.json": "ref_youtube_vos",
    "*/meta_expressions*.json": "mevis",
    "manifest.jsonl": "regions",
    "RefCOCOg_GCG_*.json": "refcocog_gcg",
    "flickr*_GCG_*.json": "flickr_gcg",
    "osprey_*.json": "osprey",
    "llava_*.json": "llava",
    "instances_*.json": "coco",
    "annotations/instances_*.json": "coco",
    "_annotations.coco.json": "coco",
    "*/_annotations.coco.json": "coco",
    "*/instances.json": "youtube_vis",
    "JPEGImages_24fps": "sav",
    "*/JPEGImages_24fps": "sav",
    "sa_*.json": "sa1b",
    "*/sa_*.json": "sa1b",
    "annot_testmini.json": "mathvista",
    "STAR_*.json": "starqa",
    "*39K*.parquet": "virl39k",
    "nlq_*.json": "ego4d",
    "annotations/nlq_*.json": "ego4d",
    "annotations/train.json": "partimagenet",
    "*_manual.json": "sav",
    "*/*_manual.json": "sav",
    "*/*/*_manual.json": "sav",
    "Annotations/*/*.png": "davis",
    "Annotations/*/*/*.png": "davis",
    "*/Annotations/*/*.png": "davis",
    "*/Annotations/*/*/*.png": "davis",
    "*train.json": "grandf",
    "*val.json": "grandf",
    "*/000000.tar": "shards",
    "train.url": "shards",
}
"""What a folder holds, or what a file is called -> the format, the first that fits."""

NO_VAL = (
    'it has a split "train" and none "val", so that nothing tells how well it is learned; give about one image in five to "val" (of COCO, '
    "`ans data import` does), or set hold_out"
)


LISTS = ("annotations", "grandf")
"""Formats of a JSON list whose file names other tools give to their objects, too."""
LOOKED_AT = 50
"""Files of a folder whose content is looked at to tell its layout."""
IMPORT = (
    "{path} is labelled in the layout {layout!r}: `ans data import {path} --out DIR` makes a folder of it "
    "that training reads, with the splits it has, else with one picture in five as val; then give DIR"
)


def infer(path: Path) -> str:
    """Return the format of a folder by its file names, else by the files' content: a name of FORMATS, or of a
    layout that only `ans data import` reads. `path` may also be one file of a folder that holds several
    sets."""
    if not path.exists():
        raise checks.DataError(
            f"{path} does not exist; give the folder that holds the annotations, or the file"
        )
    fits = path.glob if path.is_dir() else path.parent.glob
    matches = (
        (name, file)
        for marker, name in MARKERS.items()
        for file in fits(marker)
        if path.is_dir() or file == path
    )
    layout, file = next(matches, (None, path))
    if layout is None or (layout in LISTS and file.suffix == ".json" and checks.starts_with(file, b"{")):
        return _by_content(path, layout)
    if layout == "regions" and b'"video_id"' in (path / "manifest.jsonl").read_bytes().split(b"\n", 1)[0]:
        return "videos"
    return layout


def training_format(path: Path) -> str:
    """Infer the format. Raises DataError for a layout that training does not read, and says how to import
    it."""
    if (layout := infer(path)) not in FORMATS:
        raise checks.DataError(IMPORT.format(path=path, layout=layout))
    return layout


def _by_content(path: Path, otherwise: str | None) -> str:
    recognised = layouts.recognise(path, limit=LOOKED_AT)
    layout = next(iter(recognised), otherwise)
    if layout == "sam":
        raise checks.DataError(layouts.WORDLESS.format(file=recognised[layout][0]))
    if layout is None:
        names = sorted(file.name for file in path.iterdir())[:5] if path.is_dir() else [path.name]
        raise checks.DataError(
            f"{path}: no known annotations in it, but {names}. {layouts.HOW}; a published set needs --format"
        )
    if layout == "coco" and path.is_dir():  # under names that its reader does not look for
        raise checks.DataError(IMPORT.format(path=path, layout=layout))
    return layout
