"""Ego4D's natural language queries (`nlq_<split>.json`, `clips/<clip_uid>.mp4`) -> a conversation a query:
when in the clip it is answered.

The annotations lie beside `clips` or in `annotations`. A query's truth is a stretch of the clip: the answer
is `12.3 to 15.0`, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from ans_core.data.formats import checks, clip_files
from ans_core.data.formats.files import split_files
from ans_core.data.formats.turns import conversation
from ans_core.types import Sample

FILES = ("nlq_train.json", "nlq_val.json", "annotations/nlq_train.json", "annotations/nlq_val.json")
FOLDERS = ("clips", "../clips")
ASKED = "{query} From which second to which does the clip show it?"


class Query(checks.Record):
    clip_start_sec: FiniteFloat
    clip_end_sec: FiniteFloat
    query: str | None = None
    template: str | None = None


class Annotation(checks.Record):
    annotation_uid: str
    language_queries: list[Any]


class Clip(checks.Record):
    clip_uid: str
    annotations: list[Annotation]


class Video(checks.Record):
    video_uid: str
    clips: list[Clip]


class Content(checks.Record):
    videos: list[Video]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split. Left out and counted: queries without words, and those whose stretch has no length, as
    the release holds some."""
    file = split_files(path, FILES)[split]
    content = checks.load(Content, file)
    faults = checks.Faults(file)
    for clip in (clip for video in content.videos for clip in video.clips):
        with faults:
            where = f"{file}: clip {clip.clip_uid}"
            folders = [file.parent / inner for inner in FOLDERS]
            video = clip_files.find_video(folders, [f"{clip.clip_uid}{clip_files.VIDEO}"], where=where)
            for sample_id, value in _queries(clip):
                with faults:
                    here = f"{where}, query {sample_id}"
                    query = checks.record(Query, value, here)
                    words = _words(query, here)
                    faults.once(f"query {sample_id}", where=where)
                    meta = {"kind": query.template or ""}
                    yield conversation([words], video, sample_id=sample_id, image_id=clip.clip_uid, meta=meta)
    faults.tell()


def _queries(clip: Clip) -> Iterator[tuple[str, Any]]:
    for annotation in clip.annotations:
        for number, value in enumerate(annotation.language_queries):
            yield f"{clip.clip_uid}_{annotation.annotation_uid}_{number}", value


def _words(query: Query, where: str) -> tuple[str, str]:
    if not query.query or not checks.visible(query.query):
        raise checks.Unusable("no query")
    if not 0 <= query.clip_start_sec < query.clip_end_sec:
        raise checks.Unusable("a stretch without length")
    question = checks.text(query.query, where)
    return ASKED.format(
        query=question if question.endswith("?") else f"{question}?"
    ), f"{query.clip_start_sec:.1f} to {query.clip_end_sec:.1f}"
