"""Turn the samples of one image into a conversation: questions, answers, masks to draw and masks shown in questions."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from ans_core import prompts, rle
from ans_core.types import RLE, Masklet, Sample

BOX_STEP = 50
"""Box coordinates of tiny bases are rounded to this many thousandths of the image: few enough numbers to learn from few scenes."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question and its answer about the images of a row."""

    question: str
    """Without image tokens; it names regions region1, region2, ..."""
    answer: str
    past: tuple[tuple[str, str], ...] = ()
    """Questions and answers before this one; learned too. `regions` are shown before the first question, and `[SEG]` is in no answer."""
    masks: tuple[Masklet, ...] = ()
    """One per `[SEG]` of the answer."""
    regions: tuple[RLE, ...] = ()
    """Visual prompts, on the first frame."""
    target: RLE | None = None
    """The object that the question is about, in the first frame: pre-training teaches a tiny base to look there before it answers. Empty =
    nothing there fits."""


def turn(sample: Sample, rng: random.Random) -> Turn:
    """Return the Sa2VA family's conversation for a sample, in a template drawn by `rng`."""
    match sample.task:
        case "referring":
            return referring_turn(sample, rng)
        case "region_caption":
            regions = regions_of(sample)
            asked = rng.choice(prompts.DETAILED_REGION_QUESTIONS if sample.detail else prompts.REGION_QUESTIONS)
            question = prompts.region_question(len(regions), asked)
            return Turn(question=question, answer=sentence(sample.text), regions=regions)
        case "grounded_caption":
            question = rng.choice(prompts.DETAILED_GROUNDED_QUESTIONS if sample.detail else prompts.GROUNDED_QUESTIONS)
            return Turn(question=question, answer=sentence(prompts.interleave(sample.text, sample.phrases)), masks=sample.masks)
        case "conversation":
            assert sample.question is not None, f"{sample.sample_id}: a conversation without a question"
            past = tuple((prompts.plain_question(question), answer) for question, answer in sample.past)
            return Turn(question=prompts.plain_question(sample.question), answer=sample.text, past=past, regions=regions_of(sample))
        case "tracking" | "phrase":
            raise ValueError(f"{sample.dataset}/{sample.sample_id}: half of a pair; `Mixture` leaves such samples out")


def referring_turn(sample: Sample, rng: random.Random) -> Turn:
    """Ask for objects; one `[SEG]` draws all of them."""
    if len(sample.frames) > 1:
        question = prompts.referring_question(sample.text, prompts.VIDEO_QUESTION)
        if sample.detail:
            question = prompts.DESCRIBED_QUESTION.format(text=sample.text)
    else:
        question = prompts.referring_question(sample.text, rng.choice(prompts.REFERRING_QUESTIONS))
    if not sample.masks:
        return Turn(question=question, answer=prompts.NO_TARGET_ANSWER)
    return Turn(question=question, answer=rng.choice(prompts.REFERRING_ANSWERS), masks=(union(sample.masks),))


def pretraining_turn(sample: Sample, rng: random.Random) -> Turn:
    """Return what a tiny base learns before `[SEG]` exists: captions of pictures and regions, boxes of expressions (InternVL's format)."""
    match sample.task:
        case "grounded_caption":
            return Turn(question=prompts.CAPTION_QUESTION, answer=sentence(sample.text))
        case "region_caption":
            region = _first(sample.masks[0])
            return Turn(question=prompts.SHORT_REGION_QUESTION, answer=sentence(sample.text), regions=(region,), target=region)
        case "referring":
            target = rle.union([_first(m) for m in sample.masks]) if sample.masks else rle.empty(sample.height, sample.width)
            if rng.random() < 0.5:
                question, answer = prompts.PLACE_QUESTION, sentence(place(target)) if sample.masks else prompts.NO_TARGET_ANSWER
            else:
                question, answer = prompts.BOX_QUESTION, box(target) if sample.masks else prompts.NO_TARGET_ANSWER
            return Turn(question=question.format(text=sample.text), answer=answer, target=target)
        case "conversation" | "tracking" | "phrase":
            return turn(sample, rng)


def regions_of(sample: Sample) -> tuple[RLE, ...]:
    """Return the visual prompts of a sample, on the first frame: region1, region2, ..."""
    return tuple(_first(masklet) for masklet in sample.masks)


def sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else text + "."


def union(masks: tuple[Masklet, ...]) -> Masklet:
    """Merge all objects into one masklet; a frame without annotation of any object stays None."""
    merged = []
    for frame in zip(*masks, strict=True):
        known = [m for m in frame if m is not None]
        merged.append(rle.union(known) if known else None)
    return tuple(merged)


def box(mask: RLE) -> str:
    return prompts.box_text(*rle.box(mask), step=BOX_STEP)


def place(mask: RLE) -> str:
    """Name the ninth of the picture that holds the mask's centre of gravity."""
    rows, columns = np.nonzero(rle.decode(mask))
    height, width = mask["size"]
    row = min(2, int(3 * (rows.mean() + 0.5) / height))
    column = min(2, int(3 * (columns.mean() + 0.5) / width))
    if row == 1:
        return ("on the left", "in the middle", "on the right")[column]
    return f"at the {('top', '', 'bottom')[row]} {('left', '', 'right')[column]}".strip()


def _first(masklet: Masklet) -> RLE:
    assert masklet[0] is not None, "a visual prompt needs its mask in the first frame"
    return masklet[0]
