"""Region captions of RefCOCOg (val): a caption of the object that a mask shows -> METEOR, CIDEr. Scored as
captions.py does.

A model is run on the folder with `finetune_refcocog_val_with_mask.json` (COCO's layout: a picture has its
"caption", its annotation the mask) and the pictures of COCO's train2014. Upstream removes the letters "is"
from an answer, also inside words; here only tags are removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ans_core.benchmarks.public import captions, files
from ans_core.benchmarks.public.asked import Item

FILE = "finetune_refcocog_val_with_mask.json"
QUESTION = "<image>\nPlease give me a short description of the region in the picture marked by region1."


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, FILE)
    truth = files.Record(files.load(path), str(path))
    pictures = files.pictures(path.parent, "images", "train2014", "../images/coco2014/train2014", "../images")
    masks = {annotation["image_id"]: annotation for annotation in truth.records("annotations")}
    # the file has a picture entry for every object in it
    shown: dict[str, list[files.Record]] = defaultdict(list)
    for image in truth.records("images"):
        shown[image.text("file_name")].append(image)
    for name, entries in shown.items():
        for image in entries:
            if image["id"] not in masks:
                raise ValueError(f"{path}, image {image['id']}: no annotation has its mask")
            region = masks[image["id"]].mask("segmentation", (image["height"], image["width"]))
            yield captions.region_item(
                str(image["id"]),
                pictures / Path(name).name,
                region,
                question=QUESTION,
                caption=image.text("caption"),
            )


SCORER = captions.scorer(items, "val")
