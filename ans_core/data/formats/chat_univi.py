"""Chat-UniVi's video chat (`video_chat.json`, videos in `Activity_Videos/` or beside) -> conversations about
clips, one per record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ans_core.data.formats import checks, clip_files
from ans_core.data.formats.turns import Turn, exchanges
from ans_core.types import Sample, VideoFrames

FILE = "video_chat.json"
FOLDERS = ("Activity_Videos", "videos", "")


class Record(checks.Record):
    video: str
    conversations: list[Turn]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    file = path / FILE
    faults = checks.Faults(file)
    videos: dict[str, tuple[VideoFrames, tuple[int, int]]] = {}
    for number, value in enumerate(checks.load_list(file)):
        with faults:
            where = f"{file}: record {number}"
            record = checks.record(Record, value, where=where)
            if record.video not in videos:
                # those named .mkv may lie there as .mp4
                names = (record.video, record.video.replace(".mkv", ".mp4"))
                video = clip_files.find_video((path / folder for folder in FOLDERS), names, where=where)
                frames = clip_files.video_frames(video, where=where)
                videos[record.video] = frames, clip_files.size_of(frames, where=where)
            frames, (height, width) = videos[record.video]
            turns = [
                turn.model_copy(update={"value": turn.value.replace("<video>", "")})
                for turn in record.conversations
            ]
            *past, (question, answer) = exchanges(turns)
            yield Sample(
                    sample_id=str(number), image_id=record.video, frames=frames, height=height,
                    width=width, task="conversation", text=answer, question=question, past=tuple(past),
                )  # fmt: skip
    faults.tell()


def splits(path: Path) -> list[str]:
    if not (path / FILE).is_file():
        raise checks.DataError(f"{path} holds no {FILE}")
    return ["train"]
