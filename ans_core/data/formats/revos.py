"""ReVOS (`meta_expressions_<split>_.json`, `mask_dict.json`, frames in `JPEGImages/<video>/` or `<video>/`)
-> referring samples of videos.

Meta's `kind` is "referring", "reasoning" or "no_object" (nothing in the video fits).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ans_core.data.formats import checks, expressions
from ans_core.pictures import rle
from ans_core.types import Sample

KINDS = ("referring", "reasoning", "no_object")
"""By type_id."""
LAYOUT = "meta_expressions_<split>_.json"


class Expression(expressions.AnnotatedExpression):
    type_id: int


def read(path: Path, *, split: str) -> Iterator[Sample]:
    file = splits(path)[split]
    # a video's name holds folders, too, as LVVIS/train/00001
    return expressions.read_expressions(
        file,
        expressions.load_videos(file),
        Expression,
        folders=[path / "JPEGImages", path],
        masklets=expressions.MaskDict(path / "mask_dict.json").masklets,
        kind=_kind,
    )


def splits(path: Path) -> dict[str, Path]:
    files = {
        file.stem.removeprefix("meta_expressions_").strip("_"): file
        for file in path.glob("meta_expressions_*.json")
    }
    return dict(sorted(files.items()))


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
