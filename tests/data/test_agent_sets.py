"""Readers of the sets that an agent's questions come from: drawn pictures and clips in their published layouts."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from ans_core import rle, transforms
from ans_core.data.formats import FORMATS, SPLITS, fineweb, infer, partimagenet
from ans_core.data.formats.checks import DataError
from ans_core.types import Sample
from tests import picture_sets
from tests.data import clip_sets


def read(form: str, path: Path, split: str = "train") -> list[Sample]:
    return list(FORMATS[form](path, name="d", split=split))


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def jpeg(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "JPEG")


# SA-1B


def sa1b(folder: Path, *, count: int = 2) -> list[picture_sets.Drawn]:
    scenes = picture_sets.draw(count, image_size=32)
    for drawn in scenes:
        stem = folder / f"sa_00000{drawn.number % 2}" / f"sa_{drawn.number}"
        jpeg(stem.with_suffix(".jpg"), drawn.scene.image)
        annotations = [
            {"id": 100 * drawn.number + n, "segmentation": mask, "bbox": [0.0, 0.0, 1.0, 1.0], "area": rle.area(mask), "predicted_iou": 0.9,
             "stability_score": 0.98, "point_coords": [[1.5, 2.5]], "crop_box": [0.0, 0.0, 32.0, 32.0]}
            for n, mask in enumerate(drawn.masks)
        ]  # fmt: skip
        image = {"image_id": drawn.number, "file_name": stem.with_suffix(".jpg").name, **drawn.side}
        write(stem.with_suffix(".json"), {"image": image, "annotations": annotations})
    return scenes


def test_sa1bs_masks_come_back_as_they_were_drawn(tmp_path: Path) -> None:
    scenes = sa1b(tmp_path)
    assert (infer(tmp_path), SPLITS["sa1b"](tmp_path)) == ("sa1b", ["train"])
    samples = {sample.image_id: sample for sample in read("sa1b", tmp_path)}
    for drawn in scenes:
        sample = samples[str(drawn.number)]
        assert (sample.task, sample.text, len(sample.frames)) == ("tracking", "", 1)
        assert [rle.decode(m[0]).tolist() for m in sample.masks if m[0]] == [mask.tolist() for mask in drawn.scene.masks]
        assert transforms.image_size(sample.frames[0]) == (32, 32)


def test_sa1bs_faults_name_file_and_annotation(tmp_path: Path) -> None:
    (drawn,) = sa1b(tmp_path, count=1)
    (file,) = tmp_path.rglob("sa_*.json")
    content = json.loads(file.read_text())
    content["annotations"][0]["segmentation"]["size"] = [31, 32]
    write(file, content)
    with pytest.raises(DataError, match=rf"sa_{drawn.number}\.json: annotation {100 * drawn.number}"):
        read("sa1b", tmp_path)
    write(file, content | {"annotations": []})
    with pytest.raises(DataError, match="no record can be used: 1 with no mask"):
        read("sa1b", tmp_path)
    with pytest.raises(DataError, match=r"holds no sa_\*\.json"):
        read("sa1b", tmp_path / "nowhere")


# PartImageNet


@pytest.mark.parametrize("flat", [False, True])
def test_partimagenets_parts_are_expressions(tmp_path: Path, flat: bool) -> None:
    names = ["n01_1.JPEG", "n02_7.JPEG"]
    for name in names:
        folder = tmp_path / "train" if flat else tmp_path / "images/train"
        jpeg(folder / name.partition("_")[0] / name, np.zeros((24, 32, 3), np.uint8))
    masks = [rle.encode(np.eye(24, 32, k=k, dtype=bool)) for k in range(3)]
    images = [{"id": n, "file_name": name, "height": 24, "width": 32} for n, name in enumerate(names)]
    categories = [{"id": 3, "name": "Quadruped Head", "supercategory": "Quadruped"}, {"id": 4, "name": "Car Side Mirror"}]
    owned = [(0, 3), (0, 3), (1, 4)]
    annotations = [
        {"id": n, "image_id": image, "category_id": category, "segmentation": mask, "iscrowd": 0}
        for n, ((image, category), mask) in enumerate(zip(owned, masks, strict=True))
    ]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write(tmp_path / ("train.json" if flat else "annotations/train.json"), content)
    assert SPLITS["partimagenet"](tmp_path) == ["train"]
    assert flat or infer(tmp_path) == "partimagenet"
    first, second = read("partimagenet", tmp_path)
    assert (first.text, second.text) == ("the head of the quadruped", "the side mirror of the car")
    assert [m[0] for m in first.masks] == masks[:2]
    assert [m[0] for m in second.masks] == masks[2:]
    assert isinstance(second.frames[0], Path)
    assert second.frames[0].name == names[1]
    assert partimagenet.expression("torso") == "torso"
    with pytest.raises(DataError, match="'val'"):
        read("partimagenet", tmp_path, "val")


# STAR


def star(folder: Path, **changes: Any) -> Path:
    (folder / "Charades_v1_480").mkdir(parents=True, exist_ok=True)
    clip_sets.write_video(folder / "Charades_v1_480/ABC.mp4", clip_sets.draw().pictures)
    choices = [{"choice_id": n, "choice": text, "choice_program": []} for n, text in enumerate(["The box.", "A cup."])]
    asked = {"question_id": "Sequence_T1_13", "question": "Which object was moved?", "video_id": "ABC", "start": 0.05, "end": 0.2}
    record = asked | {"answer": "The box.", "question_program": [], "choices": choices, "situations": {}}
    write(folder / "STAR_val.json", [record | changes])
    write(folder / "STAR_test.json", [{key: value for key, value in record.items() if key != "answer"}])
    return folder


def test_star_asks_about_the_frames_between_two_times(tmp_path: Path) -> None:
    star(tmp_path)
    assert (infer(tmp_path), SPLITS["starqa"](tmp_path)) == ("starqa", ["val"])
    (sample,) = read("starqa", tmp_path, "val")
    assert (sample.question, sample.text, sample.meta["kind"]) == ("Which object was moved?", "The box.", "Sequence")
    assert sample.meta["choices"] == ["The box.", "A cup."]
    assert [frame.index for frame in sample.frames] == [1, 2, 3, 4]  # type: ignore[union-attr]  # of 24 a second
    for changes, message in (
        ({"answer": "A dog."}, r"Sequence_T1_13: the answer 'A dog\.' is none of its choices"),
        ({"start": 5.0, "end": 6.0}, r"5 to 6 s are no part of .*ABC\.mp4, which lasts 0\.2 s"),
        ({"video_id": "XYZ"}, r"the video 'XYZ\.mp4' is at none of"),
    ):
        with pytest.raises(DataError, match=message):
            read("starqa", star(tmp_path, **changes), "val")


# Ego4D


def test_ego4d_asks_for_the_stretch_that_answers_a_query(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "clips").mkdir()
    clip_sets.write_video(tmp_path / "clips/c1.mp4", clip_sets.draw().pictures)
    asked: list[dict[str, Any]] = [
        {"clip_start_sec": 0.1, "clip_end_sec": 0.35, "query": "Where was the box before I moved it", "template": "Objects: Where is X?"},
        {"clip_start_sec": 0.3, "clip_end_sec": 0.3, "query": "Who was it?"},
        {"clip_start_sec": 0.0, "clip_end_sec": 0.3},
    ]
    clip = {
        "clip_uid": "c1",
        "video_start_sec": 7.0,
        "video_end_sec": 8.0,
        "annotations": [{"annotation_uid": "a", "language_queries": asked}],
    }
    content = {"version": "1", "videos": [{"video_uid": "v", "clips": [clip]}]}
    write(tmp_path / "annotations/nlq_train.json", content)
    assert (infer(tmp_path), SPLITS["ego4d"](tmp_path)) == ("ego4d", ["train"])
    with caplog.at_level(logging.WARNING):
        (sample,) = read("ego4d", tmp_path)
    assert sample.question == "Where was the box before I moved it? From which second to which does the clip show it?"
    assert (sample.text, len(sample.frames), sample.sample_id) == ("0.1 to 0.3", 6, "c1_a_0")
    assert "1 with a stretch without length; 1 with no query" in caplog.text
    (tmp_path / "clips/c1.mp4").unlink()
    with pytest.raises(DataError, match=r"clip c1: the video 'c1\.mp4' is at none of"):
        read("ego4d", tmp_path)


# MathVista


def test_mathvistas_problems_are_conversations(tmp_path: Path) -> None:
    jpeg(tmp_path / "images/1.jpg", np.zeros((24, 32, 3), np.uint8))
    problem = {
        "pid": "1", "question": "How many?", "image": "images/1.jpg", "answer": "4", "query": "Hint: an integer.\nQuestion: How many?",
        "question_type": "free_form", "answer_type": "integer", "choices": None, "precision": None, "metadata": {"task": "geometry"},
    }  # fmt: skip
    write(tmp_path / "annot_testmini.json", {"1": problem})
    assert (infer(tmp_path), SPLITS["mathvista"](tmp_path)) == ("mathvista", ["testmini"])
    (sample,) = read("mathvista", tmp_path, "testmini")
    assert (sample.question, sample.text) == ("Hint: an integer.\nQuestion: How many?", "4")
    assert sample.meta == {"kind": "free_form", "category": "geometry"}
    write(tmp_path / "annot_testmini.json", {"1": problem | {"image": "images/2.jpg"}})
    with pytest.raises(DataError, match=r"problem 1: the image 'images/2\.jpg' is in none of"):
        read("mathvista", tmp_path, "testmini")


# FineWeb

WORDS = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 9


def documents(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist([{"url": "https://example.org", "language": "en", **row} for row in rows]), path)
    return path


def test_finewebs_documents_become_pages_that_say_their_first_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"id": "a", "text": WORDS},
        {"id": "b", "text": "Short."},
        {"id": "c", "text": "Übung " + WORDS},
        {"id": "d", "text": WORDS[5:]},
    ]
    documents(tmp_path / "sample/10BT/000_00000.parquet", *rows)
    assert SPLITS["fineweb"](tmp_path) == ["train"]
    with caplog.at_level(logging.WARNING):
        first, second = read("fineweb", tmp_path)
    assert "1 with too few words; 1 with letters beyond ASCII" in caplog.text
    lines = first.text.splitlines()
    assert len(lines) == fineweb.LINES
    assert all(len(line) <= fineweb.LETTERS for line in lines)
    assert WORDS.startswith(" ".join(lines))
    assert (first.sample_id, second.sample_id, first.question) == ("a", "d", "Read the text in this image.")
    assert isinstance(first.frames[0], bytes)
    with Image.open(io.BytesIO(first.frames[0])) as page:
        assert page.size == (first.width, first.height)
        dark = np.asarray(page) < 128
    assert not dark[:, -4:].any()  # no letter is cut at the right edge
    rows_with_ink = [dark[fineweb.MARGIN + n * fineweb.LEADING :][: fineweb.LEADING].any() for n in range(fineweb.LINES)]
    assert all(rows_with_ink)
    assert read("fineweb", tmp_path)[0].frames == first.frames


def test_of_a_large_file_documents_are_taken_at_equal_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fineweb, "PAGES", 3)
    path = documents(tmp_path / "x.parquet", *({"id": str(n), "text": f"{n} {WORDS}"} for n in range(7)))
    assert [sample.sample_id for sample in read("fineweb", path)] == ["0", "3", "6"]
    with pytest.raises(DataError, match="columns text are missing"):
        read("fineweb", documents(tmp_path / "y.parquet", {"id": "1"}))
