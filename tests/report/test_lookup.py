"""Samples that predictions are about are found as `evaluate` reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ans_core.config import DataSource
from ans_core.data import read_samples
from ans_core.data.scene_write import write_scenes
from ans_core.report.lookup import samples_of


@pytest.mark.slow
@pytest.mark.parametrize("with_data", [True, False], ids=["beside prepared data", "without"])
@pytest.mark.parametrize("split", ["val", ["val", "test"]], ids=["one split", "several"])
def test_samples_of_sets_that_are_only_evaluated_are_found(
    tmp_path: Path, with_data: bool, split: str | list[str]
) -> None:
    write_scenes(tmp_path / "drawn", seed=0, counts={"train": 1, "val": 2, "test": 1}, image_size=64)
    (tmp_path / "run/data").mkdir(parents=True)
    (tmp_path / "run/data/datasets.json").write_text("[]")
    path = tmp_path / "drawn/refcoco"
    source = DataSource.model_validate(
        {"name": "mine", "format": "refcoco", "path": str(path), "split": split}
    )
    (*_, last) = read_samples(format="refcoco", path=path, name="mine", split=split)
    key = ("mine", last.sample_id, last.text)
    prepared = tmp_path / "run/data" if with_data else None
    found, lost = samples_of({key}, prepared=prepared, split="val", sources=[source])
    assert found == {key: last}
    assert lost == {}
    path.rename(tmp_path / "moved")
    found, lost = samples_of({key}, prepared=prepared, split="val", sources=[source])
    assert (found, "refcoco does not exist" in lost["mine"]) == ({}, True)
