"""Questions about captions: multiple choice with scored options, the score of the answers, and
questions.jsonl."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

Kind = Literal["recognition", "positive", "negative"]
"""recognition: is it the right thing at all? positive: what does the caption say of a detail that is there?
negative: of one that is not there?"""
LETTERS = "abcdefgh"
"""Names of a question's options, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """`score` in [-1, 1], as in DLC-Bench. Positive: right 1, partial .5, not said 0, wrong -1. Negative: not
    said 1, the thing itself not described 0, said -1. Recognition: above 0 = recognised."""

    text: str
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Two to eight options with different texts, the best of which scores 1; ValueError otherwise."""

    kind: Kind
    text: str
    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        scores = [option.score for option in self.options]
        if not 2 <= len(self.options) <= len(LETTERS) or len({option.text for option in self.options}) < len(
            self.options
        ):
            raise ValueError(
                f"a question needs 2 to {len(LETTERS)} different options: {self.text!r} has "
                f"{[o.text for o in self.options]}"
            )
        if max(scores) != 1 or min(scores) < -1:
            raise ValueError(f"scores lie in [-1, 1] and the best is 1: {self.text!r} has {scores}")


Questions = tuple[Question, ...]
"""All questions of one caption. Empty: nothing can be asked, and nothing judged."""


def question(kind: Kind, text: str, scores: Mapping[str, float]) -> Question:
    """Make a question of its options' texts and scores."""
    options = tuple(Option(text=option, score=score) for option, score in scores.items())
    return Question(kind=kind, text=text, options=options)


def shuffled(question: Question) -> Question:
    """Shuffle the options in an order that depends on the question's content: no letter is right more often
    than others."""
    order = list(question.options)
    content = json.dumps([question.kind, question.text, *(option.text for option in order)])
    random.Random(hashlib.sha256(content.encode()).digest()).shuffle(order)
    return replace(question, options=tuple(order))


def score(questions: Questions, chosen: Sequence[int]) -> float:
    """Return a score in [-1, 1]: the mean of the positives' mean and the negatives' mean (of those that
    exist). If the thing is not recognised every answer counts at most 0 (DLC-Bench's gate): details of
    something else are worth nothing."""
    picked = [
        (question.kind, question.options[i].score) for question, i in zip(questions, chosen, strict=True)
    ]
    recognised = all(value > 0 for kind, value in picked if kind == "recognition")
    means = []
    for wanted in ("positive", "negative"):
        values = [value if recognised else min(0.0, value) for kind, value in picked if kind == wanted]
        means += [sum(values) / len(values)] if values else []
    if not means:
        raise ValueError("nothing to score: no positive and no negative question")
    return sum(means) / len(means)


def reward(questions: Questions, chosen: Sequence[int]) -> float:
    """Return max(0, score): the true caption gets 1 and the empty one 0, as under every other reward. (score
    + 1) / 2 would give .5 for saying nothing; a wrong statement still costs, as it lowers the mean over the
    questions."""
    return max(0.0, score(questions, chosen))


def write_questions(path: Path, questions: Mapping[tuple[str, str], Questions]) -> None:
    """Write one line per sample, from questions by (data set, sample_id)."""
    with path.open("w", encoding="utf-8") as file:
        for (dataset, sample_id), of_sample in questions.items():
            record = {
                "dataset": dataset,
                "sample_id": sample_id,
                "questions": [asdict(question) for question in of_sample],
            }
            file.write(json.dumps(record) + "\n")


def read_questions(path: Path) -> dict[tuple[str, str], Questions]:
    """Read questions by (data set, sample_id). ValueError names file and line."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; run the stage `judge_questions` first")
    questions = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                questions[record["dataset"], record["sample_id"]] = tuple(
                    question_of(entry) for entry in record["questions"]
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number}: {type(error).__name__}: {error}; run the stage `judge_questions` again"
                ) from error
    return questions


def question_of(record: Mapping[str, Any]) -> Question:
    if record["kind"] not in get_args(Kind):
        raise ValueError(f"no kind of question {record['kind']!r}; there are {list(get_args(Kind))}")
    options = tuple(
        Option(text=str(option["text"]), score=float(option["score"])) for option in record["options"]
    )
    return Question(kind=record["kind"], text=str(record["text"]), options=options)
