"""Sets of questions and answers (conversation samples: ViRL39K, STAR, MathVista, LLaVA's form, your own) ->
questions whose answers a rule can check. Nobody knows which looks they need, so no trace is made of them:
`rft` and `agent_evaluate` ask them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import numpy as np

from ans_core.agent.world.question import Question
from ans_core.types import Frames, Sample

Of = TypeVar("Of")
PREFIX = "qa_"
"""Of the family that a set's questions are; its name follows."""
LONGEST_ANSWER = 80
"""Characters. Longer ones are descriptions, which no rule can check."""
MOST_FRAMES = 16
"""Of a clip, spread evenly: a minute at 24 frames a second would fill 500 MB."""


@dataclass(frozen=True, kw_only=True)
class QuestionedPicture:
    """A picture, several, or a clip, with the questions about them."""

    picture_id: str
    frames: Frames
    questions: tuple[Question, ...]


def is_question_set(family: str) -> bool:
    return family.startswith(PREFIX)


def askable(sample: Sample) -> bool:
    """Tell whether a sample is a question by itself, without earlier turns and regions, with an answer that
    can be checked."""
    return (
        sample.task == "conversation"
        and bool(sample.question)
        and not (sample.past or sample.masks)
        and 0 < len(sample.text.strip()) <= LONGEST_ANSWER
    )


def pictures(samples: Iterable[Sample], *, name: str) -> list[QuestionedPicture]:
    """Return the pictures of the data set `name` with their questions, in the order of the samples."""
    of_picture: dict[tuple[str, Frames], list[Sample]] = {}
    for sample in samples:
        if askable(sample):
            of_picture.setdefault((sample.image_id, sample.frames), []).append(sample)
    ids = Counter(picture_id for picture_id, _ in of_picture)
    family = PREFIX + quote(name, safe="")
    return [
        QuestionedPicture(
            # parts of a set may number their pictures alike
            picture_id=f"{picture_id}/{number}" if ids[picture_id] > 1 else picture_id,
            frames=group[0].frames if group[0].stills else spread(group[0].frames),
            questions=tuple(_question(sample, family) for sample in group),
        )
        for number, ((picture_id, _), group) in enumerate(of_picture.items())
    ]


def spread(frames: Sequence[Of]) -> tuple[Of, ...]:
    """Return MOST_FRAMES of a clip's frames, or of their numbers, evenly spread; all, if there are fewer."""
    if len(frames) <= MOST_FRAMES:
        return tuple(frames)
    return tuple(frames[int(place)] for place in np.linspace(0, len(frames) - 1, MOST_FRAMES))


def _question(sample: Sample, family: str) -> Question:
    """Return the question with its choices, where the set has some apart from it, and without its picture."""
    choices = tuple(str(choice) for choice in sample.meta.get("choices", ()))
    text = (sample.question or "").replace("<image>", "").strip()
    if choices:
        letters = (f"({chr(ord('A') + i)}) {choice}" for i, choice in enumerate(choices))
        text = "\n".join([text, *letters])
    return Question(
        question_id=f"{family}/{quote(sample.sample_id, safe='')}",
        family=family,
        text=text,
        answer=sample.text.strip(),
        choices=choices,
        plan_known=False,
        stills=sample.stills,
    )
