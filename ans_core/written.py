"""A folder or file in the making -> the folder or file, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(path: Path, *, size: int = 0) -> Iterator[Path]:
    """Yield the folder `.<name>.partial` beside `path` to write into. On exit its files are synced and it
    replaces `path`, whatever that holds; of a link, the folder that it names. After an error `path` is as before,
    and nothing else is left; after a kill between the two renames at the end the next call puts it back.

    Raises OSError before anything is written when the disk has less than `size` bytes (and 1 % for the small
    files) left.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < size * 1.01:
        raise OSError(
            f"{path} needs {size / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB left; free some or write "
            "elsewhere"
        )
    # hidden: names that no folders of the user's have
    partial, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "old"))
    if old.exists() and not path.exists():
        old.rename(path)
    elif old.exists():
        shutil.rmtree(old)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial)
        raise
    for file in partial.rglob("*"):
        if file.is_file():
            sync(file)
    if path.is_dir():
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def write_atomically(file: Path, text: str) -> None:
    """Write a file that is there whole or not at all, also after a power cut; of a link, the file that it
    names. One that is mounted by itself, as in a container, can't be replaced and is overwritten."""
    file = file.resolve()
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    try:
        partial.replace(file)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        file.write_text(text, encoding="utf-8")
        sync(file)
        partial.unlink()


def sync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def is_record(file: Path, keys: Set[str]) -> bool:
    """Tell whether a file is JSON (of .jsonl: its first line) with these keys, as an earlier run wrote it."""
    try:
        with file.open(encoding="utf-8") as lines:
            record = json.loads(lines.readline() if file.suffix == ".jsonl" else lines.read())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and keys <= record.keys()


def refuse_foreign(folder: Path, record: str, keys: Set[str]) -> None:
    """Raise ValueError unless a folder is new or empty, or its file `record` is of an earlier run (`is_record`)."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give a folder to write into")
    if folder.is_dir() and any(folder.iterdir()) and not is_record(folder / record, keys):
        raise ValueError(
            f"{folder} holds files and no {record} of an earlier run of this command; give a new folder"
        )
