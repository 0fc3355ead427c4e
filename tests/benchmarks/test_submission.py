from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from ans_core.benchmarks.submission import video_zip_of_lines, write_gcg_folder, write_video_zip
from ans_core.types import Prediction, Sample
from tests.benchmarks.public.drawn import H, W, coded, score, write

FRAMES = (Path("zoo/00000.jpg"), Path("zoo/00005.jpg"))


def sample(number: str, **others: object) -> Sample:
    common = {"dataset": "d", "image_id": "zoo", "frames": FRAMES, "height": H, "width": W, "task": "referring", "text": "the cat"}
    return Sample(sample_id=f"zoo_{number}", **(common | others))


def test_the_zip_for_the_servers_scores_as_what_was_predicted(tmp_path: Path):
    samples = [sample("0"), sample("1")]
    predictions = [Prediction(text="[SEG]", masks=((coded(0, 4), coded(0, 2)), (coded(9, 10), coded(9, 10)))), Prediction(text="No.")]
    write_video_zip(tmp_path / "out.zip", samples, predictions)
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.namelist() == [f"Annotations/zoo/{e}/{f}.png" for e in "01" for f in ("00000", "00005")]
        archive.extractall(tmp_path / "drawn")
    expressions = {"0": {"exp": "x", "anno_id": [1]}, "1": {"exp": "x", "anno_id": [1]}}
    write(tmp_path / "truth/meta_expressions.json", {"videos": {"zoo": {"frames": ["00000", "00005"], "expressions": expressions}}})
    write(tmp_path / "truth/mask_dict.json", {"1": [coded(0, 4), coded(0, 4)]})
    found = score("mevis", tmp_path / "drawn", data=tmp_path / "truth")
    assert [s["J"] for s in found.samples] == [0.75, 0.0]


def test_the_folder_for_gcg_holds_plain_captions_and_a_phrase_a_mask(tmp_path: Path):
    told = Prediction(text="<p> A cat </p> [SEG] on <p> a mat </p> [SEG].", masks=((coded(0, 4),), (coded(4, 6),)))
    write_gcg_folder(tmp_path, [sample("0", image_id="7", frames=FRAMES[:1])], [told])
    record = json.loads((tmp_path / "7.json").read_text())
    assert record == {
        "image_id": "7",
        "caption": "A cat on a mat.",
        "phrases": ["A cat", "a mat"],
        "pred_masks": [coded(0, 4), coded(4, 6)],
    }
    with pytest.raises(ValueError, match=r"image id '\.\./x' is no file name"):
        write_gcg_folder(tmp_path, [sample("0", image_id="../x")], [told])


LINE = {"video": "zoo", "expression": "0", "frames": ["00000", "00005"], "size": [H, W], "prediction_masks": [None, coded(0, 4)]}


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
