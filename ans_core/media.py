"""Pictures as people have them (files, folders of frames, videos, PIL, arrays) -> the frames of a request."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import imageio.v3 as iio
import numpy as np
from PIL import Image

from ans_core.types import ImageRef

Picture = str | Path | bytes | Image.Image | np.ndarray
"""bytes: the encoded picture."""
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
VIDEOS = (".mp4", ".mov", ".mkv", ".avi", ".webm", ".gif")


SCRATCH = ".frames-"
"""How the folders begin that `frames` unpacks videos into."""


@contextmanager
def frames(source: Path, *, scratch: Path) -> Iterator[tuple[Path, ...]]:
    """One frame of a picture, all of a video, a folder's pictures in the order of their names.

    A video's frames are lossless PNG files in a folder of their own in `scratch`, removed at the end: none is held in memory.
    Raises FileNotFoundError, and ValueError for what is none of these or can't be decoded.
    """
    if (files := _files(source)) is not None:
        yield files
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=scratch) as folder:
        found = []
        for number, png in enumerate(_video(source)):
            found.append(Path(folder) / f"{number:06d}.png")
            found[-1].write_bytes(png)
        yield tuple(found)


def held(source: Path) -> tuple[ImageRef, ...]:
    """As `frames`, with the frames of a video in memory."""
    files = _files(source)
    return tuple(_video(source)) if files is None else files


def _files(source: Path) -> tuple[Path, ...] | None:
    """A picture, or those of a folder; None for a video."""
    if source.is_dir():
        pictures = tuple(sorted(p for p in source.iterdir() if p.suffix.lower() in PICTURES))
        if not pictures:
            raise ValueError(f"{source} holds no pictures ({', '.join(PICTURES)})")
        return pictures
    if not source.is_file():
        raise FileNotFoundError(f"no picture, video or folder of frames {source}")
    return None if source.suffix.lower() in VIDEOS else (source,)


def _video(source: Path) -> Iterator[bytes]:
    """Its frames as PNG."""
    empty = True
    try:
        for shot in iio.imiter(source, plugin="pillow" if source.suffix.lower() == ".gif" else "pyav"):
            empty = False
            yield _png(Image.fromarray(shot))
    except (OSError, ValueError, IndexError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot read the video {source}: {error}; is it cut short? (`ffmpeg -i` tells)") from error
    if empty:
        raise ValueError(f"the video {source} has no frames")


def reference(picture: Picture) -> ImageRef:
    """A file or encoded bytes as they are; pixels as lossless PNG. Raises ValueError for an array that is not (H, W, 3) uint8."""
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, (str, Path)):
        return Path(picture)
    if isinstance(picture, Image.Image):
        return _png(picture)
    if not isinstance(picture, np.ndarray):
        raise ValueError(f"a picture is a file, encoded bytes, PIL's or an array, not {type(picture).__name__}; give one picture")
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
