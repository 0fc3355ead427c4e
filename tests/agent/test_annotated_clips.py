"""Questions about annotated clips: answers that the drawing has by construction, what is left out, traces by
the operations (in which colours stand for SAM2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ans_core.agent.episode import Toolbox
from ans_core.agent.questions import questions as command
from ans_core.agent.world.annotated_clips import FAMILIES_OF_CLIPS, clips
from ans_core.agent.world.bank import QuestionBank, write_questions
from ans_core.agent.world.question import Question
from ans_core.agent.world.question_sets import MOST_FRAMES
from ans_core.agent.world.trace_file import read_traces
from ans_core.agent.world.traces import write_synthetic_traces
from ans_core.data import shard
from ans_core.model.network import Network
from ans_core.pictures import media, rle
from ans_core.types import Sample

WIDTH, HEIGHT, SIDE = 320, 240, 60
COLOURS = {"cat": (200, 30, 30), "dog": (40, 70, 210), "cup": (240, 240, 240)}
Ways = dict[str, tuple[tuple[int, int], tuple[int, int]]]
"""Name -> where a box's corner is in the first frame, and in the last one."""
STILL = ((200, 20), (200, 20))


def samples(ways: Ways, *, clip_id: str = "clip", frames: int = 6) -> list[Sample]:
    masks = np.zeros((len(ways), frames, HEIGHT, WIDTH), bool)
    pictures = np.full((frames, HEIGHT, WIDTH, 3), (120, 90, 60), np.uint8)
    for own, (name, (start, end)) in zip(masks, ways.items(), strict=True):
        for frame, share in enumerate(np.linspace(0, 1, frames)):
            x, y = (round(a + share * (b - a)) for a, b in zip(start, end, strict=True))
            own[frame, max(0, y) : max(0, y + SIDE), max(0, x) : max(0, x + SIDE)] = True
            pictures[frame][own[frame]] = COLOURS[name]
    references = tuple(media.reference(picture) for picture in pictures)
    return [
        Sample(
            sample_id=f"{clip_id}/{name}", dataset="boxes", image_id=clip_id, frames=references, height=HEIGHT,
            width=WIDTH, task="referring", text=f"the {name}", masks=(tuple(map(rle.encode, own)),),
        )
        for name, own in zip(ways, masks, strict=True)
    ]  # fmt: skip


def asked(*some: Sample) -> list[Question]:
    return [question for clip in clips(some, name="boxes", seed=0) for question in clip.questions]


def answers(ways: Ways, family: str) -> list[str]:
    return [question.answer for question in asked(*samples(ways)) if question.family == family]


@pytest.mark.parametrize(
    ("end", "answer"), [((120, 100), "right"), ((20, 20), "up"), ((10, 160), "down"), ((-40, 90), "left")]
)
def test_the_way_is_that_of_the_drawing(end: tuple[int, int], answer: str) -> None:
    assert answers({"cat": ((30, 90), end)}, "which_way") == [answer]


@pytest.mark.parametrize(
    "way",
    [
        ((30, 90), (45, 90)),  # hardly
        ((30, 20), (130, 110)),  # askew
        ((30, 90), (-70, 90)),  # out of the picture
        ((0, 90), (120, 90)),  # cut in the first frame
    ],
)
def test_no_way_is_asked_about_that_is_unclear(way: tuple[tuple[int, int], tuple[int, int]]) -> None:
    assert answers({"cat": way}, "which_way") == []


def test_of_things_that_stay_as_many_are_asked_about_as_leave() -> None:
    ways: Ways = {"cat": ((30, 90), (-70, 90)), "dog": STILL, "cup": ((200, 120), (210, 120))}
    assert sorted(answers(ways, "still_there")) == ["no", "yes"]
    assert answers({"dog": STILL}, "still_there") == []
    half_gone: Ways = {"cat": ((30, 90), (-70, 90)), "dog": ((30, 20), (-50, 20))}
    assert answers(half_gone, "still_there") == ["no"]  # a sixth of the dog's width is left


def test_what_is_ambiguous_or_told_by_its_name_is_left_out() -> None:
    cat, dog = samples({"cat": ((30, 90), (120, 90)), "dog": STILL})
    assert [question.targets[0].phrase for question in asked(cat, dog)] == ["the cat"]
    left_out = [
        [cat, replace(dog, text="the cat")],  # which cat?
        [cat, replace(dog, text="THE  Cat.")],
        [cat, replace(dog, text="the cat that vanishes")],  # it may be called a cat
        [replace(cat, text="the cat running away")],
        [replace(cat, text="the cat moving rightwards")],
        [replace(cat, text="the cat flying eastward")],
        [replace(cat, text="the cat that vanishes")],
        [replace(cat, text="the cat which drives off")],
        [replace(cat, masks=(*cat.masks, *dog.masks))],  # two things
        [replace(cat, meta={"joined": [0]})],
        [replace(cat, stills=True)],
        [replace(cat, frames=cat.frames[:1], masks=(cat.masks[0][:1],))],
    ]
    assert [asked(*some) for some in left_out] == [[]] * len(left_out)


def test_a_clip_is_of_the_frames_that_are_annotated_and_of_no_more_than_can_be_kept() -> None:
    (cat,) = samples({"cat": ((30, 90), (120, 90))}, frames=41)
    (clip,) = clips([cat], name="boxes", seed=0)
    assert len(clip.frames) == len(clip.questions[0].targets[0].masks) == MOST_FRAMES
    assert (clip.frames[0], clip.frames[-1]) == (cat.frames[0], cat.frames[-1])
    every_tenth = tuple(mask if frame % 10 == 5 else None for frame, mask in enumerate(cat.masks[0]))
    (clip,) = clips([replace(cat, masks=(every_tenth,))], name="boxes", seed=0)
    assert clip.frames == cat.frames[5::10]
    assert clips([replace(cat, masks=((cat.masks[0][0], *[None] * 40),))], name="boxes", seed=0) == []


@pytest.mark.slow
@pytest.mark.usefixtures("colour_sam")
def test_traces_follow_the_thing_and_say_what_the_track_says(tmp_path: Path, tiny_model: Network) -> None:
    some = [
        sample
        for number in range(6)
        for sample in samples(
            {"cat": ((30, 90), (-70, 90)), "dog": ((200, 20), (100, 20)), "cup": ((200, 120), (220, 120))},
            clip_id=f"a/{number}",
        )
    ]
    families = write_questions(clips(some, name="boxes", seed=0), tmp_path, seed=0)
    assert families == {"which_way": 6, "still_there": 12}
    with Toolbox(tiny_model) as toolbox:
        bank = QuestionBank((), {"train": tmp_path}, seed=0, tile=toolbox.tile)
        written = write_synthetic_traces(
            tmp_path, bank, families, split="train", toolbox=toolbox, provenance={}
        )
    assert not written.dropped
    assert all(written.kinds[kind] for kind in ("golden", "trap", "self_correction"))
    for trace in read_traces(tmp_path):
        assert trace.family in FAMILIES_OF_CLIPS
        assert len(trace.frames) == 6
        assert (tmp_path / trace.frames[-1]).is_file()
        calls = [turn.text for turn in trace.turns if turn.role == "assistant"]
        assert "I follow it." in calls[-2]
        assert "track_object" in calls[-2]
        if trace.kind == "self_correction":
            assert '"mask_2"' in calls[-2]
            assert "That is not the " in calls[1]


def test_the_command_writes_questions_of_clips_and_says_why_no_traces(tmp_path: Path) -> None:
    shard.write(samples({"cat": ((30, 90), (120, 90))}), tmp_path / "train")
    shown = command("mine", tmp_path, "shards", None, seed=0, out=tmp_path / "questions")
    assert "1 questions: which_way 1" in shown
    assert "no trace of a clip" in shown
