"""Questions, their score, the judge by rules, the parser of replies, and how judgements and METEOR become one
reward."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
import torch

from ans_core.data.scene_text import region_caption
from ans_core.data.scenes import Thing, draw_scene
from ans_core.judge.base import self_checked
from ans_core.judge.cache import Cache, key_of
from ans_core.judge.judging import Judging, OnFailure
from ans_core.judge.parse import choice, choices
from ans_core.judge.questions import (
    Option,
    Question,
    Questions,
    question_of,
    read_questions,
    reward,
    score,
    shuffled,
    write_questions,
)
from ans_core.judge.rules import RuleJudge, answers, questions_of

JUDGE = RuleJudge()
STAR = "a large red striped star at the top left of the picture"


def question(kind: str, *scores: float) -> Question:
    return Question(
        kind=kind,
        text=kind,
        options=tuple(Option(text=f"option {i}", score=float(s)) for i, s in enumerate(scores)),
    )  # type: ignore[arg-type]


SCORED: Questions = (
    question("recognition", 1, 0),
    question("positive", 1, 0.5, 0, -1),
    question("positive", 1, 0.5, 0, -1),
    question("negative", 1, 0, -1),
)


def earned(caption: str, questions: Questions) -> float:
    (value,) = JUDGE.submit([(caption, questions)]).result()
    assert value is not None
    return value


@pytest.fixture(scope="module")
def scenes() -> list[list[str]]:
    """Captions of the things of drawn scenes."""
    return [
        [region_caption(thing) for thing in draw_scene(seed=1, split="train", index=i, image_size=32).things]
        for i in range(50)
    ]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ((0, 0, 0, 0), 1.0),
        ((0, 1, 2, 0), (0.25 + 1) / 2),
        ((0, 0, 3, 2), (0.0 - 1) / 2),
        ((1, 0, 0, 0), 0.0),  # something else, well described
        ((1, 0, 3, 2), (-0.5 - 1) / 2),
    ],
)
def test_the_score_is_the_mean_of_positives_and_negatives_behind_the_gate(
    chosen: tuple[int, ...], expected: float
):
    assert score(SCORED, chosen) == expected
    assert reward(SCORED, chosen) == max(0.0, expected)


def test_questions_without_negatives_are_scored_by_the_positives():
    assert score(SCORED[:3], (0, 0, 2)) == 0.5
    with pytest.raises(ValueError, match="nothing to score"):
        score(SCORED[:1], (0,))


def test_impossible_questions_are_refused():
    with pytest.raises(ValueError, match="different options"):
        Question(
            kind="positive", text="?", options=(Option(text="a", score=1.0), Option(text="a", score=0.0))
        )
    with pytest.raises(ValueError, match="the best is 1"):
        question("positive", 0.5, 0)
    with pytest.raises(ValueError, match="no kind of question"):
        question_of({"kind": "x", "text": "?", "options": []})


def test_the_order_of_options_depends_on_the_content_alone_and_favours_no_place():
    asked = [Question(kind="negative", text=f"number {i}", options=SCORED[3].options) for i in range(600)]
    assert [shuffled(q) for q in asked] == [shuffled(q) for q in asked]
    places = Counter(
        next(i for i, option in enumerate(shuffled(q).options) if option.score == 1) for q in asked
    )
    assert all(150 < places[i] < 250 for i in range(3))


def test_questions_come_back_from_their_file_as_written(tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    written = {("set", "1"): SCORED, ("set", "2"): (), ("other", "1"): SCORED[:2]}
    write_questions(path, written)
    assert read_questions(path) == written


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"sample_id": "1"}',
        '{"dataset": "d", "sample_id": "1", "questions": [{"kind": "positive"}]}',
        "3",
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "questions.jsonl"
    write_questions(path, {("set", "1"): SCORED})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"questions.jsonl:2: "):
        read_questions(path)
    with pytest.raises(ValueError, match="run the stage `judge_questions` first"):
        read_questions(tmp_path / "none.jsonl")


@pytest.mark.slow
def test_true_captions_of_the_drawn_world_earn_one_and_empty_ones_nothing(scenes: list[list[str]]):
    captions = [caption for scene in scenes for caption in scene]
    drafted = [questions_of(caption, positives=4, negatives=3) for caption in captions]
    assert len(captions) > 150
    assert all(
        Counter(q.kind for q in asked) == {"recognition": 1, "positive": 4, "negative": 3}
        for asked in drafted
    )
    kept = self_checked(JUDGE, captions, drafted)
    assert kept == drafted
    assert JUDGE.submit(list(zip(captions, kept, strict=True))).result() == [1.0] * len(captions)
    assert JUDGE.submit([("", asked) for asked in kept]).result() == [0.0] * len(captions)


@pytest.mark.slow
def test_every_other_caption_of_a_scene_earns_less(scenes: list[list[str]]):
    pairs = [(true, other) for scene in scenes for true in scene for other in scene if true != other]
    values = [earned(other, questions_of(true, positives=4, negatives=3)) for true, other in pairs]
    assert len(pairs) > 300
    assert max(values) < 1.0
    assert sum(values) / len(values) < 0.25


@pytest.mark.parametrize(
    ("caption", "of_positives"),
    [
        (STAR.replace("red", "blue"), (3 - 1) / 4),
        (STAR.replace("red ", ""), 3 / 4),
        (STAR.replace("red", "coloured"), 3.5 / 4),
        (STAR.replace("at the top left", "on the left"), 3.5 / 4),
        (STAR.replace("top left", "bottom left"), (3 - 1) / 4),
        (STAR.replace("large", "big").replace("red", "ruby"), 1.0),
        (STAR.replace("red", "red blue green"), (3 - 1) / 4),
        ("a star", 0.0),
    ],
)
def test_details_cost_what_they_are_worth(caption: str, of_positives: float):
    """Negatives asked for apart: whether they hold the value that a caption gives wrongly is left to
    chance."""
    asked = questions_of(STAR, positives=4, negatives=0)
    assert earned(caption, asked) == of_positives


@pytest.mark.parametrize(
    "caption",
    ["a large red striped circle at the top left of the picture", "a large red striped star circle square"],
)
def test_another_shape_is_not_recognised(caption: str):
    assert earned(caption, questions_of(STAR, positives=4, negatives=3)) == 0.0


def test_a_hallucinated_value_that_is_asked_for_costs():
    for asked in (questions_of(STAR, positives=1, negatives=n) for n in (1, 2, 3, 12)):
        negative = next(q for q in asked if q.kind == "negative")
        value = negative.text.split('"')[1]
        chosen = answers(f"{STAR} {value}", (negative,))[0]
        assert negative.options[chosen].score == -1
        assert negative.options[answers(STAR, (negative,))[0]].score == 1
        assert negative.options[answers("", (negative,))[0]].score == 0


def test_questions_are_the_same_whenever_they_are_made():
    assert questions_of(STAR, positives=4, negatives=3) == questions_of(STAR, positives=4, negatives=3)
    assert (
        len(
            {questions_of(STAR.replace("red", c), positives=4, negatives=3) for c in ("red", "blue", "green")}
        )
        == 3
    )


@pytest.mark.parametrize(
    "caption",
    [
        "A young woman in a blue jacket, holding a black umbrella with her left hand.",
        "the dog's left ear",
        "a wooden table with a white plate and two glasses",
        "an old brick building on the right side of the street",
    ],
)
def test_other_english_is_asked_about_too(caption: str):
    (kept,) = self_checked(JUDGE, [caption], [questions_of(caption, positives=4, negatives=3)])
    assert {q.kind for q in kept} == {"recognition", "positive", "negative"}
    assert earned(caption, kept) == 1.0
    assert earned("a red car", kept) == earned("", kept) == 0.0


def test_what_cannot_be_asked_about_has_no_questions_and_no_judgement():
    assert (
        questions_of("", positives=4, negatives=3)
        == questions_of("it is in the", positives=4, negatives=3)
        == ()
    )
    assert self_checked(JUDGE, ["a sandwich"], [questions_of("a sandwich", positives=4, negatives=3)]) == [()]
    assert JUDGE.submit([("a sandwich", ())]).result() == [None]


OPTIONS = ["red", "dark red", "not said", "blue or green"]


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("b", 1), ("B.", 1), ("(c)", 2), ("**d**", 3), ("a. red", 0), ("b) Dark Red", 1), ('"not said"', 2),
        ("The colour is not said.", 2), ("It is dark red.", 1), ("c, it is not red", 0),
        ("c. It is neither red nor dark", 2), ("not red but blue or green", 3), ("blue", 3),
        ("covered", None), ("the answer is b", 1), ("Option C", 2), ("I choose (d)", 3), ("e", None),
        ("", None), ("a or b?", None), ("perhaps", None),
    ],
)  # fmt: skip
def test_one_answer_is_read_by_letter_then_by_text(piece: str, expected: int | None):
    assert choice(piece, OPTIONS) == expected


THREE = (question("positive", 1, 0), question("positive", 1, 0, -1), question("negative", 1, -1, 0))


@pytest.mark.parametrize(
    "reply",
    [
        '{"q1": "b", "q2": "c", "q3": "a"}', '{"answers": ["b", "c", "a"]}', '["b", "c", "a"]',
        '{"3": "a", "1": "b", "2": "c"}',
        '[{"question": 1, "answer": "b"}, {"question": 2, "answer": "c. option 2"}, {"question": 3, "answer": "A"}]',
        'Sure! ```json\n["B", "C", "A"]\n``` I hope this helps.', '{"q1": "b", "q2": "c", "q3": "a', '["b", "c", "a',
        '{"answers": ["b", "c", "a"]',
        "1. b\n2. c\n3. a", "1) option 1 2) option 2 3) option 0", "**Question 1:** b\n**Question 2:** c\n**Question 3:** a.",
        "b\nc\na", "b, c, a", "<think>1. a 2. a 3. b</think>\nb c a", "q1: b; q2: c; q3: a",
    ],
)  # fmt: skip
def test_replies_of_every_shape_are_read(reply: str):
    assert choices(reply, THREE) == [1, 2, 0]


@pytest.mark.parametrize(
    "reply",
    ["", "no idea", "{}", "[]", '["b", "c"]', '["b", "c", "a", "a"]', "null", '{"q1": ["b"], "q2": 3}'],
)
def test_what_cannot_be_assigned_to_questions_is_not_guessed(reply: str):
    assert choices(reply, THREE) == [None, None, None]


def test_a_part_that_is_missing_leaves_the_others():
    assert choices('{"q1": "b", "q3": "z"}', THREE) == [1, None, None]
    assert choices("1. b\n3. a", THREE) == [1, None, 0]


def test_the_key_of_the_cache_changes_with_everything_that_decides_a_reply():
    base = {
        "url": "u",
        "model": "m",
        "prompt_version": "1",
        "parameters": {"temperature": 0},
        "content": ["a"],
    }
    changed = [
        base | {"url": "v"},
        base | {"model": "n"},
        base | {"prompt_version": "2"},
        base | {"parameters": {"temperature": 1}},
        base | {"content": ["b"]},
    ]
    assert len({key_of(**words) for words in (base, *changed)}) == 6
    assert key_of(**base) == key_of(**json.loads(json.dumps(base)))


def test_two_open_caches_see_each_others_replies(tmp_path: Path):
    one, other = Cache(tmp_path / "deep/judge.sqlite"), Cache(tmp_path / "deep/judge.sqlite")
    one.put("k", "v")
    other.put("k", "w")
    assert (one.get("k"), other.get("none")) == ("w", None)
    with sqlite3.connect(tmp_path / "deep/judge.sqlite") as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    one.close()
    other.close()


def test_a_cache_that_fails_costs_no_run_and_a_file_that_is_none_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    cache = Cache(tmp_path / "judge.sqlite")
    cache.put("k", "an odd reply: \ud83d")
    assert cache.get("k") is None
    cache.put("k", "v")
    assert cache.get("k") == "v"
    cache.close()
    assert cache.get("k") is None
    cache.put("k", "w")
    assert caplog.text.count("judge.sqlite fails, and replies are not kept") == 1
    (tmp_path / "none.sqlite").write_text("not a database" * 100)
    with pytest.raises(ValueError, match=r"the judge's cache .*none\.sqlite can't be used: .*; remove it"):
        Cache(tmp_path / "none.sqlite")


def with_judgements(
    meteor: torch.Tensor,
    judged: list[float | None],
    *,
    meteor_weight: float,
    judge_weight: float,
    on_failure: OnFailure,
) -> tuple[torch.Tensor, float]:
    judging = Judging(
        judge=RuleJudge(),
        questions={},
        meteor_weight=meteor_weight,
        judge_weight=judge_weight,
        on_failure=on_failure,
    )
    rewards, metrics = judging.rewards_with_judge(meteor, judged)
    return rewards, metrics["judge/fell_back"]


def test_a_group_with_a_failed_judgement_is_paid_by_meteor_alone_and_others_are_not_touched():
    meteor = torch.tensor([[0.4, 0.8], [0.2, 0.6]])
    rewards, share = with_judgements(
        meteor, [1.0, 0.0, None, 1.0], meteor_weight=0.25, judge_weight=0.75, on_failure="meteor"
    )
    assert torch.allclose(rewards, torch.tensor([[0.1 + 0.75, 0.2], [0.2, 0.6]]))
    assert share == 0.5
    dropped, _ = with_judgements(
        meteor, [1.0, 0.0, None, 1.0], meteor_weight=0.25, judge_weight=0.75, on_failure="drop"
    )
    assert dropped.isnan().tolist() == [[False, False], [True, True]]
    assert torch.equal(dropped[0], rewards[0])


def test_weights_are_scaled_to_one():
    meteor = torch.ones(1, 3)
    rewards, share = with_judgements(
        meteor, [1.0, 1.0, 0.0], meteor_weight=1.0, judge_weight=3.0, on_failure="meteor"
    )
    assert (rewards.tolist(), share) == ([[1.0, 1.0, 0.25]], 0.0)
    with pytest.raises(ValueError, match="not both 0"):
        with_judgements(meteor, [1.0] * 3, meteor_weight=0.0, judge_weight=0.0, on_failure="meteor")


def test_things_are_told_apart_by_their_captions():
    """What the tests above rest on: the grammar of region captions."""
    place = {"x": 0.1, "y": 0.1, "radius": 0.1, "angle": 0.0, "rgb": (0, 0, 0), "stripe_angle": 0.0}
    assert region_caption(Thing(shape="star", colour="red", size="large", texture="striped", **place)) == STAR
