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
from typing import Any

from ans_core.benchmarks.public import captions, files
from ans_core.benchmarks.public.asked import Item

FILE = "finetune_refcocog_val_with_mask.json"
QUESTION = "<image>\nPlease give me a short description of the region in the picture marked by region1."


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, FILE)
    truth = files.load(path)
    pictures = files.pictures(path.parent, "images", "train2014", "../images/coco2014/train2014", "../images")
    masks: dict[Any, Any] = {a["image_id"]: a for a in files.value(truth, "annotations", where=str(path))}
    # the file has a picture entry for every object in it
    shown: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for image in files.value(truth, "images", where=str(path)):
        shown[files.text(image, "file_name", where=str(path))].append(image)
    for name, entries in shown.items():
        for image in entries:
            where = f"{path}, image {image['id']}"
            if image["id"] not in masks:
                raise ValueError(f"{where}: no annotation has its mask")
            region = files.mask(
                masks[image["id"]]["segmentation"], height=image["height"], width=image["width"], where=where
            )
            caption = files.text(image, "caption", where=where)
            yield captions.region_item(
                str(image["id"]), pictures / Path(name).name, region, question=QUESTION, caption=caption
            )


SCORER = captions.scorer(items, "val")
