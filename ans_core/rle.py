"""Masks <-> COCO run-length text (pycocotools does the coding; this file checks and converts)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool
from pycocotools import mask as coco

from ans_core.types import RLE


def encode(mask: Bool[np.ndarray, "H W"]) -> RLE:
    rle = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": [int(n) for n in rle["size"]], "counts": rle["counts"].decode("ascii")}


def decode(rle: RLE) -> Bool[np.ndarray, "H W"]:
    return coco.decode(rle).view(bool)


def empty(height: int, width: int) -> RLE:
    return encode(np.zeros((height, width), bool))


def area(rle: RLE) -> int:
    return int(coco.area(rle))


def box(rle: RLE) -> tuple[float, float, float, float]:
    """x1, y1, x2, y2 of a mask that is not empty, as shares of the image."""
    rows, columns = np.nonzero(decode(rle))
    height, width = rle["size"]
    return float(columns.min() / width), float(rows.min() / height), float((columns.max() + 1) / width), float((rows.max() + 1) / height)


def union(rles: list[RLE]) -> RLE:
    """All pixels of any of the masks (at least one mask, all of one size)."""
    merged = coco.merge(rles)
    return {"size": [int(n) for n in merged["size"]], "counts": merged["counts"].decode("ascii")}


def from_annotation(segmentation: object, *, height: int, width: int, where: str) -> RLE:
    """Any of COCO's three forms (list of polygons, uncompressed RLE, compressed RLE) as a compressed RLE of exactly height x width.

    Raises ValueError naming `where` for a size that differs from the image's, a polygon of fewer than 3 points, or an unknown form.
    """
    if isinstance(segmentation, dict) and "counts" in segmentation and "size" in segmentation:
        size = [int(n) for n in segmentation["size"]]
        if size != [height, width]:
            raise ValueError(f"{where}: RLE size {size} is not the image's [height, width] = [{height}, {width}]")
        if isinstance(segmentation["counts"], list):
            total = sum(segmentation["counts"])
            if total != height * width:
                raise ValueError(f"{where}: uncompressed RLE counts add up to {total}, the image has {height * width} pixels")
            merged = coco.frPyObjects(segmentation, height, width)
        else:
            merged = segmentation
        counts = merged["counts"]
        return {"size": size, "counts": counts if isinstance(counts, str) else counts.decode("ascii")}
    if isinstance(segmentation, list) and segmentation:
        polygons = segmentation if isinstance(segmentation[0], list) else [segmentation]
        for polygon in polygons:
            if len(polygon) < 6 or len(polygon) % 2:
                raise ValueError(f"{where}: a polygon needs at least 3 points as [x1, y1, x2, y2, ...], got {len(polygon)} numbers")
        return union([_text(r) for r in coco.frPyObjects(polygons, height, width)])
    raise ValueError(f"{where}: segmentation is neither polygons nor RLE but {type(segmentation).__name__} {str(segmentation)[:60]!r}")


def _text(rle: RLE) -> RLE:
    counts = rle["counts"]
    return {"size": list(rle["size"]), "counts": counts if isinstance(counts, str) else counts.decode("ascii")}
