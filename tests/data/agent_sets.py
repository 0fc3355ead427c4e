"""Drawn pictures and clips, written as the sets are published that an agent's questions come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
from PIL import Image

from ans_core.data.formats.virl39k import held_out as virl39k_held_out
from ans_core.pictures import rle
from tests import picture_sets
from tests.data import clip_sets

WORDS = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 9


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def jpeg(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "JPEG")


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


PARTS = [rle.encode(np.eye(24, 32, k=k, dtype=bool)) for k in range(3)]
"""The masks of `partimagenet`: two heads in the first picture, a mirror in the second."""


def partimagenet(folder: Path, *, flat: bool = False) -> None:
    """`flat`: as in the released archive, without the folders `images` and `annotations`."""
    names = ["n01_1.JPEG", "n02_7.JPEG"]
    for name in names:
        jpeg(
            (folder / "train" if flat else folder / "images/train") / name.partition("_")[0] / name,
            np.zeros((24, 32, 3), np.uint8),
        )
    images = [{"id": n, "file_name": name, "height": 24, "width": 32} for n, name in enumerate(names)]
    categories = [
        {"id": 3, "name": "Quadruped Head", "supercategory": "Quadruped"},
        {"id": 4, "name": "Car Side Mirror"},
    ]
    annotations = [
        {"id": n, "image_id": image, "category_id": category, "segmentation": mask, "iscrowd": 0}
        for n, ((image, category), mask) in enumerate(zip([(0, 3), (0, 3), (1, 4)], PARTS, strict=True))
    ]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write(folder / ("train.json" if flat else "annotations/train.json"), content)


def star(folder: Path, **changes: Any) -> Path:
    (folder / "Charades_v1_480").mkdir(parents=True, exist_ok=True)
    clip_sets.write_video(folder / "Charades_v1_480/ABC.mp4", clip_sets.draw().pictures)
    choices = [
        {"choice_id": n, "choice": text, "choice_program": []}
        for n, text in enumerate(["The box.", "A cup."])
    ]
    asked = {
        "question_id": "Sequence_T1_13",
        "question": "Which object was moved?",
        "video_id": "ABC",
        "start": 0.05,
        "end": 0.2,
    }
    record = asked | {"answer": "The box.", "question_program": [], "choices": choices, "situations": {}}
    write(folder / "STAR_val.json", [record | changes])
    write(folder / "STAR_test.json", [{key: value for key, value in record.items() if key != "answer"}])
    return folder


def ego4d(folder: Path, *, queries: int = 1) -> None:
    """The second query's stretch has no length, the third has no words."""
    (folder / "clips").mkdir(parents=True)
    clip_sets.write_video(folder / "clips/c1.mp4", clip_sets.draw().pictures)
    asked: list[dict[str, Any]] = [
        {
            "clip_start_sec": 0.1,
            "clip_end_sec": 0.35,
            "query": "Where was the box before I moved it",
            "template": "Objects: Where is X?",
        },
        {"clip_start_sec": 0.3, "clip_end_sec": 0.3, "query": "Who was it?"},
        {"clip_start_sec": 0.0, "clip_end_sec": 0.3},
    ]
    clip = {"clip_uid": "c1", "video_start_sec": 7.0, "video_end_sec": 8.0}
    clip["annotations"] = [{"annotation_uid": "a", "language_queries": asked[:queries]}]
    write(
        folder / "annotations/nlq_train.json",
        {"version": "1", "videos": [{"video_uid": "v", "clips": [clip]}]},
    )


PROBLEM = {
    "pid": "1", "question": "How many?", "image": "images/1.jpg", "answer": "4",
    "query": "Hint: an integer.\nQuestion: How many?", "question_type": "free_form", "answer_type": "integer",
    "choices": None, "precision": None, "metadata": {"task": "geometry"},
}  # fmt: skip


def mathvista(folder: Path) -> None:
    jpeg(folder / "images/1.jpg", np.zeros((24, 32, 3), np.uint8))
    write(folder / "annot_testmini.json", {"1": PROBLEM})


def fineweb(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(
        pyarrow.Table.from_pylist([{"url": "https://example.org", "language": "en", **row} for row in rows]),
        path,
    )
    return path


def virl39k(folder: Path) -> None:
    """A question to train on, one that is held out, one about two pictures."""
    (folder / "images").mkdir(parents=True)
    held_out = next(name for name in (f"images/{n}.png" for n in range(500)) if virl39k_held_out([name]))
    shown = ["images/0.png", held_out]
    for name in shown:
        Image.new("RGB", (32, 32)).save(folder / name)
    rows = [
        {
            "qid": str(n),
            "question": "<image>How many?",
            "answer": "\\boxed{3}",
            "category": "Math",
            "image": names,
        }
        for n, names in enumerate((shown[:1], shown[1:], shown))
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "39Krelease.parquet")
