from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ans_core.benchmarks.registry import SCORERS
from ans_core.pictures import rle
from tests.benchmarks.public.drawn import H, W, coded, columns, score, write, write_index_masks

FRAMES = ["00000", "00001"]
MASKS = {"1": [coded(0, 4), None], "2": [coded(4, 8), coded(0, 2)], "9": [None, None]}


def truth(folder: Path, expressions: dict[str, dict[str, Any]], foreground: Any = None) -> Path:
    meta = {
        "videos": {
            "zoo": {
                "frames": FRAMES,
                "expressions": {k: {"exp": "the cat", **v} for k, v in expressions.items()},
            }
        }
    }
    write(folder / "meta_expressions.json", meta)
    write(folder / "mask_dict.json", MASKS)
    write(
        folder / "mask_dict_foreground.json", {"zoo": {"masks_rle": foreground or [coded(0, 8), coded(0, 2)]}}
    )
    return folder


def drawn(root: Path, expression: str, *frames: np.ndarray) -> Path:
    write_index_masks(root / "zoo" / expression, [frame * np.uint8(255) for frame in frames])
    return root


def test_expressions_of_several_objects_of_some_frames_and_of_none(tmp_path: Path):
    data = truth(
        tmp_path / "data",
        {"0": {"anno_id": [1, 2]}, "1": {"anno_id": [1]}, "2": {"anno_id": [9]}, "3": {"anno_id": []}},
    )
    root = tmp_path / "drawn"
    drawn(root, "0", columns(0, 8), columns(0, 1))  # J 1 and .5
    drawn(root, "1", columns(0, 4), columns(0, 0))  # gone in the second frame, rightly not drawn
    drawn(root, "2", columns(0, 0), columns(0, 1))  # never seen: J 1 and 0
    drawn(root, "3", columns(0, 0), columns(0, 0))
    found = score("mevis", root, data=data)
    assert [s["J"] for s in found.samples] == [0.75, 1.0, 0.5, 1.0]
    assert found.metrics["J"] == 3.25 / 4
    assert found.metrics["J&F"] == (found.metrics["J"] + found.metrics["F"]) / 2


def test_results_json_scores_as_the_folder_and_missing_expressions_count_nothing(tmp_path: Path):
    data = truth(tmp_path / "data", {"0": {"anno_id": [1]}, "1": {"anno_id": [9]}})
    folder = drawn(tmp_path / "drawn", "0", columns(0, 2), columns(0, 0))
    results = write(
        tmp_path / "results.json", {"zoo": {"0": {"prediction_masks": [coded(0, 2), rle.empty(H, W)]}}}
    )
    one, other = (score("ref_youtube_vos", path, data=data) for path in (folder, results))
    assert one.metrics == other.metrics
    assert one.metrics["J"] == (0.75 + 0) / 2
    assert one.missing == 1


def test_ref_davis_reports_each_of_its_four_annotations(tmp_path: Path):
    data = truth(tmp_path / "data", {str(i): {"anno_id": [1]} for i in range(8)})
    for i in range(8):
        drawn(tmp_path / "drawn", str(i), columns(0, 4 if i % 4 == 2 else 0), columns(0, 0))
    metrics = score("ref_davis17", tmp_path / "drawn", data=data).metrics
    assert metrics["J"] == (2 * 1 + 6 * 0.5) / 8
    assert metrics["J/annotator2_first_frame"] == 1.0
    assert metrics["J/annotator1_first_frame"] == metrics["J/annotator2_full_video"] == 0.5


def test_revos_by_hand(tmp_path: Path):
    kinds = {
        "0": {"anno_id": [1, 2], "type_id": 0},
        "1": {"anno_id": [2], "type_id": 1},
        "2": {"anno_id": [], "type_id": 2},
    }
    data = truth(tmp_path / "data", kinds)
    root = tmp_path / "drawn"
    # two of ten columns too many, of eight that some object has
    drawn(root, "0", columns(0, 10), columns(0, 2))
    drawn(root, "1", columns(4, 8), columns(0, 0))
    metrics = score("revos", root, data=data).metrics
    assert metrics["referring/J"] == (0.8 + 1) / 2
    assert metrics["referring/A"] == pytest.approx((0.8 + 1) / 2)
    assert metrics["referring/R"] == pytest.approx((1 - 2 / 8 + 1) / 2)
    assert metrics["reasoning/J"] == 0.5
    assert metrics["reasoning/A"] == pytest.approx((1 + 0.8) / 2)
    assert metrics["reasoning/R"] == 1.0
    assert metrics["overall/J"] == (0.9 + 0.5) / 2
    ratios = score("revos", root, data=data).ratios
    assert {name: ratio.value for name, ratio in ratios.items() if name.endswith("/J")} == {
        name: pytest.approx(metrics[name]) for name in ("overall/J", "referring/J", "reasoning/J")
    }
    runner = SCORERS["revos"].runner
    assert runner is not None
    runner.needs(data, "valid")
    (data / "mask_dict_foreground.json").unlink()
    with pytest.raises(ValueError, match="mask_dict_foreground"):
        runner.needs(data, "valid")


def test_what_does_not_fit_is_refused(tmp_path: Path):
    data = truth(tmp_path / "data", {"0": {"anno_id": [1]}})
    root = drawn(tmp_path / "drawn", "0", columns(0, 4))
    with pytest.raises(ValueError, match="1 of 2 frames are not there: 00001"):
        score("mevis", root, data=data)
    drawn(root, "0", columns(0, 4), columns(0, 4).T.copy())
    with pytest.raises(ValueError, match=r"zoo/0, frame 00001: RLE size \[10, 6\] is not the image's"):
        score("mevis", root, data=data)
    drawn(root, "7", columns(0, 4), columns(0, 4))
    with pytest.raises(ValueError, match="1 expressions that the truth does not have: zoo/7"):
        score("mevis", root, data=data)
    with pytest.raises(ValueError, match="no prediction for any of the 1 expressions"):
        score("mevis", write(tmp_path / "none.json", {}), data=data)
    with pytest.raises(ValueError, match=r"mask_dict\.json has no 5"):
        score("mevis", root, data=truth(tmp_path / "other", {"0": {"anno_id": [5]}, "7": {"anno_id": [5]}}))
