"""Drawn questions -> a stream of experiences whose pictures are shifted on purpose, and questions to measure
on, shifted and not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from PIL import Image, ImageFilter

from ans_core.agent.workspace import Workspace
from ans_core.agent.world import FAMILIES, Question, draw_question
from ans_core.config.online import Shift
from ans_core.dist import rng_of, seed_of
from ans_core.online.practice import Confirm, Lesson, Relabel
from ans_core.online.store import Task
from ans_core.online.voting import Decision
from ans_core.pictures import media, transforms

GREY = 127.5
STREAM_FROM, CANARY_FROM, REPLAY_FROM = 2_000_000, 3_000_000, 4_000_000
"""Indices of the first questions: no other stage comes so far."""


def shifted(frame: bytes, shift: Shift, *, seed: int) -> bytes:
    """Return the shifted picture as PNG, decided by the arguments."""
    picture = transforms.open_image(frame)
    if shift.blur:
        picture = picture.filter(ImageFilter.GaussianBlur(shift.blur))
    pixels = GREY + shift.contrast * (np.asarray(picture, np.float64) - GREY)
    pixels += np.random.default_rng(seed).normal(0, shift.noise, pixels.shape)
    return media.png(Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8)))


class QuestionStream:
    """Questions of some families in turn, from an index of a split on; decided by (seed, number) alone."""

    def __init__(
        self,
        families: Sequence[str],
        *,
        split: str,
        seed: int,
        tile: int,
        first: int,
        shift: Shift | None = None,
    ) -> None:
        self.families, self.split, self.seed, self.tile, self.first, self.shift = (
            families,
            split,
            seed,
            tile,
            first,
            shift,
        )
        self.named = lru_cache(maxsize=512)(self._named)

    def number(self, number: int) -> Question:
        index, family = divmod(number, len(self.families))
        return self.named(f"{self.families[family]}/{self.split}/{self.first + index}")

    def _named(self, question_id: str) -> Question:
        family, split, index = question_id.split("/")
        question = draw_question(family, seed=self.seed, split=split, index=int(index), tile=self.tile)
        if self.shift is None:
            return question
        frames = tuple(
            shifted(frame, self.shift, seed=seed_of("shift", question_id, i))
            for i, frame in enumerate(question.frames)
        )
        return replace(question, frames=frames)


def wrong_on(confirm: Confirm, share: float, *, seed: int) -> Confirm:
    """Return a verifier that confirms another answer of the family on this share of the questions."""

    def confirm_wrongly(lesson: Lesson, looked: Workspace | None) -> str | None:
        right = confirm(lesson, looked)
        rng = rng_of(seed, "wrong verifier", lesson.name)
        others = [answer for answer in _choices(lesson.form) if answer != right]
        return rng.choice(others) if others and right is not None and rng.random() < share else right

    return confirm_wrongly


def poisoning(share: float, *, seed: int) -> Relabel:
    """Return what replaces this share of the labels by one answer, the first of the form's."""

    def relabel(task: Task, decision: Decision) -> Decision:
        hit = rng_of(seed, "poison", task.experience).random() < share
        return decision.with_label(_choices(task.form)[0]) if hit else decision

    return relabel


@lru_cache(maxsize=16)
def _choices(family: str) -> tuple[str, ...]:
    """Return a family's answers; of those with too many, some that are drawn."""
    if family not in FAMILIES:
        return ()
    questions = [draw_question(family, seed=0, split="train", index=index) for index in range(4)]
    return questions[0].choices or tuple(question.answer for question in questions)
