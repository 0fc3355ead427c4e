"""Turn the samples of one image into a conversation: questions, answers, masks to draw and masks shown in
questions."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ans_core import prompts
from ans_core.pictures import rle
from ans_core.types import RLE, Masklet, Sample

BOX_STEP = 50
"""Box coordinates of tiny bases are rounded to this many thousandths of the image: few enough numbers to
learn from few scenes."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question and its answer about the images of a row."""

    question: str
    """Without image tokens; it names regions region1, region2, ..."""
    answer: str
    past: tuple[tuple[str, str], ...] = ()
    """Questions and answers before this one; learned too. `regions` are shown before the first question, and
    `[SEG]` is in no answer."""
    masks: tuple[Masklet, ...] = ()
    """One per `[SEG]` of the answer."""
    regions: tuple[RLE, ...] = ()
    """Visual prompts, on the first frame."""
    targets: tuple[RLE, ...] = ()
    """What the question or its answer is about, in the first frame: pre-training teaches a tiny base to look
    there. One per `<box>` of the answer, the region that it describes, or, where nothing fits the question,
    an empty mask."""


def turn(sample: Sample, rng: random.Random) -> Turn:
    """Return the Sa2VA family's conversation for a sample, in a template drawn by `rng`."""
    match sample.task:
        case "referring":
            return referring_turn(sample, rng)
        case "region_caption":
            regions = regions_of(sample)
            template = rng.choice(
                prompts.DETAILED_REGION_QUESTIONS if sample.detail else prompts.REGION_QUESTIONS
            )
            question = prompts.region_question(len(regions), template)
            return Turn(question=question, answer=sentence(sample.text), regions=regions)
        case "grounded_caption":
            question = rng.choice(
                prompts.DETAILED_GROUNDED_QUESTIONS if sample.detail else prompts.GROUNDED_QUESTIONS
            )
            return Turn(
                question=question,
                answer=sentence(prompts.interleave(sample.text, sample.phrases)),
                masks=sample.masks,
            )
        case "conversation":
            assert sample.question is not None, f"{sample.sample_id}: a conversation without a question"
            past = tuple((prompts.plain_question(question), answer) for question, answer in sample.past)
            return Turn(
                question=prompts.plain_question(sample.question),
                answer=sample.text,
                past=past,
                regions=regions_of(sample),
            )
        case "tracking" | "phrase":
            raise ValueError(
                f"{sample.dataset}/{sample.sample_id}: half of a pair; `Mixture` leaves such samples out"
            )


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
    """Return what a tiny base learns before `[SEG]` exists: SFT's questions and answers, with a box
    (InternVL's format) in place of each mask. Half of the captions of pictures are plain, without boxes."""
    if sample.task == "grounded_caption" and rng.random() < 0.5:
        return Turn(question=prompts.CAPTION_QUESTION, answer=sentence(sample.text))
    made = turn(sample, rng)
    match sample.task:
        case "region_caption":
            return replace(made, targets=made.regions[:1])
        case "referring" | "grounded_caption":
            targets, answer = tuple(_first(masklet) for masklet in made.masks), made.answer
            for target in targets:
                answer = answer.replace(prompts.SEG, box(target), 1)
            if sample.task == "referring" and not targets:
                targets = (rle.empty(sample.height, sample.width),)
            return replace(made, answer=answer, masks=(), targets=targets)
        case _:
            return made


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
        annotated = [m for m in frame if m is not None]
        merged.append(rle.union(annotated) if annotated else None)
    return tuple(merged)


def box(mask: RLE) -> str:
    return prompts.box_text(*rle.box(mask), step=BOX_STEP)


def _first(masklet: Masklet) -> RLE:
    assert masklet[0] is not None, "a visual prompt needs its mask in the first frame"
    return masklet[0]
