from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.benchmarks.public.drawn import H, W, coded, columns, score, write, write_index_masks

NOTHING = np.zeros((H, W), np.uint8)
ONE = columns(0, 4).astype(np.uint8)
HALF = columns(0, 2).astype(np.uint8)
EDGE = columns(W - 1, W) * np.uint8(1)


def folders(
    tmp_path: Path, truth: list[np.ndarray], drawn: list[np.ndarray], video: str = "dog"
) -> dict[str, Path]:
    write_index_masks(tmp_path / "truth" / video, truth)
    write_index_masks(tmp_path / "drawn" / video, drawn)
    return {"predictions": tmp_path / "drawn", "data": tmp_path / "truth"}


@pytest.mark.parametrize("convention", ["davis", "mose"])
def test_the_truth_scores_one(tmp_path: Path, convention: str):
    paths = folders(tmp_path, [ONE + EDGE * 2] * 5, [ONE + EDGE * 2] * 5)
    found = score("vos", convention=convention, **paths)
    assert found.metrics["J&F"] == found.metrics["J"] == found.metrics["F"] == 1.0
    assert found.metrics["objects"] == 2
    assert convention in found.notes[0]


def test_the_conventions_differ_in_the_frames_before_an_object_appears(tmp_path: Path):
    """Object 2 is there in the last 5 of the 18 frames that count and is drawn with IoU .5."""
    first = ONE + EDGE * 2  # davis takes its objects from the first frame, which no convention scores
    truth = [first, *[NOTHING] * 13, *[ONE * 2] * 5, NOTHING]
    drawn = [first, *[NOTHING] * 13, *[HALF * 2] * 5, NOTHING]
    paths = folders(tmp_path, truth, drawn)
    davis = {s["object"]: s["J_mean"] for s in score("vos", convention="davis", **paths).samples}
    assert davis == {1: 1.0, 2: pytest.approx((13 + 5 * 0.5) / 18)}
    mose = {s["object"]: s["J_mean"] for s in score("vos", convention="mose", **paths).samples}
    assert mose == {2: 0.5}  # and object 1, only in the first frame, is not scored at all


def test_the_first_and_last_frame_do_not_count_and_objects_weigh_the_same_in_every_video(tmp_path: Path):
    paths = folders(tmp_path, [ONE] * 4, [NOTHING, ONE, HALF, NOTHING])
    assert score("vos", **paths).metrics["J"] == 0.75
    folders(tmp_path, [ONE + EDGE * 2] * 3, [NOTHING] * 3, video="goat")  # two objects missed
    assert score("vos", **paths).metrics["J"] == pytest.approx((0.75 + 0 + 0) / 3)


def test_numbers_that_no_object_has_count_only_in_davis_own_code(tmp_path: Path):
    """Objects 1 and 5 are missed. DAVIS' code counts 2, 3 and 4 too, as drawn to perfection: 3 of 5."""
    paths = folders(tmp_path, [ONE + EDGE * 5] * 4, [NOTHING] * 4)
    for convention, j, objects in (
        ("davis", 0, [1, 5]),
        ("mose", 0, [1, 5]),
        ("davis2017-evaluation", 0.6, [1, 2, 3, 4, 5]),
    ):
        found = score("vos", convention=convention, **paths)
        assert (found.metrics["J&F"], [s["object"] for s in found.samples]) == (pytest.approx(j), objects)
        assert any("1 videos have gaps" in note for note in found.notes) == (convention != "mose")
    write_index_masks(tmp_path / "drawn/dog", [ONE * 3] * 4)
    with pytest.raises(ValueError, match=r"holds object 3; .* has objects 1, 5;"):
        score("vos", **paths)
    # 3 appears later, and is below 5
    write_index_masks(tmp_path / "truth/dog", [ONE + EDGE * 5, ONE * 3, ONE * 3, ONE * 3])
    assert [s["object"] for s in score("vos", **paths).samples] == [1, 3, 5]


def test_void_is_background_for_davis_and_an_object_for_mose(tmp_path: Path):
    truth = [np.where(EDGE > 0, 255, ONE)] * 3
    paths = folders(tmp_path, truth, [ONE] * 3)
    assert score("vos", convention="davis", **paths).metrics["J"] == 1.0
    found = score("vos", convention="mose", **paths)
    assert found.metrics["J"] == 0.5
    assert "1 videos hold the number 255" in found.notes[1]


def test_sav_has_a_folder_an_object_and_they_may_overlap(tmp_path: Path):
    for one, drawn in (("000", ONE * 255), ("001", HALF * 255)):
        write_index_masks(tmp_path / "truth/dog" / one, [ONE * 255] * 3)
        write_index_masks(tmp_path / "drawn/dog" / one, [drawn] * 3)
    found = score("vos", tmp_path / "drawn", data=tmp_path / "truth", convention="mose")
    assert found.metrics["J"] == 0.75
    assert [s["video"] for s in found.samples] == ["dog/000", "dog/001"]


def test_what_does_not_fit_is_refused(tmp_path: Path):
    paths = folders(tmp_path, [ONE] * 3, [ONE * 2] * 3)
    with pytest.raises(
        ValueError, match=r"dog: a predicted mask holds object 2; .* has objects 1; --convention mose"
    ):
        score("vos", **paths)
    (paths["predictions"] / "dog/00001.png").unlink()
    with pytest.raises(ValueError, match=r"1 of 3 frames are not there: 00001\.png"):
        score("vos", **paths)
    write_index_masks(tmp_path / "drawn/dog", [ONE, ONE.T.copy(), ONE])
    with pytest.raises(
        ValueError, match=r"00001\.png: \[height, width\] \(10, 6\), the truth's is \(6, 10\)"
    ):
        score("vos", **paths)
    Image.new("RGB", (W, H)).save(tmp_path / "drawn/dog/00001.png")
    with pytest.raises(ValueError, match=r"00001\.png: mode RGB"):
        score("vos", **paths)
    write_index_masks(tmp_path / "drawn/cat", [ONE] * 3)
    with pytest.raises(ValueError, match="1 videos are not there: cat"):
        score("vos", **paths)
    write_index_masks(tmp_path / "truth/cat", [ONE * 0] * 3)
    with pytest.raises(ValueError, match="cat: the truth holds no object, only background and void"):
        score("vos", **paths)
    with pytest.raises(ValueError, match="one of davis, davis2017-evaluation, mose"):
        score("vos", convention="lvos", **paths)
    (tmp_path / "truth").rename(tmp_path / "Annotations")
    with pytest.raises(ValueError, match="the truth would be scored against itself"):
        score("vos", tmp_path / "Annotations", data=tmp_path)
    with pytest.raises(ValueError, match="no file with sequence, height, width and objects"):
        score("vos", tmp_path)


def test_masks_of_0_and_255_are_one_object_however_the_prediction_numbers_it(tmp_path: Path):
    """As DAVIS 2016 scores: what is not black."""
    for number in (1, 255):
        paths = folders(tmp_path / str(number), [ONE * 255] * 3, [HALF * number] * 3)
        for convention in ("davis", "mose"):
            assert score("vos", convention=convention, **paths).metrics["J"] == 0.5
    with pytest.raises(
        ValueError, match=r"hold 127 and 255, which look like grey levels .* number the objects 1, 2"
    ):
        score("vos", **folders(tmp_path / "grey", [ONE * 255 - HALF * 128] * 3, [ONE] * 3))


def test_recorded_clips_hold_truth_and_prediction_and_their_objects_do_not_overlap(tmp_path: Path):
    one = {"id": 1, "truth": [coded(0, 4)] * 3, "prediction": [None, coded(0, 2), None]}
    clip = {"sequence": "dog", "height": H, "width": W, "objects": [one]}
    write(tmp_path / "expected.json", {"J": 1})
    write(tmp_path / "dog.json", clip)
    assert score("vos", tmp_path).metrics["J"] == 0.5
    other = {"id": 2, "truth": [coded(3, 5)] * 3, "prediction": [None] * 3}
    write(tmp_path / "dog.json", clip | {"objects": [one, other]})
    with pytest.raises(
        ValueError, match=r"dog\.json, object 2, frame 0: the truth overlaps another object's"
    ):
        score("vos", tmp_path)
    write(tmp_path / "dog.json", clip | {"objects": [one, other | {"truth": [None]}]})
    with pytest.raises(ValueError, match=r"masks of \[1, 3\] frames"):
        score("vos", tmp_path)
    write(tmp_path / "dog.json", clip | {"objects": [one | {"id": 300}]})
    with pytest.raises(ValueError, match=r"dog\.json: object id 300 is no number of a PNG"):
        score("vos", tmp_path)
