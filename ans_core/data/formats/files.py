"""Find the files of a data set: the annotations of its splits, and its pictures in one or more folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from ans_core import nearest_file
from ans_core.data.formats import checks
from ans_core.data.formats.media import UNSTATED, Media, Stated, picture_of, together
from ans_core.pictures import rle
from ans_core.split_names import name_and_split, splits_beside
from ans_core.storage import is_url
from ans_core.types import FilePart, ImageFile

OF_COCO_2014 = re.compile(r"^COCO_(train|val|test)\d{4}_")


def split_files(path: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """Return the annotation file of every split. `path` is their folder, or one of the files: then those that
    differ only in the split belong to it too (`a_train.json` and `a_val.json`). A name that ends in no split
    is of the split that the file's folder below `path` is called (`valid/_annotations.coco.json`), else
    "train"."""
    if path.is_dir():
        files = sorted({file for pattern in patterns for file in path.glob(pattern)})
    else:
        files = [path, *splits_beside(path)]
    by_split: dict[str, Path] = {}
    for file in files:
        split = (
            name_and_split(file)[1]
            or (name_and_split(file.parent)[1] if path.is_dir() and file.parent != path else None)
            or "train"
        )
        if split in by_split:
            raise checks.DataError(
                f"{path}: {by_split[split].name} and {file.name} are both of split {split!r}; keep one in "
                "the folder, or give the path of one"
            )
        by_split[split] = file
    if not by_split:
        raise checks.DataError(
            f"{path} holds no {', '.join(patterns)}; see docs/your-data.md for the files that each format has"
        )
    return by_split


def file_of(folder: Path, name: str, *, where: str) -> ImageFile:
    """Return the picture that an annotation names, as `checks.inside` does, or the one behind a URL."""
    path = folder if is_url(name) else checks.inside(folder, name, where=where)
    url = name if is_url(name) else url_of(folder, name)
    return path if url is None else FilePart(file=url)


def url_of(folder: Path, name: str) -> str | None:
    """Return the URL of a file in a folder, if a file `<folder>.url`, or one for the first folder in `name`,
    stands in the folder's place: a line with the URL where its files are."""
    first, _, rest = name.partition("/")
    if base := _base(folder):
        return f"{base}/{name}"
    base = _base(folder / first) if rest else None
    return base and f"{base}/{rest}"


def _base(folder: Path) -> str | None:
    file = Path(f"{folder}.url")
    return _line(file, file.stat().st_mtime_ns) if file.is_file() else None


@lru_cache(maxsize=4096)
def _line(file: Path, _changed: int) -> str:
    return checks.load_text(file).strip().rstrip("/")


class ImageFolders:
    """The folders in which a data set's pictures may be; only those that exist are looked into, in their
    order."""

    def __init__(self, folder: Path, names: Iterable[str | Path]) -> None:
        tried = list(dict.fromkeys(folder / name for name in names))
        self.folders = [
            # one picture has one path, whichever set of a folder of sets names it
            folder.resolve() if ".." in folder.parts else folder
            for folder in tried
            if folder.is_dir() or url_of(folder, "")
        ]
        self._cache: dict[tuple[str, Stated], Media] = {}
        if not self.folders:
            raise checks.DataError(
                f"no folder of images: looked for {', '.join(map(str, tried))}; put (or link) the "
                "images at one of them"
            )

    def find(self, name: str, *, where: str, stated: Stated = UNSTATED) -> Media:
        """Return a picture. `stated` is the [height, width] that the annotations give."""
        if (name, stated) not in self._cache:
            image = self._path(name, where=where)
            self._cache[name, stated] = picture_of(image, where, stated=stated)
        return self._cache[name, stated]

    def all_of(self, names: Sequence[str], *, where: str) -> Media:
        """Return the pictures that one question is about."""
        return together([self.find(name, where=where) for name in names])

    def _path(self, name: str, *, where: str) -> ImageFile:
        """Return the first file that exists, of the name as it stands in any folder before a shorter one. The
        sets' own loaders take names apart: `train2017/1.jpg` may lie in a folder train2017, and
        COCO_train2014_1.jpg is 1.jpg since 2017."""
        leaf = name.rpartition("/")[2]
        for candidate in dict.fromkeys((name, leaf, OF_COCO_2014.sub("", leaf))):
            for folder in self.folders:
                path = file_of(folder, candidate, where=where)
                if isinstance(path, FilePart) or path.is_file():
                    return path
        raise missing("image", name, self.folders, where=where)


REMEDY = "put (or link) it there, or leave its record out"


def missing(
    noun: str, name: str, folders: Sequence[Path], *, where: str, remedy: str = REMEDY
) -> checks.DataError:
    """Return the error of a file that is in none of the folders."""
    return checks.DataError(
        f"{where}: the {noun} {rle.short(name)} is in none of {', '.join(map(str, folders))}; {remedy}"
        + nearest_file.hint(*(folder / name for folder in folders))
    )


def find_file(
    folders: Sequence[Path], names: Sequence[str], *, where: str, noun: str, remedy: str = REMEDY
) -> Path:
    """Return the first of these names that one of these folders has. Raises DataError where there is none."""
    for name in dict.fromkeys(names):
        for folder in folders:
            if (file := checks.inside(folder, name, where=where)).is_file():
                return file
    raise missing(noun, names[0], folders, where=where, remedy=remedy)


def parquet_files(path: Path, pattern: str, *, release: str) -> list[Path]:
    """Return the tables of a folder, or the one that `path` is."""
    files = [path] if path.is_file() else sorted(path.glob(pattern))
    if not files:
        raise checks.DataError(f"{path} holds no {pattern}; give the folder of {release}'s release")
    return files


@contextmanager
def parquet_table(file: Path) -> Iterator[Any]:
    """Open a table (pyarrow's ParquetFile). What pyarrow can't read, as it is opened or later, is a
    DataError."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        yield parquet.ParquetFile(file)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise checks.DataError(f"{file}: pyarrow can't read it ({error}); fetch it again") from None
