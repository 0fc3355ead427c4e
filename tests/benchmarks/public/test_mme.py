from __future__ import annotations

from pathlib import Path

import pytest

from ans_core.benchmarks.public.mme import TASKS, questions, yes_or_no
from tests.benchmarks.public.drawn import score, write

REPLIES = {"1.jpg": ("Yes", "No"), "2.jpg": ("yes, it is", "Yes.")}
"""Of a task: right and right; right, and wrong, as the second answer is always No."""


def results(folder: Path, tasks: tuple[str, ...]) -> Path:
    """The official results: the first question's answer is Yes, the second's is No."""
    folder.mkdir(exist_ok=True)
    for task in tasks:
        lines = [
            f"{image}\tIs it {asked}?\t{answer}\t{reply}\n"
            for image, replies in REPLIES.items()
            for asked, answer, reply in zip("xy", ("Yes", "No"), replies, strict=True)
        ]
        (folder / f"{task}.txt").write_text("".join(lines))
    return folder


def test_scores_by_hand(tmp_path: Path):
    found = score("mme", results(tmp_path / "results", TASKS["perception"]))
    assert found.metrics["accuracy/OCR"] == 3 / 4
    assert found.metrics["accuracy_plus/OCR"] == 1 / 2
    assert found.metrics["score/OCR"] == 125
    assert found.metrics["perception"] == found.ratios["perception"].value == 1250
    assert "cognition" not in found.metrics
    assert found.notes == ["cognition is left out: no question of " + ", ".join(TASKS["cognition"])]


def test_tasks_weigh_the_same_however_many_pictures_they_have(tmp_path: Path):
    folder = results(tmp_path / "results", TASKS["cognition"])
    (folder / "code_reasoning.txt").write_text("1.jpg\tx?\tYes\tyes\n1.jpg\ty?\tNo\tno\n")
    found = score("mme", folder)
    assert found.metrics["cognition"] == pytest.approx(3 * 125 + 200)
    assert found.ratios["cognition"].value == pytest.approx(3 * 125 + 200)


@pytest.mark.parametrize(
    ("reply", "parsed"),
    [
        ("Yes", "yes"),
        (" no.", "no"),
        ("Not at all", "no"),
        ("The answer is yes", None),
        ("1. yes", None),
        ("", None),
    ],
)
def test_a_reply_counts_by_its_first_four_letters(reply: str, parsed: str | None):
    assert yes_or_no(reply) == parsed


def release(folder: Path) -> Path:
    """Both layouts: apart, and side by side."""
    for text, picture in (
        ("color/questions_answers_YN/1.txt", "color/images/1.jpg"),
        ("count/2.txt", "count/2.png"),
    ):
        write(folder / picture, "a picture")
        (folder / text).parent.mkdir(parents=True, exist_ok=True)
        (folder / text).write_text("Is it x?\tYes\nIs it y?\tNo\n")
    return folder


def test_missing_replies_are_wrong_and_others_must_be_of_the_release(tmp_path: Path):
    data = release(tmp_path / "data")
    asked = [facts for _, facts in questions(data)]
    assert [facts["image"] for facts in asked] == ["1.jpg", "1.jpg", "2.png", "2.png"]
    told = [facts | {"prediction": facts["answer"]} for facts in asked]
    found = score("mme", write(tmp_path / "told.jsonl", told[:3]), data=data)
    assert (found.missing, found.metrics["score/color"], found.metrics["score/count"]) == (1, 200, 50)
    for records, message in (
        (told + told[:1], "comes twice"),
        (
            [told[0] | {"image": "9.jpg"}, *told[1:]],
            "1 questions that the truth does not have: color/9.jpg/Is it x",
        ),
        ([told[0] | {"answer": "No"}, *told[1:]], "answer 'No' is not the question's 'Yes'"),
        ([told[0] | {"answer": "A"}, *told[1:]], "record 0: the answer is 'A', not Yes or No"),
        ([told[0] | {"category": "colour"}, *told[1:]], "record 0: MME has no task 'colour'"),
        ([{**told[0], "prediction": None}, *told[1:]], "record 0: 'prediction' is NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            score("mme", write(tmp_path / "told.jsonl", records), data=data)
    with pytest.raises(ValueError, match=r"not two questions about 2\.png; accuracy\+ counts pairs"):
        score("mme", write(tmp_path / "told.jsonl", told[:3]))
