"""ReVOS (`meta_expressions_<split>_.json`, `mask_dict.json`, frames in `JPEGImages/<video>/` or `<video>/`)
-> referring samples of videos.

Meta's `kind` is "referring", "reasoning" or "no_object" (nothing in the video fits).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ans_core.data.formats import checks, expressions, mevis
from ans_core.pictures import rle
from ans_core.types import Sample

KINDS = ("referring", "reasoning", "no_object")
"""By type_id."""


class Expression(mevis.Expression):
    type_id: int


def read(path: Path, *, split: str) -> Iterator[Sample]:
    files = _files(path)
    masks = expressions.MaskDict(path / "mask_dict.json")
    return expressions.read_expressions(
        files[split], expressions.load_videos(files[split]), Expression, folder=lambda video,
        where: _folder(path, video, where=where),
        masklets=lambda expression, ref: mevis.objects(expression, ref, masks), kind=_kind,
    )  # fmt: skip


def splits(path: Path) -> list[str]:
    return sorted(_files(path))


def _files(path: Path) -> dict[str, Path]:
    files = {
        file.stem.removeprefix("meta_expressions_").strip("_"): file
        for file in sorted(path.glob("meta_expressions_*.json"))
    }
    if not files:
        raise checks.DataError(f"{path}: no meta_expressions_<split>_.json")
    return files


def _folder(path: Path, video: str, *, where: str) -> Path:
    """Return a video's folder; the names hold folders too, as `LVVIS/train/00001`."""
    inside = checks.inside(path / "JPEGImages", video, where=where)
    return (
        inside
        if inside.is_dir() or inside.with_name(f"{inside.name}.mp4").is_file()
        else checks.inside(path, video, where=where)
    )


def _kind(expression: Expression, ref: expressions.ExpressionRef) -> str:
    if not 0 <= expression.type_id < len(KINDS):
        raise checks.DataError(
            f"{ref.where}: type_id {rle.short(expression.type_id)} is none of 0 (referring), 1 "
            "(reasoning), 2 (no object)"
        )
    kind = KINDS[expression.type_id]
    if expression.anno_id is not None and (kind == "no_object") == bool(expression.anno_id):
        raise checks.DataError(
            f"{ref.where}: type_id {expression.type_id} ({kind}), and anno_id is "
            f"{rle.short(expression.anno_id)}"
        )
    return kind
