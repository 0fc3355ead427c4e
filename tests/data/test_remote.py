"""Pictures behind URLs: the samples are those of pictures on this disk; what fails is requested again, then named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from ans_core import data, storage
from ans_core.data import DatasetEntry
from ans_core.data.collate import collate_readable
from ans_core.data.formats import FORMATS
from ans_core.data.formats.checks import DataError
from ans_core.data.pictures import check_pictures
from ans_core.data.scene_write import write_clips, write_scenes
from ans_core.pictures import transforms
from ans_core.types import FilePart, Sample
from tests import tiny
from tests.data import clip_sets, stores
from tests.data.test_formats import png


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "cache").mkdir()
    with stores.own_cache(tmp_path / "cache", monkeypatch):
        yield


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[stores.Faulty]:
    (tmp_path / "served").mkdir()
    with stores.http(tmp_path / "served") as server:
        yield server


def alike(one: list[Sample], other: list[Sample]) -> None:
    """Assert that samples differ in nothing but where their pictures lie."""
    assert [replace(s, frames=()) for s in one] == [replace(s, frames=()) for s in other]
    for a, b in zip(one, other, strict=True):
        shown = [[transforms.open_image(frame).tobytes() for frame in s.frames] for s in (a, b)]
        assert shown[0] == shown[1]


def annotated(folder: Path, names: list[str], *, base: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    records = [
        {"image": f"{base}{name}", "text": f"thing {n}", "masks": [[1, 1, 4, 1, 4, 4]], "split": "train"}
        for n, name in enumerate(names)
    ]
    (folder / "annotations.json").write_text(json.dumps(records))
    return folder


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drawn")
    write_scenes(root, seed=0, counts={"train": 6, "val": 2, "test": 1}, image_size=64)
    write_clips(root, seed=0, counts={"train": 2, "val": 1}, image_size=64, frames=4)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "path", "media"),
    [
        ("refcoco", "refcoco", "images"),
        ("grandf", "grounded", "images"),
        ("mevis", "clips", "clips/train/JPEGImages"),
    ],
)
def test_pictures_in_a_store_stand_in_place_of_their_folder(form, path, media, drawn, tmp_path, monkeypatch):
    shutil.copytree(drawn, tmp_path / "set")
    clip_sets.mevis(tmp_path / "set/clips")
    expected = list(FORMATS[form](tmp_path / "set" / path, name="d", split="train"))
    shown = [[transforms.open_image(frame).tobytes() for frame in s.frames] for s in expected]
    with stores.s3(monkeypatch) as client:
        url = stores.upload(client, tmp_path / "set" / media, "some where")
        shutil.rmtree(tmp_path / "set" / media)
        (tmp_path / "set" / f"{media}.url").write_text(f"{url}/\n")
        remote = list(FORMATS[form](tmp_path / "set" / path, name="d", split="train"))
        assert str(remote[0].frames[0].file).startswith(url)
        assert [replace(s, frames=()) for s in remote] == [replace(s, frames=()) for s in expected]
        assert [[transforms.open_image(frame).tobytes() for frame in s.frames] for s in remote] == shown
        assert check_pictures(remote, where="set") == []


def test_a_record_may_name_a_url_and_is_written_to_an_index(tmp_path, faulty):
    png(faulty.folder / "a/b.png")
    folder = annotated(tmp_path / "set", ["a/b.png"], base=f"{faulty.url}/")
    prepared = tmp_path / "runs/data"
    prepared.mkdir(parents=True)
    entry = DatasetEntry(name="s", format="annotations", path=str(folder), split="train", kind="extra")
    (sample,) = data.read_entry(prepared, entry)
    assert sample.frames == (FilePart(file=f"{faulty.url}/a/b.png"),)
    assert transforms.image_size(sample.frames[0]) == (8, 6)
    assert faulty.requests == {"a/b.png": 1}  # the second time from the cache


def test_the_cache_holds_no_more_than_it_may(tmp_path, faulty, monkeypatch):
    (faulty.folder / "a.bin").write_bytes(bytes(range(256)) * 40_000)
    with stores.own_cache(tmp_path / "cache", monkeypatch, gigabytes="0.003"):
        for start in range(0, 10_000_000, 500_000):
            storage.read(f"{faulty.url}/a.bin", start, 500_000)
        cached = sum(f.stat().st_size for f in (tmp_path / "cache").rglob("*") if f.is_file())
    assert faulty.requests == {"a.bin": 20}
    assert 500_000 <= cached < 4_500_000
    with stores.own_cache(tmp_path / "cache", monkeypatch, gigabytes="0"):
        assert storage.read(f"{faulty.url}/a.bin", 255, 3) == b"\xff\0\1"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["503", "cut", "slow"])
def test_a_store_that_fails_twice_is_asked_a_third_time(fault, faulty, monkeypatch):
    monkeypatch.setattr(storage, "LONGEST_S", 0.5)
    png(faulty.folder / "a.png")
    faulty.faults["a.png"] = [fault, fault]
    assert transforms.open_image(FilePart(file=f"{faulty.url}/a.png")).size == (8, 6)
    assert faulty.requests == {"a.png": 3}


def test_a_missing_picture_is_asked_for_once_and_a_dead_store_five_times(tmp_path, faulty):
    png(faulty.folder / "a.png")
    faulty.faults["a.png"] = ["503*"]
    folder = annotated(tmp_path / "set", ["a.png", "none.png"], base=f"{faulty.url}/")
    with pytest.raises(DataError) as raised:
        data.read_samples(format="annotations", path=folder, name="s", split="train")
    assert "2 faults" in str(raised.value)
    assert f"record 0: cannot read the image {faulty.url}/a.png: " in str(raised.value)
    assert "its store failed 5 times, last with ClientResponseError: 503" in str(raised.value)
    assert f"record 1: the image {faulty.url}/none.png does not exist" in str(raised.value)
    assert faulty.requests == {"a.png": 5, "none.png": 1}


def test_a_part_beyond_the_end_and_an_unknown_store_are_named(faulty):
    (faulty.folder / "a.tar").write_bytes(b"short")
    with pytest.raises(OSError, match="store gave 2 bytes in place of 9 from byte 3 on"):
        storage.read(f"{faulty.url}/a.tar", 3, 9)
    with pytest.raises(OSError, match="Protocol not known: s4"):
        storage.read("s4://bucket/a.png", 0, None)


def test_training_leaves_out_a_row_whose_store_is_dead_by_its_name(faulty):
    png(faulty.folder / "a.png")
    model = tiny.build()
    broken = replace(tiny.row(number=1), name="set/lost", frames=(FilePart(file=f"{faulty.url}/a.png"),))
    faulty.faults["a.png"] = ["503*"]
    batch, left_out = collate_readable([tiny.row(), broken], model.tokenizer, tiny.layout(model))
    assert len(batch.input_ids) == 1
    assert [(one.row, one.unreadable) for one in left_out] == [("set/lost", True)]
    assert "its store failed 5 times" in left_out[0].reason


class Bytes:
    def __init__(self, url: str) -> None:
        self.url = url

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> int:
        return storage.read(self.url, number, 1)[0]


@pytest.mark.slow
def test_loader_workers_read_what_their_process_has_read_before_they_were_forked(tmp_path, monkeypatch):
    with stores.s3(monkeypatch) as client:
        (tmp_path / "some").mkdir()
        (tmp_path / "some/a.bin").write_bytes(bytes(range(20)))
        items = Bytes(f"{stores.upload(client, tmp_path / 'some', 'some')}/a.bin")
        assert items[7] == 7
        loader = DataLoader(items, batch_size=None, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
        assert list(loader) == list(range(20))
