"""Chat-UniVi's video chat (`video_chat.json`, videos in `Activity_Videos/` or beside) -> conversations about
clips, one per record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ans_core.data.formats import checks, clip_files
from ans_core.data.formats.files import split_files
from ans_core.data.formats.turns import Turn, conversation, exchanges
from ans_core.types import Sample

FILES = ("video_chat.json",)
FOLDERS = ("Activity_Videos", "videos", "")


class Record(checks.Record):
    video: str
    conversations: list[Turn]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    file = split_files(path, FILES)[split]
    faults = checks.Faults(file)
    for number, where, record in faults.records(Record):
        with faults:
            # those named .mkv may lie there as .mp4
            names = (record.video, record.video.replace(".mkv", ".mp4"))
            video = clip_files.find_video([file.parent / folder for folder in FOLDERS], names, where=where)
            turns = [
                turn.model_copy(update={"value": turn.value.replace("<video>", "")})
                for turn in record.conversations
            ]
            yield conversation(exchanges(turns), video, sample_id=str(number), image_id=record.video)
