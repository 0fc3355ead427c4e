"""`ans finetune`: a folder of labelled pictures and a checkpoint in, a checkpoint and a report out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ans_core.checkpoints import checkpoint
from ans_core.model import Sa2VA
from flows import cli
from tests import tiny


def ans(*words: object) -> int:
    arguments = cli.parse(["finetune", *map(str, words)])
    return arguments.function(arguments)


def pictures(folder: Path, splits: tuple[str, ...]) -> Path:
    (folder / "images").mkdir(parents=True)
    records = []
    for number, split in enumerate(splits):
        (folder / f"images/{number}.png").write_bytes(tiny.picture(number))
        record = {"image": f"images/{number}.png", "text": "the red square", "masks": [tiny.square(8, 8, 24, 24)], "split": split}
        records.append(record)
    (folder / "annotations.json").write_text(json.dumps(records))
    return folder


def test_what_can_not_be_fine_tuned_is_refused_before_a_model_is_loaded(tmp_path: Path):
    folder = pictures(tmp_path / "mine", ("train", "train"))
    with pytest.raises(ValueError, match=r'without held-out pictures nothing tells what was learned: give some records "split": "val"'):
        ans(folder, "--model", "nothing", "--out", tmp_path / "out")
    folder = pictures(tmp_path / "asked", ("train", "train"))
    asked = {"image": "images/1.png", "question": "How many?", "answer": "Two.", "split": "val"}
    records = json.loads((folder / "annotations.json").read_text())[:1]
    (folder / "annotations.json").write_text(json.dumps([*records, asked]))
    with pytest.raises(ValueError, match="held-out samples are questions and answers, or half of a pair, which no benchmark compares"):
        ans(folder, "--model", "nothing", "--out", tmp_path / "out")
    phrase = {"image": "images/0.png", "text": "the red square", "task": "phrase"}
    (folder / "annotations.json").write_text(json.dumps([phrase, records[0] | {"split": "val"}]))
    with pytest.raises(ValueError, match="no record of its split 'train' has both a text and what it is about"):
        ans(folder, "--model", "nothing", "--out", tmp_path / "out")
    folder = pictures(tmp_path / "other", ("train", "val"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a.txt").touch()
    with pytest.raises(ValueError, match="full is not empty and holds no fine-tuning"):
        ans(folder, "--model", "nothing", "--out", tmp_path / "full")
    (tmp_path / "full/finetune.json").write_text(json.dumps({"model": "another", "steps": 7}))
    with pytest.raises(ValueError, match=r"holds another fine-tuning \(.*model 'another', now 'nothing'.*steps 7, now 2"):
        ans(folder, "--model", "nothing", "--out", tmp_path / "full", "--steps", 2)


def test_a_mistyped_model_or_setting_leaves_nothing_that_refuses_the_right_one(tmp_path: Path, tiny_model: Sa2VA):
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    folder, out = pictures(tmp_path / "mine", ("train", "val")), tmp_path / "out"
    for model, words, match in (
        ("no/such/folder", (), "no folder 'no/such/folder'"),
        (folder, (), "is no model folder: it has no config"),
        (tmp_path / "model", ("sft.optim.lrr=3",), "lrr"),
        (tmp_path / "model", ("--profile", "tinny"), "no profile named 'tinny'"),
    ):
        with pytest.raises(ValueError, match=match):
            ans(folder, "--model", model, "--out", out, *words)
        assert not out.exists()


@pytest.mark.slow
def test_pictures_and_a_checkpoint_become_a_checkpoint_and_a_report(tmp_path: Path, tiny_model: Sa2VA, capsys: pytest.CaptureFixture[str]):
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    folder, out = pictures(tmp_path / "mine", ("train", "train", "val", "val")), tmp_path / "out"
    words = (folder, "--model", tmp_path / "model", "--out", out, "--steps", 2, "sft.mask_points=64", "sft.dtype=fp32", "report.overlays=4")
    assert ans(*words) == 0
    told = capsys.readouterr().out
    assert "2 samples to train on, 2 held out; 2 steps of 2" in told
    assert "s a step, " in told
    assert "fewer than 4 pictures are held out" in told
    after = Sa2VA.from_pretrained(out / "model")
    assert any(not new.equal(old) for new, old in zip(after.parameters(), tiny_model.parameters(), strict=True))
    assert "mine/referring/gIoU" in json.loads((out / "evaluate/sft/metrics.json").read_text())
    page = (out / "report/report.html").read_text()
    assert "SFT against base" in page
    assert page.count("data:image/webp") == 4  # both pictures, before and after
    assert "ANS report: fine-tuning on mine" in page
    assert "Not there: times of the stages" in page
    assert page.count("Not there") == 1  # nothing of untrained, RL or benchmarks that the folder has no samples for
    assert ans(*words) == 0
    again = capsys.readouterr().out
    assert again.count("was there") == 7
    assert "estimate" not in again
