"""Conversations about several pictures: read from files, packed for training, written into shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from ans_core import prompts
from ans_core.data import shard as writer
from ans_core.data.collate import collate
from ans_core.data.conversation import turn
from ans_core.data.facts import facts
from ans_core.data.formats import FORMATS
from ans_core.data.formats.checks import DataError
from ans_core.data.length_groups import row_length
from ans_core.data.mixture import Mixture, Source
from ans_core.data.report import panel
from ans_core.inference.prefill import prompt
from ans_core.model.network import Network
from ans_core.types import Request, Sample
from tests import tiny

SIZES = {"a.png": (160, 64), "b.png": (70, 130), "c.png": (40, 40)}


def written(folder: Path, records: list[dict[str, object]], name: str = "annotations.json") -> Path:
    folder.mkdir(exist_ok=True)
    for number, (file, size) in enumerate(SIZES.items()):
        Image.new("RGB", size, (80 * number, 90, 120)).save(folder / file)
    (folder / name).write_text(json.dumps(records))
    return folder


PAIR = {
    "image": ["./a.png", "b.png"],
    "question": "<image><image>Which is larger?",
    "answer": "the first",
    "split": "train",
}
THREE = PAIR | {"image": [*SIZES], "question": "Is <image> below <image> or <image>?"}
ONE = {"image": "a.png", "question": "What is it?", "answer": "a plain", "split": "train"}


def read(form: str, path: Path) -> list[Sample]:
    return list(FORMATS[form](path, name="d", split="train"))


@pytest.mark.parametrize(
    ("texts", "count", "named"),
    [
        (["<image>\n<image>\nWhich?"], 2, ["Which?"]),
        (["Image-1: <image>\nImage-2: <image>\nWhich?"], 2, ["Which?"]),
        (["<image>Which?"], 3, ["Which?"]),  # one for all
        (["<image> or <image>?", "the first"], 2, ["<Image-1> or <Image-2>?", "the first"]),
        (["<image>What?", "this", "And <image>?"], 2, ["<Image-1>What?", "this", "And <Image-2>?"]),
        (["Which?"], 2, ["Which?"]),
        (["What <image>?"], 1, ["What ?"]),
        ([], 2, []),
    ],
)
def test_pictures_come_first_and_the_text_names_those_that_it_shows_later(
    texts: list[str], count: int, named: list[str]
) -> None:
    assert prompts.name_pictures(texts, count) == named


def test_questions_of_a_users_file_may_be_about_several_pictures(tmp_path: Path) -> None:
    pair, three, one = read("annotations", written(tmp_path / "mine", [PAIR, THREE, ONE]))
    assert (pair.question, pair.stills, [frame.name for frame in pair.frames]) == (  # type: ignore[union-attr]
        "Which is larger?",
        True,
        ["a.png", "b.png"],
    )
    assert three.question == "Is <Image-1> below <Image-2> or <Image-3>?"
    assert (one.stills, one.image_id, three.image_id) == (False, "a.png", "a.png+b.png+c.png")
    assert (pair.width, pair.height) == SIZES["a.png"]
    found = facts([pair, three, one])
    assert set(found.frames.values()) == {1}
    assert panel(three, 32).shape == (32, 32 + 17 + 32, 3)  # unlike heights


@pytest.mark.parametrize(
    ("record", "refusal"),
    [
        (PAIR | {"question": "Is <image> it?"}, r"record 0: 1 <image> for 2 pictures; write one for each, or none"),
        (PAIR | {"regions": [[1, 1, 9, 1, 9, 9]]}, r"2 pictures; only a question without regions may be about"),
        ({"image": ["a.png", "b.png"], "text": "it", "masks": []}, r"2 pictures; only a question without regions"),
        (PAIR | {"image": []}, r"record 0"),
    ],
)  # fmt: skip
def test_what_several_pictures_can_not_have_is_refused(
    tmp_path: Path, record: dict[str, object], refusal: str
) -> None:
    with pytest.raises(DataError, match=refusal):
        read("annotations", written(tmp_path / "mine", [record]))


def test_llava_lists_several_pictures(tmp_path: Path) -> None:
    said = [
        {"from": "human", "value": "What is in <image>?"},
        {"from": "gpt", "value": "A plain."},
        {"from": "human", "value": "And in <image>?"},
        {"from": "gpt", "value": "A tower."},
    ]
    rows = [
        {"image": ["a.png", "b.png"], "conversations": said},
        {"image": ["c.png"], "conversations": said[:2]},
    ]
    written(tmp_path / "chat", rows, "llava_mine.json")  # type: ignore[arg-type]
    pair, one = read("llava", tmp_path / "chat")
    assert (pair.past, pair.question) == ((("What is in <Image-1>?", "A plain."),), "And in <Image-2>?")
    assert (one.stills, one.question) == (False, "What is in ?")


def test_a_row_of_training_reads_as_the_question_does_when_it_is_asked(
    tiny_model: Network, tmp_path: Path
) -> None:
    """Tokens and pictures are the same, of several pictures and of one in a batch."""
    samples = read("annotations", written(tmp_path / "mine", [PAIR, THREE, ONE]))
    source = Source(name="d", kind="extra", samples=samples)
    mixture = Mixture([source], {"extra": 1.0}, questions=2, frames=2, seed=0, turn=turn)
    rows = {mixture.row(number).name: mixture.row(number) for number in range(12)}
    assert {len(row.frames) for row in rows.values()} == {1, 2, 3}
    layout = tiny.layout(tiny_model, max_length=2000)
    for sample in samples:
        row = rows[f"{sample.dataset}/{sample.image_id}"]
        packed = collate([row], tiny_model.tokenizer, layout)
        assert row_length(row, tiny_model.tokenizer, layout) == packed.input_ids.shape[1]
        first = prompts.picture_marks(len(sample.frames))
        request = Request(frames=sample.frames, text=first + str(sample.question), stills=sample.stills)
        asked = tiny.embeds_of(prompt(tiny_model, [request]))
        hidden = tiny_model.embed(
            packed.input_ids[:, : len(asked)],
            [tiny_model.project(tiny_model.vision_features(packed.views))],
            [[]],
        )[0]
        assert (hidden - asked).abs().max() < 1e-4
    both = collate(list(rows.values()), tiny_model.tokenizer, layout)
    assert sorted(len(views.pictures) for views in both.views) == [1, 2, 3]


def test_shards_keep_several_pictures_and_older_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "mine", [PAIR, ONE])
    writer.shard(folder, "annotations", tmp_path / "shards")
    pair, one = read("shards", tmp_path / "shards")
    assert (pair.stills, len(pair.frames), one.stills) == (True, 2, False)
    fields = tuple(name for name in writer.FIELDS if name != "stills")
    monkeypatch.setattr(writer, "FIELDS", fields)  # as before there were such samples
    writer.shard(written(tmp_path / "one", [ONE]), "annotations", tmp_path / "older")
    assert [sample.stills for sample in read("shards", tmp_path / "older")] == [False]
