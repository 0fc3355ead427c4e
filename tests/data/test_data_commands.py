"""`ans data check` and `ans data show`."""

from __future__ import annotations

import json
import random
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from ans_core.data import check as data_check
from ans_core.data.formats import FORMATS
from ans_core.data.near_duplicates import NEAR, _pairs, dhash
from ans_core.data.show import show
from flows import cli
from tests.data import clip_sets
from tests.data.test_formats import GOOD
from tests.data.test_prepare import own_data


def check(path: Path, form: str = "annotations", *, pixels: bool = True) -> int:
    return data_check.check("mine", path, form, None, pixels=pixels, page=path / "page/report.html")


def photograph(seed: int, width: int = 64, height: int = 48) -> Image.Image:
    """Smooth blobs, as photographs have them."""
    noise = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.slow
def test_a_data_set_is_checked_and_told_about(tmp_path, capsys):
    folder = Path(own_data(tmp_path).path)
    assert check(folder) == 0
    told = capsys.readouterr().out
    assert "split 'train': 1 samples (referring 1)" in told
    assert "1 pictures, 40 x 20 pixels" in told
    assert "no fault found" in told
    assert "<figure" in (folder / "page/report.html").read_text()
    records = json.loads((tmp_path / "annotations.json").read_text())
    (tmp_path / "annotations.json").write_text(
        json.dumps([*records, records[0] | {"split": "val", "text": "a cat"}])
    )
    assert check(folder) == 0
    assert "1 pictures are in 'train' and in 'val', as " in capsys.readouterr().out
    picture = (tmp_path / "b.png").read_bytes()
    (tmp_path / "b.png").write_bytes(picture[:-20])
    assert check(folder, pixels=False) == 0
    assert check(folder) == 1
    caught = capsys.readouterr()
    assert "split 'val', sample 1: cannot read the image" in caught.err
    assert "split 'train': 1 samples" in caught.out
    assert "no fault found" in caught.out.split("not decoded")[0]
    assert "cannot read the image" in (folder / "page/report.html").read_text()


def test_the_page_of_a_set_that_cannot_be_read_is_written_into_a_new_folder(tmp_path, capsys):
    (tmp_path / "annotations").mkdir()
    page = tmp_path / "new/page/report.html"
    assert data_check.check("mine", tmp_path, "coco", None, pixels=True, page=page) == 1
    assert "holds no instances*.json" in page.read_text()


def test_faults_of_structure_and_of_masks_are_told_in_one_go(tmp_path, capsys):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    wrong = [
        {"masks": [], "text": "no image", "split": "train"},
        GOOD | {"masks": ["no mask"], "text": "of train"},
        GOOD | {"masks": ["no mask"], "text": "of val", "split": "val"},
    ]
    (tmp_path / "annotations.json").write_text(json.dumps([*wrong, GOOD]))
    assert check(tmp_path) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert [error.split("annotations.json: ")[1].split(":")[0] for error in errors] == [
        "record 0",
        "record 1, mask 0",
        "record 2, mask 0",
    ]


def test_pictures_are_alike_by_the_number_of_unlike_bits_wherever_they_are():
    chance = random.Random(0)
    one = [(Path(f"{n}"), chance.getrandbits(128)) for n in range(200)]
    other = []
    for n, (_, value) in enumerate(one[::2]):
        for bit in chance.sample(range(128), chance.randint(NEAR - 2, NEAR + 2)):
            value ^= 1 << bit
        other.append((Path(f"{2 * n}" if n % 5 == 0 else f"other {n}"), value))  # the file itself is no pair
    expected = [
        (a, b) for b, second in other for a, first in one if a != b and (first ^ second).bit_count() <= NEAR
    ]
    assert list(_pairs(one, other)) == expected
    assert 20 < len(expected) < 80
    assert list(_pairs([], other)) == list(_pairs(one, [])) == []


def test_pictures_that_look_alike_in_two_splits_are_told(tmp_path, capsys):
    photograph(1).save(tmp_path / "a.png")
    photograph(1, 128, 96).save(tmp_path / "b.jpg", quality=60)  # the same, scaled and compressed
    photograph(2).save(tmp_path / "c.png")
    for name in ("flat1.png", "flat2.png"):
        Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / name)
    shown = [
        ("a.png", "train"),
        ("b.jpg", "val"),
        ("c.png", "val"),
        ("flat1.png", "train"),
        ("flat2.png", "val"),
    ]
    records = [{"image": image, "text": image, "masks": [], "split": split} for image, split in shown]
    (tmp_path / "annotations.json").write_text(json.dumps(records))
    assert check(tmp_path) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "look like" in line]
    assert (
        told
        == f"warning: 1 pictures of 'val' look like one of 'train': {tmp_path / 'a.png'} and {tmp_path / 'b.jpg'}"
    )
    one, other = dhash(tmp_path / "a.png"), dhash(tmp_path / "c.png")
    assert one is not None
    assert other is not None
    assert 40 < (one ^ other).bit_count() < 88


@pytest.mark.slow
def test_pictures_that_are_shown_turned_are_told(tmp_path, capsys):
    tag = Image.Exif()
    for orientation, name in enumerate(("straight.jpg", "turned.jpg"), start=1):
        tag[ExifTags.Base.Orientation] = 1 if orientation == 1 else 6
        photograph(orientation).save(tmp_path / name, exif=tag)
    square = [2, 2, 9, 2, 9, 9, 2, 9]
    for masks, warned in (([square], 1), ([], 0)):  # where nothing is masked, nothing can lie wrong
        records = [
            {"image": name, "text": name, "masks": masks, "split": "train"}
            for name in ("straight.jpg", "turned.jpg")
        ]
        (tmp_path / "annotations.json").write_text(json.dumps(records))
        assert check(tmp_path) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "EXIF" in line]
        start = f"warning: 1 pictures have an EXIF tag that turns them, as {tmp_path / 'turned.jpg'}."
        assert [line.startswith(start) for line in lines] == [True] * warned


@pytest.mark.slow
def test_clips_whose_objects_have_no_identities_are_told(tmp_path, capsys):
    file = clip_sets.coco_video(tmp_path) / "demo_train.json"
    content = json.loads(file.read_text())
    assert check(tmp_path, "coco_video") == 0
    assert "instance_id" not in capsys.readouterr().out
    for annotation in content["annotations"]:
        del annotation["instance_id"]
    file.write_text(json.dumps(content))
    assert check(tmp_path, "coco_video") == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "instance_id" in line]
    assert told.startswith("warning: split 'train': 2 masks join all of a category in a clip, since")
    assert told.endswith(
        "the stage `memory` leaves them out: give each object a number of its own, the same in every frame"
    )


@pytest.mark.slow
def test_samples_are_checked_and_shown_one_by_one(tmp_path, capsys, monkeypatch):
    """A million of them take 2 GB as a list."""
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    records = [{"image": "a.png", "text": f"thing {n}", "masks": [], "split": "train"} for n in range(200)]
    (tmp_path / "annotations.json").write_text(
        json.dumps([*records, records[0] | {"text": "of val", "split": "val"}])
    )

    class Text(str):
        """One that can be watched."""

    alive: weakref.WeakSet[Text] = weakref.WeakSet()
    most, read = 0, FORMATS["annotations"]

    def watched(*words, **named):
        nonlocal most
        for sample in read(*words, **named):
            own = replace(sample, text=Text(sample.text))
            alive.add(own.text)
            most = max(most, len(alive))
            yield own

    monkeypatch.setitem(FORMATS, "annotations", watched)
    assert check(tmp_path) == 0
    assert "split 'train': 200 samples" in capsys.readouterr().out
    assert len(show("mine", tmp_path, "annotations", "train", count=3, seed=0, out=tmp_path / "shown")) == 3
    assert 0 < most < 5
    assert not list(tmp_path.rglob(".index-*"))


def test_pictures_of_an_earlier_run_go_and_files_of_others_are_not_mixed_with(tmp_path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    records = [{"image": "a.png", "text": f"thing {n}", "masks": [], "split": "train"} for n in range(3)]
    (tmp_path / "annotations.json").write_text(json.dumps(records))
    out = tmp_path / "shown"
    for count in (3, 1):
        show("mine", tmp_path, "annotations", None, count=count, seed=0, out=out)
        assert len(list(out.glob("*.png"))) == count
        (out / "notes.txt").write_text("mine")
    assert (out / "notes.txt").exists()
    (out / "samples.jsonl").write_text('{"sample": "of somebody else"}')
    with pytest.raises(ValueError, match=r"shown holds files and no samples\.jsonl of an earlier run"):
        show("mine", tmp_path, "annotations", None, count=1, seed=0, out=out)
    (page := tmp_path / "report.html").write_text("<!doctype html><title>My report</title>")
    with pytest.raises(ValueError, match=r"report\.html is no earlier report"):
        data_check.check("mine", tmp_path, "annotations", None, pixels=False, page=page)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import", "a.zip", "--split", "train"], "ans data import takes no --split"),
        (["shard", "a", "b", "--count", "3"], "ans data shard takes no --count"),
        (["draw", "a", "--kl", "0.1"], "ans data draw takes no --kl"),
        (["show", "a", "--headers-only", "--keep", "0.5"], "ans data show takes no --headers-only, --keep"),
        (["fetch", "--out", "a"], "ans data fetch takes no --out"),
        (["check", "a", "--format", "traces", "--split", "val"], "check --format traces takes no --split"),
    ],
)
def test_an_option_that_the_action_does_not_read_is_refused(words, message):
    arguments = cli.parse(["data", *words])
    with pytest.raises(ValueError, match=message):
        arguments.function(arguments)


@pytest.mark.slow
def test_clips_are_counted_and_shown_with_their_masks(tmp_path, capsys):
    root = clip_sets.sav(tmp_path)
    assert check(root, "sav") == 0
    told = capsys.readouterr().out
    assert "1 clips of 6 to 6 frames" in told
    assert "3 times an object is absent from a frame, 0 times a frame is not annotated" in told
    (file,) = show("mine", root, "sav", None, count=4, seed=0, out=tmp_path / "shown")
    with Image.open(file) as picture:
        assert picture.size == (3 * 640, 480)  # first, middle and last frame
        # the rim of the first object in the last frame
        assert picture.getpixel((2 * 640 + 341, 100)) == (255, 0, 255)
    (line,) = (tmp_path / "shown/samples.jsonl").read_text().splitlines()
    assert json.loads(line)["meta"] == {"object_ids": [0, 1]}


def test_a_data_set_is_found_by_its_name_in_the_settings_or_by_its_path(tmp_path):
    source = own_data(tmp_path)
    assert data_check.named(str(tmp_path), None, tmp_path) == (tmp_path.name, tmp_path, "annotations")
    with pytest.raises(
        ValueError, match=r"mine does not exist, and params.yaml has no data set of that name; it has \[\]"
    ):
        data_check.named("mine", None, tmp_path)
    (tmp_path / "params.yaml").write_text(
        json.dumps(
            {
                "profile": "own",
                "prepare": {"sources": [{"name": "mine", "format": "annotations", "path": source.path}]},
            }
        )
    )
    assert data_check.named("mine", None, tmp_path) == ("mine", tmp_path, "annotations")
