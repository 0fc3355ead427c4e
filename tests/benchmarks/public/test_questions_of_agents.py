"""The question benchmarks that agents are measured on: their rules by hand, and models run on drawn sets in
their layouts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from ans_core.benchmarks.public import infographicsvqa, mathvista, mm_vet, tallyqa_complex, virl39k, vstar
from ans_core.benchmarks.public.asked import Item
from ans_core.benchmarks.public.scored import Inputs, Scored
from ans_core.benchmarks.registry import SCORERS
from ans_core.types import Prediction
from tests import tiny
from tests.benchmarks.public import question_sets
from tests.benchmarks.public.drawn import predicted, score, write
from tests.benchmarks.public.question_sets import CHOICE, infographics, pictures, problem, tally, vet, virl
from tests.golden import REFERENCE

ANLS_CASE = REFERENCE / "data/eval_formats/infographicvqa/anls_case.json"
Answers = Callable[[Sequence[Item]], list[Prediction]]


def knowing(items: Sequence[Item]) -> list[Prediction]:
    return [item.truth for item in items if item.truth]


def silent(items: Sequence[Item]) -> list[Prediction]:
    return [Prediction(text="") for _ in items]


def evaluate(name: str, data: Path, out: Path, ask: Answers, **given: Any) -> Scored:
    scorer = SCORERS[name]
    assert scorer.runner is not None
    runner = scorer.runner
    path = predicted(runner, data, runner.splits[0], ask, out)
    return scorer.score(Inputs(predictions=path, data=runner.truth(data, ""), **given))


# V*Bench


def test_vstar_asks_with_the_options_in_another_order(tmp_path: Path) -> None:
    colours = ["red", "blue", "green", "white"]
    for kind, options, count in (
        ("direct_attributes", colours, 6),
        ("relative_position", ["left", "right"], 4),
    ):
        for number in range(count):
            pictures(tmp_path / kind, f"{number}.jpg")
            write(
                tmp_path / kind / f"{number}.json",
                {"question": "Which?", "options": options, "bbox": [[1, 2, 3, 4]]},
            )
    items = list(SCORERS["vstar"].runner.items(tmp_path, ""))  # type: ignore[union-attr]
    letters = [item.facts["letter"] for item in items]
    assert len(set(letters)) > 1
    assert all(
        f"{letter}. {item.facts['answer']}\n" in item.request.text
        for letter, item in zip(letters, items, strict=True)
    )
    found = evaluate("vstar", tmp_path, tmp_path / "out", knowing).metrics
    assert (found["accuracy"], found["count/direct_attributes"], found["count/relative_position"]) == (
        1.0,
        6,
        4,
    )
    always = evaluate(
        "vstar", tmp_path, tmp_path / "always", lambda some: [Prediction(text="A") for _ in some]
    ).metrics
    assert always["accuracy"] == letters.count("A") / 10 < 1
    vague = evaluate(
        "vstar", tmp_path, tmp_path / "vague", lambda some: [Prediction(text="I see it") for _ in some]
    ).metrics
    assert (vague["accuracy"], vague["undecided"]) == (0.0, 10)


def test_vstar_counts_what_a_rule_or_the_judge_calls_right(tmp_path: Path) -> None:
    record = {
        "question": "q",
        "options": ["dog", "cat"],
        "answer": "cat",
        "letter": "B",
        "test_type": "relative_position",
    }
    told = write(tmp_path / "told.json", [
        record | {"image": "1", "pred_ans": "B.", "test_type": "direct_attributes"},
        record | {"image": "2", "pred_ans": "the cat", "judged": True},
        record | {"image": "3", "pred_ans": "the cat"},
        record | {"image": "4", "pred_ans": "A", "judged": True},  # a rule decides
    ])  # fmt: skip
    found = score("vstar", told).metrics
    assert (found["accuracy"], found["accuracy/direct_attributes"], found["accuracy/relative_position"]) == (
        0.5,
        1.0,
        1 / 3,
    )
    assert (found["count/relative_position"], found["decided_by_judge"], found["undecided"]) == (3, 1, 1)


JUDGED = {
    "image": "1",
    "test_type": "t",
    "question": "q",
    "options": ["dog", "cat"],
    "answer": "dog",
    "pred_ans": "the dog",
}


@pytest.mark.parametrize("judged", [True, 1, 1.0, "1", False, 0, 0.0, "0"])
def test_vstar_reads_a_judges_verdict(tmp_path: Path, judged: Any) -> None:
    assert score("vstar", write(tmp_path / "told.json", [JUDGED | {"judged": judged}])).metrics[
        "accuracy"
    ] == float(judged)


@pytest.mark.parametrize("judged", ["0.0", "no", "", None, 2, []])
def test_vstar_refuses_a_verdict_that_says_neither(tmp_path: Path, judged: Any) -> None:
    with pytest.raises(ValueError, match=r"told.json, record 0: 'judged' is .*; write true or false, 1 or 0"):
        score("vstar", write(tmp_path / "told.json", [JUDGED | {"judged": judged}]))


def test_vstar_letters_are_those_of_the_record(tmp_path: Path) -> None:
    assert vstar.by_rule("B", "the cat", letter="B") is True
    assert vstar.by_rule("A.", "the cat", letter="B") is False
    assert vstar.by_rule("I say B. The cat", "the cat", letter="B") is True
    record = {
        "image": "x",
        "test_type": "t",
        "question": "q",
        "options": ["dog", "cat"],
        "answer": "cat",
        "letter": "B",
        "pred_ans": "B",
    }
    assert score("vstar", write(tmp_path / "told.json", [record])).metrics["accuracy"] == 1.0
    with pytest.raises(ValueError, match="record 0: option 'A' of 2 is not the answer"):
        score("vstar", write(tmp_path / "told.json", [record | {"letter": "A"}]))
    with pytest.raises(ValueError, match="no pictures in direct_attributes or relative_position"):
        next(iter(SCORERS["vstar"].runner.items(tmp_path, "")))  # type: ignore[union-attr]


def test_a_question_of_vstar_without_its_picture_is_not_left_out_unsaid(tmp_path: Path) -> None:
    (question_sets.vstar(tmp_path) / "direct_attributes/1.jpg").unlink()
    with pytest.raises(
        ValueError, match=r"1 questions have no picture beside them: direct_attributes/1\.json"
    ):
        next(iter(SCORERS["vstar"].runner.items(tmp_path, "")))  # type: ignore[union-attr]


# TallyQA


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("4", 4),
        ("Four.", 4),
        ("There are four cars.", 4),
        ("none", 0),
        ("no", 0),
        ("There are no cars", None),  # `no` counts alone
        ("4 of 5", None),  # several
        ("4, that is four", 4),
        ("2.5", None),
        ("many", None),
        ("21", 21),
    ],
)
def test_tallyqa_numbers(reply: str, number: int | None) -> None:
    assert tallyqa_complex.number_of(reply) == number


def test_tallyqa_counts_complex_questions_exactly(tmp_path: Path) -> None:
    folder = tally(tmp_path / "data")
    assert evaluate("tallyqa_complex", folder, tmp_path / "out", knowing).metrics["accuracy"] == 1.0
    told = write(tmp_path / "told.json", [{"question_id": 7, "prediction": "there are four"}])
    found = score("tallyqa_complex", told, data=folder)
    assert (
        found.metrics["accuracy"],
        found.metrics["count"],
        found.metrics["accuracy_as_said"],
        found.missing,
    ) == (0.5, 2, 0.0, 1)
    write(told, [{"question_id": 7, "prediction": "6"}, {"question_id": 8, "prediction": "who knows"}])
    found = score("tallyqa_complex", told, data=folder)
    assert (found.metrics["RMSE_of_parsed"], found.metrics["unparsed"]) == (2.0, 1)
    with pytest.raises(ValueError, match="1 questions that the truth does not have: 9"):
        score("tallyqa_complex", write(told, [{"question_id": 9, "prediction": "2"}]), data=folder)


# InfographicsVQA


def test_anls_by_hand() -> None:
    assert infographicsvqa.anls("18 %", ["18%"]) == pytest.approx(0.75)  # one of four characters
    assert infographicsvqa.anls("  New   York ", ["new york"]) == 1.0
    assert infographicsvqa.anls("ab", ["abcd"]) == 0.5  # the threshold itself
    assert infographicsvqa.anls("a", ["abcd"]) == 0.0
    assert infographicsvqa.anls("dog", ["cat", "dogs"]) == 0.75
    assert infographicsvqa.anls("ab", ["abcd"], of_paper=True) == 0.0
    # "  ab " against "abc": one edit of 5 as they are written, of 3 as they are compared
    assert infographicsvqa.anls("  ab ", ["abc"]) == pytest.approx(0.8)
    assert infographicsvqa.anls("  ab ", ["abc"], of_paper=True) == pytest.approx(2 / 3)
    assert infographicsvqa.anls("", [" "], of_paper=True) == infographicsvqa.anls("", [""]) == 1.0


@pytest.mark.skipif(not ANLS_CASE.is_file(), reason="no reference data (set ANS_REFERENCE)")
def test_anls_of_the_ported_scripts_own_case(tmp_path: Path) -> None:
    case = json.loads(ANLS_CASE.read_text())
    told = write(tmp_path / "told.json", case["submission"])
    truth = write(tmp_path / infographicsvqa.TRUTH, case["gold_label"])
    found = score("infographicsvqa", told, data=truth)
    assert found.metrics["ANLS"] == found.metrics["ANLS_of_paper"] == case["expected"]["overall"]
    assert {str(s["questionId"]): s["ANLS"] for s in found.samples} == case["expected"]["per_question"]


def test_infographics_are_scored_by_the_best_answer_and_by_kind(tmp_path: Path) -> None:
    infographics(tmp_path)
    assert evaluate("infographicsvqa", tmp_path, tmp_path / "out", knowing).metrics["ANLS"] == 1.0
    told = write(tmp_path / "told.json", [{"questionId": 71, "answer": "Pariss"}])
    found = score("infographicsvqa", told, data=tmp_path)
    assert found.missing == 1
    assert found.metrics["ANLS"] == pytest.approx((5 / 6) / 2)
    assert found.metrics["ANLS/Text"] == pytest.approx((5 / 6) / 2)
    assert found.metrics["ANLS/Figure"] == 0.0
    assert score("infographicsvqa", told, data=tmp_path, predicted_only=True).metrics[
        "ANLS/Text"
    ] == pytest.approx(5 / 6)


# MMMU


def test_mmmu_without_a_letter_is_wrong_by_subject_and_domain_and_a_guess_for_the_official_figure(
    tmp_path: Path,
) -> None:
    """The first of two options that random.Random(42) draws is A."""
    choice = {
        "question_type": "multiple-choice",
        "all_choices": ["A", "B"],
        "index2ans": {"A": "me", "B": "you"},
    }
    told = write(tmp_path / "told.jsonl", [
        {"id": "validation_Art_1", "subject": "Art", "answer": "B", "response": "The answer is (B).", **choice},
        {"id": "validation_Art_2", "subject": "Art", "answer": "A", "response": "", **choice},
        {"id": "validation_Math_1", "subject": "Math", "answer": "7", "response": "It is 8", "question_type": "open"},
    ])  # fmt: skip
    found = score("mmmu_val", told).metrics
    assert (found["accuracy"], found["accuracy_with_guesses"], found["unparsed"]) == (1 / 3, 2 / 3, 1)
    assert (
        found["accuracy/Art"],
        found["accuracy/domain/Science"],
        found["count/domain/Art and Design"],
    ) == (0.5, 0.0, 2)
    kinds = {"validation_Art_1": "B", "validation_Art_2": "A", "validation_Art_3": "B"}
    truth = {
        name: {"question_type": "multiple-choice", "ground_truth": letter} for name, letter in kinds.items()
    }
    truth["validation_Math_1"] = {"question_type": "short-answer", "ground_truth": "7"}
    found = score("mmmu_val", told, data=write(tmp_path / "answer_dict_val.json", truth))
    assert (
        found.metrics["accuracy"],
        found.metrics["count"],
        found.metrics["accuracy/Art"],
        found.missing,
    ) == (1 / 4, 4, 1 / 3, 1)


# MathVista


@pytest.mark.parametrize(
    ("extraction", "changes", "said"),
    [
        ("4.9", {}, "4"),  # int(float(x)), as the official script
        ("four", {}, None),
        ("1.25", {"answer_type": "float", "precision": 1.0}, "1.2"),
        ("1.250", {"answer_type": "float", "precision": 2.0}, "1.25"),
        ("B", CHOICE, "twenty"),
        ("(b) no", CHOICE, "twenty"),
        ("twent", CHOICE, "twenty"),  # the smallest edit distance
        ("D", CHOICE, "two"),  # no such letter: a text again
        ("[1, 2]", {"answer_type": "list"}, "[1, 2]"),
    ],
)
def test_mathvistas_normalisation(extraction: str, changes: dict[str, Any], said: str | None) -> None:
    assert mathvista.normalised(extraction, problem(**changes)) == said


def test_mathvistas_extractions_are_read_by_rule_or_replayed(tmp_path: Path) -> None:
    question_sets.mathvista(tmp_path)
    assert evaluate("mathvista", tmp_path, tmp_path / "out", knowing).metrics["accuracy"] == 1.0
    told = write(
        tmp_path / "told.json",
        {"1": {"response": "It has 4 of them."}, "2": {"response": "twenty"}, "3": {"extraction": "7"}},
    )
    judging = SCORERS["mathvista"].judging
    assert judging is not None
    assert judging.needed(Inputs(predictions=told, data=tmp_path))
    with pytest.raises(
        ValueError,
        match=r"1: no rule reads an answer in 'It has 4 of them\.'; a language model does: --replay",
    ):
        score("mathvista", told, data=tmp_path)
    asked: list[str] = []

    class Known:
        name = "known"

        def ask(self, requests: Sequence[Any], *, desc: str) -> list[str]:
            asked.extend(request.user for request in requests)
            return ["4"] * len(requests)

    given = judging.ask(Inputs(predictions=told, data=tmp_path), Known(), tmp_path / "judge.json")
    found = SCORERS["mathvista"].score(given)
    assert len(asked) == 1
    assert "It has 4 of them." in asked[0]
    assert found.metrics["accuracy"] == found.metrics["accuracy/skills/geometry"] == 1.0
    assert found.notes == ["judge: known extracted answers, asked in other words than the benchmark's"]
    assert score("mathvista", told, data=tmp_path, replay=tmp_path / "judge.json").metrics == found.metrics
    few = write(tmp_path / "few.jsonl", [{"pid": "2", "response": "(B)"}])
    assert (
        score("mathvista", few, data=tmp_path).metrics["accuracy"],
        score("mathvista", few, data=tmp_path).missing,
    ) == (1 / 3, 2)


# MM-Vet


def test_mm_vets_grades_are_means_over_runs_and_by_capability(tmp_path: Path) -> None:
    folder = vet(tmp_path / "data")
    told = write(tmp_path / "told.json", {"v1_0": "x = -1", "v1_1": "Ann", "v1_2": "sun"})
    grades = {"v1_0": [0.5, 0.3], "v1_1": [1.0, 1.0], "v1_2": [0.0, 0.2]}
    replay = {
        name: {"model": ["gpt-4-0613"] * 2, "content": [str(x) for x in xs], "score": xs}
        for name, xs in grades.items()
    }
    found = score("mm_vet", told, data=folder, replay=write(tmp_path / "grades.json", replay))
    assert found.metrics["score"] == pytest.approx((0.4 + 1.0 + 0.1) / 3)
    assert found.published["score"] == "50.0"
    assert found.metrics["score/ocr"] == pytest.approx((0.4 + 0.1) / 2)
    assert found.metrics["score/rec"] == pytest.approx((1.0 + 0.1) / 2)
    assert found.metrics["score/only/math_ocr"] == pytest.approx(0.4)
    assert found.notes == ["judge: gpt-4-0613 (published with gpt-4-0613); another judge moves the figure"]
    with pytest.raises(ValueError, match=r"v1_1: score .*1\.5.* is no list of numbers from 0 to 1"):
        score(
            "mm_vet",
            told,
            data=folder,
            replay=write(tmp_path / "odd.json", replay | {"v1_1": {"score": [1.5]}}),
        )
    with pytest.raises(ValueError, match="scored by a judge: --replay"):
        score("mm_vet", told, data=folder)


def test_mm_vets_judge_sees_question_truth_and_reply_and_its_grades_are_replayed(tmp_path: Path) -> None:
    folder, asked = vet(tmp_path / "data"), []

    class Known:
        name = "known"

        def ask(self, requests: Sequence[Any], *, desc: str) -> list[str]:
            asked.extend(requests)
            return ["1.0", "0.4 I think", "good"]

    scorer = SCORERS["mm_vet"]
    assert scorer.runner is not None
    assert scorer.judging is not None
    runner = scorer.runner
    path = predicted(runner, folder, "", knowing, tmp_path / "out")
    given = Inputs(predictions=path, data=folder)
    assert scorer.judging.needed(given)
    found = scorer.score(scorer.judging.ask(given, Known(), tmp_path / "judge.json"))
    assert "Question: x? | True answer: -1 <AND> -5 | Given answer: -1<AND>-5 | Grade:" in asked[0].user
    assert asked[0].max_tokens == 3
    assert found.metrics["score"] == pytest.approx(1.4 / 3)
    assert "the judge was asked in other words than the benchmark's, once" in found.notes
    assert "1 replies of the judge are no grade and count 0" in found.notes
    assert (
        scorer.score(Inputs(predictions=path, data=folder, replay=tmp_path / "judge.json")).metrics
        == found.metrics
    )
    other = write(tmp_path / "other.json", {"v1_0": "another"})
    with pytest.raises(ValueError, match="v1_0: the judge saw another reply"):
        score("mm_vet", other, data=folder, replay=tmp_path / "judge.json", predicted_only=True)
    assert mm_vet.number_of("1.2") is None


def test_no_answer_of_mm_vet_is_graded_0_and_shown_to_no_judge(tmp_path: Path) -> None:
    judging, told = (
        SCORERS["mm_vet"].judging,
        write(tmp_path / "told.json", {"v1_0": "x = -1", "v1_1": "", "v1_2": " "}),
    )

    class Generous:
        name = "generous"

        def ask(self, requests: Sequence[Any], *, desc: str) -> list[str]:
            return ["0.6"] * len(requests)

    assert judging is not None
    given = judging.ask(
        Inputs(predictions=told, data=vet(tmp_path / "data")), Generous(), tmp_path / "judge.json"
    )
    found = SCORERS["mm_vet"].score(given)
    assert found.metrics["score"] == pytest.approx(0.6 / 3)
    assert not any("no grade" in note for note in found.notes)


# ViRL39K


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        (r"So it is \boxed{17}.", r"\boxed{17}", True),
        ("17", r"\boxed{17^\circ}", True),
        (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", True),
        (r"\boxed{\dfrac{\sqrt{3}}{2}}", r"\boxed{\dfrac{\sqrt{3}}{2}}", True),  # braces inside
        ("first \\boxed{3}, no, \\boxed{4}", r"\boxed{4}", True),
        ("(A)", r"\boxed{A}", True),
        (r"\boxed{12 \text{ cm}}", r"\boxed{12\text{cm}}", True),
        ("1,200", r"\boxed{1200}", True),
        ("17.1", r"\boxed{17}", False),
        ("", r"\boxed{17}", False),
        (r"\boxed{1/0}", r"\boxed{0}", False),
        ("1,200.50", "1200.5", True),
        ("-1,200,000", "-1.2e6", True),
        (r"\boxed{12}", r"\boxed{1,2}", False),  # two numbers
        ("1,2,3", "123", False),
        ("1,2000", "12000", False),
        ("1_000", "1000", False),
        (".5", "0.5", True),
        ("5 cm", "5", False),  # units are compared
        ("50%", "50", True),
    ],
)
def test_final_answers(reply: str, answer: str, right: bool) -> None:
    assert virl39k.same(reply, answer) is right


def test_the_hold_out_is_chosen_by_picture_and_is_a_fiftieth(tmp_path: Path) -> None:
    chosen = [n for n in range(5000) if virl39k.held_out([f"images/{n}.png"])]
    assert 70 < len(chosen) < 130
    assert 0 not in chosen
    virl(tmp_path)
    found = evaluate("virl39k", tmp_path, tmp_path / "out", knowing)
    assert (found.metrics["accuracy"], found.metrics["count"], found.metrics["count/Charts"]) == (1.0, 3, 2)
    lines = [json.loads(line) for line in (tmp_path / "out/predictions.jsonl").read_text().splitlines()]
    assert [line["qid"] for line in lines] == ["0", "2", "3"]
    *_, several = SCORERS["virl39k"].runner.items(tmp_path, "")  # type: ignore[union-attr]
    assert several.request.text.startswith(
        "Image-1: <image>\nImage-2: <image>\nImage-3: <image>\nHow many 3?\n"
    )
    assert (len(several.request.frames), several.request.stills) == (3, True)
    assert evaluate("virl39k", tmp_path, tmp_path / "silent", silent).metrics["accuracy"] == 0.0


def test_a_question_that_shows_a_held_out_picture_among_others_is_not_trained_on() -> None:
    chosen = next(f"images/{n}.png" for n in range(500) if virl39k.held_out([f"images/{n}.png"]))
    assert virl39k.held_out([chosen, "images/0.png"])
    assert virl39k.held_out(["images/0.png", chosen])
    assert not virl39k.held_out(["images/0.png"])
    assert not virl39k.held_out([])


def test_virl39k_counts_by_category_and_how_many_replies_are_boxed(tmp_path: Path) -> None:
    answers = [("a", "Math", "\\boxed{3}"), ("b", "Math", "4"), ("c", "Charts", "3")]
    records = [
        {"qid": name, "category": category, "prediction": said, "answer": "3"}
        for name, category, said in answers
    ]
    found = score("virl39k", write(tmp_path / "told.jsonl", records)).metrics
    assert (found["accuracy"], found["accuracy/Math"], found["accuracy/Charts"], found["boxed"]) == (
        2 / 3,
        0.5,
        1.0,
        1 / 3,
    )


# MMMU


def test_mmmu_shows_all_pictures_of_a_question_in_order_and_names_them(tmp_path: Path) -> None:
    data = question_sets.mmmu(tmp_path)
    single, _, several = SCORERS["mmmu_val"].runner.items(data, "validation")  # type: ignore[union-attr]
    assert (single.request.text.splitlines()[0], single.request.stills) == ("<image>", False)
    assert several.request.text.splitlines()[:5] == [
        "Image-1: <image>",
        "Image-2: <image>",
        "Which is it?",
        "A. <Image-1>",
        "B. <Image-2>",
    ]
    assert several.request.frames == (tiny.picture(0), tiny.picture(1))
    assert several.facts["index2ans"] == {"A": "<image 1>", "B": "<image 2>"}  # the official record's
    table = parquet.read_table(data / "Art/validation-00000-of-00001.parquet").to_pylist()
    row = table[2] | {"image_2": None, "image_3": table[2]["image_1"], "image_4": table[2]["image_2"]}
    row |= {"question": "Is <image 4> like <image 3>?", "options": "['yes', 'no']"}
    parquet.write_table(pyarrow.Table.from_pylist([row]), data / "Art/validation-00000-of-00001.parquet")
    (three,) = SCORERS["mmmu_val"].runner.items(data, "validation")  # type: ignore[union-attr]
    assert len(three.request.frames) == 3
    assert three.request.text.splitlines()[3] == "Is <Image-3> like <Image-2>?"
    row["question"] = "Which, <image 2>?"
    parquet.write_table(pyarrow.Table.from_pylist([row]), data / "Art/validation-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"the text names <image 2>, and column image_2 is empty"):
        list(SCORERS["mmmu_val"].runner.items(data, "validation"))  # type: ignore[union-attr]


# Pictures that are not there


@pytest.mark.parametrize(
    ("name", "folder", "refusal"),
    [
        (
            "tallyqa_complex",
            "",
            r"test\.json: 2 of 2 pictures are not in .*: VG_100K_2/1\.jpg, val2014/2\.jpg; put them there",
        ),
        ("infographicsvqa", "images", r"withQT\.json: 2 of 2 pictures are not in .*images: 1\.jpeg, 2\.jpeg"),
        ("mm_vet", "images", r"mm-vet\.json: 2 of 2 pictures are not in .*images: a\.jpg, b\.jpg"),
        ("mathvista", "images", r"annot_testmini\.json: 1 of 1 pictures are not in .*images: 1\.jpg"),
        ("virl39k", "images", r"3 of 3 pictures are not in .*: images/"),
    ],
)
def test_pictures_that_are_not_there_are_named_before_the_first_question(
    tmp_path: Path, name: str, folder: str, refusal: str
) -> None:
    data = question_sets.SETS[name](tmp_path)
    runner = SCORERS[name].runner
    assert runner is not None
    assert runner.missing(data, runner.splits[0]) is None
    for path in sorted((data / folder).rglob("*.*")):
        if path.suffix in (".jpg", ".jpeg", ".png"):
            path.unlink()
    found = runner.missing(data, runner.splits[0])
    assert found is not None
    assert re.search(refusal, found), found


def test_one_picture_that_is_not_there_is_named_though_its_question_comes_late(tmp_path: Path) -> None:
    (infographics(tmp_path) / "images/2.jpeg").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 pictures are not in .*images: 2\.jpeg; put them there"):
        next(iter(SCORERS["infographicsvqa"].runner.items(tmp_path, "val")))  # type: ignore[union-attr]
