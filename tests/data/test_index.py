"""Samples read from an index on disk are those of the list it was made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from ans_core import data
from ans_core.data import DatasetEntry, write_entries
from ans_core.data.conversation import turn
from ans_core.data.formats.checks import DataError
from ans_core.data.index import SampleIndex, Stamp, hash_files, picture_keys, tasks, write_index
from ans_core.data.mixture import Mixture, Source
from ans_core.fingerprint import fingerprint
from ans_core.types import FilePart, Sample, VideoFrames
from tests import tiny
from tests.data.test_formats import block, png
from tests.workspace import launch

STAMP = {"format": "f", "path": "/p", "name": "drawn", "split": "train", "files": "1", "code": "1"}


def every_kind(folder: Path) -> list[Sample]:
    """Two questions about each of: a file, a part of a file, embedded bytes, a clip with an object that is
    absent or unknown; a film."""
    (folder / "table").write_bytes(b"head" + tiny.picture(7))
    part = FilePart(file=folder / "table", start=4, length=len(tiny.picture(7)))
    clip = tiny.clip(3, frames=3)
    unknown = replace(
        clip,
        masks=((None, clip.masks[0][1], clip.masks[0][2]), clip.masks[0]),
        meta={"kind": "motion", "n": [1, 2]},
    )
    talk = tiny.sample(
        6, task="conversation", question='Is "region1"\nlarger – é?', text="Yes \udcff.", masks=()
    )
    told = tiny.sample(
        5,
        task="grounded_caption",
        text="a cat, a dog",
        phrases=((0, 5), (7, 12)),
        masks=(*clip.masks[:1], clip.masks[0]),
    )
    refs = (png(folder / "a.png"), part, tiny.picture(9))
    stills = [
        replace(s, frames=(ref,), sample_id=f"{s.sample_id}-{n}")
        for n, ref in enumerate(refs)
        for s in (talk, told)
    ]
    film = replace(clip, frames=VideoFrames(folder / "film.mp4", range(0, 6, 2)), task="tracking", text="")
    return [*stills, unknown, replace(unknown, sample_id="again", text="x"), film]


def written(folder: Path, stamp: Stamp, read: Callable[[], Iterable[Sample]]) -> SampleIndex:
    write_index(folder, stamp, read)
    return SampleIndex(folder)


def test_an_index_holds_the_samples_that_it_was_made_of(tmp_path: Path):
    samples = every_kind(tmp_path)
    index = written(tmp_path / "index", STAMP, lambda: iter(samples))
    assert list(index) == index[:] == samples
    assert index[-1] == samples[-1]
    assert index[2:4] == samples[2:4]
    with pytest.raises(IndexError):
        index[len(samples)]
    assert (picture_keys(index) == picture_keys(samples)).all()
    assert len(set(picture_keys(index))) == 5  # three pictures, the clip and the film
    assert [task.decode() for task in tasks(index)] == [sample.task for sample in samples]


def sources(samples: Callable[[list[Sample], str], SampleIndex | list[Sample]]) -> list[Source]:
    """Data sets of all kinds; two of one kind, which share pictures with a third."""
    stills = [tiny.sample(i, text=f"thing {i} {k}") for i in range(5) for k in range(2)]
    regions = [tiny.region(i) for i in (3, 1, 7)]
    return [
        Source(name="one", kind="referring", samples=samples(stills, "one")),
        Source(name="two", kind="region_caption", samples=samples(regions, "two")),
        Source(
            name="three",
            kind="referring",
            samples=samples([tiny.sample(i, text="late") for i in (7, 2)], "three"),
        ),
        Source(name="clips", kind="video", samples=samples([tiny.clip(i) for i in range(2)], "clips")),
        Source(
            name="own",
            kind="extra",
            samples=samples([tiny.sample(20 + i) for i in range(9)], "own"),
            repeats=2,
        ),
    ]


def mixture(over: list[Source]) -> Mixture:
    shares = {"referring": 0.5, "region_caption": 0.2, "video": 0.1, "extra": 0.2}
    return Mixture(over, shares, questions=3, frames=2, seed=0, turn=turn)


class Steps:
    """The rows of steps of two micro-batches, in the order in which they are trained on."""

    def __init__(self, over: Mixture) -> None:
        self.over = over

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> str:
        return repr(self.over.rows(*divmod(number, 2), batch=8, micros=2))


@pytest.mark.slow
def test_loader_workers_make_the_rows_of_one_process_from_indexes_as_from_lists(tmp_path: Path):
    def indexed(samples: list[Sample], name: str) -> SampleIndex:
        return written(tmp_path / name, STAMP, lambda: samples)

    listed = Steps(mixture(sources(lambda samples, name: samples)))
    expected = [listed[n] for n in range(len(listed))]
    on_disk = Steps(mixture(sources(indexed)))
    for workers in (0, 2):
        assert list(DataLoader(on_disk, batch_size=None, num_workers=workers)) == expected  # type: ignore[arg-type]


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Path]:
    """A data set of the user's, and a prepared folder that lists it."""
    folder, prepared = tmp_path / "mine", tmp_path / "runs/data"
    prepared.mkdir(parents=True)
    png(folder / "a.png")
    write(folder, "a dog")
    write_entries(
        prepared,
        [DatasetEntry(name="mi/ne", format="annotations", path=str(folder), split="train", kind="extra")],
    )
    return folder, prepared


def write(folder: Path, *texts: str) -> None:
    records = [{"image": "a.png", "text": text, "masks": [block()], "split": "train"} for text in texts]
    (folder / "annotations.json").write_text(json.dumps(records))


def test_a_data_set_is_read_again_only_when_its_files_have_changed(
    own: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    folder, prepared = own
    reads: list[str] = []
    reader = data.FORMATS["annotations"]

    def counted(path: Path, *, name: str, split: str) -> Iterator[Sample]:
        reads.append(split)
        return reader(path, name=name, split=split)

    monkeypatch.setitem(data.FORMATS, "annotations", counted)

    def texts() -> list[str]:
        (source,) = data.sources(prepared, "train")
        assert isinstance(source.samples, SampleIndex)
        return [sample.text for sample in source.samples]

    assert texts() == texts() == ["a dog"]
    assert len(reads) == 1
    (opened,) = data.sources(prepared, "train")
    write(folder, "a cat", "a bird")
    assert texts() == ["a cat", "a bird"]
    assert opened.samples[0].text == "a dog"  # whoever has the old one open keeps it
    png(folder / "a.png", width=9)
    with pytest.raises(DataError, match=r"\[6, 8\]"):  # the mask is of 8 x 6 pixels
        texts()
    png(folder / "a.png")
    assert texts() == ["a cat", "a bird"]
    (entry,) = (prepared.parent / "index").glob("*/")
    (entry / "stamp.json").write_text("{")
    assert texts() == ["a cat", "a bird"]
    assert len(reads) == 5


OF_MANY = """
import sys
from pathlib import Path
import torch
from ans_core import data, dist

looked = []
prepared = Path(sys.argv[1])
sys.addaudithook(lambda event, words: event in ("os.scandir", "open") and looked.append(str(words[0])))
torch.distributed.init_process_group("gloo")
(source,) = data.sources(prepared, "train")
texts = [sample.text for sample in source.samples]
of_set = [name for name in looked if name.startswith(str(prepared.parent / "set"))]
(prepared.parent / f"looked-{dist.rank()}").write_text(f"{len(texts)} {len(of_set)}")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_of_sixteen_processes_one_looks_at_the_files_of_a_data_set(tmp_path: Path):
    (tmp_path / "set").mkdir()
    records = [
        {"image": "a.png", "text": f"thing {n}", "masks": [block()], "split": "train"} for n in range(3)
    ]
    png(tmp_path / "set/a.png")
    (tmp_path / "set/annotations.json").write_text(json.dumps(records))
    (tmp_path / "prepared").mkdir()
    entry = DatasetEntry(
        name="mine", format="annotations", path=str(tmp_path / "set"), split="train", kind="extra"
    )
    write_entries(tmp_path / "prepared", [entry])
    (tmp_path / "script.py").write_text(OF_MANY)
    launch(tmp_path / "script.py", str(tmp_path / "prepared"), processes=16)
    first, *others = [(tmp_path / f"looked-{rank}").read_text().split() for rank in range(16)]
    assert int(first[1]) > 0
    assert others == [["3", "0"]] * 15


def test_the_files_of_a_set_are_walked_once_for_all_of_its_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "set").mkdir()
    png(tmp_path / "set/a.png")
    records = [{"image": "a.png", "text": one, "masks": [block()], "split": one} for one in ("train", "val")]
    (tmp_path / "set/annotations.json").write_text(json.dumps(records))
    entries = [
        DatasetEntry(name="mine", format="annotations", path=str(tmp_path / "set"), split=one, kind="extra")
        for one in ("train", "val")
    ]
    walked = []
    monkeypatch.setattr(data, "hash_files", lambda path: walked.append(path) or str(len(walked)))
    assert [len(samples) for samples in data.read(tmp_path / "prepared", entries)] == [1, 1]
    assert walked == [tmp_path / "set"]
    data.read(tmp_path / "prepared", entries)
    assert len(walked) == 2  # files may have changed meanwhile


@pytest.mark.parametrize("hash_of", [hash_files, fingerprint])
def test_files_in_linked_folders_and_of_other_splits_beside_a_file_count(tmp_path: Path, hash_of: Callable):
    (tmp_path / "set").mkdir()
    (tmp_path / "disk/train").mkdir(parents=True)
    (tmp_path / "disk/train/instances.json").write_text("1")
    (tmp_path / "set/train").symlink_to(tmp_path / "disk/train")
    (tmp_path / "disk/train/up").symlink_to(tmp_path / "set")  # a cycle
    (tmp_path / "disk/train/caf\udce9.txt").write_text("a name in Latin-1")
    (tmp_path / "set/self").symlink_to(tmp_path / "set/self")
    first = hash_of(tmp_path / "set")
    assert first == hash_of(tmp_path / "set")
    png(tmp_path / "disk/train/a.png")
    second = hash_of(tmp_path / "set")
    (tmp_path / "disk/train/a.png").unlink()
    (tmp_path / "disk/train/instances.json").write_text("22")
    assert len({first, second, hash_of(tmp_path / "set")}) == 3

    train, val = tmp_path / "a_train.json", tmp_path / "a_val.json"
    train.write_text("1")
    alone = hash_of(train)
    (tmp_path / "b_val.json").write_text("of another set")
    assert hash_of(train) == alone
    val.write_text("1")
    both = hash_of(train)
    val.write_text("22")
    assert len({alone, both, hash_of(train)}) == 3


def test_an_index_that_was_cut_off_while_it_was_written_is_made_anew(tmp_path: Path):
    def cut() -> Iterator[Sample]:
        yield tiny.sample(0)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        written(tmp_path / "index", STAMP, cut)
    assert [path.name for path in tmp_path.iterdir()] == ["index.lock"]
    assert list(written(tmp_path / "index", STAMP, lambda: [tiny.sample(1)])) == [tiny.sample(1)]
    assert not list(tmp_path.glob("index.*l*d*/"))  # neither .partial nor .old
