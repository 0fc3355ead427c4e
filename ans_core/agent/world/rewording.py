"""The thoughts of questions about pictures, which templates made -> the same in other words, by the language
model that the section `judge` names. It sees no picture, so a sentence that says more than the template did is
not taken.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ans_core.agent.world.question import Question
from ans_core.agent.world.things import words_of
from ans_core.judge.parse import json_value
from ans_core.judge.wording import Request

if TYPE_CHECKING:
    from ans_core.judge.endpoint import EndpointJudge

CHUNK_DEADLINE_S = 1800.0
"""No training step waits for this, so slow endpoints may take their time."""
TOKENS = 400
LONGER = 40
"""Characters that a sentence may have more than its template: a turn's tokens are limited."""
CHUNK = 256
"""Questions that are asked about at a time."""
SYSTEM = """\
Somebody looks at a picture step by step to answer a question, and thinks a sentence before each step. Say each sentence in other words, \
as different people would, in the first person, as short as it is. Keep the names of things (after "the", "a" or "an") as they stand. Add \
nothing: no answer, no colour, place, size or number that is not there. Reply with a JSON object {"sentences": [...]}, as many as you are \
given, in the same order."""
SCHEMA = {
    "type": "object",
    "properties": {"sentences": {"type": "array", "items": {"type": "string"}}},
    "required": ["sentences"],
    "additionalProperties": False,
}


def reworded(judge: EndpointJudge, questions: Sequence[Question]) -> list[Question]:
    """Return the questions with other thoughts, where the reply can be taken; the others keep theirs. Raises
    RuntimeError where the endpoint answers nothing; what it did answer before is in the judge's cache."""
    results: list[Question] = []
    accepted = 0
    for start in range(0, len(questions), CHUNK):
        chunk = questions[start : start + CHUNK]
        thinking = [question for question in chunk if question.thoughts]
        replies = judge.results([request(question) for question in thinking], read_sentences).result()
        stats = judge.stats()
        if stats["failed"] and not stats["parse_failed"] and not any(replies):
            raise RuntimeError(
                f"the judge's endpoint reworded none of {len(thinking)} questions; the log file says why. Run "
                "again to go on from here"
            )
        other = {
            question.question_id: replace(question, thoughts=tuple(sentences))
            for question, sentences in zip(thinking, replies, strict=True)
            if sentences and may_stand(sentences, question)
        }
        accepted += len(other)
        results += [other.get(question.question_id, question) for question in chunk]
    logging.info("the thoughts of %d of %d questions are reworded", accepted, len(questions))
    return results


def request(question: Question) -> Request:
    sentences = json.dumps(question.thoughts, ensure_ascii=False)
    return Request(
        system=SYSTEM,
        user=f"Question: {json.dumps(question.text, ensure_ascii=False)}\nSentences: {sentences}",
        schema=SCHEMA,
        max_tokens=TOKENS,
        temperature=1,
    )


def read_sentences(reply: str) -> list[str] | None:
    value = json_value(reply)
    sentences = value.get("sentences") if isinstance(value, dict) else value
    if not isinstance(sentences, list) or not all(isinstance(one, str) for one in sentences):
        return None
    return [" ".join(one.split()) for one in sentences]


def may_stand(sentences: Sequence[str], question: Question) -> bool:
    """Tell whether sentences can take the thoughts' place: each has the names that its template has, no word
    of the answer, no number and no mark-up that it has not, and is hardly longer."""
    if len(sentences) != len(question.thoughts):
        return False
    names = {target.phrase.removeprefix("the ").lower() for target in question.targets}
    for new, old in zip(sentences, question.thoughts, strict=True):
        added = set(words_of(new)) - set(words_of(old))
        if (
            not new
            or len(new) > len(old) + LONGER
            or re.search(r"[<>{}\[\]]|\d", new)
            or not added.isdisjoint(words_of(question.answer))
            or any(name in old.lower() and name not in new.lower() for name in names)
        ):
            return False
    return True
