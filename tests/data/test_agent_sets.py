"""Readers of the sets that an agent's questions come from: drawn pictures and clips in their published
layouts."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ans_core.data.formats import FORMATS, SPLITS, fineweb, infer, partimagenet
from ans_core.data.formats.checks import DataError
from ans_core.pictures import rle, transforms
from ans_core.types import Sample
from tests.data import agent_sets


def read(form: str, path: Path, split: str = "train") -> list[Sample]:
    return list(FORMATS[form](path, name="d", split=split))


# SA-1B


def test_sa1bs_masks_come_back_as_they_were_drawn(tmp_path: Path) -> None:
    scenes = agent_sets.sa1b(tmp_path)
    assert (infer(tmp_path), SPLITS["sa1b"](tmp_path)) == ("sa1b", ["train"])
    samples = {sample.image_id: sample for sample in read("sa1b", tmp_path)}
    for drawn in scenes:
        sample = samples[str(drawn.number)]
        assert (sample.task, sample.text, len(sample.frames)) == ("tracking", "", 1)
        assert [rle.decode(m[0]).tolist() for m in sample.masks if m[0]] == [
            mask.tolist() for mask in drawn.scene.masks
        ]
        assert transforms.image_size(sample.frames[0]) == (32, 32)


def test_sa1bs_faults_name_file_and_annotation(tmp_path: Path) -> None:
    (drawn,) = agent_sets.sa1b(tmp_path, count=1)
    (file,) = tmp_path.rglob("sa_*.json")
    content = json.loads(file.read_text())
    content["annotations"][0]["segmentation"]["size"] = [31, 32]
    agent_sets.write(file, content)
    with pytest.raises(DataError, match=rf"sa_{drawn.number}\.json: annotation {100 * drawn.number}"):
        read("sa1b", tmp_path)
    agent_sets.write(file, content | {"annotations": []})
    with pytest.raises(DataError, match="no record can be used: 1 with no mask"):
        read("sa1b", tmp_path)
    with pytest.raises(DataError, match=r"holds no sa_\*\.json"):
        read("sa1b", tmp_path / "nowhere")


# PartImageNet


@pytest.mark.parametrize("flat", [False, True])
def test_partimagenets_parts_are_expressions(tmp_path: Path, flat: bool) -> None:
    agent_sets.partimagenet(tmp_path, flat=flat)
    assert SPLITS["partimagenet"](tmp_path) == ["train"]
    assert flat or infer(tmp_path) == "partimagenet"
    first, second = read("partimagenet", tmp_path)
    assert (first.text, second.text) == ("the head of the quadruped", "the side mirror of the car")
    assert [m[0] for m in first.masks] == agent_sets.PARTS[:2]
    assert [m[0] for m in second.masks] == agent_sets.PARTS[2:]
    assert isinstance(second.frames[0], Path)
    assert second.frames[0].name == "n02_7.JPEG"
    assert partimagenet.expression("torso") == "torso"
    with pytest.raises(DataError, match="'val'"):
        read("partimagenet", tmp_path, "val")


# STAR


def test_star_asks_about_the_frames_between_two_times(tmp_path: Path) -> None:
    agent_sets.star(tmp_path)
    assert (infer(tmp_path), SPLITS["starqa"](tmp_path)) == ("starqa", ["val"])
    (sample,) = read("starqa", tmp_path, "val")
    assert (sample.question, sample.text, sample.meta["kind"]) == (
        "Which object was moved?",
        "The box.",
        "Sequence",
    )
    assert sample.meta["choices"] == ["The box.", "A cup."]
    assert [frame.index for frame in sample.frames] == [1, 2, 3, 4]  # type: ignore[union-attr]  # of 24 a second
    for changes, message in (
        ({"answer": "A dog."}, r"Sequence_T1_13: the answer 'A dog\.' is none of its choices"),
        ({"start": 1e308, "end": float("inf")}, r"1e\+308 to inf s are no part of"),
        ({"start": float("nan")}, "nan to 0.2 s are no part of"),
        ({"start": 5.0, "end": 6.0}, r"5 to 6 s are no part of .*ABC\.mp4, which lasts 0\.2 s"),
        ({"video_id": "XYZ"}, r"the video 'XYZ\.mp4' is in none of"),
    ):
        with pytest.raises(DataError, match=message):
            read("starqa", agent_sets.star(tmp_path, **changes), "val")


# Ego4D


def test_ego4d_asks_for_the_stretch_that_answers_a_query(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent_sets.ego4d(tmp_path, queries=3)
    assert (infer(tmp_path), SPLITS["ego4d"](tmp_path)) == ("ego4d", ["train"])
    with caplog.at_level(logging.WARNING):
        (sample,) = read("ego4d", tmp_path)
    assert (
        sample.question
        == "Where was the box before I moved it? From which second to which does the clip show it?"
    )
    assert (sample.text, len(sample.frames), sample.sample_id) == ("0.1 to 0.3", 6, "c1_a_0")
    assert "1 with a stretch without length; 1 with no query" in caplog.text
    (tmp_path / "clips/c1.mp4").unlink()
    with pytest.raises(DataError, match=r"clip c1: the video 'c1\.mp4' is in none of"):
        read("ego4d", tmp_path)


# MathVista


def test_mathvistas_problems_are_conversations(tmp_path: Path) -> None:
    agent_sets.mathvista(tmp_path)
    assert (infer(tmp_path), SPLITS["mathvista"](tmp_path)) == ("mathvista", ["testmini"])
    (sample,) = read("mathvista", tmp_path, "testmini")
    assert (sample.question, sample.text) == ("Hint: an integer.\nQuestion: How many?", "4")
    assert sample.meta == {"kind": "free_form", "category": "geometry"}
    agent_sets.write(tmp_path / "annot_testmini.json", {"1": agent_sets.PROBLEM | {"image": "images/2.jpg"}})
    with pytest.raises(DataError, match=r"problem '1': the image 'images/2\.jpg' is in none of"):
        read("mathvista", tmp_path, "testmini")


# FineWeb


def test_finewebs_documents_become_pages_that_say_their_first_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"id": "a", "text": agent_sets.WORDS},
        {"id": "b", "text": "Short."},
        {"id": "c", "text": "Übung " + agent_sets.WORDS},
        {"id": "d", "text": agent_sets.WORDS[5:]},
    ]
    agent_sets.fineweb(tmp_path / "sample/10BT/000_00000.parquet", *rows)
    assert SPLITS["fineweb"](tmp_path) == ["train"]
    with caplog.at_level(logging.WARNING):
        first, second = read("fineweb", tmp_path)
    assert "1 with too few words; 1 with letters beyond ASCII" in caplog.text
    lines = first.text.splitlines()
    assert len(lines) == fineweb.LINES
    assert all(len(line) <= fineweb.LETTERS for line in lines)
    assert agent_sets.WORDS.startswith(" ".join(lines))
    assert (first.sample_id, second.sample_id, first.question) == ("a", "d", "Read the text in this image.")
    assert isinstance(first.frames[0], bytes)
    with Image.open(io.BytesIO(first.frames[0])) as page:
        assert page.size == (first.width, first.height)
        dark = np.asarray(page) < 128
    assert not dark[:, -4:].any()  # no letter is cut at the right edge
    rows_with_ink = [
        dark[fineweb.MARGIN + n * fineweb.LEADING :][: fineweb.LEADING].any() for n in range(fineweb.LINES)
    ]
    assert all(rows_with_ink)
    assert read("fineweb", tmp_path)[0].frames == first.frames


def test_of_a_large_file_documents_are_taken_at_equal_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fineweb, "PAGES", 3)
    path = agent_sets.fineweb(
        tmp_path / "x.parquet", *({"id": str(n), "text": f"{n} {agent_sets.WORDS}"} for n in range(7))
    )
    assert [sample.sample_id for sample in read("fineweb", path)] == ["0", "3", "6"]
    with pytest.raises(DataError, match="columns text are missing"):
        read("fineweb", agent_sets.fineweb(tmp_path / "y.parquet", {"id": "1"}))


# ViRL39K


def test_virl39k_is_divided_by_pictures_and_its_answers_leave_their_boxes(tmp_path: Path) -> None:
    agent_sets.virl39k(tmp_path)
    assert (infer(tmp_path), SPLITS["virl39k"](tmp_path)) == ("virl39k", ["train", "val"])
    splits = {split: read("virl39k", tmp_path, split) for split in ("train", "val")}
    ids = {split: [sample.sample_id for sample in samples] for split, samples in splits.items()}
    assert ids == {"train": ["0"], "val": ["1", "2"]}
    (sample,) = splits["train"]
    assert (sample.question, sample.text, sample.meta) == ("How many?", "3", {"category": "Math"})
    single, several = splits["val"]
    assert (len(several.frames), several.stills, single.stills) == (2, True, False)
    assert several.frames == (sample.frames[0], single.frames[0])
    (tmp_path / "images/0.png").unlink()
    with pytest.raises(
        DataError, match=r"39Krelease\.parquet: question 0: the image 'images/0\.png' is in none of"
    ):
        read("virl39k", tmp_path)
    with pytest.raises(DataError, match=r"holds no \*\.parquet"):
        read("virl39k", tmp_path / "nowhere")
