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
from ans_core.benchmarks.public.asked import Item, Runner
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, accuracy, percent
from ans_core.metrics.bootstrap import Ratio
from ans_core.types import Prediction, Request

WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
NUMBERS = {word: number for number, word in enumerate(WORDS)} | {"no": 0, "none": 0}
"""`none` and `no` alone are 0; in a sentence they say nothing."""
TEST = "test.json"


def score(inputs: Inputs) -> Scored:
    records = files.by_id(files.records(inputs.predictions), "question_id", where=str(inputs.predictions))
    truth = _truth(inputs, records)
    missing = (
        []
        if inputs.predicted_only
        else files.refuse_unknown(records, truth, where=inputs.predictions, what="questions")
    )
    samples: list[dict[str, Any]] = []
    for name, answer in truth.items():
        if name in records:
            reply = files.text(records[name], "prediction", where=f"{inputs.predictions}, {name}")
            samples.append(
                {"question_id": name, "reply": reply, "number": number_of(reply), "answer": answer}
            )
        elif not inputs.predicted_only:
            samples.append({"question_id": name, "reply": "", "number": None, "answer": answer})
    figures, ratio = accuracy(("", s["number"] == s["answer"]) for s in samples)
    metrics = {key: value for key, value in figures.items() if "/" not in key}
    verbatim = [float(s["reply"].strip() == str(s["answer"])) for s in samples]
    errors = [(s["number"] - s["answer"]) ** 2 for s in samples if s["number"] is not None]
    metrics |= {
        "accuracy_as_said": sum(verbatim) / len(verbatim),
        "unparsed": len(samples) - len(errors) - len(missing),
    }
    metrics |= {"RMSE_of_parsed": (sum(errors) / len(errors)) ** 0.5} if errors else {}
    return Scored(
        metrics=metrics,
        published={key: percent(metrics[key]) for key in ("accuracy", "accuracy_as_said")},
        ratios={"accuracy": ratio, "accuracy_as_said": Ratio(numerators=verbatim)},
        samples=samples,
        missing=len(missing),
        notes=["a reply without a number, or with several, is wrong; the RMSE is over the others"],
    )


def _truth(inputs: Inputs, records: dict[str, dict[str, Any]]) -> dict[str, int]:
    if inputs.data is None:
        return {name: _count(record, f"{inputs.predictions}, {name}") for name, record in records.items()}
    path = files.named(inputs.data, TEST)
    return {str(q["question_id"]): _count(q, f"{path}, {q['question_id']}") for q in _complex(path)}


def _count(record: dict[str, Any], where: str) -> int:
    answer = files.number(record, "answer", where=where)
    if answer != int(answer) or answer < 0:
        raise ValueError(f"{where}: answer {answer!r} is no count")
    return int(answer)


def _complex(path: Path) -> list[dict[str, Any]]:
    rows = [
        q
        for q in files.records(path)
        if files.value(q, "issimple", where=f"{path}, {q.get('question_id')}") is False
    ]
    if not rows:
        raise ValueError(
            f"{path}: no question whose `issimple` is false; complex questions are in TallyQA's {TEST}"
        )
    files.by_id(rows, "question_id", where=str(path))
    return rows


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
    listed = _complex(path)
    images = [files.text(entry, "image", where=f"{path}, {entry['question_id']}") for entry in listed]
    pictures = files.pictures_named(images, *roots, where=path)
    for entry, image in sorted(zip(listed, images, strict=True), key=lambda pair: pair[1]):
        where, name = f"{path}, {entry['question_id']}", str(entry["question_id"])
        question, answer = files.text(entry, "question", where=where), _count(entry, where)
        text = f"<image>\n{question}\n{questions.SHORT}"
        facts = {"question_id": name, "question": question, "answer": answer}
        yield Item(
            name=name,
            request=Request(frames=(pictures[image],), text=text),
            facts=facts,
            truth=Prediction(text=str(answer)),
        )


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    return item.facts | {"prediction": prediction.text}


def right(item: Item, prediction: Prediction) -> float:
    return float(number_of(prediction.text) == item.facts["answer"])


SCORER = Scorer(
    score=score,
    data=f"{TEST}, or its folder",
    needs_data=False,
    options=frozenset({"predicted_only"}),
    sample_id=("question_id",),
    runner=Runner(items=items, record=record, truth=lambda folder, split: None, running=("accuracy", right)),
)
