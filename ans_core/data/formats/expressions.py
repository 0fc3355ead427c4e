"""meta_expressions.json, as MeViS, ReVOS and Ref-YouTube-VOS write it -> referring samples of clips;
mask_dict files -> masklets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from ans_core.data.formats import checks, clip_files
from ans_core.data.formats.media import Media
from ans_core.pictures import rle
from ans_core.types import Masklet, Sample


class Expression(checks.Record):
    exp: str
    kind: str | None = None


class AnnotatedExpression(Expression):
    """MeViS' and ReVOS': the objects meant, by their keys in mask_dict.json."""

    anno_id: list[checks.Id] | None = None


class Video(checks.Record):
    frames: checks.Filled[str]
    expressions: dict[str, Any]


class Videos(checks.Record):
    videos: Annotated[dict[str, Any], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class ExpressionRef:
    """Which expression of which video is asked about, and its place in the file for errors."""

    video: str
    number: str
    frames: tuple[str, ...]
    """Their names."""
    media: Media
    where: str


E = TypeVar("E", bound=Expression)


class MaskDict:
    """The masks of a mask_dict file, by annotation; null means that the object is not visible in that frame:
    area 0, as the benchmarks count it."""

    def __init__(self, file: Path, entries: Any | None = None) -> None:
        self.file, self.entries = file, checks.load_json(file) if entries is None else entries
        if not isinstance(self.entries, dict):
            raise checks.DataError(
                f"{file}: expected an object of masks by annotation, found {rle.short(self.entries)}"
            )
        self.masklet = lru_cache(maxsize=64)(self._masklet)  # a video's expressions share their objects

    def _masklet(self, anno: str, clip: Media) -> Masklet:
        where = f"{self.file}: {anno}"
        if anno not in self.entries:
            raise checks.DataError(
                f"{where} is missing; the expressions and {self.file.name} must be of one release"
            )
        masks, frames = self.entries[anno], len(clip.frames)
        if not isinstance(masks, list) or len(masks) != frames:
            raise checks.DataError(
                f"{where} is {rle.short(masks)}, not a list with one mask (or null) for each of the video's "
                f"{frames} frames"
            )
        absent = rle.empty(*clip.size)
        masklet = tuple(absent if m is None else clip.some_mask(m, where) for m in masks)
        return clip_files.visible(masklet, where)

    def masklets(self, expression: AnnotatedExpression, ref: ExpressionRef) -> tuple[Masklet, ...]:
        """Return the masklets of an expression's annotations."""
        if expression.anno_id is None:
            raise no_truth(ref.where, "anno_id")
        return tuple(self.masklet(str(anno), ref.media) for anno in expression.anno_id)


def load_videos(file: Path) -> dict[str, Any]:
    """Load a file of expressions: the videos' unchecked records by name."""
    return checks.load(Videos, file).videos


def read_expressions(
    file: Path,
    videos: dict[str, Any],
    form: type[E],
    *,
    folders: Sequence[Path],
    masklets: Callable[[E, ExpressionRef], tuple[Masklet, ...]],
    kind: Callable[[E, ExpressionRef], str | None] = lambda expression, ref: expression.kind,
) -> Iterator[Sample]:
    """Read the videos that `load_videos` has loaded from `file`. A video's frames are in the first of
    `folders` that has it; `masklets` are the objects meant; `kind` is what results are split by."""
    faults = checks.Faults(file)
    for video, where, record in faults.records(Video, videos, noun="video"):
        with faults:
            frames = clip_files.frames_of(_folder(folders, video, where=where), record.frames, where=where)
            media = clip_files.clip_of(frames, where)
            for number, content in record.expressions.items():
                with faults:
                    here = f"{where}, expression {rle.short(number)}"
                    expression = checks.record(form, content, here)
                    ref = ExpressionRef(
                        video=video, number=number, frames=tuple(record.frames), media=media, where=here
                    )
                    kind_name = kind(expression, ref)
                    yield media.sample(
                        sample_id=f"{video}_{number}",
                        image_id=video,
                        task="referring",
                        text=checks.text(expression.exp, here),
                        masks=masklets(expression, ref),
                        meta={"kind": kind_name} if kind_name is not None else {},
                    )


def _folder(folders: Sequence[Path], video: str, *, where: str) -> Path:
    """Return a video's folder: the first that is there, or has <video>.mp4 in its place, else the last."""
    *others, last = (checks.inside(folder, video, where=where) for folder in folders)
    return next((f for f in others if f.is_dir() or Path(f"{f}{clip_files.VIDEO}").is_file()), last)


def no_truth(where: str, key: str) -> checks.DataError:
    return checks.DataError(
        f"{where}: key {key!r} is missing; the masks of a held-out split are on the benchmark's server alone"
    )
