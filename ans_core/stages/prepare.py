"""prepare: settings in, a prepared folder out: drawn data sets, a list of all data sets read and checked
(datasets.json), and a data report."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ans_core import dist
from ans_core.config import Config, Prepare
from ans_core.data import DatasetEntry, Kind, parallel, write_entries
from ans_core.data import read as read_all
from ans_core.data.pictures import check_pictures
from ans_core.data.report import write_report
from ans_core.data.scene_write import write_clips, write_scenes
from ans_core.data.scenes import WORLDS
from ans_core.pictures import rle
from ans_core.stages.sources import source_entries
from ans_core.types import RLE, ImageRef, Log, Sample

DRAWN: tuple[tuple[str, str, str, Kind], ...] = (
    ("scenes_single", "refcoco", "scenes/refcoco", "referring"),
    ("scenes_several", "grefcoco", "scenes/grefcoco", "referring"),
    ("scenes_regions", "region_arrow", "scenes/region_captions", "region_caption"),
    ("scenes_grounded", "grandf", "scenes/grounded", "grounded_caption"),
)
CLIPS: tuple[str, str, str, Kind] = ("scenes_clips", "mevis", "scenes/mevis", "video")
MASKS: tuple[str, str, str, Kind] = ("scenes_masks", "sa1b", "scenes/images", "masks")
PHRASES: tuple[str, str, str, Kind] = (
    "scenes_phrases",
    "annotations",
    "scenes/images/annotations.jsonl",
    "phrases",
)
"""Name, format, path, kind."""


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. Real data sets are checked before anything is drawn. Of several processes, a node each, the
    first does all but what it shares: shards and pictures. Metrics: samples per data set and split, and measures of
    difficulty."""
    with dist.process_group():
        return parallel.led_by_the_first(lambda: prepare(cfg, out)) or {}


def prepare(cfg: Config, out: Path) -> dict[str, float]:
    drawn = [name for name, *_ in (*DRAWN, CLIPS, MASKS, PHRASES)]
    entries = source_entries(cfg.prepare.sources, taken=drawn)
    read = dict(zip(entries, read_all(out, entries, desc="check data sets"), strict=True))
    for entry, samples in read.items():
        if not len(samples) and entry.hold_out:
            raise ValueError(
                f"data set {entry.name!r} ({entry.path}): hold_out {entry.hold_out:g} puts no picture into "
                f"{entry.split!r}; raise it, or set it to 0"
            )
        if not len(samples):
            raise ValueError(
                f"data set {entry.name!r} ({entry.path}) has no samples of {entry.on_disk}: correct its "
                "split, or remove it"
            )
    # not drawn ones, just written: decoding 6,000 takes 3 s and finds nothing
    for entry, samples in read.items():
        if turned := check_pictures(
            samples, where=f"{entry.path}, split {entry.split!r}", share=cfg.launch.checked_pictures
        ):
            logging.warning(
                "%s: %d pictures have an EXIF tag that turns them; `ans data check` says more",
                entry.path,
                len(turned),
            )
    synthetic = _draw(cfg.prepare, seed=cfg.seed, out=out)
    if not synthetic and not read:
        raise ValueError(
            "prepare.scenes, prepare.clips and prepare.sources are all empty: there is nothing to train on; "
            "set one of them"
        )
    read |= zip(synthetic, read_all(out, synthetic, desc="read back"), strict=True)
    write_entries(out, list(read))
    write_report(out / "report.html", read)
    return _metrics(read)


def _draw(cfg: Prepare, *, seed: int, out: Path) -> list[DatasetEntry]:
    root, world = out / "scenes", WORLDS[cfg.world]
    entries = []
    if cfg.scenes:
        counts = {"train": cfg.scenes, "val": cfg.val_scenes, "test": cfg.test_scenes}
        captioned, masked = math.ceil(cfg.caption_share * cfg.scenes), math.ceil(cfg.mask_share * cfg.scenes)
        write_scenes(
            root,
            seed=seed,
            counts=counts,
            image_size=cfg.image_size,
            captioned=captioned,
            masked=masked,
            world=world,
        )
        entries += [_entry(dataset, split) for dataset in DRAWN for split, count in counts.items() if count]
        if captioned < cfg.scenes:
            entries.append(_entry(MASKS, "train"))
        if masked < cfg.scenes:
            entries.append(_entry(PHRASES, "train"))
    if cfg.clips:
        counts = {"train": cfg.clips, "val": cfg.val_clips, "test": cfg.test_clips}
        write_clips(
            root, seed=seed, counts=counts, image_size=cfg.image_size, frames=cfg.clip_frames, world=world
        )
        entries += [_entry(CLIPS, split) for split, count in counts.items() if count]
    return entries


def _entry(dataset: tuple[str, str, str, Kind], split: str) -> DatasetEntry:
    name, format, path, kind = dataset
    return DatasetEntry(name=name, format=format, path=path, split=split, kind=kind)


def _metrics(read: Mapping[DatasetEntry, Sequence[Sample]]) -> dict[str, float]:
    metrics = {f"samples/{entry.name}/{entry.split}": float(len(samples)) for entry, samples in read.items()}
    for entry, samples in read.items():
        if entry.name == "scenes_single" and entry.split == "val":
            shares = [rle.area(_mask(s)) / (s.height * s.width) for s in samples]
            regions = next(
                region_samples
                for e, region_samples in read.items()
                if e.name == "scenes_regions" and e.split == "val"
            )
            metrics["val_target_area_median"] = float(np.median(shares))
            metrics["val_scenes_with_distractor"] = _distractor_share(samples, regions)
    return metrics


def _distractor_share(expressions: Sequence[Sample], regions: Sequence[Sample]) -> float:
    """Return the share of images in which a thing other than the target of some single-object expression has
    the target's colour or shape.

    `regions` are the region captions of the same images, with attributes in meta; things are matched by their
    mask.
    """
    things: dict[ImageRef, dict[str, dict[str, str]]] = {}
    for region in regions:
        things.setdefault(region.frames[0], {})[_mask(region)["counts"]] = region.meta
    shared: dict[ImageRef, bool] = {}
    for sample in expressions:
        target = _mask(sample)["counts"]
        inside = things[sample.frames[0]]
        others = [meta for counts, meta in inside.items() if counts != target]
        hit = any(meta[trait] == inside[target][trait] for meta in others for trait in ("colour", "shape"))
        shared[sample.frames[0]] = shared.get(sample.frames[0], False) or hit
    return sum(shared.values()) / len(shared)


def _mask(sample: Sample) -> RLE:
    """Return the first object's mask in the first frame."""
    mask = sample.masks[0][0]
    assert mask is not None, sample.sample_id
    return mask
