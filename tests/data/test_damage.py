"""Damage to any file of a data set, in every format: it is read, or refused by a DataError that names the
set's folder; nothing else."""

from __future__ import annotations

import copy
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ans_core.data.formats import FORMATS
from ans_core.data.formats.checks import DataError
from ans_core.data.pictures import check_pictures
from ans_core.pictures import rle, transforms
from tests.data.fuzz_readers import ODD
from tests.data.fuzz_sets import AGENT_FILES, FILES, FORMAT_OF, SPLIT_OF, draw, load, store

ALL = FILES | AGENT_FILES
MUTATIONS = 55
"""Of each file: 2,000 in all."""
VALUES = (
    *ODD,
    0,
    1,
    2**63,
    -0.0,
    "9" * 4000,
    "\ud800",
    [0, 0],
    [[0.0, 0.0]],
    {"counts": "0", "size": [1, 1]},
    [{}] * 3,
)
HANGS_S = 30


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Drawn sets, and the same again to be damaged."""
    valid = tmp_path_factory.mktemp("valid")
    draw(valid)
    return valid, Path(
        shutil.copytree(valid, tmp_path_factory.mktemp("damaged"), copy_function=os.link, dirs_exist_ok=True)
    )


def test_every_format_is_damaged():
    assert {FORMAT_OF.get(which, which) for which in ALL} == set(FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("which", ALL)
def test_a_damaged_set_is_read_or_refused_by_name(which: str, sets: tuple[Path, Path]) -> None:
    valid, root = sets
    folder, name = ALL[which]
    for number in range(MUTATIONS):
        changed, done = damage(root / folder, name, Random(f"{which} {number}"))
        with within(HANGS_S, f"{which} {number}: {done}"):
            try:
                read(FORMAT_OF.get(which, which), root / folder)
            except DataError as error:
                assert str(root / folder) in str(error), (number, done)  # noqa: PT017 - most mutations are refused, not all
            except Exception as error:
                error.add_note(f"{which} {number}: {done}")
                raise
            finally:
                restore(changed, valid / changed.relative_to(root))


def restore(changed: Path, valid: Path) -> None:
    if valid.is_dir():
        shutil.rmtree(changed)
        shutil.copytree(valid, changed, copy_function=os.link)
    else:
        changed.unlink(missing_ok=True)
        changed.hardlink_to(valid)


def read(form: str, path: Path) -> None:
    """Read all; what is read has pictures that open, of their stated sizes, and masks of those, one a
    frame."""
    samples = list(FORMATS[form](path, name="d", split=SPLIT_OF.get(form, "train")))
    check_pictures(samples, where=str(path))
    for sample in samples:
        assert transforms.image_size(sample.frames[0]) == (sample.width, sample.height)
        assert all(len(masklet) == len(sample.frames) for masklet in sample.masks)
        assert all(
            rle.decode(m).shape == (sample.height, sample.width)
            for masklet in sample.masks
            for m in masklet
            if m is not None
        )


def damage(path: Path, name: str, rng: Random) -> tuple[Path, str]:
    """Change a set's file `name`, or one of its pictures and other files; return what was changed, and
    how."""
    file = path / name
    whole = [
        p
        for p in ([file] if file.is_file() else sorted(path.rglob("*")) if path.is_dir() else [])
        if p.is_file()
    ]
    beside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else []
    way = rng.random()
    if way < 0.15 and whole:
        return damage_bytes(rng.choice(whole), rng)
    if (way < 0.3 or not name) and beside:
        return damage_bytes(rng.choice(beside), rng)
    if file.suffix == ".txt":
        return damage_bytes(file, rng)
    values = copy.deepcopy(load(file))
    done = " and ".join(change(values, rng) for _ in range(rng.choice((1, 1, 2))))
    return file, done if store(values, file) else "nothing"


def damage_bytes(file: Path, rng: Random) -> tuple[Path, str]:
    content, kind = (
        file.read_bytes(),
        rng.choice(("cut", "flip", "cross", "utf-16", "latin-1", "empty", "deep", "other", "mark", "gone")),
    )
    file.unlink()
    at = rng.randrange(len(content) + 1)
    flipped = bytes([content[at] ^ (1 << rng.randrange(8))]) if at < len(content) else b"\0"
    new = {
        "cut": content[:at],
        "flip": content[:at] + flipped + content[at + 1 :],
        "cross": content[:at] + b"\0" * 9 + content[at + 9 :],
        "utf-16": content.decode("latin-1").encode("utf-16"),
        "latin-1": content[:at] + b"\xe9\xff" + content[at:],
        "empty": b"",
        "deep": b"[" * 100_000,
        "other": rng.choice(
            (b"9" * 5000, b'"text"', b"{}", b"[]", b"null", b"[1, 2]", b"NaN", b'{"a": 1, "a": 2}')
        ),
        "mark": b"\xef\xbb\xbf" + content,
    }.get(kind)
    if new is not None:
        file.write_bytes(new)
    return file, f"{file.name}: {kind} at {at} of {len(content)}"


def change(values: Any, rng: Random) -> str:
    """Change something below `values` in place; tell what."""
    places = list(places_of(values))
    if not places:
        return "nothing"
    parent, key = rng.choice(places)
    kind = rng.choice(("odd", "odd", "odd", "delete", "twice", "swap", "wrap"))
    if kind == "odd":
        parent[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == "delete":
        del parent[key]
    elif kind == "twice" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif kind == "swap":
        other, place = rng.choice(places)
        parent[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(parent[key])
    else:
        parent[key] = [parent[key]]
    return f"{kind} of {key!r}"[:80]


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key or index) of everything below a value."""
    for key, inner in list(
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from places_of(inner)


@contextmanager
def within(seconds: int, told: str) -> Iterator[None]:
    def late(*_: object) -> None:
        pytest.fail(f"{told}: no answer after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
