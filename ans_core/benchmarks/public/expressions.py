"""What the referring benchmarks share: a mask for every expression against its true mask, both from files.

--predictions: records {"id" or "sample_id", "mask": RLE or null}; or the pipeline's predictions.jsonl
("masks": [[RLE]], of which the first counts; none = no `[SEG]`). --data: records {"id", "mask": RLE or null,
"height", "width"}; or a folder of RefCOCO / gRefCOCO as REFER keeps it (ids: <ref_id>_<sent_id>), of which
the split is taken that the predictions are of. A model is run on such a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item
from ans_core.benchmarks.public.scored import Inputs
from ans_core.metrics.mask import Counts, counts
from ans_core.metrics.referring import Answer, answer
from ans_core.pictures import rle
from ans_core.types import RLE, Prediction, Request, Sample

ID_KEYS = ("sample_id", "id")
QUESTION = "<image>\n Please segment {} in this image."
"""Upstream's, with its blank."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    by_id: dict[str, Answer]
    """In the truth's order."""
    missing: int

    @property
    def answers(self) -> list[Answer]:
        return list(self.by_id.values())

    def table(self) -> list[dict[str, Any]]:
        return [
            {"id": i, "iou": a.counts.iou, "target": a.meant, "drawn": a.predicted, "answered": a.answered}
            for i, a in self.by_id.items()
        ]


def read(
    inputs: Inputs,
    *,
    single: bool = False,
    truth: dict[str, RLE] | None = None,
    ignored: Mapping[str, RLE] = MappingProxyType({}),
) -> Answers:
    """One prediction is in memory at a time; the truth is, as run-length code.

    single: every expression of a folder means one object. truth: None = that in --data. ignored: pixels that
    don't count.
    """
    if truth is None:
        truth = _truth(inputs.truth, inputs.predictions, split=inputs.split, single=single)
    answers: dict[str, Answer] = {}
    for record in files.stream(inputs.predictions):
        name = name_of(record)
        if name in answers:
            raise ValueError(f"{record.where}: {name!r} comes twice; leave one prediction an expression")
        if name not in truth:
            raise ValueError(
                f"{record.where}: {name!r} is no expression of {inputs.truth}; is this another split's file?"
            )
        real = truth[name]
        predicted = _predicted(record, real["size"])
        if predicted is not None and name in ignored:
            predicted = rle.encode(rle.decode(predicted) & ~rle.decode(ignored[name]))
        drawn = predicted or rle.empty(*real["size"])
        answers[name] = answer(drawn, real, answered=predicted is not None)
    if not answers:
        raise ValueError(f"{inputs.predictions}: no predictions")
    if inputs.predicted_only:
        truth = {name: mask for name, mask in truth.items() if name in answers}
    missing = [name for name in truth if name not in answers]
    for name in missing:  # a miss: an empty mask where something was meant, and wrong where nothing was
        nothing = counts(truth[name], truth[name]).union
        answers[name] = Answer(
            counts=Counts(union=max(1, nothing)), meant=nothing > 0, predicted=nothing == 0, answered=False
        )
    return Answers(by_id={name: answers[name] for name in truth}, missing=len(missing))


def name_of(record: files.Record) -> str:
    for key in ID_KEYS:
        if key in record:
            return record.id_of(key)
    raise ValueError(f"{record.where}: no id ({' or '.join(ID_KEYS)}); the record has {sorted(record)}")


def _predicted(record: files.Record, size: Sequence[int]) -> RLE | None:
    """None: no mask was drawn at all."""
    if "masks" in record:
        masks = record.listed("masks", list)
        if not all(masks):
            raise ValueError(f"{record.where}: a masklet without a frame")
        first = masks[0][0] if masks else None
        return None if first is None else files.mask(first, size, where=record.where)
    for key in ("mask", "segmentation"):
        if key in record:
            return None if record[key] is None else record.mask(key, size)
    raise ValueError(f"{record.where}: no mask; a record has `mask` (RLE or null) or `masks`")


def _truth(path: Path, predictions: Path, *, split: str, single: bool) -> dict[str, RLE]:
    truth: dict[str, RLE] = {}
    pairs = (
        _truth_of_folder(path, predictions, split=split, single=single)
        if path.is_dir()
        else ((name_of(record), true_mask(record)) for record in files.stream(path))
    )
    for name, mask in pairs:
        if name in truth:
            raise ValueError(f"{path}: {name!r} comes twice")
        truth[name] = mask
    if not truth:
        raise ValueError(f"{path}: no expressions")
    return truth


def true_mask(record: files.Record) -> RLE:
    """The mask of a record of the truth; one of nothing has its size beside it."""
    if record.value("mask") is None:
        return rle.empty(int(record.number("height")), int(record.number("width")))
    return record.mask("mask", files.mask_size(record["mask"], where=record.where))


def _truth_of_folder(path: Path, predictions: Path, *, split: str, single: bool) -> Iterator[tuple[str, RLE]]:
    """Yield the expressions of a split; where none is named, of the first one that has the first
    prediction's."""
    from ans_core.data.formats import refcoco

    record = next(files.stream(predictions), None)
    if record is None:
        raise ValueError(f"{predictions}: no predictions")
    first = name_of(record)
    for one in [split] if split else refcoco.splits(path):
        samples = _samples(path, one, single=single)
        if split or any(sample.sample_id == first for sample in samples):
            yield from ((sample.sample_id, _meant(sample)) for sample in samples)
            return
    raise ValueError(f"{predictions}: {first!r} is no expression of any split of {path}")


def _meant(sample: Sample) -> RLE:
    masks = [mask for masklet in sample.masks if (mask := masklet[0]) is not None]
    return rle.union(masks) if masks else rle.empty(sample.height, sample.width)


def _samples(folder: Path, split: str, *, single: bool) -> Sequence[Sample]:
    """Read a split. Raises ValueError with `single` for gRefCOCO's, which would get RefCOCO's figures."""
    from ans_core.data.formats import refcoco

    samples = list(refcoco.read(folder, split=split))
    if single and (others := [sample.sample_id for sample in samples if len(sample.masks) != 1]):
        raise ValueError(
            f"{folder}, {split}: {len(others)} of {len(samples)} expressions mean several objects or none "
            f"({files.shown(others)}): this is gRefCOCO; its figures are `grefcoco`'s"
        )
    return samples


def items(folder: Path, split: str, *, single: bool = False) -> Iterator[Item]:
    """The expressions of a folder of REFER, picture by picture."""
    for sample in sorted(_samples(folder, split, single=single), key=lambda sample: sample.image_id):
        question = Request(frames=sample.frames, text=QUESTION.format(sample.text))
        truth = Prediction(text="", masks=((_meant(sample),),))
        yield Item(
            name=sample.sample_id,
            request=question,
            facts={"asked": sample.text},
            truth=truth,
            expression=sample.text,
        )


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    return {"sample_id": item.name, **item.facts, "text": prediction.text, "masks": prediction.masks}


def iou(item: Item, prediction: Prediction) -> float:
    assert item.truth is not None
    real = item.truth.masks[0][0]
    predicted = prediction.masks[0][0] if prediction.masks else None
    assert real is not None
    return counts(predicted or rle.empty(*real["size"]), real).iou
