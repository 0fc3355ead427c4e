"""Ferret-Bench (refer_desc): a judge's marks for reference and model -> the model's share of the reference's.

--predictions: the review file (`content`: the judge's reply; `answer2_id`: the number of the answer); or the model's answers, with
--replay the review of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner, UnscoredError
from ans_core.benchmarks.public.scored import Given, Scored, Scorer
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.grounding import plain_caption
from ans_core.types import Prediction, Request

QUESTIONS = "box_refer_caption.json"
_BRACKETED = re.compile(r" \[[^\]]*\]")


def score(given: Given) -> Scored:
    listed = files.records(given.predictions)
    if "content" in listed[0]:
        review_path, reviews, missing = given.predictions, listed, []
    elif given.replay is None:
        raise ValueError("ferret_bench is scored by a judge: give its review file as --predictions, or the answers and --replay REVIEW")
    else:
        review_path, reviews = given.replay, files.records(given.replay)
        answers = files.by_id(listed, "question_id", where=str(given.predictions))
        known = files.by_id(reviews, "answer2_id", where=str(given.replay))
        missing = files.refuse_unknown(answers, known, where=given.predictions, what="questions")
        for name, answer in answers.items():
            if _BRACKETED.sub("", answer["text"]) != _BRACKETED.sub("", known[name]["answer2"]):
                raise ValueError(f"{given.replay}, question {name}: the judge saw another answer than the predicted one")
        reviews = [r for r in reviews if str(r["answer2_id"]) not in missing]
    files.by_id(reviews, "answer2_id", where=str(review_path))
    files.by_id(reviews, "question_id", where=str(review_path))
    marks = [_marks(files.text(r, "content", where=f"{review_path}, question {r['question_id']}")) for r in reviews]
    count = len(marks) + len(missing)
    reference, model = (round(sum(mark[i] for mark in marks) / count, 3) for i in (0, 1))
    return Scored(
        metrics={
            "score": 100 * model / reference,
            "mean_reference": reference,
            "mean_model": model,
            "questions": count,
            "unparsed": sum(mark == (-1.0, -1.0) for mark in marks),
        },
        published={"score": f"{100 * model / reference:.1f}"},
        ratios={"score": Ratio(numerators=[100 * m for _, m in marks], denominators=[r for r, _ in marks])},
        samples=[_sample(r, mark) for r, mark in zip(reviews, marks, strict=True)],
        missing=len(missing),
        notes=[
            f"judge: the one that wrote {review_path.name} (published with gpt-4o-2024-11-20)",
            "a ratio of means; an unreadable verdict counts -1 for both, as in the public scorer",
        ],
    )


def _marks(content: str) -> tuple[float, float]:
    """(reference, model): the first two words of the first line."""
    parts = content.split("\n")[0].replace(",", " ").split(" ")
    try:
        return float(parts[0]), float(parts[1])
    except (ValueError, IndexError):
        return -1.0, -1.0


def _sample(review: dict[str, Any], marks: tuple[float, float]) -> dict[str, Any]:
    return {"question_id": review["question_id"], "reference": marks[0], "model": marks[1]}


def items(folder: Path, split: str) -> Iterator[Item]:
    """The questions of box_refer_caption.json, whose polygon is the region."""
    from ans_core import transforms

    path = files.named(folder, QUESTIONS)
    pictures = files.pictures(folder, "images", "coco/val2017", "val2017", "../images")
    for question in sorted(files.records(path), key=lambda q: str(q["image"])):
        where = f"{path}, question {question['question_id']}"
        picture = pictures / files.text(question, "image", where=where)
        width, height = transforms.image_size(picture)
        region = files.mask(files.value(question, "annotation", where=where)["segmentation"], height=height, width=width, where=where)
        text = "<image>\n" + files.text(question, "text", where=where).replace("<region>", "region1")
        facts = {"question_id": question["question_id"], "image": question["image"], "category": "refer_desc"}
        yield Item(name=str(question["question_id"]), request=Request(frames=(picture,), text=text, mask_prompts=(region,)), facts=facts)


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    return item.facts | {"text": plain_caption(prediction.text)}


def judged(folder: Path, split: str) -> Path:
    raise UnscoredError("a judge must read the answers: `ans eval score ferret_bench --predictions ... --replay REVIEW`")


SCORER = Scorer(
    score=score,
    data="",
    needs_data=False,
    options=frozenset({"replay"}),
    sample_id=("question_id",),
    runner=Runner(items=items, record=record, truth=judged),
)
