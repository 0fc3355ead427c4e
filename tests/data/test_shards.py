"""A data set in shards gives the samples and rows of the set that it was made of."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from ans_core.data import shard as writer
from ans_core.data.conversation import turn
from ans_core.data.formats import FORMATS, SPLITS, infer
from ans_core.data.formats.checks import DataError
from ans_core.data.index import nameless_index
from ans_core.data.mixture import Mixture, Source
from ans_core.types import Sample
from flows import cli
from tests.data import clip_sets, stores
from tests.data.test_remote import alike, cache, drawn  # noqa: F401

SETS = {
    "refcoco": "refcoco",
    "grandf": "grounded",
    "region_arrow": "region_captions",
    "mevis": "mevis",
    "coco": "coco",
}


def read(form: str, path: Path, split: str = "train") -> list[Sample]:
    return list(FORMATS[form](path, name="d", split=split))


def rows(samples: list[Sample], folder: Path) -> list[str]:
    """What SFT is given of them, without where the pictures lie."""
    index = nameless_index(samples, dataset="d", parent=folder)
    mixture = Mixture(
        [Source(name="d", kind="extra", samples=index)],
        {"extra": 1.0},
        questions=3,
        frames=2,
        seed=0,
        turn=turn,
    )
    return [repr(replace(mixture.row(number), frames=())) for number in range(60)]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["refcoco", "grandf", "region_arrow", "mevis"])
def test_shards_give_the_samples_of_their_set_and_the_same_order_of_rows(form, drawn, tmp_path, monkeypatch):  # noqa: F811
    source = drawn / SETS[form]
    monkeypatch.setattr(writer, "SHARD_BYTES", 20_000)
    lines = writer.shard(source, form, tmp_path / "shards")
    assert infer(tmp_path / "shards") == "shards"
    assert SPLITS["shards"](tmp_path / "shards") == SPLITS[form](source)
    assert len(lines) == len(SPLITS[form](source))
    assert len(list((tmp_path / "shards/train").iterdir())) > 1
    for split in SPLITS[form](source):
        expected, sharded = read(form, source, split), read("shards", tmp_path / "shards", split)
        alike(sharded, expected)
        assert rows(sharded, tmp_path) == rows(expected, tmp_path)


def test_a_video_becomes_its_frames_and_samples_of_a_picture_need_not_stand_together(tmp_path, monkeypatch):
    source = clip_sets.mevis(tmp_path / "mevis")
    folder = source / "train/JPEGImages"
    assert list(folder.iterdir())
    expected = read("mevis", source)
    writer.shard(source, "mevis", tmp_path / "shards")
    alike(read("shards", tmp_path / "shards"), expected)


@pytest.mark.slow
def test_a_store_serves_shards_in_place_of_a_folder(drawn, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    arguments = cli.parse(["data", "shard", str(drawn / "refcoco"), "shards"])
    assert arguments.function(arguments) == 0
    assert "samples in 1 shards" in capsys.readouterr().out
    with stores.s3(monkeypatch) as client:
        url = stores.upload(client, tmp_path / "shards/train", "sets/train")
        (tmp_path / "remote").mkdir()
        (tmp_path / "remote/train.url").write_text(url)
        assert infer(tmp_path / "remote") == "shards"
        remote = read("shards", tmp_path / "remote")
        assert remote[0].frames[0].file == f"{url}/000000.tar"
        alike(remote, read("refcoco", drawn / "refcoco"))


def test_shards_are_webdatasets_files(drawn, tmp_path):  # noqa: F811
    writer.shard(drawn / "mevis", "mevis", tmp_path / "shards")
    with tarfile.open(tmp_path / "shards/train/000000.tar") as tar:
        names = tar.getnames()
    assert names[:5] == [*(f"000000000.{frame}.png" for frame in range(4)), "000000000.json"]


@pytest.mark.parametrize(
    "damage", ["cut", "cut between", "lost", "lost before", "garbled", "twice", "mixed", "none"]
)
def test_shards_that_are_not_all_there_are_named(damage, drawn, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(writer, "SHARD_BYTES", 20_000)
    writer.shard(drawn / "refcoco", "refcoco", tmp_path / "shards")
    first, *_, last = sorted((tmp_path / "shards/train").iterdir())
    content = last.read_bytes()
    if damage == "cut":
        last.write_bytes(content[:700])
    elif damage == "cut between":
        last.write_bytes(content.rstrip(b"\0") + bytes(-len(content.rstrip(b"\0")) % 512))
    elif damage == "lost before":
        first.unlink()
    elif damage == "twice":
        shutil.copy(first, last.with_name("9.tar"))
    elif damage == "mixed":  # as of a set that has another record now, copied over
        samples = list(FORMATS["refcoco"](drawn / "refcoco", name="d", split="train"))
        writer.write([*samples[1:], replace(samples[0], text="another")], tmp_path / "later")
        shutil.copy(tmp_path / "later/000000.tar", first)
    elif damage == "garbled":
        last.write_bytes(content.replace(b'"sample_id"', b'"sample_ID"'))
    else:
        last.unlink()
    if damage == "none":
        shutil.rmtree(tmp_path / "shards")
        (tmp_path / "shards").mkdir()
    message = {
        "cut": "000.*tar can't be read|samples are there, and the first that is lost is number",
        "cut between": rf"{last.name} is cut; copy it again",
        "lost": "samples are there, and the first that is lost is number [1-9].*; copy its shards again: the last ones",
        "lost before": r"the first that is lost is number 0; copy its shards again: 000000\.tar",
        "twice": r"9\.tar: sample 0 comes twice; leave one copy",
        "mixed": r"was not written together with .*000000\.tar; copy the shards of one",
        "garbled": "tar: 0.*json is not as it was written; copy it again",
        "none": "no <split>/\\*.tar and no <split>.url",
    }[damage]
    with pytest.raises(DataError, match=message):
        read("shards", tmp_path / "shards")


def test_one_split_is_written_where_it_is_named(drawn, tmp_path):  # noqa: F811
    assert SPLITS["refcoco"](drawn / "refcoco") != ["train"]
    writer.shard(drawn / "refcoco", "refcoco", tmp_path / "shards", split="train")
    assert SPLITS["shards"](tmp_path / "shards") == ["train"]
    words = ["data", "shard", str(drawn / "refcoco"), str(tmp_path / "again"), "--split", "val"]
    cli.parse(words).function(cli.parse(words))
    assert SPLITS["shards"](tmp_path / "again") == ["val"]


def test_a_folder_without_its_shards_is_named(drawn, tmp_path):  # noqa: F811
    writer.shard(drawn / "refcoco", "refcoco", tmp_path / "shards")
    for shard in (tmp_path / "shards/train").iterdir():
        shard.unlink()
    (tmp_path / "shards/.cache").mkdir()
    with pytest.raises(DataError, match=r"train has no shard \(\*\.tar\); copy its shards again"):
        SPLITS["shards"](tmp_path / "shards")


def test_a_picture_that_is_cut_is_named_and_makes_no_shards(tmp_path):
    for name in "ab":
        Image.effect_noise((64, 64), 90).save(tmp_path / f"{name}.jpg")
    (tmp_path / "b.jpg").write_bytes((tmp_path / "b.jpg").read_bytes()[:-900])
    records = [{"image": f"{name}.jpg", "text": "a", "masks": [], "split": "train"} for name in "ab"]
    (tmp_path / "annotations.json").write_text(json.dumps(records))
    with pytest.raises(DataError, match=r"split 'train', sample 1: cannot read the image .*b\.jpg"):
        writer.shard(tmp_path, "annotations", tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


def test_a_set_with_a_fault_makes_no_shards_and_a_folder_is_not_overwritten(drawn, tmp_path):  # noqa: F811
    shutil.copytree(drawn, tmp_path / "set")
    next((tmp_path / "set/images").iterdir()).unlink()
    with pytest.raises(DataError):
        writer.shard(tmp_path / "set/refcoco", "refcoco", tmp_path / "out/shards")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ValueError, match="exists; give a new folder"):
        writer.shard(drawn / "refcoco", "refcoco", tmp_path)
