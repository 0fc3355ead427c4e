"""ReasonSeg: a mask a question -> gIoU, cIoU as LISA computes them, and P@0.5 to 0.9; all, and of short
(phrases) and long queries (sentences). Formats of predictions: expressions.py.

--data: the release's folder (`<split>/<name>.jpg`, `.json` with "text", "is_sentence", "shapes"), with
--split, or the split's own; or records {"id": <name>, "mask": RLE, "ignore": RLE or none, "is_sentence": true
or false or none}. As in LISA the polygons are filled as OpenCV fills them, the larger first, and pixels of a
region to be ignored count neither for nor against. The first text of a picture is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import Bool, UInt8

from ans_core.benchmarks.public import expressions, files, refcoco
from ans_core.benchmarks.public.asked import Item, Runner
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, percent
from ans_core.data.formats import checks
from ans_core.data.formats.reasonseg import ENCODING, OLD, Query, Shape
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.referring import reasonseg, shares_above
from ans_core.pictures import rle, transforms
from ans_core.types import RLE, Prediction, Request

SENTENCE = "<image>\n {} Please respond with a segmentation mask."
"""Upstream's question for a whole sentence (its v2 of ReVOS)."""
SPLITS = ("val", "test", "train")
TARGET, IGNORED = 1, 255


@dataclass(frozen=True, kw_only=True)
class Truth:
    mask: RLE
    ignored: RLE | None = None
    sentence: bool | None = None
    """None: not known."""


def score(inputs: Inputs) -> Scored:
    truth = _truth(inputs.truth, inputs.split)
    ignored = {name: one.ignored for name, one in truth.items() if one.ignored is not None}
    outcomes = expressions.read(
        inputs, truth={name: one.mask for name, one in truth.items()}, ignored=ignored
    )
    kinds = {"": [True] * len(outcomes.by_id)}
    for name, sentence in (("short/", False), ("long/", True)):
        kinds[name] = [truth[i].sentence is sentence for i in outcomes.by_id]
    metrics: dict[str, float] = {}
    ratios: dict[str, Ratio] = {}
    for name, of in kinds.items():
        if any(of):
            answers = [a for a, counts in zip(outcomes.answers, of, strict=True) if counts]
            figures = (
                reasonseg(answers) | shares_above(answers, refcoco.THRESHOLDS) | {"questions": len(answers)}
            )
            metrics |= {name + key: value for key, value in figures.items()}
            ratios |= {
                name + key: _among(ratio, of) for key, ratio in refcoco.ratios(outcomes.answers).items()
            }
    return Scored(
        metrics=metrics,
        published={key: percent(value) for key, value in metrics.items() if key.endswith("IoU")},
        ratios=ratios,
        samples=outcomes.table(),
        missing=outcomes.missing,
    )


def _among(ratio: Ratio, of: Sequence[bool]) -> Ratio:
    """The same over some of the samples."""
    terms = ratio.terms() * np.asarray(of, float)[:, None]
    return Ratio(numerators=terms[:, 0].tolist(), denominators=terms[:, 1].tolist())


def _truth(data: Path, split: str) -> dict[str, Truth]:
    masks = (
        {path.stem: truth_of(path)[1] for path in _questions(data, split)}
        if data.is_dir()
        else dict(map(_recorded, files.stream(data)))
    )
    if not masks:
        raise ValueError(f"{data}: no true masks")
    return masks


def _recorded(record: files.Record) -> tuple[str, Truth]:
    mask, sentence = expressions.true_mask(record), record.get("is_sentence")
    if sentence is not None and not isinstance(sentence, bool):
        raise ValueError(f"{record.where}: is_sentence is {rle.short(sentence)}, not true or false")
    ignored = None if record.get("ignore") is None else record.mask("ignore", mask["size"])
    return expressions.name_of(record), Truth(mask=mask, ignored=ignored, sentence=sentence)


def _questions(folder: Path, split: str) -> list[Path]:
    inner = folder / split if split and (folder / split).is_dir() else folder
    paths = sorted(inner.glob("*.json"))
    if not paths:
        raise ValueError(
            f"{inner}: no <name>.json beside <name>.jpg; give ReasonSeg's folder and --split, or the "
            "split's own"
        )
    return paths


def truth_of(path: Path) -> tuple[Query, Truth]:
    query = checks.record(Query, checks.load_json(path, encoding=ENCODING), where=str(path))
    (width, height), _ = transforms.stored(files.picture(path.parent, path.stem, where=str(path)))
    labels = painted(query.shapes, height=height, width=width)
    ignored = rle.encode(labels == IGNORED) if (labels == IGNORED).any() else None
    return query, Truth(mask=rle.encode(labels == TARGET), ignored=ignored, sentence=query.is_sentence)


def painted(shapes: Sequence[Shape], *, height: int, width: int) -> UInt8[np.ndarray, "H W"]:
    """Paint the shapes over each other, the larger first, as LISA does."""
    layers: list[tuple[Bool[np.ndarray, "H W"], int]] = []
    for shape in shapes:
        if shape.label.lower() != OLD and shape.points:
            mask = np.zeros((height, width), np.uint8)
            cv2.fillPoly(mask, [np.array(shape.points, float).astype(np.int32)], (1,))
            layers.append((mask > 0, IGNORED if "ignore" in shape.label.lower() else TARGET))
    labels = np.zeros((height, width), np.uint8)
    for filled, label in sorted(layers, key=lambda layer: -int(layer[0].sum())):
        labels[filled] = label
    return labels


def items(folder: Path, split: str) -> Iterator[Item]:
    """Read the questions; a phrase is asked as RefCOCO's expressions are."""
    for path in _questions(folder, split):
        query, truth = truth_of(path)
        text = query.text[0].strip()
        question = SENTENCE if query.is_sentence else expressions.QUESTION
        request = Request(
            frames=(files.picture(path.parent, path.stem, where=str(path)),), text=question.format(text)
        )
        yield Item(
            name=path.stem,
            request=request,
            facts={"asked": text},
            truth=Prediction(text="", masks=((truth.mask,),)),
            expression=text,
        )


def split_of(folder: Path) -> str:
    return next((split for split in SPLITS if (folder / split).is_dir()), folder.name)


SCORER = Scorer(
    score=score,
    data="the release, or records of true masks",
    options=frozenset({"predicted_only", "split"}),
    runner=Runner(
        items=items,
        record=expressions.record,
        splits=SPLITS,
        running=("IoU", expressions.iou),
        split_of=split_of,
    ),
)
