"""Drawn scenes written as the published picture sets have them, in the places that upstream's data tree gives
them.

`SETS` has each set's format and its path in the tree.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from jaxtyping import Bool
from PIL import Image

from ans_core.data.scene_text import grounded_caption, region_caption
from ans_core.data.scenes import Scene, draw_scene
from ans_core.pictures import rle

SETS = {
    "grandf": ("grandf", "glamm_data/annotations/GranDf_HA_GCG_train.json"),
    "openpsg": ("grandf", "glamm_data/annotations/OpenPsgGCG_train.json"),
    "refcocog_gcg": ("refcocog_gcg", "glamm_data/annotations/RefCOCOg_GCG_train.json"),
    "flickr_gcg": ("flickr_gcg", "glamm_data/annotations/flickr_mergedGT_GCG_train.json"),
    "osprey_conversation": ("osprey", "osprey-724k/Osprey-724K/osprey_conversation.json"),
    "osprey_detail_description": ("osprey", "osprey-724k/Osprey-724K/osprey_detail_description.json"),
    "osprey_part_level": ("osprey", "osprey-724k/Osprey-724K/osprey_part_level.json"),
    "osprey_short_form": ("osprey", "osprey-724k/Osprey-724K/osprey_short_form.json"),
    "osprey_lvis_positive_negative": ("osprey", "osprey-724k/Osprey-724K/osprey_lvis_positive_negative.json"),
    "llava": ("llava", "llava_data/LLaVA-Instruct-150K/llava_v1_5_mix665k.json"),
    "coco": ("coco", "coco/annotations/instances_train2017.json"),
    "reasonseg": ("reasonseg", "ReasonSeg"),
    "finetune": ("annotations", "finetune"),
    "gar_seed": ("region_arrow", "gar/Seed-Dataset"),
    "gar_relation": ("region_arrow", "gar/Relation-Dataset"),
}
"""Set -> format and path; all are read as split "train"."""


@dataclass(frozen=True)
class Drawn:
    """A scene, its number and the RLE of every thing."""

    number: int
    scene: Scene
    masks: list[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        return [region_caption(thing) for thing in self.scene.things]

    @property
    def side(self) -> dict[str, int]:
        height, width = self.scene.image.shape[:2]
        return {"height": height, "width": width}


def draw(count: int, *, image_size: int, seed: int = 0) -> list[Drawn]:
    scenes = [draw_scene(seed=seed, split="train", index=n, image_size=image_size) for n in range(count)]
    return [Drawn(n, scene, [rle.encode(mask) for mask in scene.masks]) for n, scene in enumerate(scenes)]


def write(root: Path, scenes: list[Drawn]) -> None:
    """Write all sets."""
    for writer in (gcg, osprey, llava, coco, reasonseg, finetune, gar):
        writer(root, scenes)


def polygons(mask: Bool[np.ndarray, "H W"]) -> list[list[float]]:
    """Return one rectangle per run of a row, as COCO's polygons: rasterised they are the mask again."""
    found: list[list[float]] = []
    for y, row in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(np.int8), [0]))))
        found += [[float(v) for v in (a, y, b, y, b, y + 1, a, y + 1)] for a, b in edges.reshape(-1, 2)]
    return found


def pictures(folder: Path, scenes: list[Drawn], name: Callable[[int], str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for drawn in scenes:
        Image.fromarray(drawn.scene.image).save(folder / name(drawn.number))


def store(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def gcg(root: Path, scenes: list[Drawn]) -> None:
    images, annotations = root / "glamm_data/images", root / "glamm_data/annotations"
    pictures(images / "grandf/train", scenes, "{}.png".format)
    pictures(images / "coco2017/train2017", scenes, "{:012d}.png".format)
    pictures(images / "coco2014/train2014", scenes, "COCO_train2014_{}.png".format)
    pictures(images / "flickr30k/Flickr30K", scenes, "{}.png".format)
    grandf, refs, flickr = [], [], {"images": [], "annotations": []}  # type: ignore[var-annotated]
    for drawn in scenes:
        caption, spans = grounded_caption(drawn.scene.things)
        groundings = {
            f"{caption[a:b]} {i}": {"token_positives": [a, b], "rle_masks": [drawn.masks[i]]}
            for (a, b), i in spans
        }
        grandf.append(
            {"file_name": f"{drawn.number}.png", "caption": f'"{caption}."', "groundings": groundings}
        )
        named = [
            {"sentence": caption[a:b], "segmentation": polygons(drawn.scene.masks[i])} for (a, b), i in spans
        ]
        refs.append(
            {
                str(drawn.number): {
                    "img_file_name": f"COCO_train2014_{drawn.number}.png",
                    "caption": caption.capitalize(),
                    "refs": named,
                }
            }
        )
        flickr["images"].append(
            {"id": drawn.number, "file_name": f"{drawn.number}.png", "caption": caption, **drawn.side}
        )
        flickr["annotations"] += [
            {
                "id": len(flickr["annotations"]) + n,
                "image_id": drawn.number,
                "tokens_positive": [[a, b]],
                "sam_mask": drawn.masks[i],
            }
            | {"area": 9.0, "bbox": [0, 0, 9, 9]}
            for n, ((a, b), i) in enumerate(spans)
        ]
    store(annotations / "GranDf_HA_GCG_train.json", grandf)
    psg = [record | {"file_name": f"train2017/{n:012d}.png"} for n, record in enumerate(grandf)]
    store(annotations / "OpenPsgGCG_train.json", psg)
    store(annotations / "RefCOCOg_GCG_train.json", refs)
    store(annotations / "flickr_mergedGT_GCG_train.json", flickr)


def osprey(root: Path, scenes: list[Drawn]) -> None:
    pictures(root / "osprey-724k/coco/train2017", scenes, "{:012d}.png".format)
    files: dict[str, list[dict[str, Any]]] = {name: [] for name in SETS if name.startswith("osprey")}
    for drawn in scenes:
        things = drawn.scene.things
        annotation = [{"bbox": [0, 0, 1, 1], "segmentation": mask} for mask in drawn.masks]
        base = {
            "id": drawn.number,
            "file_name": f"COCO_train2017_{drawn.number:012d}.png",
            "annotation": annotation,
            **drawn.side,
        }
        told = [f"<region{i}>: {name}" for i, name in enumerate(drawn.names, start=1)]
        files["osprey_detail_description"].append(base | {"description": told})
        colour = said(
            ("What is the colour of <region1>?", f"It is {things[0].colour}."),
            ("And its shape?", f"<region1> is a {things[0].shape}."),
        )
        files["osprey_conversation"].append(base | {"conversations": colour})
        files["osprey_part_level"].append(
            base | {"conversations": said(("What is <region1>?", things[0].shape))}
        )
        files["osprey_short_form"].append(
            base | {"conversations": said(("What is the shape of <region2>?", things[1].shape))}
        )
        yes = [
            (f"Is <region{i}> red?", "Yes." if thing.colour == "red" else "No.")
            for i, thing in enumerate(things, start=1)
        ]
        files["osprey_lvis_positive_negative"].append(base | {"conversations": said(*yes)})
    for name, records in files.items():
        store(root / SETS[name][1], records)


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [
        {"from": speaker, "value": text}
        for pair in pairs
        for speaker, text in zip(("human", "gpt"), pair, strict=True)
    ]


def llava(root: Path, scenes: list[Drawn]) -> None:
    pictures(root / "llava_data/llava_images/coco/train2017", scenes, "{:012d}.png".format)
    records = []
    for drawn in scenes:
        asked = said(
            ("<image>\nHow many things are there?", str(len(drawn.names))),
            ("What is one of them?", drawn.names[0]),
        )
        image = f"coco/train2017/{drawn.number:012d}.png"
        records.append({"id": f"{drawn.number:012d}", "image": image, "conversations": asked})
    store(root / SETS["llava"][1], records)


def coco(root: Path, scenes: list[Drawn]) -> None:
    """The shapes are the categories; every other object is a list of polygons."""
    pictures(root / "coco/train2017", scenes, "{:012d}.png".format)
    shapes = sorted({thing.shape for drawn in scenes for thing in drawn.scene.things})
    images, annotations = [], []
    for drawn in scenes:
        images.append({"id": drawn.number, "file_name": f"{drawn.number:012d}.png", **drawn.side})
        for i, thing in enumerate(drawn.scene.things):
            outline = polygons(drawn.scene.masks[i]) if i % 2 else drawn.masks[i]
            annotation = {
                "id": len(annotations),
                "image_id": drawn.number,
                "category_id": shapes.index(thing.shape),
                "iscrowd": 0,
            }
            annotations.append(annotation | {"segmentation": outline})
    categories = [{"id": n, "name": shape} for n, shape in enumerate(shapes)]
    store(root / SETS["coco"][1], {"images": images, "annotations": annotations, "categories": categories})


def reasonseg(root: Path, scenes: list[Drawn]) -> None:
    """The frontmost thing, of which all pixels are seen, so that one outline holds it."""
    pictures(root / "ReasonSeg/train", scenes, "{}.jpg".format)
    for drawn in scenes:
        rows = np.flatnonzero(drawn.scene.masks[-1].any(1))
        spans = [np.flatnonzero(drawn.scene.masks[-1][y])[[0, -1]] + (0, 1) for y in rows]
        left = [[float(a), float(y + dy)] for y, (a, _) in zip(rows, spans, strict=True) for dy in (0, 1)]
        right = [[float(b), float(y + dy)] for y, (_, b) in zip(rows, spans, strict=True) for dy in (0, 1)]
        shape = {"label": "target", "points": left + right[::-1]}
        query = {"text": [f"Which one is {drawn.names[-1]}?"], "is_sentence": True, "shapes": [shape]}
        store(root / f"ReasonSeg/train/{drawn.number}.json", query)


def finetune(root: Path, scenes: list[Drawn]) -> None:
    pictures(root / "finetune/images", scenes, "{}.png".format)
    outlines = [[polygons(mask) for mask in drawn.scene.masks] for drawn in scenes]
    records = [
        {"image": f"{d.number}.png", "mask": mask, "text": d.names}
        for d, mask in zip(scenes, outlines, strict=True)
    ]
    store(root / "finetune/annotations.json", records)


def gar(root: Path, scenes: list[Drawn]) -> None:
    pictures(root / "gar/images", scenes, "{}.png".format)
    seed, relation = [], []
    for drawn in scenes:
        image = f"../images/{drawn.number}.png"
        seed.append(
            {
                "image": image,
                "mask_rle": drawn.masks[0],
                "conversations": said(("<image>\nDescribe it.", drawn.names[0])),
            }
        )
        left = "Yes." if drawn.scene.things[0].x < drawn.scene.things[1].x else "No."
        asked = said(("<image>\nIs <Prompt0> left of <Prompt1>?", left))
        relation.append({"image": image, "mask_rle": drawn.masks, "conversations": asked})
    for name, rows in (("gar_seed", seed), ("gar_relation", relation)):
        Dataset.from_list(rows).save_to_disk(str(root / SETS[name][1]))
