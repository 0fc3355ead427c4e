"""The truth of data sets in their real on-disk formats scores 1.0, by way of the pipeline's own predictions
and submission files."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from ans_core.benchmarks import BENCHMARKS
from ans_core.benchmarks.public import files
from ans_core.benchmarks.registry import runnable
from ans_core.benchmarks.submission import video_zip
from ans_core.data.formats import FORMATS
from ans_core.data.scene_write import write_clips, write_scenes
from tests.benchmarks.public.drawn import score, write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "figures"),
    [("refcoco", ("cIoU", "gIoU", "P@0.9")), ("grefcoco", ("gIoU", "cIoU", "N_acc", "T_acc"))],
)
def test_referring_sets(tmp_path: Path, name: str, figures: tuple[str, ...]):
    write_scenes(tmp_path, seed=0, counts={"train": 2, "val": 4, "test": 2}, image_size=64)
    samples = list(FORMATS[name](tmp_path / name, name=name, split="val"))
    predictions = [BENCHMARKS["referring"].truth(s) for s in samples]
    lines = (
        json.dumps({"sample_id": s.sample_id, **asdict(p)}) for s, p in zip(samples, predictions, strict=True)
    )
    drawn = tmp_path / "predictions.jsonl"
    drawn.write_text("\n".join(lines))
    found = score(name, drawn, data=tmp_path / name)
    assert found.metrics["expressions"] == len(samples)
    assert found.missing == 0
    assert {found.metrics[figure] for figure in figures} == {1.0}


def test_video_sets(tmp_path: Path):
    write_clips(tmp_path, seed=0, counts={"train": 1, "val": 2}, image_size=64, frames=4)
    (folder,) = (p.parent.parent for p in tmp_path.rglob("val/meta_expressions.json"))
    _, runner = runnable("mevis")
    items = list(runner.items(folder, "val"))
    lines = write(tmp_path / "truth.jsonl", [runner.record(item, item.truth) for item in items if item.truth])
    video_zip(tmp_path / "out.zip", files.stream(lines))
    zipfile.ZipFile(tmp_path / "out.zip").extractall(tmp_path / "drawn")
    found = score("mevis", tmp_path / "drawn", data=folder / "val")
    assert found.metrics["expressions"] == len(items)
    assert found.metrics["J&F"] == 1.0
