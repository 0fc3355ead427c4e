"""The stage `prepare`: from settings to a folder that later stages load."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import Dataset, Features, Value
from PIL import Image

from ans_core import data
from ans_core.config import Config, DataSource, Prepare
from ans_core.data import read_entries
from ans_core.data.conversation import turn
from ans_core.data.index import picture_keys
from ans_core.data.mixture import Mixture
from ans_core.pictures import rle
from ans_core.stages import prepare
from ans_core.stages.sources import source_entries
from ans_core.types import Sample

SMALL = Prepare(
    scenes=8, val_scenes=5, test_scenes=2, clips=2, val_clips=1, test_clips=1, clip_frames=3, image_size=64
)


def run(settings: Prepare, out: Path) -> dict[str, float]:
    cfg = Config(profile="test", prepare=settings)
    return prepare.run(cfg, inputs={}, out=out, scratch=out, log=lambda metrics, step: None)


def load(prepared: Path, split: str, kinds: Collection[str] | None = None) -> dict[str, Sequence[Sample]]:
    """The samples of a split by data set."""
    return {source.name: source.samples for source in data.sources(prepared, split, kinds)}


def own_data(root: Path) -> DataSource:
    """Two photographs of different sizes, one of them for validation."""
    for name, size in (("a.png", (40, 20)), ("b.png", (30, 50))):
        Image.new("RGB", size, (90, 120, 60)).save(root / name)
    records = [
        {"image": image, "masks": [[1, 1, 9, 1, 9, 9, 1, 9]], "text": "the dog", "split": split}
        for image, split in (("a.png", "train"), ("b.png", "val"))
    ]
    (root / "annotations.json").write_text(json.dumps(records))
    return DataSource(name="mine", format="annotations", path=str(root), repeats=3)


@pytest.mark.slow
def test_drawn_and_own_data_are_written_listed_and_loaded(tmp_path):
    out = tmp_path / "prepared"
    out.mkdir()
    cfg = SMALL.model_copy(update={"sources": (own_data(tmp_path),)})
    metrics = run(cfg, out)
    train, val = load(out, "train"), load(out, "val")
    assert set(train) == {
        "mine",
        "scenes_single",
        "scenes_several",
        "scenes_regions",
        "scenes_grounded",
        "scenes_clips",
    }
    assert set(val) == set(train)
    assert [(s.height, s.width) for s in (*train["mine"], *val["mine"])] == [(20, 40), (50, 30)]
    assert metrics["samples/scenes_single/val"] == len(val["scenes_single"])
    assert 0.02 < metrics["val_target_area_median"] <= 0.10
    assert metrics["val_scenes_with_distractor"] > 0.5
    assert {e.name: e.repeats for e in read_entries(out, "train", {"extra"})} == {"mine": 3}
    assert set(load(out, "val", {"video", "grounded_caption"})) == {"scenes_clips", "scenes_grounded"}
    page = (out / "report.html").read_text()
    assert "scenes_clips" in page
    assert "://" not in page  # nothing is fetched from elsewhere


@pytest.mark.slow
def test_of_a_share_of_the_pictures_captions_are_known_and_of_the_others_masks_alone(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder, share in ((whole, 1.0), (part, 0.3)):
        folder.mkdir()
        run(SMALL.model_copy(update={"caption_share": share}), folder)
    everything, found = load(whole, "train"), load(part, "train")
    assert set(found) == {*everything, "scenes_masks"}
    for name in ("scenes_single", "scenes_several", "scenes_clips"):
        assert [s.text for s in found[name]] == [s.text for s in everything[name]]
    captioned = {s.frames[0].name for s in found["scenes_regions"]}
    assert (
        captioned
        == {s.frames[0].name for s in found["scenes_grounded"]}
        == {f"train_{n:06d}.png" for n in range(3)}
    )
    silent = {s.frames[0].name: {m[0]["counts"] for m in s.masks} for s in found["scenes_masks"]}
    assert set(silent) == {f"train_{n:06d}.png" for n in range(3, 8)}
    known = {
        name: {s.masks[0][0]["counts"] for s in everything["scenes_regions"] if s.frames[0].name == name}
        for name in silent
    }
    assert silent == known
    assert {s.task for s in found["scenes_masks"]} == {"tracking"}
    assert [s.text for s in load(part, "val")["scenes_regions"]] == [
        s.text for s in load(whole, "val")["scenes_regions"]
    ]


@pytest.mark.slow
def test_of_a_share_of_the_pictures_masks_are_known_and_of_the_others_captions_alone(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder, changes in ((whole, {}), (part, {"mask_share": 0.6, "caption_share": 0.7})):
        folder.mkdir()
        run(SMALL.model_copy(update=changes), folder)
    everything, found = load(whole, "train"), load(part, "train")
    assert set(found) == {*everything, "scenes_masks", "scenes_phrases"}

    def pictures(name: str) -> set[int]:
        return {int(s.frames[0].stem.removeprefix("train_")) for s in found[name]}

    assert pictures("scenes_phrases") == {0, 1, 2}
    assert pictures("scenes_regions") == pictures("scenes_grounded") == {3, 4, 5}
    assert pictures("scenes_masks") == {6, 7}
    assert pictures("scenes_single") == set(range(3, 8))
    assert {(s.task, s.masks) for s in found["scenes_phrases"]} == {("phrase", ())}
    known: dict[str, list[str]] = {}
    for sample in everything["scenes_regions"]:
        known.setdefault(sample.frames[0].name, []).append(sample.text)
    phrases = [(s.frames[0].name, s.text) for s in found["scenes_phrases"]]
    assert phrases == [
        (name, text) for name, texts in list(known.items())[:3] for text in texts if texts.count(text) == 1
    ]
    assert [s.text for s in load(part, "val")["scenes_single"]] == [
        s.text for s in load(whole, "val")["scenes_single"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("linked", [False, True])
def test_the_kinds_of_drawn_data_share_their_pictures_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
):
    """Stages read a relative folder, and each reader writes a picture's path in its own way; the folder may
    be a link into a cache."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    out = Path("cache")
    if linked:
        out = Path("prepared")
        out.symlink_to("cache")
    run(SMALL, out)
    stills = [s for s in data.sources(out, "train") if s.kind != "video"]
    assert len(stills) == 4
    assert len({bytes(key) for source in stills for key in picture_keys(source.samples)}) == SMALL.scenes
    mixture = Mixture(
        stills,
        dict.fromkeys(("referring", "region_caption", "grounded_caption"), 1.0),
        questions=20,
        frames=1,
        seed=0,
        turn=turn,
    )
    for number in range(SMALL.scenes):
        turns = mixture.row(number).turns
        assert any("<p>" in t.answer for t in turns)  # grounded caption
        assert any(t.regions for t in turns)
        assert any(t.masks and "<p>" not in t.answer for t in turns)  # referring


@pytest.mark.slow
def test_test_clips_and_scenes_leave_what_is_trained_and_tuned_on_as_it_is(tmp_path):
    found = {}
    for name, more in (
        ("without", {"test_scenes": 0, "test_clips": 0}),
        ("with", {"test_scenes": 3, "test_clips": 2}),
    ):
        out = tmp_path / name / "prepared"
        out.mkdir(parents=True)
        run(SMALL.model_copy(update=more), out)
        samples = {
            split: [s for listed in load(out, split).values() for s in listed]
            for split in ("train", "val", "test")
        }
        pictures = {
            ref.relative_to(out): ref.read_bytes()
            for split in ("train", "val")
            for s in samples[split]
            for ref in s.frames
        }
        found[name] = (repr((samples["train"], samples["val"])).replace(str(out), ""), pictures)
    assert found["with"] == found["without"]
    assert len({s.frames for s in samples["test"] if len(s.frames) > 1}) == 2


def test_a_full_size_run_draws_nothing(tmp_path):
    cfg = Prepare(scenes=0, clips=0, sources=(own_data(tmp_path),))
    metrics = run(cfg, tmp_path)
    assert metrics == {"samples/mine/train": 1.0, "samples/mine/val": 1.0}
    assert not (tmp_path / "scenes").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"name": "scenes_single", "format": "regions", "path": "."}, "the name 'scenes_single' is taken"),
        ({"name": "mine", "format": "regions", "path": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_a_wrong_source_is_refused_before_anything_is_drawn(tmp_path, source, message):
    cfg = SMALL.model_copy(update={"sources": (DataSource(**source),)})
    with pytest.raises(ValueError, match=message):
        run(cfg, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_picture_of_ones_own_that_cannot_be_decoded_is_named_before_anything_is_drawn(tmp_path):
    out = tmp_path / "prepared"
    out.mkdir()
    cfg = SMALL.model_copy(update={"sources": (own_data(tmp_path),)})
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"split 'val', sample 1: cannot read the image .*b\.png"):
        run(cfg, out)
    assert not list(out.iterdir())


def test_nothing_at_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to train on"):
        run(Prepare(scenes=0, clips=0), tmp_path)


def described(folder: Path, pictures: int) -> Path:
    """A folder as describe-anything comes: rows of one split, each with its picture."""
    Image.new("RGB", (16, 16), (90, 120, 60)).save(folder / "picture.png")
    said = [
        {"from": "human", "value": "<image>\nDescribe <Prompt0>."},
        {"from": "gpt", "value": "A green square."},
    ]
    row = {
        "image": str(folder / "picture.png"),
        "mask_rle": [rle.encode(np.eye(16, dtype=bool))],
        "conversations": said,
    }
    features = Features({"image": datasets.Image(), "mask_rle": [{"size": [Value("int64")], "counts": Value("string")}],
                         "conversations": [{"from": Value("string"), "value": Value("string")}]})  # fmt: skip
    Dataset.from_list([row] * pictures, features=features).save_to_disk(folder / "set")
    return folder / "set"


def test_a_set_without_val_holds_out_a_share_of_its_pictures(tmp_path: Path) -> None:
    source = DataSource(
        name="described", format="region_arrow", path=str(described(tmp_path, 60)), hold_out=0.2
    )
    parts = [list(data.read_entry(tmp_path / "prepared", entry)) for entry in source_entries((source,))]
    names = [{sample.image_id for sample in part} for part in parts]
    assert len(names[0] | names[1]) == sum(map(len, parts)) == 60
    assert 4 <= len(parts[1]) <= 20  # expected: 12
    everything = source_entries((source.model_copy(update={"hold_out": 0.0}),))
    # its index is another
    assert [len(data.read_entry(tmp_path / "prepared", entry)) for entry in everything] == [60]
    data.write_entries(tmp_path, source_entries((source,)) + everything)
    assert [entry.hold_out for entry in read_entries(tmp_path)] == [0.2, 0.2, 0.0]
    assert "hold_out" not in json.loads((tmp_path / "datasets.json").read_text())[2], (
        "what was prepared before reads and hashes as before"
    )


def test_what_has_held_out_pictures_holds_out_no_others(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"'mine' has hold_out 0.1, and it has a split 'val' of its own; set hold_out to 0"
    ):
        source_entries((own_data(tmp_path).model_copy(update={"hold_out": 0.1}),))
