"""MMBench with CircularEval: the replies to every rotation of a question's options -> the share of questions
right in all of them.

--predictions: records {"index", "A", "B", "C", "D", "answer", "prediction"} (by `category` too where they
have one); copies of a question have its index + k * 1,000,000. A reply that names no option counts as wrong
("exact_matching"), where the official program may ask a judge.

A model is run on the released table (`mmbench_dev_en.tsv` or another *.tsv of the folder, pictures inside),
with all rotations: those that the table holds, or of a table without any, those made here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files, questions
from ans_core.benchmarks.public.asked import Item, Runner, in_records, picture_item, recorded
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, accuracy, mean, percent
from ans_core.types import Prediction

ROTATION = 1_000_000
_SEPARATORS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_NAMED = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
"""Any word may begin with the letter, as in the official program: "the answer is a dog" means A."""
_REFUSALS = (
    "Sorry, I can't help with images of people yet.", "I can't process this file.",
    "I'm sorry, but without the image provided", "Cannot determine the answer",
)  # fmt: skip


def score(inputs: Inputs) -> Scored:
    groups: dict[int, list[files.Record]] = defaultdict(list)
    for name, record in files.by_id(
        files.records(inputs.predictions), "index", where=inputs.predictions
    ).items():
        if not name.isdecimal():
            raise ValueError(f"{inputs.predictions}: index {name!r} is no whole number")
        groups[int(name) % ROTATION].append(record)
    samples, unparsed = [], 0
    for index, copies in groups.items():
        copies.sort(key=lambda record: int(record["index"]))
        options = options_of(copies[0])
        if len(copies) != len(options):
            raise ValueError(
                f"{inputs.predictions}, question {index}: {len(copies)} rotations of {len(options)} options; "
                "CircularEval asks as many as there are options"
            )
        letters = [letter_of(record.text("prediction"), options_of(record)) for record in copies]
        unparsed += letters.count(None)
        right = [letter == record.text("answer") for letter, record in zip(letters, copies, strict=True)]
        category = copies[0].get("category", "")
        samples.append({"index": index, "category": category, "right": all(right), "first_pass": right[0]})
    figures, ratio = accuracy((s["category"] or "all", s["right"]) for s in samples)
    figures["accuracy_first_pass"] = mean(s["first_pass"] for s in samples)
    return Scored(
        metrics=figures | {"unparsed": unparsed},
        published={key: percent(figures[key]) for key in ("accuracy", "accuracy_first_pass")},
        ratios={"accuracy": ratio},
        samples=samples,
        notes=[
            "accuracy: right in every rotation (CircularEval); accuracy_first_pass: in the first alone "
            "(VanillaEval)",
            "a reply that names no option is wrong (exact_matching); with a judge the official program "
            "draws one where the judge fails",
        ],
    )


def options_of(record: dict[str, Any]) -> dict[str, str]:
    """An empty option is none."""
    return {letter: str(record[letter]) for letter in "ABCD" if record.get(letter) not in (None, "", "nan")}


def letter_of(reply: str, options: dict[str, str]) -> str | None:
    """The one option letter among the words, if it first comes within the last four; else of "answer is B";
    else the one option whose text is in the reply; None: a refusal, or none of these (VLMEvalKit's rules)."""
    if any(refusal in reply for refusal in _REFUSALS):
        return None
    words = reply.translate(_SEPARATORS).split()
    named = [letter for letter in options if letter in words]
    if len(named) == 1 and words.index(named[0]) > len(words) - 5:
        return named[0]
    if not named and "Z" in words:  # "none of these"
        return None
    if (match := _NAMED.search(reply)) and match[1].upper() in options:
        return match[1].upper()
    if len(reply) > 2 * sum(map(len, options.values())):
        return None
    inside = [letter for letter, text in options.items() if text.lower() in reply.lower()]
    return inside[0] if len(inside) == 1 else None


def items(folder: Path, split: str) -> Iterator[Item]:
    """Every question once for each of its options, rotated by one each time; the rows as they are, if the
    table holds rotated copies."""
    others = sorted(path.name for path in folder.glob("*.tsv"))
    table = partial(questions.table, folder, "mmbench_dev_en.tsv", "MMBench_DEV_EN.tsv", *others)
    rotated = any(int(row["index"]) >= ROTATION for row, _ in table())
    for row, picture in table():
        texts, true = list(options_of(row).values()), row.text("answer")
        letters = "ABCD"[: len(texts)]
        if true not in letters or not texts:
            raise ValueError(
                f"{row.where}: answer {true!r} is none of its options {letters}; is this the test split, "
                "without answers?"
            )
        for shift in range(1 if rotated else len(texts)):
            options = dict(zip(letters, texts[shift:] + texts[:shift], strict=True))
            answer = letters[(letters.index(true) - shift) % len(letters)]
            index = int(row["index"]) + shift * ROTATION
            text = questions.ask(row["question"], options, hint=row.get("hint", "") or "")
            facts = {"index": index, "category": row.get("category", ""), **options, "answer": answer}
            yield picture_item(str(index), picture, text, answer=answer, facts=facts)


def right(item: Item, prediction: Prediction) -> float:
    return float(letter_of(prediction.text, options_of(item.facts)) == item.facts["answer"])


SCORER = Scorer(
    score=score,
    sample_id=("index",),
    runner=Runner(
        items=items,
        record=recorded("prediction"),
        truth=in_records,
        running=("first passes right", right),
        group=lambda item: item.facts["index"] % ROTATION,
    ),
)
