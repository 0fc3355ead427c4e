"""`ans data caption SET --model MODEL`: masks without words -> a data set of regions with the captions that the
model itself gave them (ans_core/rl/self_captions.py)."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from jaxtyping import Int

from ans_core import dist
from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.benchmarks.public.asked import Item
from ans_core.checkpoints.checkpoint import config_hash, weights_hash
from ans_core.checkpoints.folder import local_folder
from ans_core.code_hash import CodeHashes
from ans_core.data import shard
from ans_core.data.formats import FORMATS, SPLITS
from ans_core.data.index import nameless_index
from ans_core.data.selection import Joined, Selected, unnamed
from ans_core.evaluation.predictions import NAME, by_picture, predict_all
from ans_core.evaluation.session import check_settings
from ans_core.fingerprint import fingerprint
from ans_core.inference.sa2va import Sa2VA
from ans_core.rl.self_captions import CaptionOptions, SelfCaption, UnreadableError, self_captions
from ans_core.types import Prediction
from ans_core.written import atomic_folder

BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Captioned(Prediction):
    iou: float = 0.0
    gain: float = 0.0
    left_out: str = ""
    """Why the mask has no caption, where it or its picture can't be read."""


def caption(
    model: str,
    name: str,
    path: Path,
    form: str,
    split: str,
    *,
    out: Path,
    count: int = 0,
    keep: float = 0.5,
    options: CaptionOptions | None = None,
    device: str | None = None,
) -> str:
    """Caption the masks without words of a split, and write the best of them with their captions as a new data
    set `out` (format shards, with their pictures); return what is in it. A killed run goes on from
    `.<out>.parts` beside it, and several processes share the work; all of them must call it.

    count: pictures, as the seed chooses; 0: all. keep: share of the captions that are kept, those that gained
    most by being chosen. Masks that can't be read, or whose picture can't, are left out and named.
    Raises ValueError where `out` exists, for another share than one of 0 to 1, and for a set without such
    masks.
    """
    options = options or CaptionOptions()
    if not 0 < keep <= 1:
        raise ValueError(f"keep {keep:g}: the share of the captions that are kept is above 0 and at most 1")
    if out.exists():
        raise ValueError(f"{out} exists; give a new folder")
    if split not in (splits := SPLITS[form](path)):
        raise ValueError(f"{path} has no split {split!r}; name one with --split: {', '.join(splits)}")
    parts, checkpoint = out.with_name(f".{out.name}.parts"), local_folder(model)

    def prepare() -> None:
        settings = {
            "data": str(path.resolve()), "data_files": fingerprint(path), "split": split, "count": count,
            "weights": weights_hash(checkpoint), "config": config_hash(checkpoint), **asdict(options),
            "code": CodeHashes(Path(__file__).resolve().parents[2]).hash_of(("ans_core.rl.self_captions",)),
        }  # fmt: skip
        check_settings(parts, settings)

    dist.after_the_first(prepare)
    every = unnamed(
        Joined([nameless_index(FORMATS[form](path, name=name, split=split), dataset=name, parent=parts)])
    )
    chosen = _of_pictures(every, count, options.seed)
    if not len(chosen):
        raise ValueError(f"{path} has no masks without words in {split}: nothing to caption")
    network = Sa2VA.from_pretrained(checkpoint, device_map=device or str(dist.pick_device("auto")))

    def items() -> Iterator[Item]:
        for region in map(every.__getitem__, chosen):
            request = caption_request(region, true_mask(region))
            yield Item(name=region.sample_id, request=request, facts={"region": region})

    answer = partial(_answers, network, options)
    made = predict_all(by_picture(items, BATCH), answer, _record, out=parts, desc="captions")
    if dist.rank():
        return ""
    with made.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]  # in the order of the items
    best = _best(lines, keep)
    left_out = [f"{line[NAME]}: {line['left_out']}" for line in lines if line["left_out"]]
    if not best:
        reason = f"; {len(left_out):,} can't be read, {left_out[0]}" if left_out else ""
        raise ValueError(f"{model} has no word for any of the {len(chosen):,} masks of {path}{reason}")
    captioned = (
        replace(region, text=line["text"], meta={"iou": line["iou"]})
        for region in map(every.__getitem__, chosen)
        if (line := best.get(region.sample_id))
    )
    with atomic_folder(out) as folder:
        shard.write(captioned, folder / split)
    shutil.rmtree(parts)
    iou = fmean(line["iou"] for line in best.values())
    return (
        f"{len(best):,} captions of {len(chosen):,} masks are kept; what the model draws from them has a mean "
        f"IoU of {iou:.3f}\n"
        + (f"{len(left_out):,} masks can't be read and are left out, {left_out[0]}\n" if left_out else "")
        + f"{out}: a set of the format shards, for prepare.sources; `ans data show {out}` draws some of it"
    )


def _answers(network: Sa2VA, options: CaptionOptions, items: Sequence[Item]) -> list[Prediction]:
    """Caption the regions of one picture together; each alone where one of them can't be read."""
    try:
        captions = self_captions(network, [item.facts["region"] for item in items], options)
    except UnreadableError as error:
        if len(items) > 1:
            return [prediction for item in items for prediction in _answers(network, options, [item])]
        logging.warning("%s is left out: %s", items[0].name, error)
        return [_Captioned(text="", left_out=str(error))]
    return list(map(_captioned, captions))


def _best(lines: Sequence[dict[str, Any]], share: float) -> dict[str, dict[str, Any]]:
    """Return this share of the lines with a caption, those that gained most (and as much), by region."""
    with_words = [line for line in lines if line["text"]]
    gains = sorted((line["gain"] for line in with_words), reverse=True)
    least = gains[max(1, round(share * len(gains))) - 1] if gains else 0.0
    return {line[NAME]: line for line in with_words if line["gain"] >= least}


def _of_pictures(every: Selected, count: int, seed: int) -> Int[np.ndarray, " some"]:
    """Return the places of all masks of so many pictures (0: all), which the seed chooses."""
    pictures = np.unique(every.numbers)
    if not 0 < count < len(pictures):
        return np.arange(len(every))
    chosen = [pictures[dist.permuted(i, len(pictures), seed, "self captions")] for i in range(count)]
    return np.flatnonzero(np.isin(every.numbers, chosen))


def _captioned(best: SelfCaption | None) -> _Captioned:
    if best is None:
        return _Captioned(text="")
    return _Captioned(text=best.text, iou=best.iou, gain=best.gain)


def _record(item: Item, answer: Prediction) -> dict[str, Any]:
    assert isinstance(answer, _Captioned)
    return {key: getattr(answer, key) for key in ("text", "iou", "gain", "left_out")}
