"""Questions and answers of users' sets: which are asked, what is right, how they are written and counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ans_core.agent.evaluation import Outcome, metrics
from ans_core.agent.rewards.curiosity import ToolUse, bonus, price
from ans_core.agent.world import is_right
from ans_core.agent.world.bank import QuestionBank, write_questions
from ans_core.agent.world.question import Question
from ans_core.agent.world.question_sets import MOST_FRAMES, pictures
from ans_core.pictures import media
from ans_core.types import ImageRef, Sample


def frame(shade: int) -> ImageRef:
    return media.reference(np.full((40, 60, 3), shade, np.uint8))


def sample(number: int, question: str, answer: str, **changes: object) -> Sample:
    made = Sample(
        sample_id=f"s/{number}", dataset="set", image_id="one", frames=(frame(80),), height=40, width=60,
        task="conversation", question=question, text=answer,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


STAR = sample(1, "What did he open?", "the door", meta={"choices": ["the box", "the door"]})


def questions(*samples: Sample) -> list[Question]:
    return [question for picture in pictures(samples, name="set") for question in picture.questions]


def test_only_questions_that_a_rule_can_check_are_asked() -> None:
    asked = questions(
        sample(1, "<image>\nHow many?", "3"),
        sample(2, "Describe it.", "long " * 20),
        sample(3, "And now?", "2", past=(("How many?", "1"),)),
        replace(sample(4, "", "x"), task="referring", question=None),
    )
    assert [(question.question_id, question.text) for question in asked] == [("qa_set/s%2F1", "How many?")]


def test_choices_are_listed_with_letters_and_a_letter_is_an_answer() -> None:
    (question,) = questions(STAR)
    assert question.text == "What did he open?\n(A) the box\n(B) the door"
    right = [
        reply for reply in ("the door", "The door.", "B", "(b)", "A", "the box") if is_right(reply, question)
    ]
    assert right == ["the door", "The door.", "B", "(b)"]


@pytest.mark.parametrize(
    ("reply", "right"),
    [("0.5", True), ("\\boxed{\\frac{1}{2}}", True), ("1/2", True), ("2", False), ("5 cm", False)],
)
def test_numbers_are_compared_as_numbers(reply: str, right: bool) -> None:
    (question,) = questions(sample(1, "Which share?", "1/2"))
    assert is_right(reply, question) is right
    drawn = replace(question, plan_known=True)
    assert is_right(reply, drawn) is (reply == "1/2")


@pytest.mark.parametrize(
    ("answer", "reply", "right"),
    [("10001", "10000", False), ("1,200", "1200.0", True), ("1", "1.00001", False), ("0.33333", "1/3", True)],
)
def test_whole_numbers_are_compared_exactly(answer: str, reply: str, right: bool) -> None:
    (question,) = questions(sample(1, "Which number?", answer))
    assert is_right(reply, question) is right


def test_a_letter_that_is_a_choice_itself_means_that_choice() -> None:
    (question,) = questions(sample(1, "Which box?", "B", meta={"choices": ("B", "A")}))
    assert [reply for reply in ("A", "B", "(b)") if is_right(reply, question)] == ["B", "(b)"]


def test_pictures_and_clips_are_written_and_read_back(tmp_path: Path) -> None:
    clip = sample(2, "What happens?", "it fades", image_id="clip", frames=tuple(frame(n) for n in range(40)))
    other = sample(3, "And here?", "no", frames=(frame(9),))  # another picture of the same id
    made = pictures([STAR, clip, other], name="my set")
    assert write_questions(made, tmp_path / "train", seed=0) == {"qa_my%20set": 3}
    bank = QuestionBank.of_cota(["easy"], tmp_path, seed=0, tile=96)
    assert bank.families("train") == ("easy", "qa_my%20set")
    by_answer = {
        question.answer: question
        for question in (bank.question("qa_my%20set", "train", index) for index in range(3))
    }
    assert by_answer["the door"].frames == STAR.frames
    assert by_answer["no"].frames == other.frames
    assert len(by_answer["it fades"].frames) == MOST_FRAMES
    assert (by_answer["it fades"].frames[0], by_answer["it fades"].frames[-1]) == (frame(0), frame(39))
    assert not by_answer["it fades"].plan_known


def test_a_first_call_earns_what_it_earns_where_one_is_needed_and_costs_nothing() -> None:
    (question,) = questions(STAR)
    assert question.wanted_calls == 1
    assert bonus(successful=1, shortest=question.wanted_calls, use=ToolUse()) == pytest.approx(0.15)
    assert price(calls=1, shortest=question.wanted_calls) == 0
    assert price(calls=3, shortest=question.wanted_calls) == pytest.approx(-0.1)


def test_figures_of_sets_say_nothing_of_evidence_that_nobody_knows() -> None:
    (question,) = questions(STAR)
    outcomes = [
        Outcome(question=question, answer="B", right=right, used=right, evidence=True, calls=1, valid_calls=1)
        for right in (True, False)
    ]
    figures = metrics(outcomes)
    assert figures["qa_set/accuracy"] == figures["question_sets/accuracy"] == figures["qa_set/RaPR"] == 0.5
    assert not {name for name in figures if "evidence" in name or "faithful" in name or "needed" in name}
