from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ans_core.benchmarks.public.dlc_bench import choice
from ans_core.benchmarks.public.mmbench import letter_of as mmbench_letter
from ans_core.benchmarks.public.mmmu_pro_vision import letter_of as pro_letter
from ans_core.benchmarks.public.mmmu_val import letter_of, open_right
from ans_core.benchmarks.public.scored import Inputs
from ans_core.benchmarks.public.vstar import by_rule
from tests.benchmarks.public.drawn import score, write

TEXTS = {"A": "a red fox", "B": "a dog", "C": "none"}


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        ("(B).", "B"),
        ("First (A), no, (B)", "B"),  # the one named last
        ("B or A, I think it is A", "A"),
        ("It shows without doubt a red fox", "A"),
        # texts are looked for in replies of more than five words (two blanks make no word)
        ("a red fox", None),
        ("I can't tell", None),
    ],
)
def test_mmmu_letters(reply: str, letter: str | None):
    assert letter_of(reply, list(TEXTS), TEXTS) == letter


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("Answer: **B**", "B"),
        ("Answer: (C)", "C"),
        ("Because A. Answer: C", "C"),
        # several behind "Answer:": the last blank-framed one of the whole reply
        ("Answer: A or B, so A ", "A"),
        ("I can't tell", None),
    ],
)
def test_mmmu_pro_letters(reply: str, letter: str | None):
    assert pro_letter(reply, list(TEXTS.values())) == letter


@pytest.mark.parametrize(
    ("truth", "reply", "right"),
    [
        ("12", "so the result is 12.00", True),
        ("1,200", "The answer is 1200", True),
        ("12", "The answer is 13", False),
        ("oak", "It is an Oak tree", True),
        (["oak", "ash"], "ash", True),
        ("b", "it is b ", True),
        ("b", "it is abbey", False),  # a single letter must stand alone
        ("5", "So \n5", True),  # nothing behind the only indicator word: the whole reply
        ("5", "x = 5 =", True),
        ("5", "The result is \n5", False),  # behind `result` stands `is`
        # the empty tail of `is` gives way to the longer one of `final`
        ("12", "final 12 so 7 is \nok", True),
    ],
)
def test_mmmu_open_answers(truth: Any, reply: str, right: bool):
    assert open_right(truth, reply) == right


@pytest.mark.parametrize(
    ("reply", "index"),
    [
        ("The cat is red.", 0),
        ("b. the cat is blue.", 1),
        ("C", 2),
        ("c.", 2),
        ("I choose: The cat is blue. It fits.", 1),
        ("b. The cat is red. The cat is blue.", 1),  # two texts inside: the leading letter
        ("The cat is blue. The cat is red.", 0),  # or the last text
        ("is blue", 1),
        ("the cat", None),
        ("", None),
    ],
)
def test_dlc_choices(reply: str, index: int | None):
    assert choice(reply, ["The cat is red.", "The cat is blue.", "The cat is not told of."]) == index


def dlc(folder: Path, *, recognised: str, replies: list[str], caption: str = "a cat") -> dict[str, Path]:
    questions = [
        {
            "question": "?",
            "type": "positive",
            "choices": [["red", 1], ["wrong", -1], ["nothing", 0], ["part", 0.5]],
        },
        {"question": "?", "type": "negative", "choices": [["no dog", 1], ["dog", -1]]},
    ]
    write(folder / "annotations.json", {"annotations": [{"id": 7}]})
    write(folder / "qa.json", {"7": questions})
    asked = [q | {"pred_answer": reply} for q, reply in zip(questions, replies, strict=True)]
    recognition = {"choices": [["Yes", "correct"], ["No", "incorrect"]], "pred_answer": recognised}
    entry = {
        "pred": caption,
        "details_positives": asked[:1],
        "details_negatives": asked[1:],
        "details_recognition": [recognition],
    }
    replay = write(folder / "judge.json", {"7": entry, "avg_pos": 0.5})
    return {
        "predictions": write(folder / "captions.json", {"7": "a cat", "query": "Describe."}),
        "data": folder,
        "replay": replay,
    }


def test_an_object_that_is_not_recognised_earns_nothing_but_its_faults(tmp_path: Path):
    metrics = score("dlc_bench", **dlc(tmp_path, recognised="A. Yes", replies=["part", "A. no dog"])).metrics
    assert (metrics["positive"], metrics["negative"], metrics["average"]) == (0.5, 1.0, 0.75)
    metrics = score("dlc_bench", **dlc(tmp_path, recognised="No", replies=["B", "A"])).metrics
    assert (metrics["positive"], metrics["negative"], metrics["recognised"]) == (-1.0, 0.0, 0.0)
    metrics = score("dlc_bench", **dlc(tmp_path, recognised="Yes", replies=["who knows", "B"])).metrics
    assert (metrics["positive"], metrics["negative"], metrics["unparsed"]) == (0.0, -1.0, 1)


def test_a_judge_that_saw_another_caption_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="object 7: the judge saw another caption"):
        score("dlc_bench", **dlc(tmp_path, recognised="Yes", replies=["A", "A"], caption="a dog"))
    with pytest.raises(ValueError, match="--replay with its recorded replies"):
        score("dlc_bench", tmp_path / "captions.json", data=tmp_path)


def test_gar_bench_wants_the_whole_reply_to_be_the_letter(tmp_path: Path):
    replies = ["a", "A.", "B"]
    records = [
        {"image": str(i), "choices": ["A. x", "B. y"], "answer": "A", "type": "color", "model_output": r}
        for i, r in enumerate(replies)
    ]
    metrics = score("gar_bench", write(tmp_path / "vqa.json", records)).metrics
    assert metrics["vqa/correct"] == metrics["vqa/correct/color"] == 1
    truth = [
        {key: value for key, value in r.items() if key != "model_output"}
        for r in [*records, records[0] | {"image": "3"}]
    ]
    data = write(tmp_path / "questions/GAR-Bench-VQA.json", truth)
    found = score("gar_bench", tmp_path / "vqa.json", data=data)
    assert (found.metrics["vqa/count"], found.metrics["vqa/correct"], found.missing) == (4, 1, 1)
    assert score("gar_bench", write(tmp_path / "part.json", [*records, truth[3]])).missing == 1
    with pytest.raises(ValueError, match="no file of records with model_output"):
        score("gar_bench", data)
    write(data, [r | {"model_output": "A"} for r in truth])
    with pytest.raises(ValueError, match="the truth would be scored against itself"):
        score("gar_bench", data.parent, data=data.parent)
    write(data, [truth[0] | {"answer": "B"}, *truth[1:]])
    with pytest.raises(ValueError, match="answer 'A' is not the question's 'B'"):
        score("gar_bench", tmp_path / "vqa.json", data=data)


def test_gar_bench_captions_count_the_judges_exact_true(tmp_path: Path):
    records = [
        {"image": str(i), "answer": "x", "model_output": "y", "eval_result": r}
        for i, r in enumerate(["True", "true", "False"])
    ]
    assert score("gar_bench", write(tmp_path / "simple.json", records)).metrics["caption_simple/correct"] == 1


def test_ferret_bench_divides_means_and_keeps_unreadable_verdicts(tmp_path: Path):
    contents = ["8,6 \nwhy", "4 2", "no idea"]
    reviews = [{"question_id": i, "answer2_id": i, "content": text} for i, text in enumerate(contents)]
    metrics = score("ferret_bench", write(tmp_path / "review.jsonl", reviews)).metrics
    assert metrics["mean_reference"] == pytest.approx(11 / 3, abs=5e-4)
    assert metrics["score"] == pytest.approx(100 * 2.333 / 3.667)
    assert metrics["unparsed"] == 1


@pytest.mark.parametrize("ids", ["ab", (7, 8), (7.0, 8.0)])
def test_ferret_benchs_missing_answers_count_nothing_beside_their_references(
    tmp_path: Path, ids: Sequence[object]
):
    review = write(
        tmp_path / "review.jsonl",
        [{"question_id": i, "answer2_id": i, "content": "8 4", "answer2": "a cat"} for i in ids],
    )
    told = write(tmp_path / "told.jsonl", [{"question_id": ids[0], "text": "a cat"}])
    found = score("ferret_bench", told, replay=review)
    assert (found.metrics["score"], found.metrics["questions"], found.missing) == (25.0, 2, 1)
    assert found.ratios["score"].value == 25.0
    assert score("ferret_bench", told, replay=review, predicted_only=True).metrics["score"] == 50.0


@pytest.mark.parametrize("content", ["0 6", "nan 6", "inf 6", "I would say"])
def test_ferret_bench_without_marks_of_the_reference_has_no_score(tmp_path: Path, content: str):
    reviews = [{"question_id": n, "answer2_id": n, "content": content} for n in range(2)]
    with pytest.raises(
        ValueError,
        match=r"review.jsonl: the reference answers' mean mark is (0|-1).0, so there is no share of it",
    ):
        score("ferret_bench", write(tmp_path / "review.jsonl", reviews))


def test_ferret_benchs_answers_without_text_are_refused(tmp_path: Path):
    review = write(
        tmp_path / "review.jsonl", [{"question_id": 1, "answer2_id": 1, "content": "8 6", "answer2": "a cat"}]
    )
    with pytest.raises(ValueError, match=r", 1: key 'text' is missing"):
        score("ferret_bench", write(tmp_path / "told.jsonl", [{"question_id": 1}]), replay=review)


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("captions", {"image_name": "7", "captions": ["a cat"], "prediction": "a cat"}),
        (
            "vstar",
            {
                "image": "7",
                "test_type": "t",
                "question": "q",
                "options": ["x"],
                "answer": "x",
                "pred_ans": "A",
            },
        ),
    ],
)
def test_a_sample_that_comes_twice_is_refused(tmp_path: Path, name: str, record: dict[str, Any]):
    with pytest.raises(ValueError, match="'7' comes twice"):
        score(name, write(tmp_path / "told.jsonl", [record, record]))


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("A", True),
        ("B", False),
        ("A.", True),
        ("B.", False),
        ("\\boxed{A}", True),
        ("A. the cat", True),
        ("B. the dog", None),
    ],
)
def test_vstar_rules(reply: str, right: bool | None):
    assert by_rule(reply, "the cat") is right


def test_caption_predictions_against_coco_annotations(tmp_path: Path):
    captions = {1: ["A red cat.", "The cat"], 2: ["A dog runs on the grass."]}
    annotations = [{"image_id": i, "caption": text} for i, texts in captions.items() for text in texts]
    data = write(tmp_path / "truth.json", {"annotations": annotations})
    told = [{"image_id": 1, "caption": "a red cat"}]
    found = score("captions", write(tmp_path / "told.json", told), data=data)
    assert found.missing == 1
    assert [s["caption"] for s in found.samples] == ["a red cat", ""]
    assert found.samples[0]["ROUGE_L"] == pytest.approx(1.0)
    assert found.samples[1]["METEOR_nltk"] == 0.0
    with pytest.raises(ValueError, match="image_id '1' comes twice"):
        score("captions", write(tmp_path / "told.json", told * 2), data=data)


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        ("(B) a dog", "B"),
        ("A or B", None),  # two letters, no text
        ("B is what I would say here", None),  # not among the last four words
        ("the answer is c, surely", "C"),
        ("It is a dog", "B"),
        ("D", None),  # no such option
        ("B it is, as I said: B", None),  # its first place counts, as in VLMEvalKit
        ("the answer is an old dog", "A"),  # so there
        ("Cannot determine the answer, a dog", None),
        ("none of them: Z, a dog", None),
    ],
)
def test_mmbench_letters(reply: str, letter: str | None):
    assert mmbench_letter(reply, TEXTS) == letter


def test_names_are_paired_in_linear_time():
    """The names that are compared tell how often they are hashed."""
    hashed = Counter[str]()

    class Name(str):
        __slots__ = ()

        def __hash__(self) -> int:
            hashed[str(self)] += 1
            return super().__hash__()

    names = [Name(n) for n in range(100)]
    inputs = Inputs(predictions=Path("p"), predicted_only=True)
    assert inputs.pair(["3", "97"], names, what="questions") == (["3", "97"], 0)
    assert max(hashed.values()) < 10


def test_mmbench_counts_a_question_that_is_right_in_every_rotation(tmp_path: Path):
    rotations = [("cat", "dog", "A"), ("dog", "cat", "B")]
    told = {1: "AB", 2: "AA", 3: "BB"}
    records = [
        {
            "index": i + k * 1_000_000,
            "A": a,
            "B": b,
            "answer": answer,
            "prediction": told[i][k],
            "category": "animals" if i < 3 else "x",
        }
        for i in told
        for k, (a, b, answer) in enumerate(rotations)
    ]
    metrics = score("mmbench", write(tmp_path / "told.json", records)).metrics
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["accuracy_first_pass"] == pytest.approx(2 / 3)
    assert metrics["accuracy/animals"] == 0.5
    with pytest.raises(ValueError, match="question 3: 1 rotations of 2 options"):
        score("mmbench", write(tmp_path / "told.json", records[:-1]))
