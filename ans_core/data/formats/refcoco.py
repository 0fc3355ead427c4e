"""A folder of RefCOCO (`refs(unc).p`, one object per sentence) or gRefCOCO (`grefs(unc).json`, several or none) with
`instances.json` -> referring samples.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks
from ans_core.types import RLE, Sample

IMAGE_FOLDERS = ("images", "../images/mscoco/images/train2014", "../images/train2014", "../images")
"""Relative to the folder; the second is where REFER keeps COCO's."""


class _PlainUnpickler(pickle.Unpickler):
    """Containers, text and numbers only: these need no import, so every import (and with it any code) is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants to import {module}.{name}")


def read(path: Path, *, name: str, split: str) -> list[Sample]:
    refs_file, refs = _refs(path)
    checks.known_split(split, _split_names(refs, refs_file), path=refs_file)
    instances = checks.load_json(path / "instances.json")
    images = checks.indexed(checks.field(instances, "images", where=f"{path}/instances.json"), "id", where=f"{path}/instances.json images")
    annotations = checks.indexed(
        checks.field(instances, "annotations", where=f"{path}/instances.json"), "id", where=f"{path}/instances.json annotations"
    )
    folder = checks.image_folder([path / f for f in IMAGE_FOLDERS], where=str(path))
    sizes: dict[Any, tuple[int, int]] = {}
    masks: dict[Any, RLE] = {}
    samples = []
    checks.indexed(refs, "ref_id", where=str(refs_file))
    for ref in refs:
        if ref["split"] != split:
            continue
        where = f"{refs_file}: ref_id {ref['ref_id']}"
        image_id = checks.field(ref, "image_id", where=where)
        if image_id not in images:
            raise ValueError(f"{where}: image_id {image_id} is not in instances.json; both files must be of one release")
        image = (folder / checks.field(images[image_id], "file_name", where=where)).resolve()
        if image_id not in sizes:
            sizes[image_id] = checks.image_size(image, where=where)
        height, width = sizes[image_id]
        targets = _targets(ref)
        for target in targets:
            if target not in annotations:
                raise ValueError(f"{where}: ann_id {target} is not in instances.json; both files must be of one release")
            if target not in masks:
                segmentation = checks.field(annotations[target], "segmentation", where=f"{path}/instances.json: annotation {target}")
                masks[target] = checks.mask(segmentation, height=height, width=width, where=f"{path}/instances.json: annotation {target}")
        for number, sentence in enumerate(checks.field(ref, "sentences", where=where)):
            samples.append(
                Sample(
                    sample_id=f"{ref['ref_id']}_{sentence.get('sent_id', number)}",
                    dataset=name,
                    image_id=str(image_id),
                    frames=(image,),
                    height=height,
                    width=width,
                    task="referring",
                    text=checks.text(sentence.get("sent"), where=f"{where}, sentence {number}"),
                    masks=tuple((masks[target],) for target in targets),
                    meta={"kind": sentence["kind"]} if "kind" in sentence else {},
                )
            )
    return samples


def splits(path: Path) -> list[str]:
    refs_file, refs = _refs(path)
    return sorted(_split_names(refs, refs_file))


def _refs(path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The folder's one annotation file and what it holds."""
    files = sorted([*path.glob("refs(*).p"), *path.glob("grefs(*).json")])
    if len(files) != 1:
        raise ValueError(f"{path}: expected one refs(...).p or grefs(...).json, found {[f.name for f in files]}; keep one in the folder")
    refs_file = files[0]
    if refs_file.suffix == ".json":
        return refs_file, checks.load_json(refs_file)
    try:
        # latin-1: the public files were pickled by Python 2
        return refs_file, _PlainUnpickler(io.BytesIO(refs_file.read_bytes()), encoding="latin-1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError) as error:
        raise ValueError(f"{refs_file} is not a plain pickle of refs ({error}); nothing in it was run; fetch the file again") from error


def _split_names(refs: list[dict[str, Any]], refs_file: Path) -> set[str]:
    return {checks.field(ref, "split", where=str(refs_file)) for ref in refs}


def _targets(ref: dict[str, Any]) -> list[Any]:
    """gRefCOCO marks "no such object" by `no_target` and the annotation -1."""
    if ref.get("no_target") or ref.get("ann_id") in ([-1], -1):
        return []
    targets = checks.field(ref, "ann_id", where=f"ref_id {ref['ref_id']}")
    return list(targets) if isinstance(targets, list) else [targets]
