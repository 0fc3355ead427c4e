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
from ans_core.benchmarks.public.scored import Given, Scored, Scorer, accuracy, percent
from ans_core.metrics.bootstrap import Ratio
from ans_core.types import Prediction, Request

WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen",
    "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
NUMBERS = {word: number for number, word in enumerate(WORDS)} | {"no": 0, "none": 0}
"""`none` and `no` alone are 0; in a sentence they say nothing."""
TEST = "test.json"


def score(given: Given) -> Scored:
    records = files.by_id(files.records(given.predictions), "question_id", where=str(given.predictions))
    truth = _truth(given, records)
    missing = (
        []
        if given.predicted_only
        else files.refuse_unknown(records, truth, where=given.predictions, what="questions")
    )
    samples: list[dict[str, Any]] = []
    for name, answer in truth.items():
        if name in records:
            reply = files.text(records[name], "prediction", where=f"{given.predictions}, {name}")
            samples.append(
                {"question_id": name, "reply": reply, "number": number_of(reply), "answer": answer}
            )
        elif not given.predicted_only:
            samples.append({"question_id": name, "reply": "", "number": None, "answer": answer})
    found, ratio = accuracy(("", s["number"] == s["answer"]) for s in samples)
    metrics = {key: value for key, value in found.items() if "/" not in key}
    as_said = [float(s["reply"].strip() == str(s["answer"])) for s in samples]
    errors = [(s["number"] - s["answer"]) ** 2 for s in samples if s["number"] is not None]
    metrics |= {
        "accuracy_as_said": sum(as_said) / len(as_said),
        "unparsed": len(samples) - len(errors) - len(missing),
    }
    metrics |= {"RMSE_of_parsed": (sum(errors) / len(errors)) ** 0.5} if errors else {}
    return Scored(
        metrics=metrics,
        published={key: percent(metrics[key]) for key in ("accuracy", "accuracy_as_said")},
        ratios={"accuracy": ratio, "accuracy_as_said": Ratio(numerators=as_said)},
        samples=samples,
        missing=len(missing),
        notes=["a reply without a number, or with several, is wrong; the RMSE is over the others"],
    )


def _truth(given: Given, records: dict[str, dict[str, Any]]) -> dict[str, int]:
    if given.data is None:
        return {name: _whole(record, f"{given.predictions}, {name}") for name, record in records.items()}
    path = files.named(given.data, TEST)
    return {str(q["question_id"]): _whole(q, f"{path}, {q['question_id']}") for q in _complex(path)}


def _whole(record: dict[str, Any], where: str) -> int:
    answer = files.number(record, "answer", where=where)
    if answer != int(answer) or answer < 0:
        raise ValueError(f"{where}: answer {answer!r} is no count")
    return int(answer)


def _complex(path: Path) -> list[dict[str, Any]]:
    found = [
        q
        for q in files.records(path)
        if files.value(q, "issimple", where=f"{path}, {q.get('question_id')}") is False
    ]
    if not found:
        raise ValueError(
            f"{path}: no question whose `issimple` is false; complex questions are in TallyQA's {TEST}"
        )
    files.by_id(found, "question_id", where=str(path))
    return found


def number_of(reply: str) -> int | None:
    """Return the count that a reply names; None: none, or several."""
    said = reply.strip().strip(".").lower()
    if said in NUMBERS:
        return NUMBERS[said]
    found = {
        int(word) if word.isdigit() else NUMBERS[word]
        for word in re.findall(rf"\b(?:\d{{1,9}}|{'|'.join(WORDS)})\b", said)
    }
    decimal = re.search(r"\d\.\d", said)
    return found.pop() if len(found) == 1 and not decimal else None


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, TEST)
    roots = [root for root in (path.parent, path.parent / "images") if root.is_dir()]
    listed = _complex(path)
    images = [files.text(asked, "image", where=f"{path}, {asked['question_id']}") for asked in listed]
    pictures = files.pictures_named(images, *roots, where=path)
    for asked, image in sorted(zip(listed, images, strict=True), key=lambda pair: pair[1]):
        where, name = f"{path}, {asked['question_id']}", str(asked["question_id"])
        question, answer = files.text(asked, "question", where=where), _whole(asked, where)
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
