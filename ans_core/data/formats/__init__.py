"""Annotation formats on disk -> Samples: one file and one line here per format.

A reader checks all it reads (ans_core/data/formats/checks.py) and raises ValueError naming the file and the record. Extra keys of
a record may go into meta.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ans_core.data.formats import grandf, mevis, plain, refcoco, region_arrow, regions, videos
from ans_core.types import Sample

FORMATS: dict[str, Callable[..., list[Sample]]] = {
    "annotations": plain.read,
    "grandf": grandf.read,
    "grefcoco": refcoco.read,
    "mevis": mevis.read,
    "refcoco": refcoco.read,
    "region_arrow": region_arrow.read,
    "regions": regions.read,
    "videos": videos.read,
}
"""Name -> read(path, *, name, split)."""

SPLITS: dict[str, Callable[[Path], list[str]]] = {
    "annotations": plain.splits,
    "grandf": grandf.splits,
    "grefcoco": refcoco.splits,
    "mevis": mevis.splits,
    "refcoco": refcoco.splits,
    "region_arrow": region_arrow.splits,
    "regions": regions.splits,
    "videos": videos.splits,
}
"""Name -> splits(path): the splits that a data set on disk has."""
