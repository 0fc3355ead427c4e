"""InfographicsVQA: replies against several answers -> ANLS over all, and per kind of answer, evidence and
operation.

--predictions: records {"questionId", "answer"}, as the benchmark's server takes them; --data
infographicsVQA_val_v1.0_withQT.json, or its folder. A model is run on that folder, with the pictures in
`infographicsvqa_images` or `images`.

ANLS of a question: the best of its answers' 1 - d / (length of the longer text), d = edit distance, both in
lower case with single blanks. `ANLS` is the server's: it divides by the length of the texts as they were written
and is 0 under .5. `ANLS_of_paper` divides by the length of the texts that are compared and is 0 at .5 too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files, questions
from ans_core.benchmarks.public.asked import Item, Runner, picture_item
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, mean, means_by_kind, percent
from ans_core.metrics.bootstrap import Ratio
from ans_core.types import Prediction

THRESHOLD = 0.5
TRUTH = "infographicsVQA_val_v1.0_withQT.json"
GROUPS = ("answer_type", "evidence", "operation/reasoning")
"""Lists of a question's kinds, in the file with question types."""


def score(inputs: Inputs) -> Scored:
    replies = files.by_id(files.records(inputs.predictions), "questionId", where=inputs.predictions)
    truth = _questions(files.named(inputs.truth, TRUTH))
    names, missing = inputs.pair(replies, truth, what="questions")
    samples: list[dict[str, Any]] = []
    for name in names:
        answers, reply, values = _answers(truth[name]), "", (0.0, 0.0)
        if name in replies:
            reply = replies[name].text("answer")
            values = anls(reply, answers), anls(reply, answers, of_paper=True)
        kinds = {group: truth[name].get(group) or [] for group in GROUPS}
        samples.append(
            {"questionId": name, "reply": reply, "ANLS": values[0], "ANLS_of_paper": values[1], **kinds}
        )
    parts = {name: [s[name] for s in samples] for name in ("ANLS", "ANLS_of_paper")}
    metrics = {name: mean(values) for name, values in parts.items()}
    for group in GROUPS:
        metrics |= means_by_kind(((s[group], s["ANLS"]) for s in samples), "ANLS")
    return Scored(
        metrics=metrics | {"questions": len(samples)},
        published={name: percent(metrics[name]) for name in parts},
        ratios={name: Ratio(numerators=values) for name, values in parts.items()},
        samples=samples,
        missing=missing,
        notes=[
            "ANLS is the server's: lengths of the texts as they were written, .5 counts; ANLS_of_paper: "
            "lengths of the texts that are compared, .5 is 0"
        ],
    )


def anls(reply: str, answers: list[str], *, of_paper: bool = False) -> float:
    """Return a question's ANLS in [0, 1]."""
    return max(_similarity(reply, answer, of_paper=of_paper) for answer in answers)


def _similarity(reply: str, answer: str, *, of_paper: bool) -> float:
    from nltk import edit_distance

    one, other = (" ".join(text.lower().split()) for text in (reply, answer))
    lengths = map(len, (one, other) if of_paper else (reply.upper(), answer.upper()))  # upper: as the server
    distance = edit_distance(one, other) / max(*lengths, 1)
    counts = distance < THRESHOLD if of_paper else 1 - distance >= THRESHOLD
    return 1 - distance if counts else 0.0


def _questions(path: Path) -> dict[str, files.Record]:
    """Return {questionId: question}."""
    listed = files.Record(files.load(path), str(path)).listed("data", dict)
    if not listed:
        raise ValueError(f"{path}: no questions")
    by_id = files.by_id(listed, "questionId", where=path)
    for question in by_id.values():
        for group in GROUPS:
            if question.get(group) is not None:
                question.listed(group, str)
    return by_id


def _answers(question: files.Record) -> list[str]:
    answers = question.listed("answers", str)
    if not answers:
        raise ValueError(f"{question.where}: no answers; those of the test split are with the server")
    return answers


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, TRUTH)
    pictures = files.pictures(folder, "infographicsvqa_images", "images")
    listed = files.with_pictures(_questions(path), "image_local_name", pictures, where=path)
    for name, entry, picture in listed:
        asked, answers = entry.text("question"), _answers(entry)
        facts = {"questionId": name, "question": asked, "answers": answers}
        text = f"<image>\n{asked}\n{questions.SHORT}"
        yield picture_item(name, picture, text, answer=answers[0], facts=facts)


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    return {"questionId": item.facts["questionId"], "answer": prediction.text}


def right(item: Item, prediction: Prediction) -> float:
    return anls(prediction.text, item.facts["answers"])


SCORER = Scorer(
    score=score,
    data=f"{TRUTH}, or its folder",
    options=frozenset({"predicted_only"}),
    sample_id=("questionId",),
    runner=Runner(items=items, record=record, splits=("val",), running=("ANLS", right)),
)
