"""SEED-Bench: predicted and true letters -> accuracy over all and per dimension (the number before "_" in question_id).

--predictions: records {"question_id", "prediction", "gt_answer"}. A question that the file holds twice counts twice, as it is published.
"""

from __future__ import annotations

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Given, Scored, Scorer, accuracy, percent


def score(given: Given) -> Scored:
    records = files.records(given.predictions)
    parts = []
    for number, record in enumerate(records):
        where = f"{given.predictions}, record {number}"
        parts.append([files.text(record, key, where=where) for key in ("question_id", "prediction", "gt_answer")])
    found, ratio = accuracy((name.split("_")[0], told.strip() == real.strip()) for name, told, real in parts)
    as_they_are = sum(told == real for _, told, real in parts)
    twice = len(parts) - len({name for name, _, _ in parts})
    notes = ["blanks around letters don't count; `correct_with_blanks` is the number where they do"]
    if twice:
        notes.append(f"{twice} question ids occur twice and count twice, as in the published file")
    return Scored(
        metrics=found | {"correct_with_blanks": as_they_are, "accuracy_with_blanks": as_they_are / len(parts)},
        published={"accuracy_with_blanks": percent(as_they_are / len(parts), 2)}
        | {key: percent(value, 2 if key == "accuracy" else 1) for key, value in found.items() if key.startswith("accuracy")},
        ratios={"accuracy": ratio},
        samples=[{"question_id": name, "prediction": told, "right": told.strip() == real.strip()} for name, told, real in parts],
        notes=notes,
    )


SCORER = Scorer(score=score, data="", needs_data=False)
