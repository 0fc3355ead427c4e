"""Ref-DAVIS17 -> referring samples of videos, four per object: two annotators, each after the first frame and
after the whole video.

As published: `davis_text_annotations/Davis17_annot{1,2}{,_full_video}.txt` (or beside), lines `<clip>
<object> "<expression>"`, with DAVIS 2017 in `DAVIS/` or in the folder itself. Or as ReferFormer converts it,
to Ref-YouTube-VOS' layout. Expression 4k + a is annotation a of a clip's object k (from 0); meta's `kind`
names the annotation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ans_core.data.formats import checks, clip_files, davis, ref_youtube_vos
from ans_core.pictures import rle
from ans_core.types import Sample

TEXTS = {
    "annotator1_first_frame": ("Davis17_annot1.txt", "utf-8"),
    "annotator1_full_video": ("Davis17_annot1_full_video.txt", "utf-8"),
    "annotator2_first_frame": ("Davis17_annot2.txt", "latin-1"),
    "annotator2_full_video": ("Davis17_annot2_full_video.txt", "latin-1"),
}
"""Annotation -> file and its encoding, in the order of the expressions."""
LINE = re.compile(r'(\S+)\s+(\d{1,4})\s+"?(.*?)"?\s*')
MEANT = {"clasic-car": "classic-car", "dog-scale": "dogs-scale", "motor-bike": "motorbike"}
"""Misspelt names of clips in the published files."""
LAYOUT = f"{ref_youtube_vos.LAYOUT}, nor Davis17_annot1.txt with DAVIS 2017, its lists ImageSets/2017/<split>.txt too"
MASKS = ("Annotations_unsupervised", "Annotations")
"""The first that exists is read, as ReferFormer does."""

Texts = dict[str, dict[int, tuple[str, str]]]
"""Clip -> object -> (expression, place in the file)."""


def read(path: Path, *, split: str) -> Iterator[Sample]:
    if _texts(path) is None:
        yield from ref_youtube_vos.read(
            path,
            split=split,
            kind=lambda expression, ref: _kind_of(ref.number, where=ref.where),
        )
        return
    lists = _lists(path)
    root = _root(path)
    faults = checks.Faults(path)
    by_kind: dict[str, Texts] = {}
    for kind, (file, encoding) in TEXTS.items():
        with faults:
            by_kind[kind] = _lines(_texts(path) / file, encoding, faults)  # type: ignore[operator]
    faults.tell()
    for clip in davis.listed_clips(lists[split]):
        with faults:
            yield from _samples(root, clip, by_kind)
    faults.tell()


def splits(path: Path) -> list[str]:
    return ref_youtube_vos.splits(path) if _texts(path) is None else sorted(_lists(path))


def _texts(path: Path) -> Path | None:
    """Return the folder of the text files, None if there is none."""
    first = next(iter(TEXTS.values()))[0]
    return next(
        (folder for folder in (path / "davis_text_annotations", path) if (folder / first).is_file()), None
    )


def _root(path: Path) -> Path:
    return path / "DAVIS" if (path / "DAVIS").is_dir() else path


def _lists(path: Path) -> dict[str, Path]:
    folder = _root(path) / "ImageSets/2017"
    return {file.stem: file for file in sorted(folder.glob("*.txt"))}


def _kind_of(number: str, *, where: str) -> str:
    if not (number.isdecimal() and number.isascii() and len(number) < 9):
        raise checks.DataError(f"{where}: expressions are numbered from 0, four per object")
    return list(TEXTS)[int(number) % len(TEXTS)]


def _lines(file: Path, encoding: str, faults: checks.Faults) -> Texts:
    texts: Texts = {}
    for number, line in enumerate(checks.load_text(file, encoding=encoding).splitlines(), start=1):
        if line.strip():
            with faults:
                where = f"{file}: line {number}"
                match = LINE.fullmatch(line.strip())
                if match is None:
                    raise checks.DataError(
                        f'{where} is {rle.short(line)}, not <clip> <object> "<expression>"'
                    )
                objects = texts.setdefault(MEANT.get(match[1], match[1]), {})
                if int(match[2]) in objects:
                    raise checks.DataError(f"{where}: object {match[2]} of {rle.short(match[1])} comes twice")
                objects[int(match[2])] = checks.text(match[3], where), where
    return texts


def _samples(root: Path, clip: str, by_kind: Mapping[str, Texts]) -> list[Sample]:
    where = f"{root}: clip {clip}"
    pictures = davis.quality_folder(root / "JPEGImages")
    names, media = clip_files.clip_in(checks.inside(pictures, clip, where=where), where)
    annotations = davis.quality_folder(
        next((root / part for part in MASKS if (root / part).is_dir()), root / MASKS[-1])
    )
    masklets = clip_files.palette_masklets(annotations / clip, names, media, where)
    described = {kind: sorted(texts.get(clip, {})) for kind, texts in by_kind.items()}
    objects = next(iter(described.values()))
    if not objects or any(others != objects for others in described.values()):
        raise checks.DataError(
            f"{where}: the four files describe the objects {list(described.values())}; they must be the "
            "same ones, at least one"
        )
    samples = []
    for k, number in enumerate(objects):
        for a, kind in enumerate(by_kind):
            text, line = by_kind[kind][clip][number]
            if number not in masklets:
                raise checks.DataError(
                    f"{line}: object {number} of {clip} is unknown: the PNGs of {annotations / clip} show "
                    f"{list(masklets)}"
                )
            sample_id = f"{clip}_{len(TEXTS) * k + a}"
            samples.append(
                media.sample(
                    sample_id=sample_id,
                    image_id=clip,
                    task="referring",
                    text=text,
                    masks=(masklets[number],),
                    meta={"kind": kind},
                )
            )
    return samples
