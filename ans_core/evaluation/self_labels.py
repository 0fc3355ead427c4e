"""What a model labels itself: `ans data caption SET --model MODEL` gives masks without words captions
(ans_core/rl/self_captions.py), `ans data draw` gives captions without masks masks (ans_core/rl/self_masks.py). The
best of them become a new data set."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from jaxtyping import Int

from ans_core import dist
from ans_core.benchmarks.loops import caption_request, mask_request, true_mask
from ans_core.benchmarks.public.asked import Item
from ans_core.checkpoints.checkpoint import config_hash, weights_hash
from ans_core.checkpoints.folder import local_folder
from ans_core.code_hash import CodeHashes
from ans_core.data import shard
from ans_core.data.formats import FORMATS, SPLITS
from ans_core.data.index import by_picture, nameless_index
from ans_core.data.selection import Joined, Selected, unnamed
from ans_core.evaluation import predictions
from ans_core.evaluation.predictions import NAME, PARTS, PREDICTIONS, predict_all
from ans_core.evaluation.session import check_settings
from ans_core.fingerprint import fingerprint
from ans_core.inference.sa2va import Sa2VA
from ans_core.rl.self_captions import CaptionOptions, UnreadableError, self_captions
from ans_core.rl.self_masks import MaskOptions, self_masks
from ans_core.types import Prediction, Request, Sample
from ans_core.written import atomic_folder

BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Label(Prediction):
    values: dict[str, Any] | None = None
    """The label, as its line has it; None where the sample has none."""
    score: float = 0.0
    left_out: str = ""
    """Why the sample has no label, where it or its picture can't be read."""


@dataclass(frozen=True)
class Captions:
    """Words for masks."""

    options: CaptionOptions
    module = "ans_core.rl.self_captions"
    """It makes the labels; its code is part of what a resumed run must share."""
    unlabelled, labels, refused = "masks without words", "captions", "no word"

    def missing(self, joined: Joined) -> Selected:
        """Return the samples that lack the label; those about one picture stand together."""
        return unnamed(joined)

    def request(self, sample: Sample) -> Request:
        return caption_request(sample, true_mask(sample))

    def label(
        self, network: Sa2VA, samples: Sequence[Sample], about: Sequence[list[Sample]]
    ) -> list[_Label | None]:
        """Label samples; None for what gets no label. about: of each, all samples of its picture that lack the label.
        Raises UnreadableError."""
        return [
            _Label(text=made.text, values={"text": made.text, "iou": made.iou}, score=made.gain)
            if made
            else None
            for made in self_captions(network, samples, self.options)
        ]

    def labelled(self, sample: Sample, values: dict[str, Any]) -> Iterator[Sample]:
        """Yield what is learned from a sample with its label."""
        yield replace(sample, text=values["text"], meta={"iou": values["iou"]})

    def quality(self, kept: Sequence[dict[str, Any]]) -> str:
        """Say how good the labels that are kept are, by their lines."""
        iou = fmean(line["values"]["iou"] for line in kept)
        return f"what the model draws from them has a mean IoU of {iou:.3f}"


@dataclass(frozen=True)
class Masks:
    """Masks for captions, with the same methods."""

    options: MaskOptions
    module = "ans_core.rl.self_masks"
    unlabelled, labels, refused = "captions without masks", "masks", "no mask"

    def missing(self, joined: Joined) -> Selected:
        numbers = joined.where(lambda sample: sample.task == "phrase")
        return Selected(joined, numbers[by_picture(joined.picture_keys[numbers])[0]])

    def request(self, sample: Sample) -> Request:
        return mask_request(sample, sample.text)

    def label(
        self, network: Sa2VA, samples: Sequence[Sample], about: Sequence[list[Sample]]
    ) -> list[_Label | None]:
        others = [
            [other.text for other in every if other.sample_id != sample.sample_id]
            for sample, every in zip(samples, about, strict=True)
        ]
        return [
            _Label(text="", values=asdict(made), score=made.fit) if made else None
            for made in self_masks(network, samples, others, self.options)
        ]

    def labelled(self, sample: Sample, values: dict[str, Any]) -> Iterator[Sample]:
        masks, meta = ((values["mask"],),), {"fit": values["fit"]}
        region = replace(sample, task="region_caption", masks=masks, meta=meta)
        yield replace(region, sample_id=f"{sample.sample_id}/caption")
        for place, text in enumerate(values["expressions"]):
            yield replace(region, sample_id=f"{sample.sample_id}/{place}", task="referring", text=text)

    def quality(self, kept: Sequence[dict[str, Any]]) -> str:
        fit = fmean(line["score"] for line in kept)
        return f"the model gives them their captions with a mean log-probability of {fit:.3f} a token"


Labelling = Captions | Masks


def label(
    labelling: Labelling,
    model: str,
    name: str,
    path: Path,
    form: str,
    split: str,
    *,
    out: Path,
    count: int = 0,
    keep: float = 0.5,
    device: str | None = None,
) -> str:
    """Label the samples of a split that lack labels, and write the best as a new data set `out` (format shards, with
    their pictures); return what is in it. A killed run goes on from `.<out>.parts` beside it, and several
    processes share the work; all of them must call it.

    count: pictures, as the seed chooses; 0: all. keep: share of the labels that are kept, those with the best
    score. Samples that can't be read, or whose picture can't, are left out and named.
    Raises ValueError where `out` exists, for another share than one of 0 to 1, and for a set without such
    samples.
    """
    if not 0 < keep <= 1:
        raise ValueError(
            f"keep {keep:g}: the share of the {labelling.labels} that are kept is above 0 and at most 1"
        )
    if out.exists():
        raise ValueError(f"{out} exists; give a new folder")
    if split not in (splits := SPLITS[form](path)):
        raise ValueError(f"{path} has no split {split!r}; name one with --split: {', '.join(splits)}")
    parts, checkpoint = out.with_name(f".{out.name}.parts"), local_folder(model)

    def prepare() -> None:
        settings = {
            "data": str(path.resolve()), "data_files": fingerprint(path), "split": split, "count": count,
            "weights": weights_hash(checkpoint), "config": config_hash(checkpoint), **asdict(labelling.options),
            "code": CodeHashes(Path(__file__).resolve().parents[2]).hash_of((labelling.module,)),
        }  # fmt: skip
        check_settings(parts, settings)

    dist.after_the_first(prepare)
    try:
        samples = nameless_index(FORMATS[form](path, name=name, split=split), dataset=name, parent=parts)
        every = labelling.missing(Joined([samples]))
        chosen = _of_pictures(every, count, labelling.options.seed)
        if not len(chosen):
            raise ValueError(f"{path} has no {labelling.unlabelled} in {split}: nothing to label")
        network = Sa2VA.from_pretrained(checkpoint, device_map=device or str(dist.pick_device("auto")))
    except BaseException:
        if dist.rank() == 0 and not any((parts / left).exists() for left in (PARTS, PREDICTIONS)):
            shutil.rmtree(parts)  # nothing was labelled yet
        raise
    batches = predictions.by_picture(partial(_items, labelling, every, chosen), BATCH)
    made = predict_all(
        batches, partial(_labels, labelling, network), _record, out=parts, desc=labelling.labels
    )
    if dist.rank():
        return ""
    with made.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]  # in the order of the items
    best = _best(lines, keep)
    left_out = [f"{line[NAME]}: {line['left_out']}" for line in lines if line["left_out"]]
    of = f"{len(chosen):,} {labelling.unlabelled}"
    if not best:
        reason = f"; {len(left_out):,} can't be read, {left_out[0]}" if left_out else ""
        raise ValueError(f"{model} has {labelling.refused} for any of the {of} of {path}{reason}")
    with atomic_folder(out) as folder:
        shard.write(_labelled(labelling, every, chosen, best), folder / split)
    shutil.rmtree(parts)
    return (
        f"{len(best):,} {labelling.labels} of {of} are kept; {labelling.quality([*best.values()])}\n"
        + (f"{len(left_out):,} can't be read and are left out, {left_out[0]}\n" if left_out else "")
        + f"{out}: a set of the format shards, for prepare.sources; `ans data show {out}` draws some of it"
    )


def _items(labelling: Labelling, every: Selected, chosen: Int[np.ndarray, " some"]) -> Iterator[Item]:
    for _, some in groupby(map(every.__getitem__, chosen), key=lambda sample: sample.frames):
        about = list(some)
        for sample in about:
            facts = {"sample": sample, "about": about}
            yield Item(name=sample.sample_id, request=labelling.request(sample), facts=facts)


def _labelled(
    labelling: Labelling,
    every: Selected,
    chosen: Int[np.ndarray, " some"],
    best: Mapping[str, dict[str, Any]],
) -> Iterator[Sample]:
    """Yield what is learned from the samples with the best labels (their lines, by sample)."""
    for sample in map(every.__getitem__, chosen):
        if line := best.get(sample.sample_id):
            yield from labelling.labelled(sample, line["values"])


def _labels(labelling: Labelling, network: Sa2VA, items: Sequence[Item]) -> list[Prediction]:
    """Label a batch, or each sample alone where one of them can't be read."""
    samples, about = ([item.facts[name] for item in items] for name in ("sample", "about"))
    try:
        return [made or _Label(text="") for made in labelling.label(network, samples, about)]
    except UnreadableError as error:
        if len(items) > 1:
            return [one for item in items for one in _labels(labelling, network, [item])]
        logging.warning("%s is left out: %s", items[0].name, error)
        return [_Label(text="", left_out=str(error))]


def _best(lines: Sequence[dict[str, Any]], share: float) -> dict[str, dict[str, Any]]:
    """Return this share of the lines with a label, those with the best score (and as good ones), by sample."""
    labelled = [line for line in lines if line["values"]]
    scores = sorted((line["score"] for line in labelled), reverse=True)
    least = scores[max(1, round(share * len(scores))) - 1] if scores else 0.0
    return {line[NAME]: line for line in labelled if line["score"] >= least}


def _of_pictures(every: Selected, count: int, seed: int) -> Int[np.ndarray, " some"]:
    """Return the places of all samples of so many pictures (0: all), which the seed chooses."""
    if not count:  # without looking at millions of pictures' keys
        return np.arange(len(every))
    numbers = np.unique(every.numbers)
    order, starts = by_picture(every.joined.picture_keys[numbers])
    pictures = len(starts) - 1
    if count >= pictures:
        return np.arange(len(every))
    chosen = [dist.permuted(i, pictures, seed, "self captions") for i in range(count)]
    kept = np.concatenate([numbers[order[starts[i] : starts[i + 1]]] for i in chosen])
    return np.flatnonzero(np.isin(every.numbers, kept))


def _record(item: Item, answer: Prediction) -> dict[str, Any]:
    assert isinstance(answer, _Label)
    return {key: getattr(answer, key) for key in ("values", "score", "left_out")}
