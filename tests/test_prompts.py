"""Tokens and templates, in upstream's words."""

from __future__ import annotations

import pytest

from ans_core import prompts


def test_a_picture_is_a_run_of_image_tokens_and_frames_stand_on_lines():
    assert prompts.image_text([2]) == "<img><IMG_CONTEXT><IMG_CONTEXT></img>"
    assert prompts.image_text([1, 1]) == "<img><IMG_CONTEXT></img>\n<img><IMG_CONTEXT></img>"


def test_regions_are_listed_with_their_tokens():
    assert prompts.region_text([]) == ""
    assert prompts.region_text([1, 2]) == (
        "\nThere are 2 part regions in the picture: region1<vp><IMG_CONTEXT></vp>, region2<vp><IMG_CONTEXT><IMG_CONTEXT></vp>.\n"
    )


def test_phrases_are_marked_where_they_stand():
    assert (
        prompts.interleave("a cat on a mat", ((0, 5), (9, 14)))
        == "<p> a cat </p> [SEG] on <p> a mat </p> [SEG]"
    )
    assert prompts.interleave("the end", ()) == "the end"


def test_a_box_is_in_thousandths_of_the_image():
    assert prompts.box_text(0.0, 0.1234, 0.5, 1.0) == "<box>[[0, 123, 500, 1000]]</box>"
    assert prompts.box_text(0.0, 0.1234, 0.5, 1.0, step=50) == "<box>[[0, 100, 500, 1000]]</box>"


def test_a_turn_ends_with_its_own_suffix_in_every_template():
    for name, template in prompts.TEMPLATES.items():
        assert template.user.count("{input}") == 1, name
        assert template.suffix in template.stop_words, name


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Red square.", "Please segment red square in this image."),
        (" the red square. ", "Please segment the red square in this image."),
        ("Which one is Red? Answer with a mask. ", "Which one is Red? Answer with a mask."),
        ("a {set}", "Please segment a {set} in this image."),
        (
            "The one that barks. Please respond with segmentation mask.",
            "The one that barks. Please respond with segmentation mask.",
        ),
    ],
)
def test_an_expression_is_asked_for_in_lower_case_without_full_stop_and_a_question_as_it_is(
    text: str, question: str
):
    assert prompts.referring_question(text, prompts.REFERRING_QUESTIONS[1]) == question
    assert prompts.referring_question(text, prompts.REFERRING_EVAL) == "<image>\n" + question


def test_all_the_regions_that_are_shown_are_asked_about():
    asked = [prompts.region_question(n, "Describe {region}.") for n in (1, 2, 3)]
    assert asked == [
        "Describe region1.",
        "Describe region1 and region2.",
        "Describe region1, region2 and region3.",
    ]
    assert "<image>" + prompts.region_question(1, prompts.REGION_QUESTIONS[0]) == prompts.REGION_EVAL


def test_pictures_stand_before_a_users_words():
    assert (
        prompts.plain_question("What is this?\n<image>")
        == prompts.plain_question("<image>\nWhat is this?")
        == "What is this?"
    )
