"""DLC-Bench (describe-anything): captions of 100 objects, questions about each, a judge's recorded replies ->
positive, negative, average.

--predictions: {object id: caption}, or a line an object {"id", "caption"}. --data: folder with
annotations.json, qa.json, class_names.json, and `images` for running a model. --replay: {object id: {"pred",
"details_positives", "details_negatives", "details_recognition"}}, whose `pred_answer` are the judge's
replies; without it the judge of the settings is asked, a question a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner
from ans_core.benchmarks.public.scored import Inputs, Judge, JudgeRequest, Judging, Scored, Scorer, mean
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.grounding import plain_caption
from ans_core.types import Prediction, Request

QUESTION = "<image>\nPlease give me a detailed description of the region in the picture marked by region1."
LETTERS = "abcdefghijklmnopqrstuvwxyz"
KINDS = {"positive": "details_positives", "negative": "details_negatives"}
RECOGNITION = "details_recognition"
REPLIES = "{object id: ...}"
"""What files of captions, and of replies, are."""


def score(inputs: Inputs) -> Scored:
    if inputs.replay is None:
        raise ValueError("dlc_bench is scored by a judge: --replay with its recorded replies")
    replies = _objects(inputs.replay)
    captions, questions, objects, missing = _read_inputs(inputs)
    samples: list[dict[str, Any]] = []
    means: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for i in objects:
        if i in captions and i not in replies:
            raise ValueError(
                f"{inputs.replay}: no replies about object {i}; the judge must see every caption"
            )
        of_object: list[dict[str, Any]] = []
        if i in captions:
            recorded = files.Record(replies[i], f"{inputs.replay}, object {i}")
            of_object = _of_object(i, captions[i], questions[i], recorded)
        samples += of_object
        for kind in KINDS:
            scores = [s["score"] for s in of_object if s["type"] == kind]
            means[kind].append(mean(scores) if scores else 0.0)
    means["average"] = [(p + n) / 2 for p, n in zip(*means.values(), strict=True)]
    positive, negative = (mean(means[kind]) for kind in KINDS)
    figures = {"average": (positive + negative) / 2, "positive": positive, "negative": negative}
    recognised = [s["recognised"] for s in samples if s["type"] == "recognition"]
    judge = files.by_name(inputs.replay, REPLIES).get("judge", f"the one that wrote {inputs.replay.name}")
    return Scored(
        metrics=figures
        | {
            "recognised": sum(recognised) / len(objects),
            "objects": len(objects),
            "questions": len(samples),
            "unparsed": sum(s["choice"] is None for s in samples),
        },
        published={key: f"{value:.3f}" for key, value in figures.items()},
        ratios={kind: Ratio(numerators=values) for kind, values in means.items()},
        samples=samples,
        missing=missing,
        notes=[
            f"judge: {judge}; another judge moves DLC-Bench by up to 9 points",
            "a reply without a choice counts 0",
        ],
    )


def _read_inputs(inputs: Inputs) -> tuple[dict[str, Any], dict[str, list[files.Record]], list[str], int]:
    """(captions, questions, the objects that count, how many of them have no caption)"""
    captions, questions = _objects(inputs.predictions), _questions(files.named(inputs.truth, "qa.json"))
    path = files.named(inputs.truth, "annotations.json")
    truth = files.Record(files.load(path), str(path))
    objects = list(files.by_id(truth.listed("annotations"), "id", where=path))
    if unknown := [i for i in objects if i not in questions]:
        raise ValueError(f"{inputs.truth}: qa.json has no questions about objects {files.shown(unknown)}")
    return captions, questions, *inputs.pair(captions, objects, what="objects")


def _questions(path: Path) -> dict[str, list[files.Record]]:
    """Those of each object."""
    by_object = files.Record(files.load(path), str(path))
    questions = {i: by_object.records(i) for i in by_object}
    for question in itertools.chain.from_iterable(questions.values()):
        question.text("type")
        for _, worth in _choices(question):
            if isinstance(worth, bool) or not isinstance(worth, int | float):
                raise ValueError(f"{question.where}: a choice is worth {worth!r}, not a number")
    return questions


def _choices(question: files.Record) -> list[tuple[str, Any]]:
    """(text, what it is worth)"""
    listed = question.listed("choices", list)
    if not listed or any(len(choice) != 2 or not isinstance(choice[0], str) for choice in listed):
        raise ValueError(f"{question.where}: choices are not [text, what it is worth]")
    return [(text, worth) for text, worth in listed]


def _objects(path: Path) -> dict[str, Any]:
    """Captions, or replies, by object, without the prompt and the totals that the public programs put beside
    the objects."""
    loaded = files.load(path)
    if isinstance(loaded, list):
        return {name: line.value("caption") for name, line in files.by_id(loaded, "id", where=path).items()}
    return {
        key: value
        for key, value in files.by_name(path, REPLIES).items()
        if key not in ("query", "judge") and not isinstance(value, int | float)
    }


def _of_object(
    i: str, caption: Any, questions: list[files.Record], recorded: files.Record
) -> list[dict[str, Any]]:
    """Recognition first; where it fails no question can earn more than 0."""
    where = recorded.where
    if str(recorded.value("pred")).strip() != str(caption).strip():
        raise ValueError(
            f"{where}: the judge saw another caption than the predicted one; its replies are of an older run"
        )
    recognitions = recorded.records(RECOGNITION)
    if len(recognitions) != 1:
        raise ValueError(f"{where}: {len(recognitions)} replies about recognition, not one")
    picked, worth = _picked(recognitions[0])
    recognised = worth == "correct"
    samples = [{"object": i, "type": "recognition", "choice": picked, "recognised": recognised, "score": 0.0}]
    for kind, key in KINDS.items():
        details = recorded.records(key)
        if [q["choices"] for q in questions if q["type"] == kind] != [t.get("choices") for t in details]:
            raise ValueError(f"{where}: {key} are not about qa.json's questions")
        for number, reply in enumerate(details):
            picked, worth = _picked(reply)
            earned = 0.0 if picked is None else float(worth)
            sample = {"object": i, "type": kind, "question": number, "choice": picked}
            samples.append(sample | {"score": earned if recognised else min(0.0, earned)})
    return samples


def _picked(reply: files.Record) -> tuple[int | None, Any]:
    """Which of its options a judge's reply means, and what that is worth."""
    options = _choices(reply)
    picked = choice(reply.text("pred_answer"), [text for text, _ in options])
    return picked, None if picked is None else options[picked][1]


def choice(reply: str, options: Sequence[str]) -> int | None:
    """Which option a reply means, in the benchmark's order of rules: the text, `a. text` or the letter; the
    one text inside it; a leading `x.`; the text that comes last (the longest on a tie); the one option that
    holds the reply; None."""
    answer, texts = reply.strip().lower(), [option.lower() for option in options]
    for i, text in enumerate(texts):
        if answer in (text, f"{LETTERS[i]}. {text}", LETTERS[i], f"{LETTERS[i]}."):
            return i
    inside = [i for i, text in enumerate(texts) if text in answer]
    if len(inside) == 1:
        return inside[0]
    if len(answer) > 1 and answer[1] == "." and answer[0] in LETTERS[: len(texts)]:
        return LETTERS.index(answer[0])
    if inside:
        return max(inside, key=lambda i: (answer.rfind(texts[i]), len(texts[i])))
    around = [i for i, text in enumerate(texts) if answer and answer in text]
    return around[0] if len(around) == 1 else None


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, "annotations.json")
    truth = files.Record(files.load(path), str(path))
    pictures = files.pictures(folder, "images", "../images")
    images = {image["id"]: image for image in truth.records("images")}
    objects = files.by_id(truth.listed("annotations"), "id", where=path).items()
    for name, annotation in sorted(objects, key=lambda entry: str(entry[1]["image_id"])):
        image = images[annotation["image_id"]]
        region = annotation.mask("segmentation", (image["height"], image["width"]))
        request = Request(frames=(pictures / image["file_name"],), text=QUESTION, mask_prompts=(region,))
        yield Item(name=name, request=request, facts={"id": name})


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    return item.facts | {"caption": plain_caption(prediction.text), "text": prediction.text}


PROMPT = """\
Answer the multiple-choice question based on the text description of an object in an image. You need to follow these rules:
1. Do not output any reasoning. Do not perform correction. Please output exactly one answer from the choices for each question. \
Do not repeat the question.
2. There is no need for exact matching. Please choose the closest option based on the description.

The description is:
{caption}

From the description above, please answer the following question with one of the choices:
{question}
{choices}
"""
"""The benchmark's, as its recorded replies hold it."""
REPLY_TOKENS = 300


def ask_judge(inputs: Inputs, judge: Judge) -> dict[str, Any]:
    """Ask a call a question, recognition first, and return the replies as the public program writes them."""
    captions, questions, objects, _ = _read_inputs(inputs)
    path = files.named(inputs.truth, "class_names.json")
    names = files.Record(files.load(path), str(path))
    by_object = {i: [recognition(names.text(i)), *questions[i]] for i in objects if i in captions}
    requests = [request_of(str(captions[i]), question) for i in by_object for question in by_object[i]]
    replies = iter(judge.ask(requests, desc=f"dlc_bench, judged by {judge.name}"))
    judged: dict[str, Any] = {"judge": judge.name}
    for i, listed in by_object.items():
        answered = [question | {"pred_answer": next(replies)} for question in listed]
        judged[i] = {"pred": captions[i]}
        for kind, key in (KINDS | {"recognition": RECOGNITION}).items():
            judged[i][key] = [a for a in answered if a["type"] == kind]
    return judged


def recognition(name: str) -> dict[str, Any]:
    """Return the question whether the caption is of the right object; `name` is one of the benchmark's, whose
    plurals alone end in s."""
    article = "an" if name[0].lower() in "aeiou" else "a"
    claim = f"objects in the description are {name} or objects" if name.endswith("s") else (
        f"object in the description is {article} {name} or an object"
    )  # fmt: skip
    question = (
        f"Is it likely that the {claim} of a similar type? Again, It does not have to be an exact match."
    )
    return {"question": question, "choices": [["Yes", "correct"], ["No", "incorrect"]], "type": "recognition"}


def request_of(caption: str, question: dict[str, Any]) -> JudgeRequest:
    choices = "\n".join(
        f"{letter.upper()}. {text}" for letter, (text, _) in zip(LETTERS, question["choices"], strict=False)
    )
    text = PROMPT.format(caption=caption, question=question["question"], choices=choices)
    return JudgeRequest(user=text, max_tokens=REPLY_TOKENS)


SCORER = Scorer(
    score=score,
    data="folder with annotations.json, qa.json, class_names.json",
    options=frozenset({"replay", "predicted_only"}),
    sample_id=("object", "type", "question"),
    runner=Runner(items=items, record=record, needs=lambda truth, split: files.named(truth, "qa.json")),
    judging=Judging(replies=ask_judge, replay="--replay REPLIES.json"),
)
