"""DLC-Bench (describe-anything): captions of 100 objects, questions about each, a judge's recorded replies ->
positive, negative, average.

--predictions: {object id: caption}, or a line an object {"id", "caption"}. --data: folder with
annotations.json, qa.json, class_names.json, and `images` for running a model. --replay: {object id: {"pred",
"details_positives", "details_negatives", "details_recognition"}}, whose `pred_answer` are the judge's
replies; without it the judge of the settings is asked, a question a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner
from ans_core.benchmarks.public.scored import Inputs, Judge, JudgeRequest, Judging, Scored, Scorer
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.grounding import plain_caption
from ans_core.types import Prediction, Request

QUESTION = "<image>\nPlease give me a detailed description of the region in the picture marked by region1."
LETTERS = "abcdefghijklmnopqrstuvwxyz"
KINDS = {"positive": "details_positives", "negative": "details_negatives"}


def score(inputs: Inputs) -> Scored:
    assert inputs.data is not None
    if inputs.replay is None:
        raise ValueError("dlc_bench is scored by a judge: --replay with its recorded replies")
    replies = _objects(inputs.replay)
    captions, questions, objects, missing = _read_inputs(inputs)
    samples: list[dict[str, Any]] = []
    means: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for i in objects:
        object_samples = (
            _of_object(i, captions[i], questions[i], replies, inputs.replay) if i in captions else []
        )
        samples += object_samples
        for kind in KINDS:
            scores = [s["score"] for s in object_samples if s["type"] == kind]
            means[kind].append(sum(scores) / len(scores) if scores else 0.0)
    positive, negative = (sum(means[kind]) / len(means[kind]) for kind in KINDS)
    recognised = [s["recognised"] for s in samples if s["type"] == "recognition"]
    return Scored(
        metrics={
            "average": (positive + negative) / 2,
            "positive": positive,
            "negative": negative,
            "recognised": sum(recognised) / len(objects),
            "objects": len(objects),
            "questions": len(samples),
            "unparsed": sum(s["choice"] is None for s in samples),
        },
        published={
            "average": f"{(positive + negative) / 2:.3f}",
            "positive": f"{positive:.3f}",
            "negative": f"{negative:.3f}",
        },
        ratios={
            "positive": Ratio(numerators=means["positive"]),
            "negative": Ratio(numerators=means["negative"]),
            "average": Ratio(numerators=[(p + n) / 2 for p, n in zip(*means.values(), strict=True)]),
        },
        samples=samples,
        missing=missing,
        notes=[
            f"judge: {_judge(inputs.replay)}; another judge moves DLC-Bench by up to 9 points",
            "a reply without a choice counts 0",
        ],
    )


def _read_inputs(inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any], list[str], int]:
    """(captions, questions, the objects that count, how many of them have no caption)"""
    assert inputs.data is not None
    captions, questions = _objects(inputs.predictions), _questions(files.named(inputs.data, "qa.json"))
    path = files.named(inputs.data, "annotations.json")
    objects = list(
        files.by_id(files.listed(files.load(path), "annotations", where=str(path)), "id", where=str(path))
    )
    if unknown := [i for i in objects if i not in questions]:
        raise ValueError(f"{inputs.data}: qa.json has no questions about objects {files.shown(unknown)}")
    return captions, questions, *inputs.pair(captions, objects, what="objects")


def _questions(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Those of each object."""
    questions = files.load(path)
    if not isinstance(questions, dict):
        raise ValueError(f"{path}: not {{object id: [question]}}")
    for i in questions:
        for number, question in enumerate(files.listed(questions, i, where=str(path))):
            where = f"{path}, object {i}, question {number}"
            files.text(question, "type", where=where)
            for _, worth in _choices(question, where):
                if isinstance(worth, bool) or not isinstance(worth, int | float):
                    raise ValueError(f"{where}: a choice is worth {worth!r}, not a number")
    return questions


def _choices(question: Any, where: str) -> list[tuple[str, Any]]:
    """(text, what it is worth)"""
    listed = files.listed(question, "choices", where=where, of=list)
    if not listed or any(len(choice) != 2 or not isinstance(choice[0], str) for choice in listed):
        raise ValueError(f"{where}: choices are not [text, what it is worth]")
    return [(text, worth) for text, worth in listed]


def _judge(replay: Path) -> str:
    replies = files.load(replay)
    return str(replies["judge"]) if "judge" in replies else f"the one that wrote {replay.name}"


def _objects(path: Path) -> dict[str, Any]:
    """Without the prompt and the totals that the public programs put beside the objects."""
    loaded = files.load(path)
    if isinstance(loaded, list):
        return {
            name: files.value(line, "caption", where=str(path))
            for name, line in files.by_id(loaded, "id", where=str(path)).items()
        }
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: expected an object {{id: ...}}, found {type(loaded).__name__}")
    return {
        str(key): value
        for key, value in loaded.items()
        if key not in ("query", "judge") and not isinstance(value, int | float)
    }


def _of_object(
    i: str, caption: Any, questions: list[dict[str, Any]], replies: dict[str, Any], path: Path
) -> list[dict[str, Any]]:
    """Recognition first; where it fails no question can earn more than 0."""
    where = f"{path}, object {i}"
    if i not in replies:
        raise ValueError(f"{where}: no recorded reply; the judge must have seen every caption")
    recorded = replies[i]
    if str(files.value(recorded, "pred", where=where)).strip() != str(caption).strip():
        raise ValueError(
            f"{where}: the judge saw another caption than the predicted one; its replies are of an older run"
        )
    recognitions = files.listed(recorded, "details_recognition", where=where)
    if len(recognitions) != 1:
        raise ValueError(f"{where}: {len(recognitions)} replies about recognition, not one")
    options = _choices(recognitions[0], f"{where}, details_recognition")
    picked = choice(files.text(recognitions[0], "pred_answer", where=where), [text for text, _ in options])
    recognised = picked is not None and options[picked][1] == "correct"
    samples = [{"object": i, "type": "recognition", "choice": picked, "recognised": recognised, "score": 0.0}]
    for kind, key in KINDS.items():
        of_kind = [q for q in questions if q["type"] == kind]
        details = files.listed(recorded, key, where=where, of=dict)
        if [q["choices"] for q in of_kind] != [t.get("choices") for t in details]:
            raise ValueError(f"{where}: {key} are not about qa.json's questions")
        for number, (question, reply) in enumerate(zip(of_kind, details, strict=True)):
            picked = choice(
                files.text(reply, "pred_answer", where=f"{where}, {key} {number}"),
                [str(c[0]) for c in question["choices"]],
            )
            earned = 0.0 if picked is None else float(question["choices"][picked][1])
            samples.append(
                {
                    "object": i,
                    "type": kind,
                    "question": number,
                    "choice": picked,
                    "score": earned if recognised else min(0.0, earned),
                }
            )
    return samples


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
    truth = files.load(path)
    pictures = files.pictures(folder, "images", "../images")
    images = {image["id"]: image for image in files.value(truth, "images", where=str(path))}
    for annotation in sorted(
        files.value(truth, "annotations", where=str(path)), key=lambda a: str(a["image_id"])
    ):
        image, where = images[annotation["image_id"]], f"{path}, object {annotation['id']}"
        region = files.mask(
            annotation["segmentation"], height=image["height"], width=image["width"], where=where
        )
        request = Request(frames=(pictures / image["file_name"],), text=QUESTION, mask_prompts=(region,))
        yield Item(name=str(annotation["id"]), request=request, facts={"id": str(annotation["id"])})


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


def ask_judge(inputs: Inputs, judge: Judge, out: Path) -> Inputs:
    """Ask a call a question, recognition first, and write the replies as the public program does."""
    assert inputs.data is not None
    captions, questions, objects, _ = _read_inputs(inputs)
    names = files.load(files.named(inputs.data, "class_names.json"))
    by_object = {
        i: [recognition(files.text(names, i, where="class_names.json")), *questions[i]]
        for i in objects
        if i in captions
    }
    requests = [request_of(str(captions[i]), question) for i in by_object for question in by_object[i]]
    replies = iter(judge.ask(requests, desc=f"dlc_bench, judged by {judge.name}"))
    judged: dict[str, Any] = {"judge": judge.name}
    for i, listed in by_object.items():
        answered = [question | {"pred_answer": next(replies)} for question in listed]
        details = {
            key: [a for a in answered if a["type"] == kind]
            for kind, key in (KINDS | {"recognition": "details_recognition"}).items()
        }
        judged[i] = {"pred": captions[i], **details}
    out.write_text(json.dumps(judged, indent=1) + "\n", encoding="utf-8")
    return replace(inputs, replay=out)


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
    return JudgeRequest(system="", user=text, schema=None, max_tokens=REPLY_TOKENS)


SCORER = Scorer(
    score=score,
    data="folder with annotations.json, qa.json, class_names.json",
    options=frozenset({"replay", "predicted_only"}),
    sample_id=("object", "type", "question"),
    runner=Runner(items=items, record=record),
    judging=Judging(
        needed=lambda inputs: inputs.replay is None,
        ask=ask_judge,
        suffix=".json",
        replay="--replay REPLIES.json",
    ),
)
