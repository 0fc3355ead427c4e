"""GAR-Bench's captions, their pictures and regions -> a judge's True or False about each.

As in the benchmark the judge is shown the picture, and every region cut out with its mask. What it is asked
is said in other words than the benchmark's: the figures carry a note.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from PIL import Image

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Inputs, Judge, JudgeRequest
from ans_core.pictures import rle, transforms

SIMPLE = """\
Above are a picture and some of its regions. A model was asked about the regions; <Prompt0>, <Prompt1>, ... are their names.
Question: {question}
Right answer: {answer}
The model's answer: {model_output}
Is the model's answer right: does it say the same of the same regions, in whatever words? Reply with one word, True or False."""
DETAILED = """\
Above are a picture and some of its regions. A model described <Prompt0>, {subject_name}, and was to tell how it is related to \
{object_name}: {predicate_name}.
The model's description: {model_output}
Reply True if the description names {subject_name} and also says, in whatever words, a relation to {object_name} like \
"{predicate_name}"; otherwise False. Reply with one word, True or False."""
SMALLEST = 56
"""Sides of a region's box in pixels, at least."""
REPLY_TOKENS = 1000


def ask(inputs: Inputs, judge: Judge, out: Path, *, records: list[dict[str, Any]], questions: Path) -> Inputs:
    """Write the records with `eval_result`, and return them as the predictions."""
    truth = files.by_id(files.records(questions), "image", where=str(questions))
    answers = files.by_id(records, "image", where=str(inputs.predictions))
    files.refuse_unknown(answers, truth, where=inputs.predictions, what="questions")
    requests = [
        _request(record, truth[name], questions.parent / name, f"{inputs.predictions}, {name}")
        for name, record in answers.items()
    ]
    replies = judge.ask(requests, desc=f"gar_bench, judged by {judge.name}")
    whose = f"{judge.name}, asked in other words than the benchmark's"
    judged = [
        record | {"eval_result": reply.strip(), "judge": whose}
        for record, reply in zip(records, replies, strict=True)
    ]
    out.write_text(json.dumps(judged, indent=1) + "\n", encoding="utf-8")
    return replace(inputs, predictions=out)


def _request(record: dict[str, Any], question: dict[str, Any], picture: Path, where: str) -> JudgeRequest:
    fields = {"model_output": files.text(record, "model_output", where=where)}
    words = DETAILED if "predicate_name" in question else SIMPLE
    keys = (
        ("subject_name", "object_name", "predicate_name")
        if "predicate_name" in question
        else ("question", "answer")
    )
    image = transforms.open_image(transforms.stored_pixels(picture))  # as the masks and the model had it
    parts: list[str | bytes] = ["The picture:", _png(image)]
    for number, coded in enumerate(files.value(question, "mask_rles", where=where)):
        mask = rle.decode(files.mask(coded, height=image.height, width=image.width, where=where))
        around = surroundings(mask)
        cut = np.asarray(image.convert("RGB"))[around], mask[around]
        parts += [
            f"<Prompt{number}>:",
            _png(Image.fromarray(cut[0])),
            f"The mask of <Prompt{number}>:",
            _png(Image.fromarray(cut[1])),
        ]
    parts.append(words.format(**fields, **{key: files.text(question, key, where=where) for key in keys}))
    return JudgeRequest(system="", user=tuple(parts), schema=None, max_tokens=REPLY_TOKENS)


def surroundings(mask: Bool[np.ndarray, "H W"]) -> tuple[slice, slice]:
    """Return the mask's box, three times as high and wide, within the picture."""
    spans = []
    for axis, size in enumerate(mask.shape):
        inside = np.flatnonzero(mask.any(axis=1 - axis))
        first, length = int(inside[0]), int(inside[-1]) + 1 - int(inside[0])
        grown = max(length, SMALLEST)
        start = int(first + length / 2 - grown / 2)
        spans.append(slice(max(start - grown, 0), min(start + 2 * grown, size)))
    return spans[0], spans[1]


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
