"""A path that does not exist -> the file that is probably meant, and in what the names differ."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

PICTURES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"))
SUFFIXES = PICTURES | {".mp4", ".mov", ".avi", ".mkv", ".webm"}
"""A file with one of these may be meant by a name with another."""


def _nfc(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _trimmed(name: str) -> str:
    return "/".join(" ".join(part.split()) for part in name.split("/"))


SPELLINGS: dict[str, Callable[[str], str]] = {
    "upper and lower case": str.casefold,
    "the Unicode form of its letters (NFC, as most systems write them, and NFD, as macOS does)": _nfc,
    "blanks": _trimmed,
}
"""Kind of difference -> the function that removes it."""


def hint(*paths: Path) -> str:
    """Return the end of an error about files that don't exist: `; <file> is there, ...`, or "" where no name
    is like any of theirs."""
    similar = [alike for path in paths for alike in _like(path)]
    if not similar:
        return ""
    file, differences = min(similar, key=lambda alike: len(alike[1]))
    return f"; {file} is there, whose name differs in {', '.join(differences)}: correct one of them"


def _like(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield files of a like name in the nearest folder that exists, also without the folders of the name, and
    the differences."""
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    if folder is None:
        return
    name = str(path.relative_to(folder))
    parts = [part for part in re.split(r"[/\\]", name) if part not in ("", ".")]
    for start in range(len(parts)):
        for there in _alike(folder, parts[start:]):
            yield folder / there, _differences(name, there)


def _alike(folder: Path, parts: list[str]) -> Iterator[str]:
    """Yield files below the folder, by their path from there, whose parts are spelt alike."""
    first, rest = parts[0], parts[1:]
    for name in _listing(folder, folder.stat().st_mtime_ns).get(_key(Path(first).stem), ()):
        path = folder / name
        if rest and path.is_dir() and _key(name) == _key(first):
            yield from (f"{name}/{inner}" for inner in _alike(path, rest))
        elif (
            not rest
            and path.is_file()
            and (_key(path.suffix) == _key(Path(first).suffix) or path.suffix.lower() in SUFFIXES)
        ):
            yield name


@lru_cache(maxsize=16)
def _listing(folder: Path, _changed: int) -> dict[str, list[str]]:
    """Return the names in a folder by the key of their stem. Thousands of pictures may be missing, so a
    folder is read once."""
    names: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        names[_key(path.stem)].append(path.name)
    return names


def _key(name: str) -> str:
    for spelling in SPELLINGS.values():
        name = spelling(name)
    return name


def _differences(name: str, there: str) -> list[str]:
    differences = []
    if "\\" in name:
        name = name.replace("\\", "/")
        differences.append("backslashes, which Windows writes (write / between folders)")
    short = "/".join(name.split("/")[-len(there.split("/")) :])
    if short != name:
        differences.append("its folder")
    one, other = Path(short), Path(there)
    if one.suffix.casefold() != other.suffix.casefold():
        differences.append(f"its suffix ({one.suffix or 'none'} and {other.suffix or 'none'})")
        one, other = one.with_suffix(""), other.with_suffix("")
    for kind in SPELLINGS:
        left, right = str(one), str(other)
        for spelling in (function for of, function in SPELLINGS.items() if of != kind):
            left, right = spelling(left), spelling(right)
        if left != right:  # what is left when all other kinds are removed
            differences.append(kind)
    return differences
