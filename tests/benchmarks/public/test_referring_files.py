from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ans_core.metrics.bootstrap import interval
from ans_core.pictures import rle
from tests.benchmarks.public.drawn import H, W, coded, score, write

TRUTH = [
    {"id": "a", "mask": coded(0, 4)},
    {"id": "b", "mask": coded(0, 4)},
    {"id": "c", "mask": None, "height": H, "width": W},
    {"id": "d", "mask": coded(0, 4)},
]
SPOKEN = [
    {"id": "a", "mask": coded(0, 5)},
    {"id": "b", "mask": coded(0, 2)},
    {"id": "c", "mask": None},
    {"id": "d", "mask": None},
]


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    return write(tmp_path / "truth.jsonl", TRUTH)


def test_refcoco_counts_by_hand(tmp_path: Path, truth: Path):
    found = score("refcoco", write(tmp_path / "drawn.jsonl", SPOKEN), data=truth)
    # d, which got no mask, leaves its pixels in the union
    assert found.metrics["cIoU"] == (24 + 12) / (30 + 24 + 24)
    assert found.metrics["cIoU_upstream"] == (24 + 12) / (30 + 24)
    assert found.metrics["gIoU"] == pytest.approx((0.8 + 0.5 + 1 + 0) / 4)
    assert {t: found.metrics[f"P@{t}"] for t in (0.5, 0.6, 0.8, 0.9)} == pytest.approx(
        {0.5: 2 / 3, 0.6: 1 / 3, 0.8: 1 / 3, 0.9: 0}
    )
    assert found.metrics["without_a_mask"] == 2
    assert found.missing == 0
    assert {key: ratio.value for key, ratio in found.ratios.items()} == {
        key: found.metrics[key] for key in found.ratios
    }
    # every figure has one
    assert set(found.intervals()) == set(found.metrics) - {"expressions", "without_a_mask"}
    assert found.intervals()["cIoU"] == interval(found.ratios["cIoU"])  # as by itself
    general = score("grefcoco", write(tmp_path / "drawn.jsonl", SPOKEN), data=truth)
    assert {key: ratio.value for key, ratio in general.ratios.items()} == {
        key: general.metrics[key] for key in general.ratios
    }
    assert set(general.ratios) == set(general.metrics) - {"expressions", "without_target"}


def test_the_pipelines_own_predictions_are_read_too(tmp_path: Path, truth: Path):
    ours = [
        {
            "benchmark": "x",
            "sample_id": r["id"],
            "masks": [] if r["mask"] is None else [[r["mask"]], [coded(9, 10)]],
        }
        for r in SPOKEN
    ]
    other = score("refcoco", write(tmp_path / "drawn.jsonl", SPOKEN), data=truth)
    assert score("refcoco", write(tmp_path / "predictions.jsonl", ours), data=truth).metrics == other.metrics


def test_the_truth_scores_one_everywhere(tmp_path: Path, truth: Path):
    drawn = write(tmp_path / "drawn.json", [{"id": r["id"], "mask": r["mask"]} for r in TRUTH])
    for name, keys in (
        ("refcoco", ("cIoU", "gIoU", "P@0.9")),
        ("grefcoco", ("gIoU", "N_acc", "T_acc")),
        ("reasonseg", ("gIoU", "cIoU")),
    ):
        metrics = score(name, drawn, data=truth).metrics
        assert [metrics[key] for key in keys] == pytest.approx([1.0] * len(keys), abs=1e-5)


def test_missing_predictions_count_nothing_not_even_where_nothing_was_meant(tmp_path: Path, truth: Path):
    found = score("grefcoco", write(tmp_path / "drawn.jsonl", [{"id": "a", "mask": coded(0, 4)}]), data=truth)
    assert found.missing == 3
    assert found.metrics["gIoU"] == 1 / 4
    assert found.metrics["N_acc"] == 0.0
    assert found.metrics["T_acc"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"id": "a", "mask": coded(0, 4)}] * 2, "record 1: 'a' comes twice"),
        ([{"id": "z", "mask": None}], r"record 0: 'z' is no expression of .*truth\.jsonl"),
        ([{"id": "a", "mask": rle.empty(W, H)}], r"record 0: RLE size \[10, 6\] is not the image's"),
        ([{"id": "a", "mask": 7}], "record 0: segmentation is neither polygons nor RLE but int"),
        (
            [{"id": "a", "mask": {"size": [H, W], "counts": 7}}],
            "record 0: RLE counts are 7, neither text nor a list of numbers",
        ),
        (
            [{"id": "a", "mask": {"size": [H, W], "counts": "zzzz"}}],
            "record 0: RLE counts 'zzzz' have letters outside",
        ),
        ([{"id": "a"}], "record 0: no mask"),
        ([{"mask": None}], "record 0: no id"),
        ([[]], "record 0: list, not an object"),
    ],
)
def test_predictions_that_do_not_fit_are_refused(
    tmp_path: Path, truth: Path, records: list[Any], message: str
):
    with pytest.raises(ValueError, match=message):
        score("refcoco", write(tmp_path / "drawn.jsonl", records), data=truth)


def test_a_line_that_is_no_json_is_named(tmp_path: Path, truth: Path):
    broken = tmp_path / "drawn.jsonl"
    broken.write_text('{"id": "a", "mask": null}\n{"id":')
    with pytest.raises(ValueError, match=r"drawn\.jsonl, line 2: not JSON"):
        score("refcoco", broken, data=truth)
