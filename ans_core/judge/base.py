"""The interface of every judge, and the self-check that drafted questions must pass before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar, runtime_checkable

from ans_core.judge.questions import Questions

CaptionQuestions = Sequence[tuple[str, Questions]]
"""(caption, the questions of its true caption)."""
Choice = tuple[int, ...]
"""The chosen option of each question."""
T = TypeVar("T")
STATS = ("calls", "cached", "failed", "parse_failed", "tokens_in", "tokens_out", "cost", "latency_s")


@runtime_checkable
class Judge(Protocol):
    """Results come as futures in the order asked, so only those who need a result wait. None: no
    judgement."""

    def submit(self, pairs: CaptionQuestions) -> Future[list[float | None]]:
        """Return rewards in [0, 1]. A caption without words gets 0; without questions there is no
        judgement."""
        ...

    def choose(self, pairs: CaptionQuestions) -> Future[list[Choice | None]]:
        """Return the answers themselves."""
        ...

    def write(
        self, captions: Sequence[str], *, positives: int, negatives: int
    ) -> Future[list[Questions | None]]:
        """Draft up to so many questions from each true caption, and one recognition question. Empty: nothing
        can be asked about it."""
        ...

    def stats(self) -> dict[str, float]:
        """Return counts since the last call, by the names of STATS. calls: requests answered or given up,
        retries not counted; cached: answered without a request; failed: no judgement because of the endpoint;
        parse_failed: unreadable replies; cost: USD; latency_s: mean of the answered calls."""
        ...

    def close(self) -> None: ...


def finished(values: list[T]) -> Future[list[T]]:
    """Return a finished future, for a judge that waits for nobody."""
    future: Future[list[T]] = Future()
    future.set_result(values)
    return future


def self_checked(judge: Judge, captions: Sequence[str], drafted: Sequence[Questions]) -> list[Questions]:
    """Keep for each true caption the questions that the caption answers with a score of 1 and the empty
    caption with at most 0.

    None are kept if the recognition question or all positives fail: the rest alone would reward saying
    little. A caption that the judge cannot answer for has none either.
    """
    pairs = list(zip(captions, drafted, strict=True))
    answers = judge.choose([*pairs, *(("", questions) for questions in drafted)]).result()
    of_truth, of_nothing = answers[: len(pairs)], answers[len(pairs) :]
    return [_passing(*row) for row in zip(drafted, of_truth, of_nothing, strict=True)]


def _passing(questions: Questions, of_truth: Choice | None, of_nothing: Choice | None) -> Questions:
    if of_truth is None or of_nothing is None:
        return ()
    rows = zip(questions, of_truth, of_nothing, strict=True)
    passing = tuple(
        question
        for question, true, empty in rows
        if question.options[true].score == 1 and question.options[empty].score <= 0
    )
    kinds = {question.kind for question in passing}
    return passing if {"recognition", "positive"} <= kinds else ()
