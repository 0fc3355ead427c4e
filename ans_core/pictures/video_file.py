"""Decode single frames of video files. A file is read as far as the asked frame needs, and one frame is in
memory at a time."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame as Shot
from PIL import Image

from ans_core.pictures.orientation import of_matrix, upright
from ans_core.types import VideoFrame, VideoFrames

CODEC_ERRORS = (av.FFmpegError, OSError, ValueError, IndexError, EOFError)
"""Errors that PyAV raises for a broken file."""
FEW = 2
"""Frames that a whole file may lack: those before the first key frame can't be decoded."""


def frames_of(file: Path) -> VideoFrames:
    """Return all frames of a video. Raises ValueError for a file without a readable video."""
    return VideoFrames(file, range(_header(file, _changed(file))[0]))


def shots(file: Path) -> Iterator[Image.Image]:
    """Decode a video from its first frame to its last, upright, in one pass. Raises FFmpegError, an OSError
    or a ValueError by cause, or IndexError where the file has no video; a ValueError also at a frame that the
    decoder says is damaged (those of H.264 and MPEG-4 do; of VP9 and H.265 damage may pass), and at the end
    of a file that holds clearly less than it says."""
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        # several end at a broken frame without an error, or don't say that it is damaged
        stream.codec_context.thread_count = 1
        expected = _shown(container)
        count, end_s = 0, 0.0
        for packet in container.demux(stream):
            for shot in packet.decode():
                if shot.is_corrupt:
                    raise ValueError(f"frame {count} is damaged")
                count, end_s = count + 1, max(end_s, _end_s(shot))
                yield _upright(shot)
        if count < expected - max(FEW, expected // 50):
            raise ValueError(f"it says that it has {expected} frames, and ends after {count}")
        alone = len(container.streams) == 1  # another stream, as sound, may well be longer
        if not stream.frames and alone and container.duration and end_s:
            duration_s = container.duration / av.time_base
            if end_s < duration_s - max(1.0, duration_s / 20):
                raise ValueError(f"it says that it lasts {duration_s:.1f} s, and ends after {end_s:.1f} s")


def size(file: Path) -> tuple[int, int]:
    """Return (width, height) of the frames as they are shown. Raises ValueError as `frames_of` does."""
    return _header(file, _changed(file))[1]


def rate(file: Path) -> float:
    """Return the mean number of frames a second. Raises ValueError for a file without a readable video, or
    one that says no rate."""
    try:
        with av.open(str(file)) as container:
            per_second = container.streams.video[0].average_rate
    except CODEC_ERRORS as error:
        raise ValueError(
            f"cannot read the video {file}: {error}; is it cut short? (`ffmpeg -i` tells)"
        ) from None
    if not per_second:
        raise ValueError(
            f"the video {file} says no frame rate, by which its annotations are timed; write it again as MP4"
        )
    return float(per_second)


def read(frame: VideoFrame) -> Image.Image:
    """Decode one frame, upright. Frames in rising order need one pass through the file; others are sought
    from the key frame before.

    Raises ValueError naming the file for one that can't be decoded up to this frame.
    """
    try:
        return _decoder(frame.file).frame(frame.index)
    except CODEC_ERRORS as error:
        _open.decoder = None
        raise ValueError(
            f"cannot read frame {frame.index} of the video {frame.file}: {error}; is it cut short?"
        ) from None


def check(frames: VideoFrames) -> None:
    """Decode a video once up to the last of some frames. Raises ValueError as `read` does."""
    expected = size(frames.file)
    for frame in frames:
        if (shape := read(frame).size) != expected:
            raise ValueError(
                f"the video {frame.file}: frame {frame.index} is of {shape}, the first of {expected} "
                "(width, height)"
            )


def _end_s(shot: Shot) -> float:
    """Return when a frame's time is over, in seconds; 0 where it has none."""
    return (
        0.0
        if shot.pts is None or shot.time_base is None
        else float((shot.pts + (shot.duration or 0)) * shot.time_base)
    )


def _changed(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        raise ValueError(
            f"the video {file} does not exist; put the file there, or correct the path"
        ) from None


@lru_cache(maxsize=65536)
def _header(file: Path, changed: int) -> tuple[int, tuple[int, int]]:
    """Return (number of frames, (width, height)): the first frame is decoded, as only it tells how the video
    is turned."""
    try:
        with av.open(str(file)) as container:
            stream = next(iter(container.streams.video))
            first = _upright(next(container.decode(stream)))
            count = _shown(container)
        return count or len(_times(file, changed)), first.size
    except (*CODEC_ERRORS, StopIteration) as error:
        reason = str(error) or "it holds no picture"
        raise ValueError(
            f"cannot read the video {file}: {reason}; is it cut short? (`ffmpeg -i` tells)"
        ) from None


def _shown(container: InputContainer) -> int:
    """Return how many frames the file says that players show; 0 if it says nothing. An MP4 that was cut
    without encoding (`ffmpeg -c copy`, a phone's editor) stores more of them, from the key frame before,
    which its edit list hides."""
    stream = container.streams.video[0]
    if stream.frames and container.format.name.startswith("mov"):
        return sum(not entry.is_discard for entry in stream.index_entries)
    return stream.frames


@lru_cache(maxsize=256)
def _times(file: Path, changed: int) -> list[int | None]:
    """Return the frames' presentation times in order, read from the packets without decoding; None where the
    file has none (AVI). All of the file is read for that, so the lists of some files are kept."""
    with av.open(str(file)) as container:
        times = [p.pts for p in container.demux(container.streams.video[0]) if p.size and not p.is_discard]
    return times if None in times else sorted(times)  # type: ignore[type-var]


def _upright(shot: Shot) -> Image.Image:
    """Return the picture as players show it: phones store video lying on its side, front cameras mirrored,
    and say so."""
    picture: Image.Image = shot.to_image()
    matrix = shot.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return picture
    orientation = of_matrix(np.frombuffer(matrix, "=i4").tolist())  # type: ignore[call-overload]  # PyAV's stub has no mapping here
    return (
        picture.rotate(shot.rotation, expand=True) if orientation is None else upright(picture, orientation)
    )


class _Decoder:
    """One open video, at one place."""

    def __init__(self, file: Path) -> None:
        self.file, self.process, self.changed = file, os.getpid(), _changed(file)
        self.container = av.open(str(file))
        self.stream = self.container.streams.video[0]
        self.stream.codec_context.thread_count = 1  # loader workers share the cores
        self.times = _times(file, self.changed)
        entries = (entry for entry in self.stream.index_entries if not entry.is_discard)
        self.keys = [n for n, entry in enumerate(entries) if entry.is_keyframe]
        self.shots: Iterator[Shot] = self.container.decode(self.stream)
        self.settled = False
        """Whether a key frame was decoded since the file was opened or sought in: what comes before may lack
        what it is made from."""
        self.due = 0
        """At most the index of the frame that `shots` yields next; exact where the file has no times."""

    def frame(self, index: int) -> Image.Image:
        if not 0 <= index < len(self.times):
            raise ValueError(f"it has {len(self.times)} frames")
        time = self.times[index]
        key_between = bisect_right(self.keys, index) > bisect_right(self.keys, self.due)
        if index < self.due or (key_between and time is not None):
            self._seek(0 if time is None else time)
        for shot in self.shots:
            is_target = shot.pts == time if time is not None else self.due == index
            self.settled = self.settled or shot.key_frame
            if shot.is_corrupt and (is_target or self.settled):  # the frames after it are made from it
                raise ValueError(f"the file is damaged {'there' if is_target else 'before'}")
            if is_target:
                self.due = index + 1
                return _upright(shot)
            if time is not None and shot.pts is not None and shot.pts > time:
                break
            self.due += 1
        raise ValueError("its data ends before, or holds no picture there")

    def _seek(self, time: int) -> None:
        self.container.seek(time, stream=self.stream)
        self.shots, self.due, self.settled = self.container.decode(self.stream), 0, False


_open = threading.local()
"""The video that a thread read last. A forked process opens its own: it would share the file's position with
its parent."""


def _decoder(file: Path) -> _Decoder:
    decoder: _Decoder | None = getattr(_open, "decoder", None)
    if decoder is None or (decoder.file, decoder.process, decoder.changed) != (
        file,
        os.getpid(),
        _changed(file),
    ):
        decoder = _open.decoder = _Decoder(file)
    return decoder
