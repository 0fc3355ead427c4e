"""perf/rl_ablation.py: what it keeps of every run, and the arithmetic of its table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ans_core.benchmarks import BENCHMARKS
from ans_core.pictures import rle
from ans_core.types import Prediction, Request, Sample
from perf.rl_ablation import NAMES, NOTHING, differences, gain, judged, table

H, W = 8, 16


def box(start: int, end: int) -> dict:
    mask = np.zeros((H, W), bool)
    mask[:, start:end] = True
    return rle.encode(mask)


def referring(text: str, *masks: dict) -> Sample:
    return Sample(
        sample_id=text, dataset="d", image_id="i", frames=(Path("x.png"),), height=H, width=W,
        task="referring", text=text, masks=tuple((mask,) for mask in masks),
    )  # fmt: skip


def region(text: str, mask: dict) -> Sample:
    return replace(referring(text, mask), task="region_caption")


def test_every_column_is_kept_sample_by_sample_and_its_mean_is_the_benchmarks_metric():
    regions = [region("a red circle", box(0, 4)), region("a blue square", box(8, 12))]
    expressions = [
        referring("the red circle", box(0, 4)),
        referring("the blue square", box(8, 12)),
        referring("all objects", box(0, 4), box(8, 12)),
        referring("the green star"),
    ]
    left = Prediction(text="[SEG]", masks=((box(0, 4),),))

    def ask(requests: Sequence[Request]) -> list[Prediction]:
        """Draw the left thing and call everything a red circle, whatever is asked."""
        return [Prediction(text="A red circle.") if r.mask_prompts else left for r in requests]

    found = judged(ask, ask, regions, expressions)
    assert tuple(found) == NAMES
    assert found["loop1 IoU"] == [1.0, 0.0]
    assert found["exact captions"] == [1.0, 0.0]
    assert found["gIoU"] == [1.0, 0.0]
    # of the two things it draws one; of the absent one it draws something
    assert found["all expressions"] == [1.0, 0.0, 0.5, 0.0]
    of_captions = (
        BENCHMARKS["region_caption"]
        .of_samples(regions, ask([BENCHMARKS["region_caption"].request(s) for s in regions]))
        .metrics
    )
    of_masks = BENCHMARKS["referring"].of_samples(expressions, [left] * 4).metrics
    assert np.mean(found["exact captions"]) == of_captions["exact_match"]
    assert np.mean(found["gIoU"]) == of_masks["gIoU"]
    assert np.mean(found["all expressions"]) == of_masks["gIoU_all"]


def test_one_seeds_gain_has_the_standard_error_of_paired_differences():
    runs = {"SFT": {"gIoU": [0.2, 0.9]}, "no KL": {"gIoU": [0.4, 1.0]}}
    paired = differences(runs, "no KL", "gIoU")
    assert paired == pytest.approx([0.2, 0.1])
    assert gain([paired]) == "+0.1500 ± 0.0500"  # deviation .0707 over the root of 2
    assert gain([[0.1, 0.1, -0.2, -0.2]]) == "-0.0500 ± 0.0866"  # .1732 / 2


def test_several_seeds_gain_has_the_deviation_over_seeds():
    assert gain([[0.1, 0.3], [0.4, 0.4]]) == "+0.3000 ± 0.1414"  # of .2 and .4
    assert gain([[0.1], [0.3]]) == "+0.2000 ± 0.1414"


def test_runs_of_other_samples_are_not_paired():
    with pytest.raises(ValueError, match="longer"):
        differences({"SFT": {"gIoU": [0.2, 0.9]}, "no KL": {"gIoU": [0.4]}}, "no KL", "gIoU")


def test_older_files_with_one_number_a_column_print_without_an_error_and_without_what_they_lack(
    tmp_path: Path,
):
    runs = {
        "SFT": {"loop1 IoU": [0.8, 0.6], "gIoU": [0.7]},
        "no KL": {"loop1 IoU": [0.9, 0.6], "gIoU": [0.75]},
        "`token`": {},
    }
    path = tmp_path / "rl-ablation-seed0.json"
    path.write_text(json.dumps({"runs": runs}))
    assert table([path]).splitlines() == [
        "| run | loop1 IoU | gIoU |",
        "|-|-|-|",
        "| SFT | 0.700 | 0.700 |",
        "| no KL | +0.0500 ± 0.0500 | +0.0500 |",
        f"| `token` | {NOTHING} |  |",
    ]


def test_a_run_that_not_every_seed_has_is_left_out(tmp_path: Path):
    both = {"SFT": {"gIoU": [0.5]}, "no KL": {"gIoU": [0.6]}}
    for seed, runs in enumerate([both | {"no judge": {"gIoU": [0.9]}}, {**both, "no KL": {"gIoU": [0.8]}}]):
        (tmp_path / f"rl-ablation-seed{seed}.json").write_text(json.dumps({"runs": runs}))
    assert table(sorted(tmp_path.iterdir())).splitlines()[2:] == [
        "| SFT | 0.500 |",
        "| no KL | +0.2000 ± 0.1414 |",
    ]
