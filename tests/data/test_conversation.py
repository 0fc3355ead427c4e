from __future__ import annotations

import random

import pytest

from ans_core import prompts
from ans_core.benchmarks import BENCHMARKS
from ans_core.data.conversation import Turn, box, pretraining_turn, turn, union
from ans_core.pictures import rle
from ans_core.rl import vqa_loop
from ans_core.types import Sample
from tests import tiny


def turns(sample, count: int = 40):  # type: ignore[no-untyped-def]
    return [turn(sample, random.Random(seed)) for seed in range(count)]


def test_an_expression_is_asked_for_in_all_of_upstreams_words():
    made = turns(tiny.sample(text="Red square."), 200)
    assert {t.question for t in made} == {q.format(text="red square") for q in prompts.REFERRING_QUESTIONS}
    assert {t.answer for t in made} == set(prompts.REFERRING_ANSWERS)
    assert all(t.masks == ((tiny.square(8, 8, 24, 24),),) and t.regions == () for t in made)


def test_an_article_in_the_expression_does_not_stand_twice():
    made = turns(tiny.sample(text="the red square"))
    assert not any("the the" in t.question for t in made)
    assert "Can you segment the red square in this image?" in {t.question for t in made}


def test_an_expression_that_is_a_question_is_asked_as_it_is():
    asked = "What would You sit on? Answer with a mask."
    assert {t.question for t in turns(tiny.sample(text=asked))} == {asked}


def test_an_expression_that_means_nothing_is_answered_so_without_a_mask():
    assert {(t.answer, t.masks) for t in turns(tiny.sample(masks=()))} == {("There is no such object.", ())}


def test_a_clip_is_asked_for_in_the_words_of_the_evaluation():
    assert {t.question for t in turns(tiny.clip(text="the moving square"))} == {
        "Please segment the moving square."
    }


def test_one_seg_draws_all_the_objects_of_an_expression():
    sample = tiny.sample(masks=((tiny.square(0, 0, 16, 16),), (tiny.square(8, 8, 24, 24),)))
    (drawn,) = turn(sample, random.Random(0)).masks
    assert [rle.area(m) for m in drawn] == [16 * 16 + 16 * 16 - 8 * 8]


def test_a_frame_that_nobody_annotated_stays_unknown_and_an_absent_object_adds_nothing():
    one, absent = tiny.square(0, 0, 4, 4), rle.empty(64, 64)
    merged = union(((one, None, absent), (None, None, absent)))
    assert [None if m is None else rle.area(m) for m in merged] == [16, None, 0]


def test_a_region_is_described_in_a_sentence():
    made = turns(tiny.region(text="a red square"))
    assert {t.answer for t in made} == {"a red square."}
    assert {t.question for t in made} == {q.format(region="region1") for q in prompts.REGION_QUESTIONS}
    assert all(t.regions == (tiny.square(8, 8, 24, 24),) and t.masks == () for t in made)
    assert turn(tiny.region(text="is it red?"), random.Random(0)).answer == "is it red?"


def test_a_conversation_keeps_the_users_words_and_regions():
    sample = tiny.sample(task="conversation", question="Is region1 red?", text="Yes")
    made = turn(sample, random.Random(0))
    assert (made.question, made.answer, made.regions, made.masks) == (
        "Is region1 red?",
        "Yes",
        (tiny.square(8, 8, 24, 24),),
        (),
    )


def test_a_region_whose_first_frame_is_not_annotated_is_an_error():
    with pytest.raises(AssertionError, match="needs its mask in the first frame"):
        turn(tiny.region(masks=((None,),)), random.Random(0))


def test_pretraining_asks_as_sft_does_and_answers_with_boxes() -> None:
    def asked(sample: Sample) -> list[Turn]:
        return [pretraining_turn(sample, random.Random(n)) for n in range(200)]

    square = tiny.square(0, 16, 32, 64)
    found, drawn = asked(tiny.sample(masks=((square,),))), turns(tiny.sample(masks=((square,),)), 200)
    assert {t.question for t in found} == {t.question for t in drawn}
    assert {t.answer for t in found} == {
        t.answer.replace("[SEG]", "<box>[[0, 250, 500, 1000]]</box>") for t in drawn
    }
    assert all((t.targets, t.masks) == ((square,), ()) for t in found)
    nothing = asked(tiny.sample(masks=()))
    assert {t.question for t in nothing} == {t.question for t in drawn}
    assert all((t.answer, t.targets) == (prompts.NO_TARGET_ANSWER, (rle.empty(64, 64),)) for t in nothing)
    region = tiny.region()
    assert [(t.question, t.answer, t.regions) for t in asked(region)] == [
        (t.question, t.answer, t.regions) for t in turns(region, 200)
    ]
    assert all(t.targets == t.regions for t in asked(region))


def test_pretraining_captions_pictures_with_boxes_and_without() -> None:
    masks = ((tiny.square(0, 16, 32, 64),), (tiny.square(0, 0, 64, 64),))
    sample = tiny.sample(
        task="grounded_caption", text="a cat and a dog", masks=masks, phrases=((0, 5), (10, 15))
    )
    made = [pretraining_turn(sample, random.Random(n)) for n in range(50)]
    grounded = (
        "<p> a cat </p> <box>[[0, 250, 500, 1000]]</box> and <p> a dog </p> <box>[[0, 0, 1000, 1000]]</box>."
    )
    told = {(t.question in prompts.GROUNDED_QUESTIONS, t.answer, len(t.targets)) for t in made}
    assert told == {(True, grounded, 2), (False, "a cat and a dog.", 0)}


def test_a_long_caption_is_asked_for_in_detail_and_ends_with_one_full_stop():
    sample = tiny.sample(task="grounded_caption", text="A cat.", phrases=((0, 5),), detail=True)
    assert {t.question for t in turns(sample, 200)} == set(prompts.DETAILED_GROUNDED_QUESTIONS)
    assert {t.answer for t in turns(sample)} == {"<p> A cat </p> [SEG]."}
    assert (
        turn(tiny.sample(task="grounded_caption", text="A cat", phrases=((0, 5),)), random.Random(0)).answer
        == "<p> A cat </p> [SEG]."
    )
    told = turns(tiny.region(text="A red square.", detail=True), 400)
    assert {t.question for t in told} == {
        q.format(region="region1") for q in prompts.DETAILED_REGION_QUESTIONS
    }


def test_box_coordinates_are_thousandths_rounded_to_fifties():
    # 125, 125 (to even: 100), 375 (to even: 400), 391
    assert box(tiny.square(8, 8, 24, 25)) == "<box>[[100, 100, 400, 400]]</box>"


TWO = ((tiny.square(0, 0, 16, 16),), (tiny.square(8, 8, 24, 24),))


@pytest.mark.parametrize(
    "sample",
    [
        tiny.sample(text=" The Red square. "),
        tiny.sample(text="Which is red?", masks=TWO),
        tiny.clip(text="The square that moves."),
        tiny.clip(text="What moves to the right?"),
        tiny.region(text="a red square"),
        tiny.region(text="a red square over a blue one", masks=TWO),
        tiny.region(text="A red square, one of two.", detail=True),
        tiny.sample(task="grounded_caption", text="a cat", phrases=((0, 5),)),
    ],
)
def test_what_a_benchmark_asks_is_one_of_the_questions_of_training(sample: Sample):
    name = "video" if len(sample.frames) > 1 else sample.task
    request = BENCHMARKS[name].request(sample)
    asked = request.text.removeprefix("<image>").removeprefix("\n")
    assert (asked, request.mask_prompts) in [(t.question, t.regions) for t in turns(sample, 100)]


def test_a_conversation_asks_the_same_in_sft_and_in_rl():
    sample = tiny.sample(task="conversation", question="<image>\nIs region1 red?", text="Yes")
    made, request = turn(sample, random.Random(0)), vqa_loop.request(sample)
    assert made.question == request.text.removeprefix("<image>") == "Is region1 red?"
    assert made.regions == request.mask_prompts
    assert (
        vqa_loop.request(tiny.sample(task="conversation", question="Why?", text="So.", masks=())).text
        == "<image>\nWhy?"
    )
    longer = tiny.sample(
        task="conversation", past=(("What is region1?", "A dog."),), question="Why?", text="So."
    )
    made, request = turn(longer, random.Random(0)), vqa_loop.request(longer)
    assert (made.past, made.question) == (longer.past, "Why?")
    assert (request.past, request.text) == ((("<image>What is region1?", "A dog."),), "Why?")
