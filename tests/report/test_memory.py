"""The page of a SAM2's memory: figures, J by distance, curves and clips, from files written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from ans_core.config import Config
from ans_core.report import memory
from ans_core.stages import memory_report

TRAINED = {
    "J&F/before": 0.125, "J&F/best": 0.6543214, "J&F/before_without_memory": 0.25,
    "J&F/best_without_memory": 0.5, "best_epoch": 2.0, "left_out_clips": 3.0, "tensors_without_gradient": 0.0,
}  # fmt: skip
EPOCHS = {9: (0.5, 0.75, 0.25), 19: (0.654321, 0.875, 0.5), 29: (0.625, 0.8, 0.4)}
"""Step -> J&F (six digits, as curves.csv has them), J one frame and two frames after the prompt."""


def write(folder: Path, metrics: dict[str, float], epochs: dict[int, tuple[float, float, float]]) -> Path:
    (folder / "clips").mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(metrics))
    names = ("J&F", "J_at_1", "J_at_2")
    rows = [
        (step, f"val_{name}", value)
        for step, values in epochs.items()
        for name, value in zip(names, values, strict=True)
    ]
    rows += [(step, "loss", 1.0) for step in range(30) if epochs]
    (folder / "curves.csv").write_text(
        "step,name,value\n" + "".join(f"{step},memory/{name},{value}\n" for step, name, value in rows)
    )
    Image.new("RGB", (40, 20), "red").save(folder / "clips/00-mine_1.gif")
    return folder


def page_of(folder: Path, out: Path) -> str:
    out.mkdir()
    run = {"inputs": {"memory": folder}, "out": out, "scratch": out, "log": lambda metrics, step: None}
    assert memory_report.run(Config(profile="sam2-memory"), **run) == json.loads(
        (folder / "metrics.json").read_text()
    )
    return (out / "report.html").read_text(encoding="utf-8")


def test_the_page_says_what_training_and_what_memory_are_worth(tmp_path: Path):
    text = page_of(write(tmp_path / "memory", TRAINED, EPOCHS), tmp_path / "out")
    rows = re.findall(r"<tr role=\"row\"><th role=\"rowheader\".*?</tr>", text)
    cells = [re.findall(r">([^<>]+)</t[hd]>", row) for row in rows]
    assert cells == [
        ["before training", "0.125", "0.250", "\N{MINUS SIGN}0.125"],
        ["best epoch", "0.654", "0.500", "+0.154"],
    ]
    assert "Best: epoch 2. Left out: 3 clips." in text
    # what the chart says to those who can't see it
    assert "first epoch from 0.75 to 0.25, best epoch from 0.875 to 0.5" in text
    assert "<figcaption>mine_1</figcaption>" in text
    assert "loss from 1 to 1" in text
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)  # nothing is loaded from elsewhere


@pytest.mark.slow
def test_the_base_that_no_epoch_betters_and_one_that_is_only_validated_are_said_so(tmp_path: Path):
    kept = TRAINED | {"J&F/best": 0.125, "best_epoch": 0.0}
    text = page_of(write(tmp_path / "kept", kept, {9: (0.1, 0.75, 0.25)}), tmp_path / "kept page")
    assert "Best: the base itself, as no epoch is better." in text
    assert "first epoch from 0.75 to 0.25" in text
    assert "best epoch from" not in text
    assert "held-out pictures" not in text
    measured = {
        "J&F": 0.4,
        "J": 0.4,
        "F": 0.4,
        "J_at_1": 0.5,
        "J_at_16": 0.25,
        "J_at_2": 0.375,
        "J&F_without_memory": 0.5,
    }
    measured |= {"trained": 0.0, "pseudo_clips": 12.0}
    folder = write(tmp_path / "validated", measured, {})
    assert memory.lines(measured) == [
        {"name": "base", "with": 0.4, "without": 0.5, "worth": pytest.approx(-0.1)}
    ]
    text = page_of(folder, tmp_path / "validated page")
    assert "Lines over frames after the prompt: base from 0.5 to 0.25." in text
    assert "Not there: nothing was trained." in text
    assert "the clips are made of 12 held-out pictures" in text


def test_a_stage_that_passed_the_base_through_has_no_page(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"holds no metrics\.json: it passed the base through; set memory\.train=true, or"
    ):
        memory.figures_of(tmp_path)
