"""SEED-Bench: predicted and true letters -> accuracy over all and per dimension (the number before "_" in
question_id, as in SEED-Bench 2; the ids of SEED-Bench 1 name none).

--predictions: records {"question_id", "prediction", "gt_answer"}. A question that the file holds twice counts
twice, as it is published.

A model is run on SEED-Bench.json with the folder SEED-Bench-image, on the questions about single pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files, questions
from ans_core.benchmarks.public.asked import Item, Runner, in_records, picture_item
from ans_core.benchmarks.public.mmbench import letter_of
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, accuracies, accuracy, mean, percent
from ans_core.types import Prediction

LETTERS = "ABCD"
SINGLE = ("image", "single image")
"""`data_type` of questions about one picture, in SEED-Bench 1 and 2."""


def score(inputs: Inputs) -> Scored:
    samples: list[dict[str, Any]] = []
    as_they_are = []
    for record in files.records(inputs.predictions):
        name, reply, real = (record.text(key) for key in ("question_id", "prediction", "gt_answer"))
        samples.append({"question_id": name, "prediction": reply, "right": reply.strip() == real.strip()})
        as_they_are.append(reply == real)
    names = [sample["question_id"] for sample in samples]
    for sample, name in zip(samples, _unique(names), strict=True):
        sample["id"] = name
    figures, ratio = accuracy(
        (name.split("_")[0] if "_" in name else "", s["right"])
        for name, s in zip(names, samples, strict=True)
    )
    with_blanks = mean(as_they_are)
    notes = ["blanks around letters don't count; `correct_with_blanks` is the number where they do"]
    if twice := len(names) - len(set(names)):
        notes.append(f"{twice} question ids occur twice and count twice, as in the published file")
    return Scored(
        metrics=figures | {"correct_with_blanks": sum(as_they_are), "accuracy_with_blanks": with_blanks},
        published={"accuracy_with_blanks": percent(with_blanks, 2)}
        | accuracies(figures, 1)
        | {"accuracy": percent(figures["accuracy"], 2)},
        ratios={"accuracy": ratio},
        samples=samples,
        notes=notes,
    )


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, "SEED-Bench.json", "SEED-Bench-2.json")
    pictures = files.pictures(folder, "SEED-Bench-image", "images")
    release = files.Record(files.load(path), str(path))
    listed = [q for q in release.records("questions") if str(q.get("data_type", "")).lower() in SINGLE]
    if not listed:
        raise ValueError(f"{path}: no question whose data_type is {' or '.join(SINGLE)}")
    listed.sort(key=lambda q: str(q["data_id"]))
    ids = [f"{q['question_type_id']}_{str(q['question_id']).rpartition('_')[2]}" for q in listed]
    for entry, question_id, name in zip(listed, ids, _unique(ids), strict=True):
        options = {letter: entry.text(f"choice_{letter.lower()}") for letter in LETTERS}
        answer, text = entry.text("answer"), questions.ask(entry["question"], options)
        facts = {"question_id": question_id, "gt_answer": answer, "options": options}
        yield picture_item(name, pictures / str(entry["data_id"]), text, answer=answer, facts=facts)


def _unique(ids: Iterable[str]) -> Iterator[str]:
    """Name the second question of an id `<id>/2`: the published files have such."""
    counts = Counter[str]()
    for one in ids:
        counts[one] += 1
        yield one if counts[one] == 1 else f"{one}/{counts[one]}"


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    """The letter that the reply names, else the reply."""
    letter = letter_of(prediction.text, item.facts["options"])
    return item.facts | {"prediction": letter or prediction.text, "text": prediction.text}


def right(item: Item, prediction: Prediction) -> float:
    return float(letter_of(prediction.text, item.facts["options"]) == item.facts["gt_answer"])


SCORER = Scorer(
    score=score,
    runner=Runner(
        items=items,
        record=record,
        truth=in_records,
        running=("accuracy", right),
        notes=(
            "the model is asked for a letter; the official protocol takes the option with the lowest loss",
        ),
    ),
)
