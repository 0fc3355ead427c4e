from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ans_core.benchmarks.public import files
from ans_core.benchmarks.submission import gcg_folder, video_zip, write_vos
from ans_core.cli import main as cli
from ans_core.evaluation.submit import submit
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
    out = tmp_path / "new/out"
    assert gcg_folder(out, records(tmp_path, [record | {"text": "<p> A cat </p> [SEG]."}])) == 1
    assert json.loads((out / "7.json").read_text()) == record
    wrong = [record | {"image_id": "8"}, record | {"image_id": "../x"}]
    with pytest.raises(ValueError, match=r"record 1: image id '\.\./x' is no file name"):
        gcg_folder(out, records(tmp_path, wrong))
    assert [file.name for file in out.rglob("*")] == ["7.json"]


RUN = {"video": "zoo", "objects": ["1"], "overlap": False, "frames": ["0"], "size": [H, W], "masks": [[None]]}


@pytest.mark.parametrize("name", ["out", "out.zip"])
def test_a_run_of_videos_is_written_whole_or_not_at_all(tmp_path: Path, name: str):
    out = tmp_path / "new" / name
    assert write_vos(out, records(tmp_path, [RUN])) == 1
    before = out.read_bytes() if out.is_file() else [file.name for file in out.rglob("*")]
    with pytest.raises(ValueError, match="record 1: 'masks' is None, not a list"):
        write_vos(out, records(tmp_path, [RUN | {"video": "other"}, RUN | {"masks": None}]))
    assert before == (out.read_bytes() if out.is_file() else [file.name for file in out.rglob("*")])
    assert [file.name for file in out.parent.iterdir()] == [name]


def test_no_folder_of_the_users_is_replaced(tmp_path: Path):
    lines = write(tmp_path / "predictions.jsonl", [RUN])
    command = ["eval", "submit", "vos", "--predictions", str(lines), "--out", str(tmp_path)]
    with pytest.raises(ValueError, match="holds files; give a new file or folder"):
        submit(cli.parse(command))


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
        (LINE, "record 1: video zoo, expression 0 comes twice"),
        ([LINE], "record 1: list, not an object"),
        ({"video": "zoo"}, "record 1: no expression, frames, prediction_masks, size; give"),
        (
            LINE | {"expression": "1", "prediction_masks": [None]},
            "record 1: 1 masks of 'prediction_masks' for 2 frames",
        ),
        (LINE | {"expression": "1", "size": [H, W + 1]}, "record 1, frame 00005: RLE size"),
    ],
)
def test_a_wrong_line_is_refused_and_leaves_no_archive(tmp_path: Path, line: object, message: str):
    with pytest.raises(ValueError, match=message):
        video_zip(tmp_path / "out.zip", records(tmp_path, [LINE, line]))
    assert [file.name for file in tmp_path.iterdir()] == ["told.jsonl"]
