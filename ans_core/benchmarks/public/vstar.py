"""V*Bench with free-text replies (DeepEyes' protocol) -> accuracy per question type and over all.

--predictions: records {"image", "test_type", "question", "options", "answer", "pred_ans"}; `letter` is that
of the right option (without it the options are not shuffled and A is right), `judged` what a text judge said
of a reply that no rule decides (true or false, 1 or 0, "1" or "0"; without it the reply is wrong).

A model is run on the release: folders `direct_attributes` and `relative_position`, beside each picture a JSON
file with `question` and `options`, the first of which is right. It is asked with the options in an order that
the picture's name decides: told A, B, C, D as they are listed, a model that always says A would be right
everywhere.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files, questions
from ans_core.benchmarks.public.asked import Item, Runner, in_records, picture_item, recorded
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, accuracies, accuracy
from ans_core.dist import rng_of
from ans_core.types import Prediction

TYPES = ("direct_attributes", "relative_position")
_BOXED = re.compile(r"\\boxed\{(.*)\}", re.DOTALL)


def score(inputs: Inputs) -> Scored:
    records = files.records(inputs.predictions)
    files.by_id(records, "image", where=inputs.predictions)  # a question a picture
    samples: list[dict[str, Any]] = []
    judged = undecided = 0
    for record in records:
        sample = {key: record.text(key) for key in ("image", "test_type", "question")}
        right = by_rule(record.text("pred_ans"), record.text("answer"), letter=_letter(record))
        if right is None and "judged" in record:
            judged += 1
            right = record.verdict("judged")
        undecided += right is None
        samples.append(sample | {"right": bool(right)})
    figures, ratio = accuracy((s["test_type"], s["right"]) for s in samples)
    return Scored(
        metrics=figures | {"decided_by_judge": judged, "undecided": undecided},
        published=accuracies(figures, 2),
        ratios={"accuracy": ratio},
        samples=samples,
        notes=[
            "free replies, the protocol of DeepEyes; the official V* score (lowest loss of the options' "
            "texts) is another protocol",
            f"{judged} replies that no rule decides: as the text judge of that run decided (`judged`); "
            f"{undecided} without one are wrong",
        ],
    )


def _letter(record: files.Record) -> str:
    """Return the right option's letter, of options that hold the answer at that place."""
    options = record.listed("options", str)
    letter = record.text("letter") if "letter" in record else "A"
    place = string.ascii_uppercase.find(letter) if len(letter) == 1 else -1
    if options[place : place + 1] != [record["answer"]] or place < 0:
        other = "" if "letter" in record else "; without `letter` the first one must be right"
        raise ValueError(f"{record.where}: option {letter[:3]!r} of {len(options)} is not the answer{other}")
    return letter


def by_rule(reply: str, answer: str, *, letter: str = "A") -> bool | None:
    """None: a judge must decide."""
    boxed = _BOXED.search(reply)
    text = (boxed[1] if boxed else reply).strip()
    if len(text) == 1:
        return text == letter
    if len(text) == 2 and "." in text:
        return letter in text
    return True if f"{letter}. {answer}".lower() in text.lower() else None


def items(folder: Path, split: str) -> Iterator[Item]:
    there = [(kind, path) for kind in TYPES for path in sorted((folder / kind).glob("*"))]
    pictures = [(kind, path) for kind, path in there if path.suffix.lower() in files.PICTURES]
    if not pictures:
        raise ValueError(
            f"{folder}: no pictures in {' or '.join(TYPES)}; give the folder of V*Bench's release"
        )
    expected = {picture.with_suffix(".json") for _, picture in pictures}
    if alone := [f"{k}/{path.name}" for k, path in there if path.suffix == ".json" and path not in expected]:
        raise ValueError(
            f"{folder}: {len(alone)} questions have no picture beside them: {files.shown(alone)}; put the "
            "pictures there"
        )
    for kind, picture in pictures:
        annotation = picture.with_suffix(".json")
        entry = files.Record(files.load(annotation), str(annotation))
        asked, listed = entry.text("question"), entry.listed("options", str)
        if not 0 < len(listed) <= len(string.ascii_uppercase):
            raise ValueError(
                f"{annotation}: {len(listed)} options; there must be one for each of some letters from A to Z"
            )
        name = f"{kind}/{picture.name}"
        order = rng_of("vstar", name).sample(range(len(listed)), len(listed))
        options = [listed[place] for place in order]
        letter = string.ascii_uppercase[order.index(0)]
        facts = {
            "image": name,
            "test_type": kind,
            "question": asked,
            "options": options,
            "letter": letter,
            "answer": listed[0],
        }
        text = questions.ask(asked, dict(zip(string.ascii_uppercase, options, strict=False)))
        yield picture_item(name, picture, text, answer=letter, facts=facts)


def right(item: Item, prediction: Prediction) -> float:
    return float(bool(by_rule(prediction.text, item.facts["answer"], letter=item.facts["letter"])))


SCORER = Scorer(
    score=score,
    sample_id=("image",),
    runner=Runner(
        items=items,
        record=recorded("pred_ans"),
        truth=in_records,
        running=("accuracy", right),
        notes=(
            "the options are asked about in an order that the picture's name decides; in DeepEyes' runs A "
            "is always right",
        ),
    ),
)
