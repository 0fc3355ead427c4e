"""Ferret-Bench (refer_desc): a judge's marks for reference and model -> the model's share of the reference's.

--predictions: the review file (`content`: the judge's reply; `answer2_id`: the number of the answer); or the
model's answers, with
--replay the review of them. Without that the judge of the settings is asked: --data is then the folder with
question.jsonl, context.jsonl, answer.jsonl (the reference answers) and rule.json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
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
    if "content" in listed[0]:
        review_path, reviews, missing = inputs.predictions, listed, []
    elif inputs.replay is None:
        raise ValueError(
            "ferret_bench is scored by a judge: give its review file as --predictions, or the answers and "
            "--replay REVIEW"
        )
    else:
        review_path, reviews = inputs.replay, files.records(inputs.replay)
        answers = files.by_id(listed, "question_id", where=str(inputs.predictions))
        reviews_by_id = files.by_id(reviews, "answer2_id", where=str(inputs.replay))
        missing = files.refuse_unknown(answers, reviews_by_id, where=inputs.predictions, what="questions")
        for name, answer in answers.items():
            reply = files.text(answer, "text", where=f"{inputs.predictions}, question {name}")
            if _BRACKETED.sub("", reply) != _BRACKETED.sub(
                "", files.text(reviews_by_id[name], "answer2", where=f"{inputs.replay}, question {name}")
            ):
                raise ValueError(
                    f"{inputs.replay}, question {name}: the judge saw another answer than the predicted one"
                )
        reviews = [r for r in reviews if str(r["answer2_id"]) not in missing]
        missing = [] if inputs.predicted_only else missing
    files.by_id(reviews, "answer2_id", where=str(review_path))
    files.by_id(reviews, "question_id", where=str(review_path))
    marks = [
        _marks(files.text(r, "content", where=f"{review_path}, question {r['question_id']}")) for r in reviews
    ]
    count = len(marks) + len(missing)
    reference, model = (round(sum(mark[i] for mark in marks) / count, 3) for i in (0, 1))
    unparsed = sum(mark == UNREADABLE for mark in marks)
    if reference <= 0:  # -1 / -1 would be a perfect score
        raise ValueError(
            f"{review_path}: the reference answers' mean mark is {reference}, so there is no share of it; "
            f"{unparsed} of {len(marks)}"
            " replies don't begin with two marks: were they cut off, or is this another judge's form?"
        )
    return Scored(
        metrics={
            "score": 100 * model / reference,
            "mean_reference": reference,
            "mean_model": model,
            "questions": count,
            "unparsed": unparsed,
        },
        published={"score": f"{100 * model / reference:.1f}"},
        ratios={"score": Ratio(numerators=[100 * m for _, m in marks], denominators=[r for r, _ in marks])},
        samples=[_sample(r, mark) for r, mark in zip(reviews, marks, strict=True)],
        missing=len(missing),
        notes=[
            f"judge: {reviews[0].get('judge', f'the one that wrote {review_path.name}')} (published with "
            "gpt-4o-2024-11-20)",
            "a ratio of means; an unreadable verdict counts -1 for both, as in the public scorer",
        ],
    )


def _marks(content: str) -> tuple[float, float]:
    """(reference, model): the first two words of the first line."""
    parts = content.split("\n")[0].replace(",", " ").split(" ")
    try:
        marks = float(parts[0]), float(parts[1])
    except (ValueError, IndexError):
        return UNREADABLE
    return marks if all(map(math.isfinite, marks)) else UNREADABLE


def _sample(review: dict[str, Any], marks: tuple[float, float]) -> dict[str, Any]:
    return {"question_id": review["question_id"], "reference": marks[0], "model": marks[1]}


def items(folder: Path, split: str) -> Iterator[Item]:
    """The questions of box_refer_caption.json, whose polygon is the region."""
    from ans_core.pictures import transforms

    path = files.named(folder, QUESTIONS)
    pictures = files.pictures(folder, "images", "coco/val2017", "val2017", "../images")
    for question in sorted(files.records(path), key=lambda q: str(q["image"])):
        where = f"{path}, question {question['question_id']}"
        picture = pictures / files.text(question, "image", where=where)
        (width, height), _ = transforms.stored(picture)
        region = files.mask(
            files.value(question, "annotation", where=where)["segmentation"],
            height=height,
            width=width,
            where=where,
        )
        text = "<image>\n" + files.text(question, "text", where=where).replace("<region>", "region1")
        facts = {"question_id": question["question_id"], "image": question["image"], "category": "refer_desc"}
        yield Item(
            name=str(question["question_id"]),
            request=Request(frames=(picture,), text=text, mask_prompts=(region,)),
            facts=facts,
        )


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


def ask_judge(inputs: Inputs, judge: Judge, out: Path) -> Inputs:
    """Ask a call a question, and write the reviews as the public program does."""
    if inputs.data is None:
        raise ValueError(
            "ferret_bench: to ask a judge, --data must be the folder with question.jsonl, context.jsonl, "
            "answer.jsonl, rule.json"
        )
    rule = files.value(
        files.load(files.named(inputs.data, "rule.json")), "refer_desc", where=f"{inputs.data}, rule.json"
    )
    named = [files.named(inputs.data, f"{name}.jsonl") for name in ("question", "context", "answer")]
    rows = [files.records(path) for path in named]
    if len({tuple(record["question_id"] for record in listed) for listed in rows}) != 1:
        raise ValueError(
            f"{inputs.data}: question.jsonl, context.jsonl and answer.jsonl are not about the same questions "
            "in one order"
        )
    # a question a picture
    by_picture = {files.text(row[0], "image", where=str(named[0])): row for row in zip(*rows, strict=True)}
    answers = files.by_id(files.records(inputs.predictions), "image", where=str(inputs.predictions))
    missing = files.refuse_unknown(answers, by_picture, where=inputs.predictions, what="pictures")
    if missing and not inputs.predicted_only:
        shown = files.shown(missing)
        raise ValueError(
            f"{inputs.predictions}: {len(missing)} questions are not answered: {shown} (--predicted-only "
            "scores the others)"
        )
    cases = {picture: (*row, answers[picture]) for picture, row in by_picture.items() if picture in answers}
    requests = [
        _request(rule, *row, where=f"{inputs.predictions}, {picture}") for picture, row in cases.items()
    ]
    replies = judge.ask(requests, desc=f"ferret_bench, judged by {judge.name}")
    with out.open("w", encoding="utf-8") as file:
        for (question, _, reference, answer), reply in zip(cases.values(), replies, strict=True):
            about = {
                "question_id": question["question_id"],
                "answer2_id": answer["question_id"],
                "judge": judge.name,
            }
            file.write(
                json.dumps(
                    about | {"content": reply, "answer1": reference["text"], "answer2": answer["text"]}
                )
                + "\n"
            )
    return replace(inputs, replay=out)


def _request(rule: Any, *row: Any, where: str) -> JudgeRequest:
    question, context, reference, answer = (files.text(record, "text", where=where) for record in row)
    text = PROMPT.format(
        context=context,
        question=question,
        reference=reference,
        answer=_BRACKETED.sub("", answer),
        role=rule["role"],
        rule=rule["prompt"],
    )
    return JudgeRequest(system=SYSTEM, user=text, schema=None, max_tokens=REPLY_TOKENS)


def needs_judge(inputs: Inputs) -> bool:
    return inputs.replay is None and "content" not in files.records(inputs.predictions)[0]


SCORER = Scorer(
    score=score,
    data="question.jsonl, context.jsonl, answer.jsonl and rule.json, for a judge that is asked",
    needs_data=False,
    options=frozenset({"replay", "predicted_only"}),
    sample_id=("question_id",),
    runner=Runner(items=items, record=record),
    judging=Judging(needed=needs_judge, ask=ask_judge, suffix=".jsonl", replay="--replay REVIEW.jsonl"),
)
