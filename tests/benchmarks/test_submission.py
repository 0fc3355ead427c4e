from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ans_core.benchmarks.public import files
from ans_core.benchmarks.submission import gcg_folder, video_zip
from tests.benchmarks.public.drawn import H, W, coded, score, write


def records(folder: Path, lines: list[object]) -> Iterator[files.Record]:
    return files.stream(write(folder / "told.jsonl", lines))


def test_the_zip_for_the_servers_scores_as_what_was_predicted(tmp_path: Path):
    masks = {"0": [coded(0, 4), coded(0, 2)], "1": [None, None]}
    lines = [LINE | {"expression": number, "prediction_masks": drawn} for number, drawn in masks.items()]
    assert video_zip(tmp_path / "out.zip", records(tmp_path, lines)) == 2
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.namelist() == [
            f"Annotations/zoo/{e}/{f}.png" for e in "01" for f in ("00000", "00005")
        ]
        archive.extractall(tmp_path / "drawn")
    expressions = {"0": {"exp": "x", "anno_id": [1]}, "1": {"exp": "x", "anno_id": [1]}}
    write(
        tmp_path / "truth/meta_expressions.json",
        {"videos": {"zoo": {"frames": ["00000", "00005"], "expressions": expressions}}},
    )
    write(tmp_path / "truth/mask_dict.json", {"1": [coded(0, 4), coded(0, 4)]})
    found = score("mevis", tmp_path / "drawn", data=tmp_path / "truth")
    assert [s["J"] for s in found.samples] == [0.75, 0.0]


def test_the_folder_for_gcg_holds_a_file_an_image(tmp_path: Path):
    record = {"image_id": "7", "caption": "A cat.", "phrases": ["A cat"], "pred_masks": [coded(0, 4)]}
    assert gcg_folder(tmp_path, records(tmp_path, [record | {"text": "<p> A cat </p> [SEG]."}])) == 1
    assert json.loads((tmp_path / "7.json").read_text()) == record
    with pytest.raises(ValueError, match=r"record 0: image id '\.\./x' is no file name"):
        gcg_folder(tmp_path, records(tmp_path, [record | {"image_id": "../x"}]))


LINE = {
    "video": "zoo",
    "expression": "0",
    "frames": ["00000", "00005"],
    "size": [H, W],
    "prediction_masks": [None, coded(0, 4)],
}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([LINE], "record 1: list, not an object"),
        ({"video": "zoo"}, "record 1: no expression, frames, prediction_masks, size; give"),
        (LINE | {"prediction_masks": [None]}, "record 1: 1 masks of 'prediction_masks' for 2 frames"),
        (LINE | {"size": [H, W + 1]}, "record 1, frame 00005: RLE size"),
    ],
)
def test_a_wrong_line_is_refused_and_leaves_no_archive(tmp_path: Path, line: object, message: str):
    with pytest.raises(ValueError, match=message):
        video_zip(tmp_path / "out.zip", records(tmp_path, [LINE, line]))
    assert not (tmp_path / "out.zip").exists()
