"""Pictures as people have them (files, folders of frames, videos, PIL, arrays) -> the frames of a request."""

from __future__ import annotations

import io
from pathlib import Path

import imageio.v3 as iio
import numpy as np
from PIL import Image

from ans_core.types import ImageRef

Picture = str | Path | bytes | Image.Image | np.ndarray
"""bytes: the encoded picture."""
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


def reference(picture: Picture) -> ImageRef:
    """A file or encoded bytes as they are; pixels as lossless PNG. Raises ValueError for an array that is not (H, W, 3) uint8."""
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, (str, Path)):
        return Path(picture)
    if isinstance(picture, Image.Image):
        return _png(picture)
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise ValueError(f"a picture of shape {picture.shape} and {picture.dtype}; give (height, width, 3) of uint8")
    return _png(Image.fromarray(picture))


def _png(picture: Image.Image) -> bytes:
    """In 16 bits where a picture of grey has them: `open_image` makes 8 of them."""
    file = io.BytesIO()
    if picture.mode.startswith("I"):
        picture = Image.fromarray(np.asarray(picture).clip(0, 65535).astype(np.uint16))
    else:
        picture = picture.convert("RGB")
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()
