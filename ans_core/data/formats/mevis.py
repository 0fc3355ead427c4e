"""MeViS, v1 or v2: `<split>/meta_expressions*.json`, `mask_dict.json`, `JPEGImages/<video>/<frame>` (or
`<video>.mp4`) -> referring samples of videos.

v2 has expressions that nothing in the video fits (anno_id is empty); meta's `kind` then tells "target" from
"no_target".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks, expressions
from ans_core.types import Sample

FILES = "meta_expressions*.json"
LAYOUT = f"<split>/{FILES}"


def read(path: Path, *, split: str) -> Iterator[Sample]:
    files = sorted((path / split).glob(FILES))
    if len(files) != 1:
        raise checks.DataError(
            f"{path / split}: {' and '.join(f.name for f in files)} are two releases; keep the one of "
            "mask_dict.json"
        )
    masks = expressions.MaskDict(path / split / "mask_dict.json")
    videos = expressions.load_videos(files[0])
    second = _second(videos)

    def kind(expression: expressions.AnnotatedExpression, ref: expressions.ExpressionRef) -> str | None:
        return expression.kind or (("target" if expression.anno_id else "no_target") if second else None)

    return expressions.read_expressions(
        files[0],
        videos,
        expressions.AnnotatedExpression,
        folders=[path / split / "JPEGImages"],
        masklets=masks.masklets,
        kind=kind,
    )


def _second(videos: Mapping[str, Any]) -> bool:
    """Tell whether it is version 2: one expression without a target is enough."""
    groups = [value.get("expressions") for value in videos.values() if isinstance(value, dict)]
    each = (expression for some in groups if isinstance(some, dict) for expression in some.values())
    return any(isinstance(expression, dict) and expression.get("anno_id") == [] for expression in each)


def splits(path: Path) -> list[str]:
    return sorted({file.parent.name for file in path.glob(f"*/{FILES}")})
