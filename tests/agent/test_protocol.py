"""Turns as text: what is a call, what is refused, and that nothing a model says raises anything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ans_core.agent import protocol
from ans_core.agent.episode import Episode, Toolbox
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.protocol import Call, call_text
from ans_core.agent.refusal import Refused
from ans_core.agent.workspace import Workspace
from ans_core.agent.world import FAMILIES, draw_question
from ans_core.data import scene_text
from ans_core.data.conversation import BOX_STEP
from ans_core.pictures import rle
from ans_core.pretrain.build import build_tokenizer
from tests import tiny

ZOOM = Call(name="zoom_in", arguments={"bbox_2d": [250, 500, 500, 750]})
BODY = json.dumps({"name": "zoom_in", "arguments": {"bbox_2d": [250, 500, 500, 750]}})


def test_a_call_is_read_as_it_is_written() -> None:
    assert protocol.parse("Look. " + call_text(ZOOM)) == ("Look.", ZOOM)
    assert protocol.parse(f"<tool_call>\n{BODY}\n</tool_call>\n") == ("", ZOOM)  # as Hermes writes it
    assert protocol.parse(" It is checked. ") == ("It is checked.", None)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (f"<tool_call>{BODY}</tool_call><tool_call>{BODY}</tool_call>", "several_calls"),
        (f"<tool_call>{BODY}", "broken_call"),
        (f"{BODY}</tool_call>", "broken_call"),
        (f"</tool_call>{BODY}<tool_call>", "broken_call"),
        (f"<tool_call>{BODY}</tool_call> checked", "broken_call"),
        (f"<tool_call>{BODY[:-1]}</tool_call>", "broken_call"),
        (f"<tool_call>[{BODY}]</tool_call>", "broken_call"),
        ('<tool_call>{"name": "zoom_in"}</tool_call>', "broken_call"),
        ('<tool_call>{"name": "zoom_in", "arguments": [], "more": 1}</tool_call>', "broken_call"),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "broken_call"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "broken_call"),
        ('<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', "broken_call"),
        (
            '<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [NaN, 0, 1, 1]}}</tool_call>',
            "broken_call",
        ),
        ("<tool_call>" + "[" * 1900 + "</tool_call>", "broken_call"),
        ("<tool_call>" + " 9" * 3000 + "</tool_call>", "broken_call"),
        ('<tool_call>{"name": "zoom", "arguments": {}}</tool_call>', "unknown_operation"),
        (
            '<tool_call>{"name": "zoom_in", "arguments": {"box": [0, 0, 9, 9]}}</tool_call>',
            "unknown_argument",
        ),
        (
            '<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": ["0", 0, 9, 9]}}</tool_call>',
            "wrong_type",
        ),
        (
            '<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [0, 0, 9.5, 9]}}</tool_call>',
            "wrong_type",
        ),
        (
            '<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [0, 0, true, 9]}}</tool_call>',
            "wrong_type",
        ),
        ('<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [0, 0, 9]}}</tool_call>', "wrong_type"),
        ('<tool_call>{"name": "get_properties", "arguments": {}}</tool_call>', "wrong_type"),
    ],
)
def test_what_is_no_call_is_an_observation_with_a_reason(toolbox: Toolbox, said: str, kind: str) -> None:
    episode = Episode(toolbox, Workspace.of([tiny.picture(0)]))
    observation = episode.turn(said)
    assert observation is not None
    assert (observation.error, episode.counts) == (kind, {"calls": 1, kind: 1})
    assert observation.turn().startswith("Error: ")
    assert len(observation.text) < 400


def test_an_unknown_name_comes_with_the_nearest_one() -> None:
    with pytest.raises(Refused, match=r"did you mean zoom_in\?"):
        protocol.checked(Call(name="ZOOM_in", arguments={}), OPERATIONS)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["image_1", "mask_1", "track_1"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*OPERATIONS, "zoom", ""])
KEYS = st.sampled_from(["bbox_2d", "image", "mask", "masks", "properties", "frames", "text", "point_2d", "x"])
ARGUMENTS = st.dictionaries(
    KEYS, st.lists(st.integers(-5, 1005), min_size=2, max_size=5) | VALUES, max_size=3
)
PIECES = st.sampled_from(
    [
        protocol.OPEN,
        protocol.CLOSE,
        '{"name": ',
        '"zoom_in"',
        ', "arguments": ',
        "{",
        "}",
        '"',
        "[",
        "]",
        "9" * 5000,
        "\\u",
    ]
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(said=st.text(max_size=80) | st.lists(PIECES | st.text(max_size=4), max_size=14).map("".join))
def test_any_text_is_an_answer_a_call_or_refused(said: str) -> None:
    try:
        _, call = protocol.parse(said)
    except Refused:
        assert protocol.OPEN in said or protocol.CLOSE in said
    else:
        assert (call is None) == (protocol.OPEN not in said)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(name=NAMES, arguments=ARGUMENTS, clip=st.booleans())
def test_any_call_gives_an_observation(
    toolbox: Toolbox, name: str, arguments: dict[str, object], clip: bool
) -> None:
    frames = [tiny.picture(0), tiny.picture(1)] if clip else [tiny.picture(0)]
    workspace = Workspace.of(frames, masks=[rle.decode(tiny.square(8, 8, 24, 24))])
    call = Call(name=name, arguments=arguments)
    observation, after = toolbox.call(workspace, call)
    assert observation.ok or after == workspace
    assert json.loads(json.dumps(observation.values)) is not None
    if (
        all(ord(c) < 0xD800 for c in str(arguments))
        and "nan" not in str(arguments)
        and "inf" not in str(arguments)
    ):
        assert protocol.parse(call_text(call)) == ("", call)


@pytest.mark.slow
def test_calls_of_every_plan_are_at_most_14_tokens_of_a_tokenizer_that_never_saw_one() -> None:
    words = [
        f"the large {word} circle {n * BOX_STEP}"
        for word in scene_text.vocabulary()
        for n in range(1000 // BOX_STEP + 1)
    ]
    tokenizer = build_tokenizer(words)
    questions = [
        draw_question(family, seed=1, split="train", index=index) for family in FAMILIES for index in range(8)
    ]
    plans = [call for question in questions for call in question.plan + question.distraction]
    plans += [
        Call(name="segment_object_at", arguments={"text": "the large red circle"}),
        Call(name="select_frames", arguments={"frames": [0, 3, 7]}),
    ]
    # small agents know no words for it (operations/locate.py)
    assert {call.name for call in plans} == OPERATIONS.keys() - {"locate"}
    assert min(len(tokenizer.encode(call_text(call))) for call in plans) > 30
    ordinary = "the large red circle, at the top [left] of the picture {250, 500}"
    before = tokenizer.encode(ordinary)
    tokenizer.add_tokens(protocol.call_tokens(OPERATIONS))
    assert max(len(tokenizer.encode(call_text(call))) for call in plans) <= 14
    assert all(tokenizer.decode(tokenizer.encode(call_text(call))) == call_text(call) for call in plans)
    assert tokenizer.encode(ordinary) == before


def test_the_prompt_tells_every_operation_and_its_arguments() -> None:
    first, *lines, last = protocol.tools_text(OPERATIONS).split("\n")
    assert (first, last) == ("<tools>", "</tools>")
    told = {
        function["name"]: function["parameters"]
        for function in (json.loads(line)["function"] for line in lines)
    }
    assert {name: set(parameters["properties"]) for name, parameters in told.items()} == {
        name: set(operation.arguments.model_fields) for name, operation in OPERATIONS.items()
    }
    assert told["get_properties"]["required"] == ["masks"]
