"""Ref-YouTube-VOS -> referring samples of videos, one object each.

`meta_expressions/<split>/meta_expressions.json`, frames in `<split>/JPEGImages/<video>/`, masks as palette
PNGs in `<split>/Annotations/<video>/` (a frame without PNG is not annotated) or, without that folder, in
upstream's `mask_dict.pkl`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks, clip_files, expressions
from ans_core.data.formats.media import Media
from ans_core.data.formats.refcoco import unpickled
from ans_core.pictures import rle
from ans_core.types import Masklet, Sample

LAYOUT = "meta_expressions/<split>/meta_expressions.json"


class Expression(expressions.Expression):
    obj_id: checks.Id = None
    """The object's number in the PNGs."""


Kind = Callable[[Expression, expressions.ExpressionRef], str | None]


def read(path: Path, *, split: str, kind: Kind = lambda expression, ref: expression.kind) -> Iterator[Sample]:
    file = path / "meta_expressions" / split / "meta_expressions.json"
    root = path / split
    videos = expressions.load_videos(file)
    masklets = (
        _of_palettes(root / "Annotations")
        if (root / "Annotations").is_dir()
        else _of_pickle(path, split, videos)
    )
    return expressions.read_expressions(
        file, videos, Expression, folders=[root / "JPEGImages"], masklets=masklets, kind=kind
    )


def splits(path: Path) -> list[str]:
    return sorted(file.parent.name for file in path.glob("meta_expressions/*/meta_expressions.json"))


Masklets = Callable[[Expression, expressions.ExpressionRef], tuple[Masklet, ...]]


def _of_palettes(annotations: Path) -> Masklets:
    @lru_cache(maxsize=1)  # a video's expressions come one after the other
    def of_video(video: str, frames: tuple[str, ...], media: Media) -> dict[int, Masklet]:
        where = f"{annotations}: video {rle.short(video)}"
        folder = checks.inside(annotations, video, where=where)
        return clip_files.palette_masklets(folder, frames, media, where)

    def masklets(expression: Expression, ref: expressions.ExpressionRef) -> tuple[Masklet, ...]:
        if expression.obj_id is None:
            raise expressions.no_truth(ref.where, "obj_id")
        by_number = of_video(ref.video, ref.frames, ref.media)
        number = next((n for n in by_number if str(n) == str(expression.obj_id)), None)
        if number is None:
            shown = f"{annotations / ref.video} show {list(by_number)}"
            raise checks.DataError(
                f"{ref.where}: obj_id {rle.short(expression.obj_id)} is unknown: the PNGs of {shown}"
            )
        return (by_number[number],)

    return masklets


def _of_pickle(path: Path, split: str, videos: Mapping[str, Any]) -> Masklets:
    """Read upstream's mask_dict.pkl: the masks of expression number n of the whole split, where a video's
    expressions are in the order of their ids as text."""
    pickled = next((p for p in (path / split / "mask_dict.pkl", path / "mask_dict.pkl") if p.is_file()), None)
    if pickled is None:
        raise checks.DataError(
            f"{path / split / 'Annotations'} does not exist, nor mask_dict.pkl; one of them must hold the "
            "masks"
        )
    masks = expressions.MaskDict(pickled, unpickled(pickled))
    order: dict[tuple[str, str], int] = {}
    for video, value in videos.items():
        listed: Any = value.get("expressions") if isinstance(value, dict) else None
        for number in sorted(listed) if isinstance(listed, dict) else ():
            order[video, number] = len(order)

    def masklets(expression: Expression, ref: expressions.ExpressionRef) -> tuple[Masklet, ...]:
        return (masks.masklet(str(order[ref.video, ref.number]), ref.media),)

    return masklets
