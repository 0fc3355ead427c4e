"""Questions about annotated pictures: answers that the drawing has by construction, what is refused, traces
by the real operations."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageDraw, ImageFont

from ans_core import data
from ans_core.agent import ocr
from ans_core.agent.episode import Observation, Toolbox
from ans_core.agent.operations.base import Tools
from ans_core.agent.operations.zoom_in import ZOOM_IN, ZoomIn
from ans_core.agent.questions import questions as command
from ans_core.agent.world import annotated, bank
from ans_core.agent.world.annotated import READS_TEXT, plural
from ans_core.agent.world.bank import QuestionBank, divided, write_questions
from ans_core.agent.world.question import Question, evidence, faithful_calls
from ans_core.agent.world.question_sets import QuestionedPicture
from ans_core.agent.world.things import askable, pictures
from ans_core.agent.world.trace_file import read_traces
from ans_core.agent.world.traces import Written, kinds_of_questions, trace, write_synthetic_traces
from ans_core.pictures import media, rle, transforms
from ans_core.types import Sample
from tests.golden import REFERENCE
from tests.workspace import launch

COCO = REFERENCE / "data/tiny_coco"
WIDTH, HEIGHT = 320, 240
Boxes = dict[str, list[tuple[int, int, int, int]]]
COLOURS = {"cat": (200, 30, 30), "dog": (40, 70, 210), "cup": (240, 240, 240)}


def samples(
    things: Boxes, *, picture_id: str = "1", joined: tuple[str, ...] = (), category: bool = False
) -> list[Sample]:
    """A picture of filled boxes (x1, y1, x2, y2) on brown, as a reader gives it."""
    pixels = np.full((HEIGHT, WIDTH, 3), (120, 90, 60), np.uint8)
    masks: dict[str, list[np.ndarray]] = {name: [] for name in things}
    for name, boxes in things.items():
        for x1, y1, x2, y2 in boxes:
            pixels[y1:y2, x1:x2] = COLOURS[name]
            masks[name].append(np.zeros((HEIGHT, WIDTH), bool))
            masks[name][-1][y1:y2, x1:x2] = True
    frame = media.reference(pixels)
    return [
        Sample(
            sample_id=f"{picture_id}_{name}", dataset="boxes", image_id=picture_id, frames=(frame,),
            height=HEIGHT, width=WIDTH, task="referring", text=name,
            masks=tuple((rle.encode(mask),) for mask in own),
            meta=({"category": name} if category else {}) | ({"joined": [0]} if name in joined else {}),
        )
        for name, own in masks.items()
    ]  # fmt: skip


def asked(things: Boxes, family: str, **words: object) -> dict[str, str]:
    found = annotated.questions(pictures(samples(things, **words)), families=[family], seed=0)  # type: ignore[arg-type]
    return {question.text: question.answer for question in found}


CAT, DOG = (20, 20, 140, 140), (200, 100, 260, 160)


def test_every_family_has_the_answer_of_the_drawing() -> None:
    both: Boxes = {"cat": [CAT], "dog": [DOG]}
    assert set(asked(both, "which_larger").values()) == {"the cat"}
    ((text, answer),) = asked(both, "left_or_right").items()
    assert answer == ("left" if text == "Is the cat left or right of the dog?" else "right")
    assert asked(both, "which_colour") == {
        "What colour is the cat?": "red",
        "What colour is the dog?": "blue",
    }
    assert list(
        asked({"cat": [(20, 20, 90, 140)], "dog": [(230, 100, 290, 160)]}, "which_third").values()
    ) == ["left", "right"]
    two: Boxes = {"cat": [CAT, (200, 100, 260, 160)]}
    assert asked(two, "smaller_of_two", category=True) == {
        "Is the smaller of the two cats left or right of the larger one?": "right"
    }
    assert asked(two, "count", category=True) == {"How many cats are in the picture?": "2"}
    three: Boxes = {"cat": [(20, 20, 80, 80)], "dog": [(90, 20, 150, 80)], "cup": [(250, 150, 310, 220)]}
    nearest = {text.split(",")[0]: answer for text, answer in asked(three, "nearer").items()}
    assert nearest["Which is nearer to the cat in the picture"] == "the dog"
    assert asked({"cat": [CAT], "cup": []}, "is_there") == {
        "Is there a cat in the picture?": "yes",
        "Is there a cup in the picture?": "no",
    }


@pytest.mark.slow
@pytest.mark.skipif(bool(ocr.not_installed()), reason="no reader of photographs: pip install -e '.[ocr]'")
def test_what_is_written_is_asked_of_one_line_that_the_reader_is_sure_of(tmp_path: Path) -> None:
    def written(*lines: str, **things: list[tuple[int, int, int, int]]) -> list[Question]:
        """The lines, on the boxes of the cup."""
        found = samples({"cup": [(20, 20, 220, 200)], **things})
        picture = transforms.open_image(found[0].frames[0])
        for number, line in enumerate(lines):
            ImageDraw.Draw(picture).text((60, 60 + 70 * number), line, (0, 0, 0), ImageFont.load_default(36))
        found = [replace(sample, frames=(media.reference(picture),)) for sample in found]
        write_questions(pictures(found), tmp_path / "-".join(lines), seed=0, reader=READS_TEXT)
        bank = QuestionBank((), {"train": tmp_path / "-".join(lines)}, seed=0, tile=96)
        ids = bank.written["train"].of_family.get("what_is_written", [])
        return [bank.named(question_id, "train") for question_id in ids]

    (question,) = written("EXIT 27", dog=[(240, 100, 310, 160)])
    assert (question.text, question.answer) == ("What is written on the cup?", "EXIT 27")
    with Toolbox(reader=READS_TEXT) as toolbox:
        for kind in ("golden", "self_correction"):
            record = trace(question, kind, toolbox, seed=0, provenance={"source": "mine"})
            assert not isinstance(record, str)
            said = [turn.text for turn in record[0].turns if turn.role == "assistant"]
            assert '"read_text"' in said[-2]
            assert said[-1] == "EXIT 27"
    assert written("EXIT 27", "STOP") == []  # which of them?
    assert written("EX") == []  # too short to be sure
    one_cup = samples({"cup": [(20, 20, 220, 200)]})
    assert not [
        q for q in annotated.questions(pictures(one_cup), seed=0, reader="template") if "written" in q.text
    ]


def test_a_class_is_surely_absent_only_where_all_classes_are_annotated() -> None:
    of_two = [*samples({"cat": [CAT]}, picture_id="1"), *samples({"dog": [DOG]}, picture_id="2")]
    plain = annotated.questions(pictures(of_two), families=["is_there"], seed=0)
    assert [question.answer for question in plain] == ["yes", "yes"]
    classes = [
        *samples({"cat": [CAT]}, picture_id="1", category=True),
        *samples({"dog": [DOG]}, picture_id="2", category=True),
    ]
    found = annotated.questions(pictures(classes), families=["is_there"], seed=0)
    assert [question.answer for question in found] == ["yes", "no", "yes", "no"]


@pytest.mark.parametrize(
    ("family", "things", "words"),
    [
        ("count", {"cat": [CAT, DOG]}, {"joined": ("cat",), "category": True}),  # a crowd
        ("count", {"cat": [CAT, (200, 100, 220, 120)]}, {"category": True}),  # one is too small to be shown
        # more than an episode has looks for
        ("count", {"cat": [(40 * i, 20, 40 * i + 32, 60) for i in range(5)]}, {"category": True}),
        ("count", {"cat": [CAT, DOG]}, {}),  # expressions: a third cat may have none
        ("smaller_of_two", {"cat": [CAT, DOG]}, {}),
        ("which_larger", {"cat": [(0, 20, 120, 140)], "dog": [DOG]}, {}),  # cut by the edge
        ("which_larger", {"cat": [(20, 20, 90, 90)], "dog": [DOG]}, {}),  # nearly as large
        ("which_larger", {"cat": [CAT, (150, 20, 190, 90)], "dog": [DOG]}, {}),  # which cat?
        ("left_or_right", {"cat": [CAT], "dog": [(100, 150, 200, 220)]}, {}),  # above each other
        ("nearer", {"cat": [(120, 20, 180, 80)], "dog": [(30, 20, 90, 80)], "cup": [(210, 20, 270, 80)]}, {}),
        ("which_third", {"cat": [CAT]}, {}),  # in two thirds
        ("smaller_of_two", {"cat": [CAT, (150, 20, 270, 140)]}, {"category": True}),
        ("is_there", {"cat": [(20, 20, 40, 40)]}, {}),
    ],
)  # fmt: skip
def test_what_is_ambiguous_is_not_asked(family: str, things: Boxes, words: dict[str, object]) -> None:
    found = asked(things, family, **words)
    if family == "nearer":
        assert not any("nearer to the cat" in text for text in found)  # both are 90 pixels away
    else:
        assert found == {}


def write(folder: Path, numbers: Mapping[str, int]) -> Written:
    with Toolbox(reader="template", seconds=60.0) as toolbox:
        bank = QuestionBank((), {"train": folder}, seed=0, tile=toolbox.tile)
        return write_synthetic_traces(folder, bank, numbers, split="train", toolbox=toolbox, provenance={})


def renamed(given: list[Sample], *texts: str) -> list[Sample]:
    return [replace(sample, text=text) for sample, text in zip(given, texts, strict=True)]


def test_records_of_one_name_are_gathered_and_the_same_mask_is_one_thing() -> None:
    one, other = samples({"cat": [CAT]}, category=True), samples({"cat": [DOG]}, category=True)
    found = pictures([*one, *renamed(other, "A cat."), *renamed(one, "the cat")])
    assert [(name, [thing.box for thing in things]) for name, things in found[0].things.items()] == [
        ("cat", [CAT, DOG])
    ]
    (question,) = annotated.questions(found, families=["count"], seed=0)
    assert question.answer == "2"
    assert found[0].single() == []
    unsure = pictures([*one, *renamed(samples({"cat": []}, category=True), "a cat")])
    assert not unsure[0].absent


def test_names_that_differ_in_case_alone_are_one() -> None:
    one = renamed(samples({"cat": [CAT], "dog": [DOG], "cup": []}), "Cat", "a cat", "A  CAT.")
    (found,) = pictures(one)
    assert (list(found.things), found.absent, len(found.things["cat"])) == (["cat"], set(), 2)


BEARS: Boxes = {"cat": [CAT], "dog": [DOG], "cup": [(230, 170, 300, 230)]}
"""Renamed to things one of whose names holds the other."""


def test_a_name_that_another_thing_may_have_too_is_not_asked_about() -> None:
    named = renamed(samples(BEARS, category=True), "teddy bear", "bear", "cup")
    found = pictures(named)
    assert [thing.name for thing in found[0].single()] == ["teddy bear", "cup"]
    about = {question.family for question in annotated.questions(found, seed=0) if " bear" in question.text}
    asked = annotated.questions(found, families=["count", "is_there"], seed=0)
    assert [(question.text, question.answer) for question in asked] == [
        ("How many teddy bears are in the picture?", "1"),
        ("How many cups are in the picture?", "1"),
        ("Is there a teddy bear in the picture?", "yes"),
        ("Is there a bear in the picture?", "yes"),
        ("Is there a cup in the picture?", "yes"),
    ]
    assert about > {"count", "is_there"}
    # "That is not the bear" is not said of a teddy bear
    (bear,) = [question for question in asked if "a bear" in question.text]
    assert bear.distraction == (annotated.zoom(found[0], found[0].things["cup"][0]),)
    # of one thing with two names, either means it alone
    both = renamed([*samples({"cat": [CAT]}), *samples({"cat": [CAT]})], "man", "man in red")
    assert len(pictures(both)[0].single()) == 2


def test_a_class_is_not_absent_where_another_name_holds_it() -> None:
    teddy = renamed(samples({"cat": [CAT]}, picture_id="1", category=True), "teddy bear")
    bear = renamed(samples({"dog": [DOG]}, picture_id="2", category=True), "bear")
    asked = annotated.questions(pictures([*teddy, *bear]), families=["is_there"], seed=0)
    assert {(question.text, question.answer) for question in asked} == {
        ("Is there a teddy bear in the picture?", "yes"),
        ("Is there a bear in the picture?", "yes"),
        ("Is there a teddy bear in the picture?", "no"),
    }


def test_whether_a_thing_is_there_takes_one_look_for_either_answer() -> None:
    small, large = (20, 20, 90, 90), (120, 20, 310, 200)
    given = samples({"cat": [small, large], "cup": []})
    found = pictures(given)
    yes, no = (
        replace(question, frames=(given[0].frames[0],))  # type: ignore[arg-type]
        for question in annotated.questions(found, families=["is_there"], seed=0)
    )
    # of what is not there, the largest thing is looked at
    assert (yes.answer, no.answer, yes.plan) == ("yes", "no", no.plan)
    for question in (yes, no):
        start = question.workspace()
        assert not evidence(question, start, [])
        for thing in found[0].things["cat"]:
            call = annotated.zoom(found[0], thing)
            made = ZOOM_IN.run(start, ZoomIn(**call.arguments), Tools(tile=96))
            looked = [Observation(call=call, text=made.text, values=made.values, pictures=made.pictures)]
            assert evidence(question, start.add(made.handles), looked)
            assert faithful_calls(question, start.add(made.handles), looked) == 1


def test_one_thing_of_two_names_is_not_compared_with_itself_nor_denied() -> None:
    wide = (20, 20, 140, 92)  # .6 of CAT, which is 1.67 times as large
    things: Boxes = {"cat": [CAT], "cup": [wide], "dog": [(230, 160, 300, 230)]}
    larger = annotated.questions(pictures(samples(things)), families=["which_larger", "nearer"], seed=0)
    assert [{target.phrase for target in question.targets} for question in larger] == [
        {"the cat", "the dog"},
        {"the cup", "the dog"},
    ]
    assert not any(question.distraction for question in larger)  # the third is one of the two
    apart: Boxes = things | {"cup": [(20, 150, 140, 222)]}
    larger = annotated.questions(pictures(samples(apart)), families=["which_larger"], seed=0)
    assert len(larger) == 3
    assert all(question.distraction for question in larger)


def test_a_self_correction_denies_no_thing_of_the_questions_name() -> None:
    small, large = (20, 20, 90, 90), (120, 20, 310, 200)
    found = pictures(samples({"cat": [small, large], "dog": [(20, 120, 90, 190)]}, category=True))
    asked_of_cat = annotated.questions(found, families=["is_there"], seed=0)[0]
    assert asked_of_cat.text == "Is there a cat in the picture?"
    # the other cat is larger
    assert asked_of_cat.distraction == (annotated.zoom(found[0], found[0].things["dog"][0]),)
    alone = pictures(samples({"cat": [small, large]}, category=True))
    assert all(not question.distraction for question in annotated.questions(alone, seed=0))


def test_pictures_of_one_file_name_in_two_folders_are_two_files(tmp_path: Path) -> None:
    shifted = {"images/1.png": 0, "images/2.png": 8, "other/1.png": 16}
    given: list[Sample] = []
    for picture_id, x in shifted.items():
        things: Boxes = {"cat": [(20 + x, 20, 130, 140)], "dog": [(180, 90, 260 - x, 160)], "cup": []}
        given += samples(things, picture_id=picture_id)
    found = pictures(given)
    made = annotated.questions(found, seed=0)
    frames = {
        question.question_id: sample.frames[0]
        for question in made
        for sample in given
        if f"/{sample.image_id}/" in question.question_id
    }
    families = write_questions(found, tmp_path, seed=0)
    write(tmp_path, families)
    traces = read_traces(tmp_path)
    assert {trace.trace_id for trace in traces} == frames.keys()
    bank = QuestionBank((), {"train": tmp_path}, seed=0, tile=96)
    for question in made:
        read = bank.named(question.question_id, "train")
        assert read == replace(question, frames=(frames[question.question_id],), picture=read.picture)
    assert {trace.frames[0] for trace in traces} == {
        f"pictures/{name.replace('/', '%2F')}.png" for name in shifted
    }
    assert all((tmp_path / trace.frames[0]).read_bytes() == frames[trace.trace_id] for trace in traces)


def test_a_thing_of_two_colours_and_a_grey_one_have_no_colours_name() -> None:
    pixels = np.full((60, 60, 3), (200, 30, 30), np.uint8)
    mask = np.ones((60, 60), bool)
    assert annotated.uniform_colour(pixels, mask) == "red"
    pixels[:30] = (40, 70, 210)
    assert annotated.uniform_colour(pixels, mask) is None
    assert annotated.uniform_colour(np.full((60, 60, 3), 128, np.uint8), mask) is None


def test_questions_of_pictures_come_from_a_bank_and_begin_again_after_the_last(tmp_path: Path) -> None:
    found = pictures(samples({"cat": [CAT], "dog": [DOG], "cup": []}))
    number = write_questions(found, tmp_path / "train", seed=0)["is_there"]
    (tmp_path / "val").mkdir()
    bank = QuestionBank.of_cota(["easy"], tmp_path, seed=0, tile=96)
    assert bank.families("train") == ("easy", *bank.of_pictures("train"))
    assert bank.families("val") == ("easy",)
    assert bank.at_most(99, "is_there", "train") == number == 3
    assert bank.at_most(99, "easy", "train") == 99
    ids = [bank.id_of("is_there", "train", index) for index in range(2 * number)]
    assert ids[:number] == ids[number:]
    assert len(set(ids)) == number
    shuffled = [
        QuestionBank.of_cota([], tmp_path, seed=seed, tile=96).written["train"].of_family["is_there"]
        for seed in range(9)
    ]
    assert len({tuple(order) for order in shuffled}) > 1
    assert bank.question("easy", "val", 2).question_id == "easy/val/2"


def test_pictures_of_one_id_in_two_parts_stay_two_pictures(tmp_path: Path) -> None:
    frames = []
    for part, boxes in (("train", {"cat": [CAT]}), ("val", {"dog": [DOG]})):
        (sample,) = samples(boxes)  # type: ignore[arg-type]
        frame = sample.frames[0]
        assert isinstance(frame, bytes)
        (tmp_path / f"{part}.png").write_bytes(frame)
        frames.append(replace(sample, frames=(tmp_path / f"{part}.png",)))
    found = pictures(frames)
    assert [list(picture.things) for picture in found] == [["cat"], ["dog"]]
    ids = [question.question_id for question in annotated.questions(found, seed=0)]
    assert len(set(ids)) == len(ids) > 2
    assert not any(question.family == "left_or_right" for question in annotated.questions(found, seed=0))


@pytest.mark.parametrize("picture_id", ["../../up.png", "写真" * 60, "a b#%.png", ".."])
def test_odd_names_of_pictures_become_files_inside_the_folder(tmp_path: Path, picture_id: str) -> None:
    found = pictures(samples({"cat": [CAT], "dog": [DOG]}, picture_id=picture_id))
    families = write_questions(found, tmp_path / "made", seed=0)
    write(tmp_path / "made", families)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert len(read_traces(tmp_path / "made")) == families.total()


def test_an_upright_jpeg_is_copied_as_it_is_and_a_turned_one_is_turned(tmp_path: Path) -> None:
    (sample,) = samples({"cat": [CAT]})
    pixels = Image.open(io.BytesIO(sample.frames[0]))  # type: ignore[arg-type]
    for turn, name in ((1, "upright.jpg"), (3, "turned.jpg")):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = turn
        pixels.save(tmp_path / name, exif=exif)
        found = pictures([replace(sample, frames=(tmp_path / name,))])
        folder = tmp_path / f"of_{turn}"
        write_questions(found, folder, seed=0)
        bank = QuestionBank((), {"train": folder}, seed=0, tile=96)
        shown = bank.question("is_there", "train", 0)
        assert (shown.frames[0] == (tmp_path / name).read_bytes()) == (turn == 1)
        assert Path(shown.picture).suffix == (".jpg" if turn == 1 else ".png")


def test_a_name_that_tells_the_answer_is_not_asked_about() -> None:
    apart: Boxes = {"cat": [(20, 20, 90, 140)], "dog": [(230, 100, 290, 160)]}
    plain = annotated.questions(pictures(samples(apart)), seed=0)
    telling = {
        "the cat on the left": {"left_or_right", "which_third"},
        "the lefthand cat": {"left_or_right", "which_third"},
        "the centered cat": {"left_or_right", "which_third"},
        "a Red cat": {"which_colour"},
        "the reddish cat": {"which_colour"},
        "the big cat": {"which_larger"},
        "the longest giant cat": {"which_larger"},
    }
    for text, families in telling.items():
        named = renamed(samples(apart), text, "dog")
        found = annotated.questions(pictures(named), seed=0)
        asked_of_it = {q.family for q in found if any("cat" in target.phrase for target in q.targets)}
        assert (
            asked_of_it
            == {"is_there", "which_larger", "left_or_right", "which_colour", "which_third"} - families
        )
    assert {q.family for q in plain} >= {"which_larger", "left_or_right", "which_colour", "which_third"}


@pytest.mark.parametrize("words", ["next to a wall", "beside a wall", "closest to us"])
def test_a_name_that_tells_what_is_near_is_not_asked_about(words: str) -> None:
    three: Boxes = {"cat": [(20, 20, 80, 80)], "dog": [(90, 20, 150, 80)], "cup": [(250, 150, 310, 220)]}
    named = renamed(samples(three), f"cat {words}", "dog", "cup")
    assert annotated.questions(pictures(named), families=["nearer"], seed=0) == []


def test_text_that_is_shown_otherwise_than_it_is_answered_is_not_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = pictures(samples({"cup": [(20, 20, 220, 200)]}))

    def written(text: str) -> list[Question]:
        line = ocr.Line(text=text, box=(60, 60, 120, 90), confidence=0.99)
        monkeypatch.setattr(ocr, "read_lines", lambda picture, by: [line])
        return annotated.questions(found, families=["what_is_written"], seed=0, reader=READS_TEXT)

    assert [len(written(text)) for text in ("EXIT 27", "DON'T", "EXIT >", "a\\b cd")] == [1, 1, 0, 0]


def test_text_is_looked_for_on_photographs_whatever_stands_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs = [p for i in range(3) for p in pictures(samples({"cat": [CAT]}, picture_id=str(i)))]
    others = [QuestionedPicture(picture_id=f"q{i}", frames=(b"",), questions=()) for i in range(9)]
    readers: list[str | None] = []

    def asked(some: object, *, seed: int, reader: str | None) -> list[Question]:
        readers.append(reader)
        return []

    monkeypatch.setattr(bank, "MOST_READ", 2)
    monkeypatch.setattr(annotated, "questions", asked)
    write_questions([*others[:4], *photographs, *others[4:]], tmp_path, seed=0, reader=READS_TEXT)
    assert readers == [READS_TEXT, None, READS_TEXT]


def test_words_that_no_question_can_hold_are_left_out() -> None:
    texts = ["the cat", " . ", "the", "x" * 4800]
    one = samples({"cat": [CAT]})
    assert [askable(replace(one[0], text=text)) for text in texts] == [True, False, True, False]


def test_a_share_of_a_sequence_is_spread_evenly() -> None:
    assert [divided(number, 0.25) for number in range(8)] == [
        (False, 0), (False, 1), (False, 2), (True, 0), (False, 3), (False, 4), (False, 5), (True, 1)
    ]  # fmt: skip
    assert [divided(number, 1.0) for number in range(3)] == [(True, 0), (True, 1), (True, 2)]
    assert [divided(number, 0.0) for number in range(3)] == [(False, 0), (False, 1), (False, 2)]
    assert sum(divided(number, 0.3)[0] for number in range(1000)) == 300


def test_pictures_of_one_thing_have_golden_traces_alone() -> None:
    alone = annotated.questions(pictures(samples({"cat": [(20, 20, 80, 80)]})), seed=0)
    assert {question.family for question in alone} == {"is_there", "which_third", "which_colour"}
    assert Counter(kinds_of_questions(alone * 5, seed=0)) == {"golden": 12, "trap": 3}
    unseen = [replace(question, plan=()) for question in alone]
    assert set(kinds_of_questions(unseen * 5, seed=0)) == {"golden"}


def test_plurals() -> None:
    assert [plural(name) for name in ("dog", "person", "bus", "glass", "box")] == [
        "dogs",
        "people",
        "buses",
        "glasses",
        "boxes",
    ]


def five_photographs(folder: Path) -> None:
    """A user's set in the plain form."""
    records = []
    for number in range(5):
        shift = 5 * number
        things: Boxes = {"cat": [(20 + shift, 20, 130, 140)], "dog": [(180, 90, 260 - shift, 160)], "cup": []}
        for sample in samples(things):
            frame = sample.frames[0]
            assert isinstance(frame, bytes)
            (folder / f"{number}.png").write_bytes(frame)
            masks = [mask for (mask,) in sample.masks]
            records.append(
                {"image": f"{number}.png", "text": f"the {sample.text}", "masks": masks, "split": "train"}
            )
    (folder / "annotations.json").write_text(json.dumps(records))


@pytest.mark.slow
def test_five_photographs_with_masks_give_questions_and_valid_traces_by_one_command(tmp_path: Path) -> None:
    five_photographs(tmp_path)
    told = command("mine", tmp_path, "annotations", None, seed=0, out=tmp_path / "questions")
    traces = read_traces(tmp_path / "questions")
    lines = (tmp_path / "questions/questions.jsonl").read_text().splitlines()
    assert len(lines) == len(traces) >= 30
    assert told.splitlines()[0].startswith(
        f"5 pictures and clips, {len(lines)} questions: is_there 15, which_larger 5"
    )
    golden = next(trace for trace in traces if trace.kind == "golden" and trace.family == "which_larger")
    thoughts = [turn.text.partition("<tool_call>")[0] for turn in golden.turns if turn.role == "assistant"]
    assert thoughts[0] in ("I look at the cat. ", "I look at the dog. ")
    assert thoughts[1] in (
        "That was the cat; now I look at the dog. ",
        "That was the dog; now I look at the cat. ",
    )
    assert len(list((tmp_path / "questions/pictures").glob("*.png"))) == 5  # shared by a picture's questions
    with pytest.raises(ValueError, match="questions is not empty; give a new folder"):
        command("mine", tmp_path, "annotations", None, seed=0, out=tmp_path / "questions")
    with pytest.raises(ValueError, match="has no split 'val'; name one with --split: train"):
        command("mine", tmp_path, "annotations", "val", seed=0, out=tmp_path / "other")


def test_pictures_of_which_nothing_can_be_asked_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(samples({"cat": [CAT]})[0].frames[0])  # type: ignore[arg-type]
    small = samples({"cat": [(20, 20, 40, 40)]})[0].masks[0][0]
    record = {"image": "1.png", "text": "the cat", "masks": [small], "split": "train"}
    (tmp_path / "annotations.json").write_text(json.dumps([record]))
    with pytest.raises(ValueError, match="nothing can be asked about the 1 pictures"):
        command("mine", tmp_path, "annotations", None, seed=0, out=tmp_path / "questions")
    assert not (tmp_path / "questions").exists()


IN_TURN = """
import json, sys
from pathlib import Path
from ans_core import dist
from ans_core.agent.world.bank import write_questions
from ans_core.agent.world.things import pictures
from tests.agent.test_annotated import CAT, DOG, samples
if __name__ == "__main__":
    found = [picture for number in range(40) for picture in pictures(
        samples({"cat": [CAT], "dog": [DOG]} if number % 3 else {"cat": [(20, 20, 40, 40)]}, picture_id=str(number)))]
    with dist.process_group():
        counts = write_questions(found, Path(sys.argv[1]), seed=0)
    Path(sys.argv[1], f"counts-{dist.rank()}.json").write_text(json.dumps(counts))
"""


@pytest.mark.slow
def test_two_processes_write_the_questions_of_one(tmp_path: Path) -> None:
    """Forty pictures, of which each third gives no question: the shares are unlike."""
    script = tmp_path / "in_turn.py"
    script.write_text(IN_TURN)
    for processes in (1, 2):
        launch(script, str(tmp_path / str(processes)), processes=processes)
    one, two = (
        {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (tmp_path / "1", tmp_path / "2")
    )
    counts = one["counts-0.json"]
    assert counts == two.pop("counts-0.json") == two.pop("counts-1.json")
    assert len(one) == 2 + 26  # the counts, the questions and the pictures that have some
    del one["counts-0.json"]
    assert one == two


@pytest.mark.slow
@pytest.mark.skipif(not COCO.is_dir(), reason=f"no photographs at {COCO} (set ANS_REFERENCE)")
def test_a_hundred_photographs_give_six_hundred_questions_whose_traces_hold_the_evidence(
    tmp_path: Path,
) -> None:
    found = [
        s
        for split in ("train", "val")
        for s in data.read_samples(format="coco", path=COCO, name="coco", split=split)
    ]
    made: list[Question] = annotated.questions(pictures(found), seed=0)
    assert len(made) >= 600
    assert len(Counter(question.family for question in made)) == 8  # without a reader
    families = write_questions(pictures(found), tmp_path, seed=0)
    assert families == Counter(question.family for question in made)
    some = {family: number // 6 for family, number in families.items()}
    written = write(tmp_path, some)
    assert not written.dropped  # `trace` drops what was not looked at
    assert len(read_traces(tmp_path)) == sum(some.values())
