"""Ferret-Bench (refer_desc): a judge's marks for reference and model -> the model's share of the reference's.

--predictions: the review file (`content`: the judge's reply; `answer2_id`: the number of the answer); or the
model's answers, with
--replay the review of them. Without that the judge of the settings is asked: --data is then the folder with
question.jsonl, context.jsonl, answer.jsonl (the reference answers) and rule.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner
from ans_core.benchmarks.public.scored import Inputs, Judge, JudgeRequest, Judging, Scored, Scorer
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.grounding import plain_caption
from ans_core.types import Prediction, Request

QUESTIONS = "box_refer_caption.json"
UNREADABLE = -1.0, -1.0
"""Marks of a verdict without two numbers, as in the public scorer."""
_BRACKETED = re.compile(r" \[[^\]]*\]")


def score(inputs: Inputs) -> Scored:
    listed = files.records(inputs.predictions)
    path, unanswered = inputs.predictions, frozenset[str]()
    if "content" not in listed[0]:
        if inputs.replay is None:
            raise ValueError(
                "ferret_bench is scored by a judge: give its review file as --predictions, or the answers and "
                "--replay REVIEW"
            )
        path, (listed, unanswered) = inputs.replay, _reviewed(listed, inputs, inputs.replay)
    reviews = files.by_id(listed, "question_id", where=path)
    marks = [_marks(review.text("content")) for review in reviews.values()]
    for place, name in enumerate(files.by_id(listed, "answer2_id", where=path)):
        if name in unanswered and marks[place] != UNREADABLE:
            marks[place] = marks[place][0], 0.0
    count = len(marks)
    reference, model = (round(sum(mark[i] for mark in marks) / count, 3) for i in (0, 1))
    unparsed = sum(mark == UNREADABLE for mark in marks)
    if reference <= 0:  # -1 / -1 would be a perfect score
        raise ValueError(
            f"{path}: the reference answers' mean mark is {reference}, so there is no share of it; "
            f"{unparsed} of {len(marks)}"
            " replies don't begin with two marks: were they cut off, or is this another judge's form?"
        )
    share = 100 * model / reference
    judge = listed[0].get("judge", f"the one that wrote {path.name}")
    return Scored(
        metrics={
            "score": share,
            "mean_reference": reference,
            "mean_model": model,
            "questions": count,
            "unparsed": unparsed,
        },
        published={"score": f"{share:.1f}"},
        ratios={"score": Ratio(numerators=[100 * m for _, m in marks], denominators=[r for r, _ in marks])},
        samples=[
            {"question_id": review["question_id"], "reference": mark[0], "model": mark[1]}
            for review, mark in zip(listed, marks, strict=True)
        ],
        missing=len(unanswered),
        notes=[
            f"judge: {judge} (published with gpt-4o-2024-11-20)",
            "a ratio of means; an unreadable verdict counts -1 for both, as in the public scorer",
        ],
    )


def _reviewed(
    answered: list[files.Record], inputs: Inputs, replay: Path
) -> tuple[list[files.Record], frozenset[str]]:
    """The reviews that count, and the names of those whose question was not answered."""
    answers = files.by_id(answered, "question_id", where=inputs.predictions)
    reviews = files.by_id(files.records(replay), "answer2_id", where=replay)
    missing = files.refuse_unknown(answers, reviews, where=inputs.predictions, what="questions")
    for name, answer in answers.items():
        if _BRACKETED.sub("", answer.text("text")) != _BRACKETED.sub("", reviews[name].text("answer2")):
            raise ValueError(f"{replay}, {name}: the judge saw another answer than the predicted one")
    if inputs.predicted_only:
        return [review for name, review in reviews.items() if name in answers], frozenset()
    return list(reviews.values()), frozenset(missing)


def _marks(content: str) -> tuple[float, float]:
    """(reference, model): the first two words of the first line."""
    parts = content.split("\n")[0].replace(",", " ").split(" ")
    try:
        marks = float(parts[0]), float(parts[1])
    except (ValueError, IndexError):
        return UNREADABLE
    return marks if all(map(math.isfinite, marks)) else UNREADABLE


def items(folder: Path, split: str) -> Iterator[Item]:
    """The questions of box_refer_caption.json, whose polygon is the region."""
    from ans_core.pictures import transforms

    path = files.named(folder, QUESTIONS)
    pictures = files.pictures(folder, "images", "coco/val2017", "val2017", "../images")
    listed = files.by_id(files.records(path), "question_id", where=path).items()
    for name, question in sorted(listed, key=lambda entry: str(entry[1]["image"])):
        picture = pictures / question.text("image")
        (width, height), _ = transforms.stored(picture)
        region = question.record("annotation").mask("segmentation", (height, width))
        text = "<image>\n" + question.text("text").replace("<region>", "region1")
        facts = {"question_id": question["question_id"], "image": question["image"], "category": "refer_desc"}
        request = Request(frames=(picture,), text=text, mask_prompts=(region,))
        yield Item(name=name, request=request, facts=facts)


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    return item.facts | {"text": plain_caption(prediction.text)}


SYSTEM = "You are a helpful and precise assistant for checking the quality of the answer."
PROMPT = """\
[Context]\\{context}

[Question]
{question}

[{role} 1]
{reference}

[End of {role} 1]

[{role} 2]
{answer}

[End of {role} 2]

[System]
{rule}

"""
"""The benchmark's, with its backslash in place of a line break."""
REPLY_TOKENS = 1000


def ask_judge(inputs: Inputs, judge: Judge) -> list[dict[str, Any]]:
    """Ask a call a question, and return the reviews that the public program writes."""
    if inputs.data is None:
        raise ValueError(
            "ferret_bench: to ask a judge, --data must be the folder with question.jsonl, context.jsonl, "
            "answer.jsonl, rule.json"
        )
    rules = files.named(inputs.data, "rule.json")
    rule = files.Record(files.load(rules), str(rules)).record("refer_desc")
    named = [files.named(inputs.data, f"{name}.jsonl") for name in ("question", "context", "answer")]
    rows = [files.records(path) for path in named]
    if len({tuple(record["question_id"] for record in listed) for listed in rows}) != 1:
        raise ValueError(
            f"{inputs.data}: question.jsonl, context.jsonl and answer.jsonl are not about the same questions "
            "in one order"
        )
    by_picture = {row[0].text("image"): row for row in zip(*rows, strict=True)}  # a question a picture
    answers = files.by_id(files.records(inputs.predictions), "image", where=inputs.predictions)
    missing = files.refuse_unknown(answers, by_picture, where=inputs.predictions, what="pictures")
    if missing and not inputs.predicted_only:
        shown = files.shown(missing)
        raise ValueError(
            f"{inputs.predictions}: {len(missing)} questions are not answered: {shown} (--predicted-only "
            "scores the others)"
        )
    cases = [(*row, answers[picture]) for picture, row in by_picture.items() if picture in answers]
    replies = judge.ask(
        [_request(rule, *case) for case in cases], desc=f"ferret_bench, judged by {judge.name}"
    )
    return [
        {
            "question_id": question["question_id"],
            "answer2_id": answer["question_id"],
            "judge": judge.name,
            "content": reply,
            "answer1": reference["text"],
            "answer2": answer["text"],
        }
        for (question, _, reference, answer), reply in zip(cases, replies, strict=True)
    ]


def _request(rule: files.Record, *case: files.Record) -> JudgeRequest:
    question, context, reference, answer = (record.text("text") for record in case)
    text = PROMPT.format(
        context=context,
        question=question,
        reference=reference,
        answer=_BRACKETED.sub("", answer),
        role=rule.text("role"),
        rule=rule.text("prompt"),
    )
    return JudgeRequest(system=SYSTEM, user=text, max_tokens=REPLY_TOKENS)


def needs_judge(inputs: Inputs) -> bool:
    return inputs.replay is None and "content" not in files.records(inputs.predictions)[0]


SCORER = Scorer(
    score=score,
    data="question.jsonl, context.jsonl, answer.jsonl and rule.json, for a judge that is asked",
    data_optional=True,
    options=frozenset({"replay", "predicted_only"}),
    sample_id=("question_id",),
    runner=Runner(items=items, record=record),
    judging=Judging(replies=ask_judge, needed=needs_judge, suffix=".jsonl", replay="--replay REVIEW.jsonl"),
)
