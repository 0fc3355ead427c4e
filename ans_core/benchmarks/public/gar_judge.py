"""GAR-Bench's captions, their pictures and regions -> a judge's True or False about each.

As in the benchmark the judge is shown the picture, and every region cut out with its mask. What it is asked
is said in other words than the benchmark's: the figures carry a note.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from PIL import Image

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Judge, JudgeRequest
from ans_core.pictures import media, rle, transforms

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


def ask(
    records: list[files.Record], judge: Judge, *, questions: Path, predictions: Path
) -> list[dict[str, Any]]:
    """Return the records with `eval_result`."""
    truth = files.by_id(files.records(questions), "image", where=questions)
    answers = files.by_id(records, "image", where=predictions)
    files.refuse_unknown(answers, truth, where=predictions, what="questions")
    requests = [_request(record, truth[name], questions.parent / name) for name, record in answers.items()]
    replies = judge.ask(requests, desc=f"gar_bench, judged by {judge.name}")
    whose = f"{judge.name}, asked in other words than the benchmark's"
    return [
        record | {"eval_result": reply.strip(), "judge": whose}
        for record, reply in zip(records, replies, strict=True)
    ]


def _request(record: files.Record, question: files.Record, picture: Path) -> JudgeRequest:
    detailed = "predicate_name" in question
    keys = ("subject_name", "object_name", "predicate_name") if detailed else ("question", "answer")
    fields = {key: question.text(key) for key in keys} | {"model_output": record.text("model_output")}
    image = transforms.open_image(transforms.stored_pixels(picture))  # as the masks and the model had it
    parts: list[str | bytes] = ["The picture:", media.png_as_is(image)]
    for number, annotation in enumerate(question.listed("mask_rles")):
        mask = rle.decode(files.mask(annotation, (image.height, image.width), where=question.where))
        around = surroundings(mask)
        parts += [
            f"<Prompt{number}>:",
            media.png_as_is(Image.fromarray(np.asarray(image.convert("RGB"))[around])),
            f"The mask of <Prompt{number}>:",
            media.png_as_is(Image.fromarray(mask[around])),
        ]
    parts.append((DETAILED if detailed else SIMPLE).format(**fields))
    return JudgeRequest(user=tuple(parts), max_tokens=REPLY_TOKENS)


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
