"""Write drawn scenes and clips in the layouts of RefCOCO, gRefCOCO, GAR region captions, GranD-f and MeViS.

root/images/*.png                         every still scene, once
root/refcoco/{refs(unc).p,instances.json}         one thing per expression
root/grefcoco/{grefs(unc).json,instances.json}    several things or none
root/region_captions/<split>/             Hugging Face `datasets` folder: image, mask_rle, conversations
root/grounded/<split>.json                GranD-f
root/images/sa_<index>.json               SA-1B: training scenes without captions
root/images/annotations.jsonl             plain annotations: phrases of training scenes without masks
root/mevis/<split>/{meta_expressions.json,mask_dict.json,JPEGImages/<clip>/<frame>.png}
Keys that the real sets lack (`kind`, the columns of attributes) only serve reports.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from PIL import Image
from tqdm import tqdm

from ans_core.data import scene_text as say
from ans_core.data.clips import clip_expressions, draw_clip
from ans_core.data.scenes import FULL, SHAPES, SPLITS, Scene, World, draw_scene
from ans_core.pictures import rle

PNG_LEVEL = 3
"""zlib level: 4 ms less per picture than the default for 3 % larger files."""
SEVERAL_SHARE = 0.6
"""Share of scenes that also get an expression for several things."""
NONE_SHARE = {"train": 0.6, "val": 0.35, "test": 0.35}
"""Share of scenes that also get an expression for an absent thing. If every training scene has one, a tiny
model denies a twelfth of the things that are there; with a third of the scenes, it never denies (LOG)."""

EXPRESSIONS = {"train": 6, "val": 3, "test": 3}
"""Most single-object expressions per scene. Training has more per picture because encoding the picture is the
costly part."""


def write_scenes(
    root: Path,
    *,
    seed: int,
    counts: dict[str, int],
    image_size: int,
    captioned: int | None = None,
    masked: int | None = None,
    world: World = FULL,
) -> None:
    """Draw `counts[split]` still scenes per split and write them in the four still layouts. Of the training
    scenes after the first `captioned` (None: all), masks are written in place of captions of regions and of
    the picture; of those before the last `masked` (None: all), phrases in place of all that has masks."""
    (root / "images").mkdir(parents=True)
    coco = {
        "images": [],
        "annotations": [],
        "categories": [{"id": i, "name": name} for i, name in enumerate(SHAPES, start=1)],
    }
    refs: list[dict[str, Any]] = []
    grefs: list[dict[str, Any]] = []
    phrases: list[dict[str, Any]] = []
    for split in SPLITS:
        regions: list[dict[str, Any]] = []
        grounded: list[dict[str, Any]] = []
        for index in tqdm(range(counts[split]), desc=f"draw {split} scenes", mininterval=1):
            scene = draw_scene(seed=seed, split=split, index=index, image_size=image_size, world=world)
            file_name = f"{split}_{index:06d}.png"
            Image.fromarray(scene.image).save(root / "images" / file_name, compress_level=PNG_LEVEL)
            if split == "train" and masked is not None and index < counts[split] - masked:
                phrases += _phrases(scene, file_name)
                continue
            masks = [rle.encode(mask) for mask in scene.masks]
            image_id = len(coco["images"]) + 1
            coco["images"].append(
                {"id": image_id, "file_name": file_name, "height": image_size, "width": image_size}
            )
            first = len(coco["annotations"]) + 1
            coco["annotations"] += _annotations(scene, masks, image_id=image_id, first=first)
            rng = np.random.default_rng([seed, SPLITS.index(split), index, 0])
            records = partial(
                _refs, scene=scene, image_id=image_id, first=first, split=split, file_name=file_name
            )
            expressions = say.single_expressions(rng, scene.things, EXPRESSIONS[split])
            refs += records(expressions, ref_id=len(refs), grouped=True)
            others = [
                (SEVERAL_SHARE, say.several_expression(rng, scene.things)),
                (NONE_SHARE[split], say.none_expression(rng, scene.things, world)),
            ]
            expressions = [e for share, e in others if rng.random() < share and e is not None]
            grefs += records(expressions, ref_id=len(grefs), grouped=False)
            if split == "train" and captioned is not None and index >= captioned:
                _json(root / "images" / f"sa_{index:06d}.json", _masks_alone(coco["images"][-1], masks))
                continue
            regions += [
                _region(scene, i, masks[i], image=f"../../images/{file_name}", order=rng)
                for i in range(len(masks))
            ]
            grounded.append(_grounded(scene, masks, file_name))
        if counts[split]:
            Dataset.from_list(regions).save_to_disk(str(root / "region_captions" / split))
            _json(root / "grounded" / f"{split}.json", grounded)
    if phrases:
        (root / "images" / "annotations.jsonl").write_text(
            "".join(f"{json.dumps(p)}\n" for p in phrases), encoding="utf-8"
        )
    _number_sentences(refs)
    _number_sentences(grefs)
    _json(root / "refcoco" / "instances.json", coco)
    _json(root / "grefcoco" / "instances.json", coco)
    (root / "refcoco" / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=2))
    _json(root / "grefcoco" / "grefs(unc).json", grefs)


def write_clips(
    root: Path, *, seed: int, counts: dict[str, int], image_size: int, frames: int, world: World = FULL
) -> None:
    """Draw `counts[split]` clips per split and write them as a MeViS-type set."""
    for split, count in counts.items():
        videos: dict[str, Any] = {}
        mask_dict: dict[str, Any] = {}
        for index in tqdm(range(count), desc=f"draw {split} clips", mininterval=1):
            clip = draw_clip(
                seed=seed, split=split, index=index, image_size=image_size, frames=frames, world=world
            )
            name = f"{split}_{index:06d}"
            folder = root / "mevis" / split / "JPEGImages" / name
            folder.mkdir(parents=True)
            names = [f"{f:05d}" for f in range(frames)]
            for frame, picture in zip(names, clip.frames, strict=True):
                Image.fromarray(picture).save(folder / f"{frame}.png", compress_level=PNG_LEVEL)
            first = len(mask_dict)
            for masklet in clip.masks:
                mask_dict[str(len(mask_dict))] = [
                    rle.encode(mask) if mask.any() else None for mask in masklet
                ]
            rng = np.random.default_rng([seed, SPLITS.index(split), index, 7, 0])
            expressions = {
                str(n): {
                    "exp": e.text,
                    "obj_id": list(e.targets),
                    "anno_id": [first + t for t in e.targets],
                    "kind": e.kind,
                }
                for n, e in enumerate(clip_expressions(rng, clip.things))
            }
            videos[name] = {"frames": names, "expressions": expressions}
        if count:
            _json(root / "mevis" / split / "meta_expressions.json", {"videos": videos})
            _json(root / "mevis" / split / "mask_dict.json", mask_dict)


def _annotations(
    scene: Scene, masks: list[dict[str, Any]], *, image_id: int, first: int
) -> list[dict[str, Any]]:
    made = []
    for i, (thing, mask) in enumerate(zip(scene.things, scene.masks, strict=True)):
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        x, y = int(columns[0]), int(rows[0])
        bbox = [x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1]
        made.append(
            {
                "id": first + i, "image_id": image_id, "category_id": SHAPES.index(thing.shape) + 1,
                "segmentation": masks[i], "area": int(mask.sum()), "bbox": bbox, "iscrowd": 0,
            }
        )  # fmt: skip
    return made


def _refs(
    expressions: Iterable[say.Expression],
    *,
    scene: Scene,
    image_id: int,
    first: int,
    split: str,
    file_name: str,
    ref_id: int,
    grouped: bool,
) -> list[dict[str, Any]]:
    """Make records. grouped: RefCOCO, one record per thing with all its sentences. Otherwise gRefCOCO, one
    record per sentence with a list of things (-1: none)."""
    records: dict[tuple[int, ...], dict[str, Any]] = {}
    for number, expression in enumerate(expressions):
        targets = expression.targets
        ann_ids = [first + t for t in targets] or [-1]
        categories = [SHAPES.index(scene.things[t].shape) + 1 for t in targets] or [-1]
        key = targets if grouped else (number,)
        if key not in records:
            records[key] = {
                "ref_id": ref_id + len(records), "image_id": image_id, "split": split, "sentences": [],
                "file_name": f"{file_name.removesuffix('.png')}_{ref_id + len(records)}.png",
            }  # fmt: skip
            if grouped:
                records[key] |= {"ann_id": ann_ids[0], "category_id": categories[0]}
            else:
                records[key] |= {"ann_id": ann_ids, "category_id": categories, "no_target": not targets}
        text = expression.text
        records[key]["sentences"].append(
            {"sent": text, "raw": text, "tokens": text.split(), "kind": expression.kind}
        )
    return list(records.values())


def _number_sentences(refs: list[dict[str, Any]]) -> None:
    number = 0
    for ref in refs:
        ref["sent_ids"] = list(range(number, number + len(ref["sentences"])))
        for sentence in ref["sentences"]:
            sentence["sent_id"] = number
            number += 1


def _region(
    scene: Scene, i: int, mask: dict[str, Any], *, image: str, order: np.random.Generator
) -> dict[str, Any]:
    question = ("Describe the region <Prompt0> in the picture.", "What is <Prompt0> in the picture?")[
        order.integers(2)
    ]
    turns = [
        {"from": "human", "value": f"<image>\n{question}"},
        {"from": "gpt", "value": say.region_caption(scene.things[i])},
    ]
    return {"image": image, "mask_rle": mask, "conversations": turns, **say.attributes(scene.things[i])}


def _masks_alone(picture: dict[str, Any], masks: list[dict[str, Any]]) -> dict[str, Any]:
    size = {key: picture[key] for key in ("file_name", "height", "width")}
    return {
        "image": {"image_id": picture["id"], **size},
        "annotations": [{"id": i, "segmentation": m} for i, m in enumerate(masks)],
    }


def _phrases(scene: Scene, file_name: str) -> list[dict[str, Any]]:
    """Return the captions of regions that mean one thing of the picture."""
    times = Counter(say.region_caption(thing) for thing in scene.things)
    return [
        {"image": file_name, "text": text, "task": "phrase", "split": "train"}
        for text, count in times.items()
        if count == 1
    ]


def _grounded(scene: Scene, masks: list[dict[str, Any]], file_name: str) -> dict[str, Any]:
    caption, spans = say.grounded_caption(scene.things)
    groundings: dict[str, Any] = {}
    for (start, end), i in spans:
        # GranD-f's dict is keyed by the phrase; the second "a small red circle" of a caption gets a number
        # that readers of the spans never see
        name = caption[start:end]
        if name in groundings:
            name += f" {len(groundings)}"
        groundings[name] = {"token_positives": [start, end], "rle_masks": [masks[i]]}
    return {"file_name": file_name, "caption": caption, "groundings": groundings}


def _json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
