from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from ans_core.benchmarks.submission import gcg_folder_of_lines, video_zip_of_lines
from tests.benchmarks.public.drawn import H, W, coded, score, write


def test_the_zip_for_the_servers_scores_as_what_was_predicted(tmp_path: Path):
    masks = {"0": [coded(0, 4), coded(0, 2)], "1": [None, None]}
    lines = [LINE | {"expression": number, "prediction_masks": drawn} for number, drawn in masks.items()]
    assert video_zip_of_lines(tmp_path / "out.zip", lines, where="told.jsonl") == 2
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
    assert (
        gcg_folder_of_lines(tmp_path, [record | {"text": "<p> A cat </p> [SEG]."}], where="told.jsonl") == 1
    )
    assert json.loads((tmp_path / "7.json").read_text()) == record
    with pytest.raises(ValueError, match=r"line 1: image id '\.\./x' is no file name"):
        gcg_folder_of_lines(tmp_path, [record | {"image_id": "../x"}], where="told.jsonl")


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
        ([LINE], "line 2: no record; give the predictions.jsonl of `ans eval mevis"),
        ({"video": "zoo"}, "line 2: no expression, frames, prediction_masks, size; give"),
        (LINE | {"prediction_masks": [None]}, "line 2: 1 masks for 2 frames"),
        (LINE | {"size": [H, W + 1]}, "line 2, frame 00005: RLE size"),
    ],
)
def test_a_wrong_line_is_refused_and_leaves_no_archive(tmp_path: Path, line: object, message: str):
    with pytest.raises(ValueError, match=message):
        video_zip_of_lines(tmp_path / "out.zip", [LINE, line], where="told.jsonl")
    assert not (tmp_path / "out.zip").exists()
