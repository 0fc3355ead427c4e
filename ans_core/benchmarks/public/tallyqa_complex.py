"""TallyQA's complex questions: replies -> whole numbers -> accuracy (exact) and RMSE.

--predictions: records {"question_id", "prediction", "answer"}; without `answer`, --data holds it. A model is
run on the release: test.json with the folders of COCO and Visual Genome that its `image` names
(VG_100K_2/2410408.jpg), beside it or in `images`.

A reply counts as the number that it is, or as the only number in it, in digits or as a word up to twenty;
with none or several it is wrong. `accuracy_as_said` takes digits alone, as a plain comparison of texts does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files, questions
from ans_core.benchmarks.public.asked import Item, Runner, in_records, picture_item, recorded
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, accuracies, accuracy, mean
from ans_core.metrics.bootstrap import Ratio
from ans_core.types import Prediction

WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
NUMBERS = {word: number for number, word in enumerate(WORDS)} | {"no": 0, "none": 0}
"""`none` and `no` alone are 0; in a sentence they say nothing."""
TEST = "test.json"


def score(inputs: Inputs) -> Scored:
    records = files.by_id(files.records(inputs.predictions), "question_id", where=inputs.predictions)
    truth = records if inputs.data is None else _complex(files.named(inputs.data, TEST))
    true_counts = {name: _count(entry) for name, entry in truth.items()}
    names, missing = inputs.pair(records, true_counts, what="questions")
    samples: list[dict[str, Any]] = []
    for name in names:
        reply = records[name].text("prediction") if name in records else ""
        samples.append(
            {"question_id": name, "reply": reply, "number": number_of(reply), "answer": true_counts[name]}
        )
    metrics, ratio = accuracy(("", s["number"] == s["answer"]) for s in samples)
    verbatim = [float(s["reply"].strip() == str(s["answer"])) for s in samples]
    errors = [(s["number"] - s["answer"]) ** 2 for s in samples if s["number"] is not None]
    metrics |= {"accuracy_as_said": mean(verbatim), "unparsed": len(samples) - len(errors) - missing}
    metrics |= {"RMSE_of_parsed": mean(errors) ** 0.5} if errors else {}
    return Scored(
        metrics=metrics,
        published=accuracies(metrics, 1),
        ratios={"accuracy": ratio, "accuracy_as_said": Ratio(numerators=verbatim)},
        samples=samples,
        missing=missing,
        notes=["a reply without a number, or with several, is wrong; the RMSE is over the others"],
    )


def _count(record: files.Record) -> int:
    answer = record.number("answer")
    if answer != int(answer) or answer < 0:
        raise ValueError(f"{record.where}: answer {answer!r} is no count")
    return int(answer)


def _complex(path: Path) -> dict[str, files.Record]:
    """Return {question_id: question}."""
    rows = [row for row in files.records(path) if row.value("issimple") is False]
    if not rows:
        raise ValueError(
            f"{path}: no question whose `issimple` is false; complex questions are in TallyQA's {TEST}"
        )
    return files.by_id(rows, "question_id", where=path)


def number_of(reply: str) -> int | None:
    """Return the count that a reply names; None: none, or several."""
    plain = reply.strip().strip(".").lower()
    if plain in NUMBERS:
        return NUMBERS[plain]
    counts = {
        int(word) if word.isdigit() else NUMBERS[word]
        for word in re.findall(rf"\b(?:\d{{1,9}}|{'|'.join(WORDS)})\b", plain)
    }
    decimal = re.search(r"\d\.\d", plain)
    return counts.pop() if len(counts) == 1 and not decimal else None


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, TEST)
    roots = [root for root in (path.parent, path.parent / "images") if root.is_dir()]
    for name, entry, picture in files.with_pictures(_complex(path), "image", *roots, where=path):
        asked, answer = entry.text("question"), _count(entry)
        facts = {"question_id": name, "question": asked, "answer": answer}
        text = f"<image>\n{asked}\n{questions.SHORT}"
        yield picture_item(name, picture, text, answer=str(answer), facts=facts)


def right(item: Item, prediction: Prediction) -> float:
    return float(number_of(prediction.text) == item.facts["answer"])


SCORER = Scorer(
    score=score,
    data=f"{TEST}, or its folder",
    data_optional=True,
    options=frozenset({"predicted_only"}),
    sample_id=("question_id",),
    runner=Runner(items=items, record=recorded("prediction"), truth=in_records, running=("accuracy", right)),
)
