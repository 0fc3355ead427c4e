"""Detailed captions of regions, in MDVP-Bench's layout -> METEOR, CIDEr, ROUGE-L. Scored as captions.py does.

A model is run on the folder with `mdvp_caption_mask.json` (records {"image_path", "mask_rle", "caption"}) and
the pictures. MDVP-Bench's own figure is a judge's; METEOR needs none, and is not to be compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ans_core.benchmarks.public import captions, files
from ans_core.benchmarks.public.asked import Item

FILE = "mdvp_caption_mask.json"
QUESTION = "<image>\nPlease give me a detailed description of the region in the picture marked by region1."


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, FILE)
    listed = list(enumerate(files.records(path)))
    for number, record in sorted(listed, key=lambda entry: str(entry[1].get("image_path"))):
        region = record.mask("mask_rle", record.record("mask_rle").size())
        yield captions.region_item(
            str(number),
            path.parent / record.text("image_path"),
            region,
            question=QUESTION,
            caption=record.text("caption"),
        )


SCORER = captions.scorer(items)
