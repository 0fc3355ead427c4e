"""Conversations as LLaVA writes them, [{"from": "human", "value": ...}, {"from": "gpt", ...}] -> questions
and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from ans_core.data.formats import checks
from ans_core.data.formats.media import Media
from ans_core.types import Sample


class Turn(checks.Record):
    speaker: Literal["human", "gpt"] = Field(alias="from")
    value: str


def exchanges(turns: Sequence[Turn], *, pictures: int = 1) -> tuple[tuple[str, str], ...]:
    """Return (question, answer) pairs. As upstream reads them: an answer before the first question is
    skipped, questions in a row are one, a last question without answer is dropped; `<image>` (of several
    pictures: see `prompts.name_pictures`) and control characters are taken out.

    Raises Unusable if no pair is left, or where a question or an answer is empty or holds a token that stands
    for pixels.
    """
    pairs: list[tuple[str, str]] = []
    questions: list[str] = []
    texts = checks.named_pictures([turn.value for turn in turns], pictures)
    for turn, text in zip(turns, texts, strict=True):
        words = checks.CONTROL.sub("", text)
        if turn.speaker == "human":
            questions.append(words)
        elif questions:
            pairs.append(("\n".join(questions), words))
            questions = []
        elif pairs:
            raise checks.Unusable("two answers in a row")
    if not pairs:
        raise checks.Unusable("no question with an answer")
    for text in (text for pair in pairs for text in pair):
        if not checks.visible(text):
            raise checks.Unusable("an empty question or answer")
        if any(token in text for token in checks.RESERVED):
            raise checks.Unusable(f"a text with one of the tokens {', '.join(checks.RESERVED)}")
    return tuple(pairs)


def conversation(pairs: Sequence[tuple[str, str]], media: Media, **fields: Any) -> Sample:
    """Make a sample of (question, answer) pairs, at least one: the last is what the sample asks."""
    *past, (question, answer) = pairs
    return media.sample(task="conversation", question=question, text=answer, past=tuple(past), **fields)
