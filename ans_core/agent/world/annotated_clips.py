"""Annotated clips (data sets whose samples have words and the masks of one thing) -> questions about what
happens to it, whose answers are right by construction. Only the first frame is shown; the shortest plan marks
the thing there and follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from urllib.parse import quote

import numpy as np

from ans_core.agent.episode import Observation
from ans_core.agent.operations.track_object import describe, large_enough, way
from ans_core.agent.protocol import Call
from ans_core.agent.world.annotated import CLEARLY, FAMILIES_OF_PHOTOGRAPHS, PLACES, STEPS
from ans_core.agent.world.drawing import segment
from ans_core.agent.world.question import Question, Target
from ans_core.agent.world.question_sets import QuestionedPicture, spread
from ans_core.agent.world.things import (
    LONGEST_NAME,
    distinct,
    name_of,
    name_of_file,
    stems,
    thing_of,
    words_of,
)
from ans_core.data.clips import DIRECTIONS
from ans_core.dist import rng_of
from ans_core.pictures import rle
from ans_core.types import RLE, Frames, Sample

WHICH_WAY, STILL_THERE = FAMILIES_OF_CLIPS = ("which_way", "still_there")
FAMILIES_OF_PICTURES = (*FAMILIES_OF_PHOTOGRAPHS, *FAMILIES_OF_CLIPS)
FOLLOW = Call(name="track_object", arguments={"mask": "mask_1"})
LEAST_WAY = 0.12
"""Of the picture's longer side, between the first and the last frame."""
STAYS = 0.25
"""Share of its area in the first frame that a thing has in the last one, to be there still."""
FEWEST_FRAMES = 4
TELLING = PLACES | stems(
    "up upward down downward away toward across cross north south east west leave disappear vanish exit out off "
    "gone enter pass stay remain still stationary rise rising fall climb sink drop descend ascend"
)
"""Words in a thing's name, without their endings, that may tell what happens to it: the dog running away."""


def askable(sample: Sample) -> bool:
    """Tell whether a sample names one thing of a clip, in words that a question can hold."""
    name = name_of(sample.text or "")
    return (
        sample.task == "referring"
        and len(sample.frames) > 1
        and not sample.stills
        and len(sample.masks) == 1
        and not sample.meta.get("joined")
        and 0 < len(name) <= LONGEST_NAME
    )


def clips(samples: Iterable[Sample], *, name: str, seed: int) -> list[QuestionedPicture]:
    """Return the clips of the data set `name` with their questions, in the order of the samples. A thing is
    asked about that its words mean alone, without telling the answer, and that is clear and whole in the first
    frame. Of things that stay in the picture as many are asked about as leave it, by `seed`."""
    of_clip: dict[tuple[str, Frames], list[Sample]] = {}
    for sample in samples:
        if askable(sample):
            of_clip.setdefault((sample.image_id, sample.frames), []).append(sample)
    asked = [
        _clip(frames, group, f"{quote(name, safe='')}/{name_of_file(quote(clip_id, safe=''))}-{number}")
        for number, ((clip_id, frames), group) in enumerate(of_clip.items())
    ]
    of_end = [q for clip in asked for q in clip.questions if q.family == STILL_THERE]
    stay = [q.question_id for q in of_end if q.answer == "yes"]
    as_many = min(len(stay), len(of_end) - len(stay))
    left_out = set(stay) - set(rng_of(seed, "things that stay", name).sample(stay, as_many))
    balanced = (
        replace(clip, questions=tuple(q for q in clip.questions if q.question_id not in left_out))
        for clip in asked
    )
    return [clip for clip in balanced if clip.questions]


def _clip(frames: Frames, group: Sequence[Sample], clip_id: str) -> QuestionedPicture:
    """Return a clip of the frames that are annotated for all things asked about, with all questions."""
    names = Counter(name_of(sample.text or "") for sample in group)
    asked = []
    for sample in group:
        own = name_of(sample.text or "")
        # a teddy bear may be called a bear
        longer = any(set(words_of(own)) < set(words_of(name)) for name in names)
        if TELLING.isdisjoint(stems(own)) and not longer:
            asked.append(sample)
    annotated = [frame for frame in range(len(frames)) if all(s.masks[0][frame] is not None for s in asked)]
    shown = spread(annotated)
    things = []
    for sample in asked if len(shown) >= FEWEST_FRAMES else ():
        masks = tuple(mask for frame in shown if (mask := sample.masks[0][frame]) is not None)
        thing = thing_of(sample, masks[0])
        if names[thing.name] == 1 and thing.clear and not thing.cut:
            things.append((thing, masks))
    questions = []
    for number, (thing, masks) in enumerate(things):
        others = [other for other, _ in things if distinct(other, thing)]
        distraction = [segment(other.mask, steps=STEPS) for other in others[:1]]
        for family, text, answer, choices in _drafts(thing.phrase, masks):
            questions.append(
                Question(
                    question_id=f"{family}/{clip_id}/{number}",
                    family=family,
                    text=text,
                    answer=answer,
                    choices=choices,
                    targets=(Target(phrase=thing.phrase, masks=masks),),
                    plan=(segment(thing.mask, steps=STEPS), FOLLOW),
                    look="track",
                    distraction=tuple(distraction),
                    thoughts=(f"I mark {thing.phrase}.", f"That is {thing.phrase}; I follow it."),
                )
            )
    return QuestionedPicture(
        picture_id=clip_id, frames=tuple(frames[f] for f in shown), questions=tuple(questions)
    )


def _drafts(phrase: str, masks: Sequence[RLE]) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Yield family, text, answer and choices of what can be asked without ambiguity."""
    areas = np.array([rle.area(mask) for mask in masks])
    if large_enough(areas).all():
        ends = np.stack([rle.decode(masks[0]), rle.decode(masks[-1])])
        small, large = sorted(map(abs, way(ends)))
        if large >= max(LEAST_WAY * max(ends.shape[1:]), CLEARLY * small):
            text = f"Which way does {phrase} move in the picture, left, right, up or down?"
            yield WHICH_WAY, text, describe(ends)["direction"], tuple(DIRECTIONS)
    if areas[-1] == 0 or areas[-1] >= STAYS * areas[0]:
        text = f"Is {phrase} still in the picture at the end of the clip?"
        yield STILL_THERE, text, "yes" if areas[-1] else "no", ("yes", "no")


def still_there(question: Question, observations: Sequence[Observation]) -> str | None:
    """Return what a track says."""
    left = observations[-1].values.get("left") if observations else None
    return None if left is None else "no" if left else "yes"
