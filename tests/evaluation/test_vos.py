"""`ans eval davis17|mose|sav --model`: a SAM2 follows the objects of clips in the data sets' own folders."""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ans_core.benchmarks.public.asked import Item
from ans_core.checkpoints import checkpoint
from ans_core.checkpoints import sam2 as sam2_files
from ans_core.evaluation import answerers
from ans_core.evaluation import session as eval_run
from ans_core.model.masks import upsample_logits
from ans_core.model.network import Network
from ans_core.pictures import rle, transforms
from ans_core.tracking.follow import ObjectPrompt, follow, label_map
from ans_core.types import Prediction
from flows import cli
from tests import tiny
from tests.benchmarks.public.drawn import write_index_masks

FRAMES = 5
LABELS = [np.zeros((tiny.SIDE, tiny.SIDE), np.uint8) for _ in range(FRAMES)]
for t, labels in enumerate(LABELS):
    labels[16:32, 4 * t : 4 * t + 16] = 1
    labels[40:50, 30:50] = 2
    labels[:, 60:] = 255 * (t == 2)  # void


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_run, "root", lambda: tmp_path)
    monkeypatch.setattr("flows.eval_command.log_to_mlflow", lambda *_: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Network) -> Path:
    folder = tmp_path_factory.mktemp("model") / "sa2va"
    checkpoint.save(tiny_model, folder, metadata={})
    return folder


def pictures(folder: Path, *, every: int = 1) -> None:
    """`every` pictures to an annotated one, as in SA-V."""
    folder.mkdir(parents=True)
    for t, frame in enumerate(tiny.clip(0, every * (FRAMES - 1) + 1).frames):
        transforms.open_image(frame).save(folder / f"{t:05d}.png")


def davis(root: Path) -> Path:
    for video in ("bear", "cow", "dog"):
        pictures(root / "JPEGImages/480p" / video)
        write_index_masks(root / "Annotations/480p" / video, LABELS)
    (root / "ImageSets/2017").mkdir(parents=True)
    (root / "ImageSets/2017/val.txt").write_text("dog\ncow\n")
    return root


def mose(root: Path) -> Path:
    pictures(root / "train/JPEGImages/dog")
    write_index_masks(root / "train/Annotations/dog", [np.where(m == 255, 0, m) for m in LABELS])
    pictures(root / "valid/JPEGImages/cat")
    write_index_masks(root / "valid/Annotations/cat", LABELS[:1])
    return root


def sav(root: Path) -> Path:
    pictures(root / "sav_val/JPEGImages_24fps/sav_1", every=4)
    for name, masks in (("000", [m == 1 for m in LABELS]), ("001", [(m == 1) | (m == 2) for m in LABELS])):
        for t, mask in enumerate(masks):
            folder = root / "sav_val/Annotations_6fps/sav_1" / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask * np.uint8(255)).save(folder / f"{4 * t:05d}.png")
    (root / "sav_val/sav_val.txt").write_text("sav_1\n")
    return root


def ans(*given: object) -> int:
    arguments: argparse.Namespace = cli.parse(["eval", *map(str, given)])
    status: int = arguments.function(arguments)
    return status


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


def truth_of(items: Sequence[Item]) -> list[Prediction]:
    """A tracker that knows the masks; where nothing is annotated it sees nothing."""
    nothing = rle.empty(tiny.SIDE, tiny.SIDE)
    right = [item.right_answer() for item in items]
    return [
        Prediction(text="", masks=tuple(tuple(m or nothing for m in masklet) for masklet in p.masks))
        for p in right
        if p
    ]


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["davis", "mose"])
@pytest.mark.parametrize(
    ("name", "layout", "split"), [("davis17", davis, "val"), ("mose", mose, "train"), ("sav", sav, "val")]
)
def test_the_truth_scores_one_in_every_layout(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    name: str,
    layout: Any,
    split: str,
    convention: str,
):
    data, out = layout(tmp_path / "data"), tmp_path / "out"
    monkeypatch.setattr(answerers, "following", lambda _: truth_of)
    if convention == "mose" and name == "davis17":  # which would count DAVIS' void as an object
        for path in data.glob("Annotations/480p/*/00002.png"):
            write_index_masks(path.parent, [np.where(m == 255, 0, m) for m in LABELS])
    assert (
        ans(
            name, "--model", model, "--data", data, "--split", split, "--convention", convention, "--out", out
        )
        == 0
    )
    found = metrics(out)
    assert found["metrics"]["J&F"] == 1.0
    # of SA-V every object is a clip
    assert found["metrics"]["videos"] == {"davis17": 2, "mose": 1, "sav": 2}[name]
    assert found["notes"][0].startswith(f"convention {convention}")
    assert (out / "page.html").read_text().count("<figure>") == found["metrics"]["videos"] // (
        2 if name == "sav" else 1
    )
    score = [
        "score",
        name,
        "--predictions",
        out / "Annotations",
        "--data",
        data,
        "--split",
        split,
        "--convention",
        convention,
    ]
    assert ans(*score, "--out", tmp_path / "pngs.json") == 0
    assert json.loads((tmp_path / "pngs.json").read_text())["metrics"] == found["metrics"]


@pytest.mark.slow
def test_a_sam2_follows_each_object_from_its_first_mask(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    data, out = davis(tmp_path / "data"), tmp_path / "out"
    assert ans("davis17", "--model", model, "--data", data, "--limit", 1, "--out", out) == 0
    assert "davis17/val" in capsys.readouterr().out
    sam2 = sam2_files.load(model)
    shots = [transforms.open_image(frame) for frame in tiny.clip(0, FRAMES).frames]
    prompts = [ObjectPrompt(mask=LABELS[0] == n) for n in (1, 2)]
    for t, low in follow(sam2, shots, prompts, frames=FRAMES):
        logits = [upsample_logits(z, size=sam2.image_size, height=tiny.SIDE, width=tiny.SIDE) for z in low]
        assert (
            np.asarray(Image.open(out / f"Annotations/cow/{t:05d}.png")) == label_map(np.stack(logits))
        ).all()
    assert (metrics(out)["metrics"]["videos"], metrics(out)["metrics"]["objects"]) == (1, 2)
    assert (
        ans("davis17", "--model", model, "--data", data, "--limit", 1, "--out", out, "--convention", "mose")
        == 0
    )  # nothing is asked again
    assert metrics(out)["notes"][0].startswith("convention mose")


@pytest.mark.slow
def test_a_split_on_a_server_is_predicted_and_becomes_its_file(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    data, out = mose(tmp_path / "data"), tmp_path / "out"
    assert ans("mose", "--model", model, "--data", data, "--out", out) == 0
    assert "mose/val: unscored" in capsys.readouterr().out
    assert (
        ans("submit", "mose", "--predictions", out / "predictions.jsonl", "--out", tmp_path / "mose.zip") == 0
    )
    with zipfile.ZipFile(tmp_path / "mose.zip") as archive:
        assert archive.namelist() == [f"cat/{t:05d}.png" for t in range(FRAMES)]


def test_what_does_not_fit_is_refused_before_a_model_is_loaded(tmp_path: Path):
    words = ["davis17", "--data", davis(tmp_path / "data"), "--model"]
    for more, told in (
        (["m", "--dtype", "float16"], "davis17: a SAM2 follows masks without words, so it takes no --dtype"),
        (["box:m"], "davis17 follows given masks; box: answers expressions"),
        (["m", "--device", "gpu"], "'gpu' is no device"),
        (["nowhere"], "no folder 'nowhere'"),
    ):
        with pytest.raises(ValueError, match=told):
            ans(*words, *more)
    with pytest.raises(ValueError, match="--convention is of vos, not of refcoco"):
        ans("refcoco", "--model", "m", "--convention", "mose")
