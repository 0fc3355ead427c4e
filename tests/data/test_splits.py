"""Sources whose splits have names of their own: read as one where they are listed, refused where no stage
would read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image

from ans_core import data
from ans_core.config import PROFILES, Config, ConfigError, DataSource, Prepare, resolve
from ans_core.data.formats.checks import NoSplit
from ans_core.data.mixture import paired
from ans_core.data.splits import chosen
from ans_core.stages import prepare
from ans_core.stages.sources import source_entries
from tests import picture_sets
from tests.data import clip_sets
from tests.data.test_formats import block
from tests.picture_sets import SETS, said

PARTS = ["Part1", "Part2", "val"]
CLIPS = (
    "davis",
    "sav",
    "youtube_vis",
    "coco_video",
    "mevis",
    "revos",
    "ref_youtube_vos",
    "ref_davis17",
    "ref_sav",
    "chat_univi",
)


def write_parts(root: Path) -> Path:
    """Write an Arrow set like describe-anything's: folders Part1 and Part2, and a list of categories in each
    row."""
    for part in PARTS:
        folder = root / part
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 6)).save(root / "a.png")
        row = {
            "image": "../a.png",
            "mask_rle": [block()],
            "conversations": said(("Describe.", f"a dog of {part}")),
        }
        Dataset.from_list([row | {"category": ["dog", "animal"], "source": "drawn"}]).save_to_disk(
            str(folder)
        )
    return root


def source(path: Path, split: str | list[str], form: str = "region_arrow") -> DataSource:
    return DataSource.model_validate({"name": "mine", "format": form, "path": str(path), "split": split})


@pytest.mark.slow
@pytest.mark.parametrize("split", [["Part1", "Part2"], ["Part*"], ["*"]])
def test_parts_of_a_set_are_trained_on_as_one_with_their_categories(tmp_path, split):
    folder, out = write_parts(tmp_path / "mine"), tmp_path / "prepared"
    out.mkdir()
    cfg = Config(profile="tiny", prepare=Prepare(scenes=0, clips=0, sources=(source(folder, split),)))
    metrics = prepare.run(cfg, inputs={}, out=out, scratch=tmp_path, log=lambda metrics, step: None)
    assert metrics == {"samples/mine/train": 2.0, "samples/mine/val": 1.0}
    (trained,) = data.sources(out, "train")
    assert [(s.sample_id, s.text) for s in trained.samples] == [
        ("Part1/0", "a dog of Part1"),
        ("Part2/0", "a dog of Part2"),
    ]
    assert trained.samples[0].meta == {"category": ["dog", "animal"], "source": "drawn"}
    assert paired(trained.samples).all()
    (mine,) = data.sources(out, "val")
    assert [s.sample_id for s in mine.samples] == ["0"]


def test_a_list_may_hold_what_would_be_held_out(tmp_path):
    entries = source_entries((source(write_parts(tmp_path), ["Part1", "val"]),))
    assert [(entry.split, entry.on_disk) for entry in entries] == [("train", ("Part1", "val"))]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["Part1"], ""),
        ("Part1", r"no stage reads a split 'Part1'.*`split: \[\"Part1\"\]`"),
        ("trian", r"'trian' \(did you mean 'train'\?\)"),
        ([1], r"\[1\] is neither a name of a split nor a list of names"),
    ],
)
def test_a_part_alone_is_trained_on_where_it_is_a_list_and_refused_where_no_stage_reads_it(split, message):
    record = {"name": "mine", "format": "region_arrow", "path": "data/mine", "split": split}
    words = (f"prepare.sources={json.dumps([record])}",)
    if message:
        with pytest.raises(ConfigError, match=f"prepare.sources.0.split.*{message}"):
            resolve(PROFILES / "smoke.yaml", words)
    else:
        assert resolve(PROFILES / "smoke.yaml", words)["prepare"]["sources"][0]["split"] == ["Part1"]


def test_a_set_without_the_split_is_refused_with_the_list_to_write(tmp_path):
    write_parts(tmp_path)
    with pytest.raises(
        NoSplit,
        match=r"no split 'train'; it has \['Part1', 'Part2', 'val'\].*`split: \[\"Part1\", \"Part2\"\]` there",
    ):
        source_entries((source(tmp_path, "train"),))
    with pytest.raises(NoSplit, match=r"no split 'Part3' \(did you mean 'Part2'\?\)"):
        source_entries((source(tmp_path, ["Part1", "Part3"]),))
    assert chosen(["*"], PARTS, path=tmp_path) == ["Part1", "Part2"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    picture_sets.write(root, picture_sets.draw(2, image_size=32))
    return root


@pytest.mark.parametrize("name", SETS)
def test_every_format_of_pictures_refuses_a_split_that_is_not_there(tree, name):
    form, path = SETS[name]
    with pytest.raises(NoSplit, match=r"no split 'tarin' \(did you mean 'train'\?\)"):
        source_entries((source(tree / path, "tarin", form),))


@pytest.mark.parametrize("form", CLIPS)
def test_every_format_of_clips_refuses_a_split_that_is_not_there(tmp_path, form):
    root = getattr(clip_sets, form)(tmp_path / form)
    with pytest.raises(NoSplit, match="no split 'nothing'"):
        source_entries((source(root, "nothing", form),))


def test_a_set_without_samples_is_refused(tmp_path):
    png = tmp_path / "a.png"
    Image.new("RGB", (8, 6)).save(png)
    held_out = {"image": "a.png", "text": "the dog", "masks": [block()], "split": "val"}
    (tmp_path / "annotations.json").write_text(json.dumps([held_out]))
    with pytest.raises(ValueError, match="no split 'train'; it has"):
        source_entries((source(tmp_path, "train", "annotations"),))


def test_pictures_held_out_of_parts_are_no_test_split(tmp_path):
    """A set of Part1, Part2 and test: `hold_out` divides the parts into train and val, and test stays what it
    is."""
    parts = ["Part1", "Part2", "test"]
    for part in parts:
        (tmp_path / part).mkdir()
        rows = []
        for number in range(20):
            Image.new("RGB", (8, 6)).save(tmp_path / f"{part}-{number}.png")
            rows.append(
                {
                    "image": f"../{part}-{number}.png",
                    "mask_rle": [block()],
                    "conversations": said(("Describe.", f"{part} {number}")),
                }
            )
        Dataset.from_list(rows).save_to_disk(str(tmp_path / part))
    held = source(tmp_path, ["Part1", "Part2"]).model_copy(update={"hold_out": 0.3})
    entries = {entry.split: entry for entry in source_entries((held,))}
    assert {split: entry.on_disk for split, entry in entries.items()} == {
        "train": ("Part1", "Part2"), "test": "test", "val": ("Part1", "Part2")
    }  # fmt: skip
    (tmp_path / "prepared").mkdir()
    texts = {
        split: {s.text for s in data.read_entry(tmp_path / "prepared", entry)}
        for split, entry in entries.items()
    }
    assert not texts["train"] & texts["val"]
    assert texts["train"] | texts["val"] == {f"{part} {number}" for part in parts[:2] for number in range(20)}
    assert texts["test"] == {f"test {number}" for number in range(20)}
