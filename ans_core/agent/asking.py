"""What a user asks -> the same, fit for a request; or the reason why it can't be asked, before any work."""

from __future__ import annotations

from collections.abc import Mapping

from ans_core.agent import protocol, tokens
from ans_core.agent.operations import Operation

LONGEST = 4000
"""Characters of a question."""


def checked(text: str) -> str:
    """Return a user's question without the space around it. Raises ValueError for one that can't be asked."""
    question = text.strip()
    if not question:
        raise ValueError("the question is empty; ask something, such as: What is written on the door?")
    if len(question) > LONGEST:
        raise ValueError(f"the question has {len(question)} characters; at most {LONGEST} are read")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the question is no text: character {error.start + 1} is half of one, or a byte that is not "
            "UTF-8"
        ) from None
    if protocol.IMAGE in question:
        raise ValueError(
            f"the question holds {protocol.IMAGE}; leave it out, the agent sees the picture before the "
            "question"
        )
    return question


def first_turn(question: str, operations: Mapping[str, Operation] | None = None, *, pictures: int = 1) -> str:
    """Return the first turn with a user's question, in which nothing passes for a token of the template. A
    question of the drawn world holds none and stays as it is."""
    return tokens.first_question(protocol.without_tokens(question), operations, pictures=pictures)
