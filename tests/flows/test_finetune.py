"""`ans finetune`: a folder of labelled pictures and a checkpoint in, a checkpoint and a report out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ans_core import data
from ans_core.checkpoints import checkpoint
from ans_core.config import DataSource, load
from ans_core.data.formats.plain import split_by_image
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.network import Network
from flows import cli, finetune
from flows.finetune import checked
from flows.paths import root
from flows.short_training import begin, longest_rows
from tasks.process import held
from tests import tiny


def ans(*words: object) -> int:
    arguments = cli.parse(["finetune", *map(str, words)])
    return arguments.function(arguments)


def pictures(folder: Path, splits: tuple[str, ...]) -> Path:
    (folder / "images").mkdir(parents=True)
    records = []
    for number, split in enumerate(splits):
        (folder / f"images/{number}.png").write_bytes(tiny.picture(number))
        record = {
            "image": f"images/{number}.png",
            "text": "the red square",
            "masks": [tiny.square(8, 8, 24, 24)],
            "split": split,
        }
        records.append(record)
    (folder / "annotations.json").write_text(json.dumps(records))
    return folder


def test_what_can_not_be_fine_tuned_is_refused_before_a_model_is_loaded(tmp_path: Path):
    folder = pictures(tmp_path / "mine", ("train", "train"))
    with pytest.raises(
        ValueError,
        match=r'without held-out pictures nothing tells what was learned: give some records "split": "val"',
    ):
        ans(folder, "--model", "nothing", "--out", tmp_path / "out")
    folder = pictures(tmp_path / "asked", ("train", "train"))
    asked = {"image": "images/1.png", "question": "How many?", "answer": "Two.", "split": "val"}
    records = json.loads((folder / "annotations.json").read_text())[:1]
    (folder / "annotations.json").write_text(json.dumps([*records, asked]))
    with pytest.raises(
        ValueError,
        match="held-out samples are questions and answers, or half of a pair, which no benchmark compares",
    ):
        ans(folder, "--model", "nothing", "--out", tmp_path / "out")
    phrase = {"image": "images/0.png", "text": "the red square", "task": "phrase"}
    (folder / "annotations.json").write_text(json.dumps([phrase, records[0] | {"split": "val"}]))
    with pytest.raises(
        ValueError, match="no record of its split 'train' has both a text and what it is about"
    ):
        ans(folder, "--model", "nothing", "--out", tmp_path / "out")
    folder = pictures(tmp_path / "other", ("train", "val"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a.txt").touch()
    with pytest.raises(ValueError, match="full is not empty and holds no fine-tuning"):
        ans(folder, "--model", "nothing", "--out", tmp_path / "full")
    before = {"model": "another", "steps": 7, "format": "labelme"}
    (tmp_path / "full/finetune.json").write_text(json.dumps(before))
    with pytest.raises(
        ValueError,
        match=r"holds another fine-tuning \(.*model 'another', now 'nothing'.*steps 7, now 2; "
        "format 'labelme', now None",
    ):
        ans(folder, "--model", "nothing", "--out", tmp_path / "full", "--steps", 2)


def coco(folder: Path, name: str, pictures: int) -> Path:
    """Write one COCO file, as annotation tools do that know no splits."""
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for number in range(pictures):
        (folder / f"images/{number}.png").write_bytes(tiny.picture(number))
        images.append({"id": number, "file_name": f"{number}.png", "height": tiny.SIDE, "width": tiny.SIDE})
        outline = [8, 8, 24, 8, 24, 24, 8, 24]
        annotations.append(
            {
                "id": number,
                "image_id": number,
                "category_id": 1,
                "segmentation": [outline],
                "bbox": [8, 8, 16, 16],
            }
        )
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "red square"}]}
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["instances_default.json", "instances_train.json", "instances_val2017.json"])
def test_coco_of_one_split_has_pictures_held_out_by_their_names(
    tmp_path: Path, tiny_model: Network, name: str, capsys: pytest.CaptureFixture[str]
):
    """Of the names 0.png to 9.png, the hash holds out a share."""
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    folder, out = coco(tmp_path / "mine", name, 10), tmp_path / "out"
    held_out = sum(split_by_image(f"images/{number}.png") == "val" for number in range(10))
    arguments = cli.parse(["finetune", str(folder), "--model", str(tmp_path / "model"), "--out", str(out)])
    (tmp_path / "scratch").mkdir()
    begin(checked(arguments, tmp_path / "scratch"))
    assert f"{10 - held_out} samples to train on, {held_out} held out" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "scratch")
    (source,) = load(out / "params.yaml").prepare.sources
    assert (source.format, source.path) == ("annotations", str(out / "imported"))
    assert (
        len(data.read_samples(format=source.format, path=Path(source.path), name="mine", split="val"))
        == held_out
    )
    (tmp_path / "again").mkdir()
    checked(arguments, tmp_path / "again")  # a killed run goes on with what was imported
    assert not any((tmp_path / "again").iterdir())


def test_the_remedy_for_an_export_too_small_to_hold_out_a_picture_works(tmp_path: Path):
    folder = coco(tmp_path / "mine", "instances_default.json", 2)
    assert {split_by_image(f"images/{number}.png") for number in range(2)} == {"train"}
    with pytest.raises(
        ValueError, match=r"has no split 'val'\n.*give some records of DIR/annotations\.json"
    ) as error:
        ans(folder, "--model", "nothing", "--out", tmp_path / "out")
    command = re.search(r"`ans (data import .*) DIR`", str(error.value))
    assert command
    words = [*command[1].split(), str(tmp_path / "DIR")]
    assert cli.parse(words).function(cli.parse(words)) == 0
    file = tmp_path / "DIR/annotations.json"
    first, second = json.loads(file.read_text())
    file.write_text(json.dumps([first | {"split": "train"}, second | {"split": "val"}]))
    with pytest.raises(ValueError, match="no folder 'nothing'"):  # the data pass
        ans(tmp_path / "DIR", "--model", "nothing", "--out", tmp_path / "out")


@pytest.mark.slow
def test_a_refusal_does_not_wait_for_a_run_at_work_and_an_estimate_neither_waits_nor_claims_the_folder(
    tmp_path: Path, tiny_model: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Training three steps is left out: what waits and what is left behind is the same without."""
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    monkeypatch.setattr("flows.short_training.estimate", lambda request: f"estimate in {request.out}")
    folder, out = pictures(tmp_path / "mine", ("train", "val")), tmp_path / "out"
    before = set((root() / ".ans").glob("finetune-*"))
    with held(root() / ".ans/stage.lock", "a run"):  # of another process in life; flock knows open files
        with pytest.raises(ValueError, match="no folder 'nothing'"):
            ans(folder, "--model", "nothing", "--out", out)
        assert ans(folder, "--model", tmp_path / "model", "--out", out, "--estimate") == 0
    told = capsys.readouterr().out
    assert "a run (pid" in told
    assert "is at work here: the estimate is of a machine that both share" in told
    assert "estimate in " in told
    assert not out.exists()
    assert set((root() / ".ans").glob("finetune-*")) == before


def test_a_mistyped_model_or_setting_leaves_nothing_that_refuses_the_right_one(
    tmp_path: Path, tiny_model: Network
):
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
def test_pictures_and_a_checkpoint_become_a_checkpoint_and_a_report(
    tmp_path: Path, tiny_model: Network, capsys: pytest.CaptureFixture[str]
):
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    folder, out = pictures(tmp_path / "mine", ("train", "train", "val", "val")), tmp_path / "out"
    words = (
        folder,
        "--model",
        tmp_path / "model",
        "--out",
        out,
        "--steps",
        2,
        "sft.mask_points=64",
        "sft.dtype=fp32",
        "report.overlays=4",
    )
    assert ans(*words) == 0
    told = capsys.readouterr().out
    assert "2 samples to train on, 2 held out; 2 steps of 2" in told
    assert "s a step, " in told
    assert "fewer than 4 pictures are held out" in told
    after = Sa2VA.from_pretrained(out / "model")
    assert re.search(
        r"^held-out pictures, before and after\n +before +after +change +95 % interval\n  Referring",
        told,
        re.MULTILINE,
    )
    assert any(
        not new.equal(old) for new, old in zip(after.parameters(), tiny_model.parameters(), strict=True)
    )
    assert "mine/referring/gIoU" in json.loads((out / "evaluate/sft/metrics.json").read_text())
    page = (out / "report/report.html").read_text()
    assert "SFT against base" in page
    assert page.count("data:image/webp") == 4  # both pictures, before and after
    assert "ANS report: fine-tuning on mine" in page
    assert "Not there: times of the stages" in page
    # nothing of untrained, RL or benchmarks that the folder has no samples for
    assert page.count("Not there") == 1
    assert ans(*words) == 0
    again = capsys.readouterr().out
    assert again.count("was there") == 7
    assert "estimate" not in again


def test_a_large_model_computes_as_many_rows_at_once_as_its_profile(tmp_path: Path):
    source = DataSource(name="mine", format="annotations", path=str(tmp_path))

    def optim(*words: str) -> tuple[int, int]:
        arguments = cli.parse(["finetune", str(tmp_path), "--model", "m", *words])
        found = finetune.settings(
            source, arguments, pictures=500, benchmarks=["referring"], parameters=4 * 10**9
        ).sft.optim
        return found.batch, found.accumulate

    assert optim("launch.processes=2") == (64, 32)
    assert optim("launch.processes=1", "sft.optim.batch=6") == (6, 6)
    assert optim("launch.processes=1", "sft.optim.accumulate=4") == (64, 4)
    assert optim("launch.processes=2", "--profile", "sa2va-1b") == (64, 16)


@pytest.mark.slow
def test_an_estimate_counts_the_longest_rows_too(tmp_path: Path, tiny_model: Network):
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    folder = pictures(tmp_path / "mine", ("train", "val"))
    words = [
        str(folder),
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "out"),
        "sft.max_length=100000",
    ]
    (tmp_path / "scratch").mkdir()
    request = checked(cli.parse(["finetune", *words]), tmp_path / "scratch")
    begin(request)
    told = longest_rows(request, 80 * 10**9)
    assert re.fullmatch(
        r"By formula the longest rows take \d+ GB \(weights 0\.0, gradients 0\.0, optimizer 0\.0, activations [\d.]+;"
        r" 0 of 2 layers computed again\)\.",
        told,
    ), told
    assert longest_rows(request, 10**6).endswith(
        "which may not fit: raise sft.optim.accumulate, or lower sft.max_length."
    )
