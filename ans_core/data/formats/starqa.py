"""STAR, situated reasoning in real-world videos (`STAR_<split>.json`, Charades' videos) -> a conversation a
question.

Videos are `Charades_v1_480/<video_id>.mp4` (or `Charades_v1`, `videos`). A question is about the frames from
`start` to `end` seconds; the answer is the text of the right one of its four choices, which are in meta.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ans_core.data.formats import checks, clip_files
from ans_core.data.formats.files import find_file, split_files
from ans_core.pictures import video_file
from ans_core.types import Sample, VideoFrames

FILES = ("STAR_*.json",)
LAYOUT = "STAR_train.json and no STAR_val.json; the test split's answers are not public"
FOLDERS = ("Charades_v1_480", "Charades_v1", "videos")


class Choice(checks.Record):
    choice_id: int
    choice: str


class Record(checks.Record):
    question_id: str
    """Interaction_T1_13: begins with the kind of question."""
    question: str
    video_id: str
    start: float
    end: float
    answer: str
    choices: Annotated[list[Choice], Field(min_length=2)]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split; that for the server has no answers."""
    file = split_files(path, FILES)[split]
    faults = checks.Faults(file)
    for _, where, record in faults.records(Record):
        with faults:
            sample = _sample(record, file.parent, f"{file}: question {record.question_id}")
            faults.once(f"question {sample.sample_id}", where=where)
            yield sample


def splits(path: Path) -> list[str]:
    return [split for split in split_files(path, FILES) if split != "test"]


def _sample(record: Record, folder: Path, where: str) -> Sample:
    choices = [choice.choice for choice in record.choices]
    if record.answer not in choices:
        raise checks.DataError(f"{where}: the answer {record.answer!r} is none of its choices {choices}")
    inner = [folder / name for name in FOLDERS]
    names = [f"{record.video_id}{clip_files.VIDEO}"]
    video = find_file(inner, names, where=where, noun="video")
    frames = _stretch(video, record.start, record.end, where)
    return clip_files.clip_of(frames, where).sample(
        sample_id=record.question_id,
        image_id=f"{record.video_id}_{record.start:g}_{record.end:g}",
        task="conversation",
        question=checks.text(record.question, where),
        text=checks.text(record.answer, where),
        meta={"kind": record.question_id.partition("_")[0], "choices": choices},
    )


def _stretch(video: Path, start_s: float, end_s: float, where: str) -> VideoFrames:
    """Return the frames between two times, at least one."""
    frames = clip_files.video_frames(video, where)
    try:
        rate = video_file.rate(video)
    except ValueError as error:
        raise checks.DataError(f"{where}: {error}") from None
    lasts_s = len(frames) / rate
    if not 0 <= start_s < min(end_s, lasts_s):
        raise checks.DataError(
            f"{where}: {start_s:g} to {end_s:g} s are no part of {video}, which lasts {lasts_s:.1f} s"
        )
    first = min(round(start_s * rate), len(frames) - 1)
    return frames[first : max(first + 1, round(min(end_s, lasts_s) * rate))]
