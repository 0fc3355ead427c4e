"""Turn pictures in any usual form (files, folders of frames, videos, PIL, arrays) into the frames of a
request."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence
from torch import Tensor

from ans_core.lazy import Lazy
from ans_core.pictures import orientation, video_file
from ans_core.types import ImageRef

Picture = str | Path | bytes | Image.Image | np.ndarray
"""bytes: an encoded picture."""
Video = str | Path | Sequence[Picture] | np.ndarray | Tensor
"""A file, a folder of frames, the frames themselves, or one (F, H, W, 3) array of uint8."""
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
VIDEOS = (
    ".mp4",
    ".m4v",
    ".mov",
    ".mkv",
    ".avi",
    ".webm",
    ".mpg",
    ".mpeg",
    ".ts",
    ".ogv",
    ".wmv",
    ".flv",
    ".gif",
)


SCRATCH = ".frames-"
"""Prefix of the folders into which `frames` unpacks videos."""


@contextmanager
def frames(source: Path, *, scratch: Path) -> Iterator[tuple[Path, ...]]:
    """Yield one frame for a picture, all frames of a video, or a folder's pictures in the order of their
    names (`place_in_time`).

    A video's frames are lossless PNG files in a folder of their own in `scratch`, removed at the end: none is
    held in memory. Raises FileNotFoundError, and ValueError for any other or undecodable file.
    """
    if (files := _files(source)) is not None:
        yield files
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=scratch) as folder:
        paths = []
        for number, shot in enumerate(_shots(source)):
            paths.append(Path(folder) / f"{number:06d}.png")
            paths[-1].write_bytes(png(shot))
        yield tuple(paths)


class VideoFile(Lazy[bytes]):
    """The frames of a video file as PNG, decoded on access, one held at a time. Indices that do not fall need
    one pass through the file. Raises ValueError for a file that can't be decoded to its end."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._length = sum(1 for _ in _shots(source))
        self._rest: Iterator[tuple[int, Image.Image]] = iter(())
        self._due = self._length
        """Index of the frame that `_rest` yields next."""
        self._held = b""
        """The frame before it."""

    def __len__(self) -> int:
        return self._length

    def item(self, number: int) -> bytes:
        if number == self._due - 1 and self._held:
            return self._held
        if number < self._due:
            self._rest = enumerate(_shots(self._source))
        self._held = next(png(shot) for place, shot in self._rest if place == number)
        self._due = number + 1
        return self._held


def clip(video: Video) -> Sequence[ImageRef]:
    """Return the frames of a clip, at least one. Those of a video file are decoded on access.

    Raises ValueError for what is no clip, and FileNotFoundError.
    """
    if isinstance(video, (str, Path)):
        files = _files(Path(video))
        return VideoFile(Path(video)) if files is None else files
    if isinstance(video, (bytes, Image.Image)):
        raise ValueError(
            f"the video is {type(video).__name__}, one picture; give it as image, or give a list of frames "
            "or a file"
        )
    if isinstance(video, (np.ndarray, Tensor)):
        video = video if isinstance(video, np.ndarray) else video.numpy(force=True)
        if video.ndim != 4:
            raise ValueError(
                f"a video of shape {video.shape}; give (frames, height, width, 3) of uint8, or one picture "
                "as image"
            )
    pictures = tuple(reference(picture) for picture in video)
    if not pictures:
        raise ValueError("the video has no frames; give at least one, or None to ask without a video")
    return pictures


def place_in_time(name: str) -> tuple[list[str | int], str]:
    """Return what frames of a clip are sorted by: numbers in their names by value, whether or not zeros stand
    before them."""
    parts: list[str | int] = re.split(r"([0-9]+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name


def _files(source: Path) -> tuple[Path, ...] | None:
    """Return a picture, or the pictures of a folder; None for a video."""
    if source.is_dir():
        pictures = tuple(
            sorted(
                (p for p in source.iterdir() if p.suffix.lower() in PICTURES),
                key=lambda p: place_in_time(p.stem),
            )
        )
        if not pictures:
            raise ValueError(f"{source} holds no pictures ({', '.join(PICTURES)})")
        return pictures
    if not source.is_file():
        raise FileNotFoundError(f"no picture, video or folder of frames {source}")
    return None if source.suffix.lower() in VIDEOS else (source,)


def _shots(source: Path) -> Iterator[Image.Image]:
    """Yield the frames of a video, one after the other."""
    empty = True
    try:
        for shot in _gif(source) if source.suffix.lower() == ".gif" else video_file.shots(source):
            empty = False
            yield shot
    except GeneratorExit:  # also as Python ends, when the modules that the next line names are gone
        raise
    except (*video_file.CODEC_ERRORS, Image.DecompressionBombError) as error:
        raise ValueError(
            f"cannot read the video {source}: {error}; is it cut short? (`ffmpeg -i` tells)"
        ) from error
    if empty:
        raise ValueError(f"the video {source} has no frames")


def _gif(source: Path) -> Iterator[Image.Image]:
    with Image.open(source) as animation:
        yield from (frame.convert("RGB") for frame in ImageSequence.Iterator(animation))


def reference(picture: Picture) -> ImageRef:
    """Return a file or encoded bytes as they are, pixels as lossless PNG. Raises ValueError for an array that
    is not (H, W, 3) uint8."""
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, (str, Path)):
        return Path(picture)
    if isinstance(picture, Image.Image):
        return png(picture)
    if not isinstance(picture, np.ndarray):
        raise ValueError(
            f"a picture is a file, encoded bytes, PIL's or an array, not {type(picture).__name__}; give one "
            "picture"
        )
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise ValueError(
            f"a picture of shape {picture.shape} and {picture.dtype}; give (height, width, 3) of uint8"
        )
    return png(Image.fromarray(picture))


def png_as_is(picture: Image.Image) -> bytes:
    """Encode as PNG in the picture's own mode: masks, labels."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def png(picture: Image.Image) -> bytes:
    """Encode as PNG, upright. A 16-bit grey picture stays 16-bit: `open_image` takes the high byte. Pillow's
    mode "I" has no range of its own: values up to 255 count as 8 bits, others as 16."""
    file = io.BytesIO()
    turn = orientation.of_picture(picture)
    if picture.mode.startswith("I"):
        values = np.asarray(picture).clip(0, 65535)
        small = picture.mode == "I" and values.max(initial=0) <= 255
        picture = Image.fromarray(values.astype(np.uint8 if small else np.uint16))
    else:
        picture = picture.convert("RGB")
    orientation.upright(picture, turn).save(file, "PNG", compress_level=1)
    return file.getvalue()
