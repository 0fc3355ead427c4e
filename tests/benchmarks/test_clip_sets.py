"""Video data sets as `evaluate.sources`: every expression is asked, and the truth scores 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ans_core.benchmarks.video import BENCHMARK
from ans_core.config import Config, DataSource, Evaluate
from ans_core.data import write_entries
from ans_core.pictures import rle
from ans_core.stages.evaluate import evaluated_sets
from ans_core.types import Prediction, Sample
from tests.data import clip_sets

KINDS = {
    "mevis": {"J&F/target", "J&F/no_target"},
    "revos": {"J&F/referring", "J&F/reasoning", "J&F/no_object"},
    "ref_davis17": {f"J&F/annotator{n}_{part}" for n in (1, 2) for part in ("first_frame", "full_video")},
    "ref_youtube_vos": set(),
    "ref_sav": set(),
    "youtube_vis": set(),
    "coco_video": set(),
}


def asked(root: Path, form: str) -> list[Sample]:
    source = DataSource(
        name="clips", format=form, path=str(getattr(clip_sets, form)(root / form)), split="train"
    )
    prepared = root / "prepared"
    prepared.mkdir()
    write_entries(prepared, [])
    config = Config(profile="test", evaluate=Evaluate(benchmarks=("video",), sources=(source,)))
    return [sample for found in evaluated_sets(config, prepared) for sample in found.samples]


@pytest.mark.parametrize(("form", "kinds"), KINDS.items())
def test_true_masks_score_one_by_every_kind_and_empty_ones_less(tmp_path, form, kinds):
    samples = asked(tmp_path, form)
    score = BENCHMARK.of_samples(samples, [BENCHMARK.truth(sample) for sample in samples])
    assert set(score.metrics) == {"J", "F", "J&F", "samples", *kinds}
    assert {value for name, value in score.metrics.items() if name != "samples"} == {1.0}
    empty = BENCHMARK.of_samples(samples, [Prediction(text="") for _ in samples])
    assert empty.metrics["J"] < 0.8
    without = [s for s, found in zip(samples, empty.samples, strict=True) if found["score"] == 1]
    assert without == [s for s in samples if not s.masks]


def test_frames_without_annotation_are_not_judged(tmp_path):
    """The car is visible in four frames and absent from one; the sixth has no annotation, and what is drawn
    there counts nothing."""
    (car, *_) = asked(tmp_path, "coco_video")
    unknown = car.masks[0].index(None)
    everything = rle.encode(rle.decode(rle.empty(car.height, car.width)) | True)
    masklet = tuple(everything if place == unknown else mask for place, mask in enumerate(car.masks[0]))
    assert BENCHMARK.of_samples([car], [Prediction(text="[SEG]", masks=(masklet,))]).metrics["J&F"] == 1
    nothing = replace(car, masks=((None,) * 6,))
    with pytest.raises(ValueError, match="has no annotated frame"):
        BENCHMARK.of_samples([nothing], [Prediction(text="[SEG]", masks=(masklet,))])


def test_objects_without_a_text_are_no_questions(tmp_path):
    assert asked(tmp_path, "davis") == []
