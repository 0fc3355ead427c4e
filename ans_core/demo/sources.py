"""An uploaded file, or a sample of a data set -> a Source: the picture or clip that a chat is about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import av
from PIL import Image

from ans_core.pictures import media, transforms, video_file
from ans_core.types import ImageRef, Sample

MOST_BYTES = 200_000_000
MOST_PIXELS = 40_000_000
"""Of a picture, or of one frame of a clip."""
MOST_FRAMES = 600
"""Of a clip: somebody waits for it. `ans predict` takes any length."""
SLOWEST_FPS, FASTEST_FPS = 1.0, 60.0
DEFAULT_FPS = 8.0
"""Of frames that come without a rate."""


@dataclass(frozen=True, kw_only=True)
class Source:
    name: str
    frames: Sequence[ImageRef]
    size: tuple[int, int]
    """(width, height) of every frame."""
    is_clip: bool = False
    fps: float = DEFAULT_FPS

    def picture(self, frame: int) -> Image.Image:
        return transforms.open_image(self.frames[frame])


def read_upload(path: Path) -> Source:
    """Check and open an uploaded file; one that is too large is removed.

    Raises ValueError with one sentence, which names the file without its folder.
    """
    suffix = path.suffix.lower()
    if suffix not in (*media.PICTURES, *media.VIDEOS):
        raise ValueError(
            f"{path.name} is neither a picture ({', '.join(media.PICTURES)}) nor a clip "
            f"({', '.join(media.VIDEOS)})"
        )
    if (size := path.stat().st_size) > MOST_BYTES:
        path.unlink()  # nobody else will
        raise ValueError(
            f"{path.name} has {size / 1e6:,.0f} MB, the page takes up to {MOST_BYTES / 1e6:,.0f}: cut it, "
            "or use `ans predict`"
        )
    with _named(path):
        return _clip(path) if suffix in media.VIDEOS else _picture(path)


def of_sample(sample: Sample) -> Source:
    is_clip = len(sample.frames) > 1
    return Source(
        name=f"{sample.dataset}/{sample.sample_id}",
        frames=sample.frames,
        size=(sample.width, sample.height),
        is_clip=is_clip,
    )


def _picture(path: Path) -> Source:
    size = transforms.image_size(path)
    _check_pixels(path, size)
    transforms.check_image(path)
    return Source(name=path.name, frames=(path,), size=size)


def _clip(path: Path) -> Source:
    size, count = video_file.size(path), len(video_file.frames_of(path))
    _check_pixels(path, size)
    if count > MOST_FRAMES:
        raise ValueError(
            f"{path.name} has {count:,} frames, the page takes up to {MOST_FRAMES}: cut it, or use `ans "
            "predict`"
        )
    with av.open(str(path)) as container:
        fps = float(container.streams.video[0].average_rate or DEFAULT_FPS)
    frames = media.clip(path)
    size = transforms.image_size(frames[0])  # of frames as they are followed
    return Source(
        name=path.name, frames=frames, size=size, is_clip=True, fps=min(max(fps, SLOWEST_FPS), FASTEST_FPS)
    )


def _check_pixels(path: Path, size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"{path.name} is {width:,} x {height:,} pixels, the page takes up to {MOST_PIXELS:,} in all: "
            "scale it down"
        )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Take the upload's folder on this machine out of an error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(str(path), path.name)) from error
