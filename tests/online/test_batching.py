from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ans_core.online.batching import Batching
from ans_core.online.engine import Query, Reply


class Answers:
    """Answers with the question; of `bad` no picture can be read."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, queries: Sequence[Query]) -> list[Reply]:
        self.asked.append([query.question for query in queries])
        if "bad" in self.asked[-1]:
            raise ValueError("the picture is cut")
        return [
            Reply(answer=query.question, version=0, confidence=None, experience=None) for query in queries
        ]


def query(question: str) -> Query:
    return Query(request=question, question=question, frames=())


def ask_at_once(batching: Batching, questions: Sequence[str]) -> list[str | None]:
    """Return the answers, or what was raised."""

    def ask(question: str) -> str | None:
        try:
            return batching.ask(query(question)).answer
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(ask, questions))


def test_those_who_wait_are_answered_together_each_with_its_own_answer() -> None:
    answers, questions = Answers(), [f"number {i}" for i in range(8)]
    # without the others, each would wait for an hour
    assert ask_at_once(Batching(answers, size=4, wait_s=3600), questions) == questions
    assert [len(batch) for batch in answers.asked] == [4, 4]
    assert sorted(question for batch in answers.asked for question in batch) == questions


def test_a_fault_is_told_to_who_asked_for_it_alone() -> None:
    answers, questions = Answers(), ["number 0", "bad", "number 2"]
    found = ask_at_once(Batching(answers, size=3, wait_s=3600), questions)
    assert found == ["number 0", "the picture is cut", "number 2"]
    assert [len(batch) for batch in answers.asked] == [3, 1, 1, 1]


def test_who_is_alone_waits_no_longer_than_told() -> None:
    answers = Answers()
    batching = Batching(answers, size=4, wait_s=0.0)
    assert batching.ask(query("alone")).answer == "alone"
    with pytest.raises(ValueError, match="cut"):
        batching.ask(query("bad"))
    assert batching.ask(query("the next")).answer == "the next"
    assert answers.asked == [["alone"], ["bad"], ["the next"]]
