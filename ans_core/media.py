"""A picture, a video file or a folder of frames -> the frames of a request."""

from __future__ import annotations

import io
from pathlib import Path

import imageio.v3 as iio
from PIL import Image

from ans_core.types import ImageRef

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
VIDEOS = (".mp4", ".mov", ".mkv", ".avi", ".webm", ".gif")


def frames(source: Path) -> tuple[ImageRef, ...]:
    """One frame of a picture, all of a video (as lossless PNG), a folder's pictures in the order of their names.

    Raises FileNotFoundError, and ValueError for what is none of these or can't be decoded.
    """
    if source.is_dir():
        pictures = tuple(sorted(p for p in source.iterdir() if p.suffix.lower() in PICTURES))
        if not pictures:
            raise ValueError(f"{source} holds no pictures ({', '.join(PICTURES)})")
        return pictures
    if not source.is_file():
        raise FileNotFoundError(f"no picture, video or folder of frames {source}")
    if source.suffix.lower() not in VIDEOS:
        return (source,)
    try:
        shots = iio.imiter(source, plugin="pillow" if source.suffix.lower() == ".gif" else "pyav")
        found = tuple(_png(Image.fromarray(shot)) for shot in shots)
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(f"cannot read the video {source}: {error}; is it cut short? (`ffmpeg -i` tells)") from error
    if not found:
        raise ValueError(f"the video {source} has no frames")
    return found


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.convert("RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()
