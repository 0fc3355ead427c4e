"""Small drawn data sets in every format, for tests/data/fuzz_readers.py and tests/data/test_damage.py: which file
of which set is damaged, and how such a file is read and written."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
from datasets import Dataset, load_from_disk

from ans_core.data.scene_write import write_clips, write_scenes
from ans_core.data.shard import shard
from tests import picture_sets
from tests.data import agent_sets, clip_sets

PUBLISHED = (
    "openpsg", "refcocog_gcg", "flickr_gcg", "osprey_conversation", "osprey_detail_description", "llava",
    "coco", "gar_relation",
)  # fmt: skip
CLIPS = {
    "davis": "",
    "sav": "sav_000/sav_000001_manual.json",
    "youtube_vis": "train/instances.json",
    "coco_video": "demo_train.json",
    "revos": "meta_expressions_train_.json",
    "revos_masks": "mask_dict.json",
    "ref_youtube_vos": "meta_expressions/train/meta_expressions.json",
    "ref_davis17": "davis_text_annotations/Davis17_annot2.txt",
    "ref_sav": "Ref-SAV.json",
    "chat_univi": "video_chat.json",
}
"""Mutated file of a set of clips, drawn in a folder of its name; "" where pictures alone tell everything."""
AGENT_FILES = {
    "ego4d": ("agent/ego4d", "annotations/nlq_train.json"),
    "fineweb": ("agent/fineweb", "pages.parquet"),
    "mathvista": ("agent/mathvista", "annot_testmini.json"),
    "partimagenet": ("agent/partimagenet", "annotations/train.json"),
    "sa1b": ("agent/sa1b", "sa_000000/sa_0.json"),
    "star": ("agent/star", "STAR_val.json"),
    "virl39k": ("agent/virl39k", "39Krelease.parquet"),
}
"""As FILES, of the sets that an agent's questions come from; tests/data/fuzz_readers.py does without them."""
SPLIT_OF = {"videos": "val", "starqa": "val", "mathvista": "testmini"}
"""Format -> the split that is read, where it is not "train"."""
UNREAD = "dogs"
"""A clip of another split."""
FILES = {
    "annotations": ("plain", "annotations.json"),
    "grefcoco": ("grefcoco", "grefs(unc).json"),
    "refcoco": ("refcoco", "refs(unc).p"),
    "instances": ("refcoco", "instances.json"),
    "grandf": ("grounded", "train.json"),
    "mevis": ("mevis", "train/meta_expressions.json"),
    "mask_dict": ("mevis", "train/mask_dict.json"),
    "region_arrow": ("region_captions", "train"),
    "regions": ("regions", "manifest.jsonl"),
    "videos": ("videos", "manifest.jsonl"),
    "clip_masks": ("videos", "masks.json"),
    "finetune": ("finetune", "annotations.json"),
    "reasonseg": ("ReasonSeg", "train/0.json"),
    "shards": ("shards", ""),
    **{name: (picture_sets.SETS[name][1], "") for name in PUBLISHED},
    **{name: (f"clips/{name.removesuffix('_masks')}", file) for name, file in CLIPS.items()},
}
"""Mutated file -> what is read, and the file in it ("": itself)."""
FORMAT_OF = {
    "instances": "refcoco",
    "mask_dict": "mevis",
    "clip_masks": "videos",
    "revos_masks": "revos",
    "star": "starqa",
    **{name: picture_sets.SETS[name][0] for name in ("finetune", *PUBLISHED)},
}


def draw(root: Path) -> None:
    """A valid data set in each format."""
    write_scenes(root, seed=0, counts={"train": 3, "val": 0, "test": 0}, image_size=64)
    write_clips(root, seed=0, counts={"train": 2}, image_size=64, frames=3)
    captions = json.loads((root / "grounded/train.json").read_text())
    plain, regions = [], []
    for record in captions:
        image = f"images/{record['file_name']}"
        for number, (phrase, grounding) in enumerate(record["groundings"].items()):
            masks = grounding["rle_masks"]
            plain.append({"image": image, "text": f"{phrase} {number}", "masks": masks, "split": "train"})
            regions.append({"id": len(regions), "image": image, "segmentation": masks[0], "caption": phrase})
        plain.append(
            {"image": image, "text": "polygon", "masks": [[2, 2, 40.5, 2, 40, 30.5]], "split": "train"}
        )
        plain.append(
            {
                "image": image,
                "question": "Is region1 red?",
                "answer": "no",
                "regions": masks,
                "split": "train",
            }
        )
    clips = json.loads((root / "mevis/train/meta_expressions.json").read_text())["videos"]
    masks = json.loads((root / "mevis/train/mask_dict.json").read_text())
    clip, (name, video) = {}, next(iter(clips.items()))
    clip["objects"] = [{"obj_id": int(number), "name": "thing"} for number in list(masks)[:2]]
    clip |= {
        "video_id": name,
        "masks_file": "masks.json",
        "frames": [{"file": f"frames/{f}.png"} for f in video["frames"]],
    }
    for folder in ("plain", "regions"):
        shutil.copytree(root / "images", root / folder / "images")
    (root / "plain/annotations.json").write_text(json.dumps(plain))
    shard(root / "plain", "annotations", root / "shards")
    (root / "regions/manifest.jsonl").write_text("\n".join(map(json.dumps, regions)))
    shutil.copytree(root / "mevis/train/JPEGImages" / name, root / "videos/frames")
    (root / "videos/manifest.jsonl").write_text(json.dumps(clip))
    (root / "videos/masks.json").write_text(json.dumps({"masks": {n: masks[n] for n in list(masks)[:2]}}))
    picture_sets.write(root, picture_sets.draw(3, image_size=64))
    for name in CLIPS:
        if name != "revos_masks":
            getattr(clip_sets, name)(root / "clips" / name)
    for name, (folder, file) in AGENT_FILES.items():
        if name != "fineweb":
            getattr(agent_sets, name)(root / folder)
        else:
            agent_sets.fineweb(root / folder / file, {"id": "a", "text": agent_sets.WORDS})


def load(file: Path) -> Any:
    if file.is_dir():
        return [dict(row) for row in load_from_disk(str(file))]
    if file.suffix == ".parquet":
        return parquet.read_table(file).to_pylist()
    if file.suffix == ".p":
        return pickle.loads(file.read_bytes())
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    return json.loads(file.read_text())


def store(values: Any, file: Path) -> bool:
    """False where the format can't hold the values."""
    try:
        if file.is_dir():
            made = Dataset.from_list(values)
            shutil.rmtree(file)
            made.save_to_disk(str(file))
            return True
        if file.suffix == ".parquet":
            content = io.BytesIO()
            parquet.write_table(pyarrow.Table.from_pylist(values), content)
            file.unlink()
            file.write_bytes(content.getvalue())
            return True
    except (ValueError, TypeError, OverflowError, AttributeError, NotImplementedError):
        return False
    file.unlink()
    if file.suffix == ".p":
        file.write_bytes(pickle.dumps(values, protocol=2))
    elif file.suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, values)))
    else:
        file.write_text(json.dumps(values))
    return True
