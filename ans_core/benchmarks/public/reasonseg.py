"""ReasonSeg: a mask a question -> gIoU, cIoU as LISA computes them, and P@0.5 to 0.9. Formats: expressions.py.

The true masks come as run-length code: ReasonSeg's own polygons must be filled by OpenCV to give the benchmark's pixels. A model is run on
the release's folder (`<split>/<name>.jpg`, `.json` with "text" and "is_sentence"); the first text of a picture is asked, as LISA does, and
`<split>/true_masks.jsonl` holds the masks (id = <name>).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ans_core.benchmarks.public import expressions, files, refcoco
from ans_core.benchmarks.public.asked import Item, Runner, UnscoredError
from ans_core.benchmarks.public.scored import Given, Scored, Scorer, percent
from ans_core.metrics.referring import reasonseg, shares_above
from ans_core.types import Prediction, Request


def score(given: Given) -> Scored:
    found = expressions.read(given)
    metrics = reasonseg(found.answers) | shares_above(found.answers, refcoco.THRESHOLDS)
    return Scored(
        metrics=metrics | {"questions": len(found.ids)},
        published={key: percent(metrics[key]) for key in ("gIoU", "cIoU")},
        ratios=refcoco.ratios(found.answers),
        samples=found.table(),
        missing=found.missing,
    )


TRUE_MASKS = "true_masks.jsonl"
SENTENCE = "<image>\n {} Please respond with a segmentation mask."
"""Upstream's question for a whole sentence (its v2 of ReVOS)."""


def items(folder: Path, split: str) -> Iterator[Item]:
    """Read the questions; a phrase is asked as RefCOCO's expressions are."""
    paths = sorted((folder / split).glob("*.json"))
    if not paths:
        raise ValueError(f"{folder / split}: no <name>.json beside <name>.jpg; give ReasonSeg's folder")
    true = dict(expressions.truth_of_file(folder / split / TRUE_MASKS)) if (folder / split / TRUE_MASKS).is_file() else {}
    for path in paths:
        record = files.load(path)
        text = str(files.value(record, "text", where=str(path))[0]).strip()
        question = SENTENCE if files.value(record, "is_sentence", where=str(path)) else expressions.QUESTION
        request = Request(frames=(files.picture(path.parent, path.stem, where=str(path)),), text=question.format(text))
        truth = Prediction(text="", masks=((true[path.stem],),)) if path.stem in true else None
        yield Item(name=path.stem, request=request, facts={"asked": text}, truth=truth, expression=text)


def truth(folder: Path, split: str) -> Path:
    if not (path := folder / split / TRUE_MASKS).is_file():
        raise UnscoredError(
            f"{path} is not there: records {{id, mask}} of the polygons as OpenCV fills them; then `ans eval score reasonseg --data {path}`"
        )
    return path


SCORER = Scorer(
    score=score,
    data="records of true masks",
    options=frozenset({"predicted_only"}),
    runner=Runner(items=items, record=expressions.record, splits=("val", "test"), truth=truth, running=("IoU", expressions.iou)),
)
