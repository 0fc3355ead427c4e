"""A folder of RefCOCO (`refs(unc).p`, one object per sentence) or gRefCOCO (`grefs(unc).json`, several or
none) with `instances.json` -> referring samples.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from ans_core.data.formats import checks, coco
from ans_core.data.formats.files import ImageFolders
from ans_core.data.formats.media import Media
from ans_core.pictures import rle
from ans_core.types import RLE, Sample

IMAGE_FOLDERS = (
    "images",
    "coco2014/train2014",
    "../images/mscoco/images/train2014",
    "../images/train2014",
    "../images",
)
"""Relative to the folder; upstream's data tree keeps COCO's images in the second, REFER in the third."""
NO_OBJECT = -1


class Sentence(checks.Record):
    sent: str
    sent_id: checks.Id | None = None
    kind: str | None = None


class Ref(checks.Record):
    ref_id: checks.Id
    image_id: checks.Id
    split: str
    sentences: checks.Filled[Sentence]
    ann_id: Annotated[
        list[checks.Id], BeforeValidator(lambda value: value if isinstance(value, list) else [value])
    ]
    no_target: bool = False


class Annotation(checks.Record):
    segmentation: Any
    image_id: checks.Id | None = None


class Instances(checks.Record):
    images: list[Any]
    annotations: list[Any]


class PlainUnpickler(pickle.Unpickler):
    """Unpickle containers, text and numbers only: these need no import, so every import (and with it any
    code) is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants to import {module}.{name}")


class Pictures:
    """instances.json: pictures and their annotations by id. Records are checked, masks decoded and pictures
    opened on first use, and only once: a split uses few of COCO's pictures."""

    def __init__(self, path: Path) -> None:
        self.file = path / "instances.json"
        instances = checks.load(Instances, self.file)
        self._files = ImageFolders(path, IMAGE_FOLDERS)
        self.images = checks.by_id(instances.images, f"{self.file}: image")
        self.annotations = checks.by_id(instances.annotations, f"{self.file}: annotation")
        self._masks: dict[Any, tuple[Any, RLE]] = {}

    def image(self, image_id: Any, where: str) -> Media:
        if image_id not in self.images:
            raise checks.DataError(
                f"{where}: image_id {image_id} is not in instances.json; both files must be of one release"
            )
        here = f"{self.file}: image {image_id}"
        picture = checks.record(coco.Picture, self.images[image_id], here)
        return self._files.find(picture.file_name, where=here, stated=(picture.height, picture.width))

    def mask(self, target: Any, image_id: Any, where: str, *, faults: checks.Faults) -> RLE:
        if target not in self.annotations:
            raise checks.DataError(
                f"{where}: ann_id {target} is not in instances.json; both files must be of one release"
            )
        if target not in self._masks:
            here = f"{self.file}: annotation {target}"
            annotation = checks.record(Annotation, self.annotations[target], here)
            if annotation.image_id not in (None, image_id):
                raise checks.DataError(
                    f"{where}: image_id is {image_id}, and ann_id {target} belongs to image "
                    f"{annotation.image_id}"
                )
            image = self.image(image_id, where)
            self._masks[target] = image_id, image.mask(annotation.segmentation, here, faults=faults)
        owner, mask = self._masks[target]
        if owner != image_id:
            raise checks.DataError(
                f"{where}: image_id is {image_id}, and ann_id {target} belongs to image {owner}"
            )
        return mask


def read(path: Path, *, split: str) -> Iterator[Sample]:
    file, refs, faults = _refs(path)
    checks.check_split(split, {ref.split for _, ref in refs} if refs else {split}, path=file)
    with faults:
        checks.once((where, ref.ref_id) for where, ref in refs)
    pictures = Pictures(path)
    for where, ref in refs:
        if ref.split == split:
            with faults:
                image = pictures.image(ref.image_id, where)
                targets = _targets(ref, where)
                masks = tuple(
                    (pictures.mask(target, ref.image_id, where, faults=faults),) for target in targets
                )
                for number, sentence in enumerate(ref.sentences):
                    yield image.sample(
                        sample_id=f"{ref.ref_id}_{number if sentence.sent_id is None else sentence.sent_id}",
                        image_id=str(ref.image_id),
                        task="referring",
                        text=checks.text(sentence.sent, f"{where}, sentence {number}"),
                        masks=masks,
                        meta={"kind": sentence.kind} if sentence.kind is not None else {},
                    )
    faults.tell()


def splits(path: Path) -> list[str]:
    _, refs, faults = _refs(path)
    faults.tell()
    return sorted({ref.split for _, ref in refs})


def _refs(path: Path) -> tuple[Path, list[tuple[str, Ref]], checks.Faults]:
    """Return the folder's one annotation file, (place, record) of its well-formed records, and the faults of
    the others."""
    files = sorted([*path.glob("refs(*).p"), *path.glob("grefs(*).json")])
    if len(files) != 1:
        raise checks.DataError(
            f"{path}: expected one refs(...).p or grefs(...).json, found {[f.name for f in files]}; keep "
            "one in the folder"
        )
    file = files[0]
    is_json = file.suffix == ".json"
    values = checks.load_json(file) if is_json else unpickled(file)
    faults, refs = checks.Faults(file), []
    for number, value in enumerate(checks.filled(values, list, file)):
        with faults:
            ref_id = value.get("ref_id") if isinstance(value, dict) else None
            where = f"{file}: record {number}" if ref_id is None else f"{file}: ref_id {rle.short(ref_id)}"
            refs.append((where, checks.record(Ref, value, where)))
    return file, refs, faults


def unpickled(file: Path) -> Any:
    try:
        # latin-1: the public files were pickled by Python 2
        return PlainUnpickler(io.BytesIO(file.read_bytes()), encoding="latin-1").load()
    except PICKLE_ERRORS as error:
        raise checks.DataError(
            f"{file} is not a plain pickle ({error}); nothing in it was run; fetch the file again"
        ) from None


PICKLE_ERRORS = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
    OSError,
)
"""Errors that a damaged pickle can raise: its operations run on whatever is on the stack."""


def _targets(ref: Ref, where: str) -> list[Any]:
    """Return the annotation ids; gRefCOCO marks "no such object" by `no_target` and the annotation -1."""
    none = ref.ann_id == [NO_OBJECT]
    if ref.no_target and ref.ann_id and not none:
        raise checks.DataError(
            f"{where}: no_target is set, and ann_id names {rle.short(ref.ann_id)}; one of them is wrong"
        )
    if not (ref.ann_id or ref.no_target):
        raise checks.DataError(
            f"{where}: ann_id is empty; an expression that means nothing has no_target and the ann_id [-1]"
        )
    return [] if none else ref.ann_id
